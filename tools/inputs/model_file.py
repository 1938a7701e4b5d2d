"""Run a Python file that defines ``model`` and its inputs.

Naming the file on the command line is consent; still nothing of it runs if its text lacks one of these names.
"""

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from fxamp.errors import ListingError, nearest
from fxamp.tools.common.silence import one_line
from fxamp.tools.inputs.kinds import bound_names, program_syntax

ACCEPTED = (
    "model (an nn.Module or function) and inputs (a tuple of its arguments, a dict of keyword arguments, or a tuple of "
    "both), or functions model() and inputs()"
)

#: One for each file that runs: Dynamo caches modules by name.
_names = (f"__fxamp_model_{at}__" for at in count())


@dataclass(frozen=True)
class Program:
    """A model and its arguments."""

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def program(file: str, notice: Callable[[str], None]) -> Program:
    """Run ``file``, and return its model with its inputs; ``notice`` gets a message first.

    Raises ListingError as :func:`run_file`, and for a model or inputs of another kind. A model may be larger than
    memory if the file creates it under ``torch.device("meta")``.
    """
    with run_file(file, "a Python file with model and inputs", [("model",), ("inputs",)], ACCEPTED, notice) as defined:
        model, inputs = (value_of(file, defined[name]) for name in ("model", "inputs"))
    checked = callable_model(file, model)
    return Program(checked, *arguments(checked, inputs, f"{file}: inputs"))


@contextlib.contextmanager
def run_file(
    file: str, kind: str, needs: Sequence[tuple[str, ...]], accepted: str, notice: Callable[[str], None]
) -> Iterator[Mapping[str, Any]]:
    """Run ``file``, and yield what it defines; what is called inside runs as a part of it.

    It must define one of each of ``needs``. Raises ListingError with the line where it raised, or with the names that
    are missing and those that exist: before it runs if its text lacks one.
    """
    tree = program_syntax(file, kind)
    bound = bound_names(tree)
    if "*" not in bound:
        _require(file, bound, needs, accepted)
    notice(f"running {file} to get its {' and '.join(names[0] for names in needs)}")
    with as_module(file) as module:
        guarded(file, lambda: exec(compile(tree, file, "exec"), vars(module)))
        defined = {name: value for name, value in vars(module).items() if not name.startswith("__")}
        _require(file, defined, needs, accepted)
        yield defined


def _require(file: str, defined: Collection[str], needs: Sequence[tuple[str, ...]], accepted: str) -> None:
    missing = [names[0] for names in needs if not set(names) & set(defined)]
    if not missing:
        return
    close = next((near for name in missing if (near := nearest(name, defined))), "")
    known = ", ".join(sorted(defined)[:12]) or "nothing"
    raise ListingError(
        f"{file}: it defines no {' and no '.join(missing)}{close}; it defines {known}; accepted: {accepted}"
    )


@contextlib.contextmanager
def as_module(file: str) -> Iterator[ModuleType]:
    """Create a module for the file, importable while it runs, with the file's folder on the path as Python does."""
    name = next(_names)
    module = ModuleType(name)
    module.__file__ = file
    before, argv = sys.path[:], sys.argv[:]
    sys.modules[name] = module
    sys.path.insert(0, str(Path(file).resolve().parent))
    sys.argv = [file]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield module
    finally:
        sys.path[:], sys.argv[:] = before, argv


def guarded(file: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        raise ListingError(f"{place(file, error)}: the file ended itself by exit({error.code!r})") from error
    except BaseException as error:
        raise ListingError(f"{place(file, error)}: {one_line(error)}") from error


def place(file: str, error: BaseException) -> str:
    """Return ``file:line`` of the innermost frame of ``error`` in ``file``; only ``file`` if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else file


def value_of(file: str, value: Any) -> Any:
    """Return ``value``, or its result if it is a function that creates it."""
    if not inspect.isfunction(value):
        return value
    parameters = inspect.signature(value).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(p.default is p.empty and p.kind not in variadic for p in parameters):
        return value
    return guarded(file, value)


def callable_model(file: str, model: Any) -> Callable[..., Any]:
    """Return ``model`` of ``file`` if it can be called; raise ListingError otherwise."""
    if isinstance(model, type):
        raise ListingError(f"{file}: model is the class {model.__name__}; accepted: an instance, {model.__name__}(...)")
    if not callable(model):
        raise ListingError(f"{file}: model is of type {type(model).__name__}; accepted: an nn.Module or a function")
    checked: Callable[..., Any] = model
    return checked


def require_own_tensors(file: str, model: Callable[..., Any]) -> None:
    """Raise ListingError for a model whose tensors cannot be copied and restored: a lazy or a scripted one."""
    modules = dict(model.named_modules()) if isinstance(model, torch.nn.Module) else {}
    for path, module in modules.items():
        named = f"module {path}" if path else "model"
        if any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            kind = type(module).__name__
            raise ListingError(f"{file}: {named}, a {kind}, has no sizes yet; accepted: a model that was called once")
        if isinstance(module, torch.jit.ScriptModule):
            raise ListingError(f"{file}: {named} is of torch.jit; accepted: the nn.Module that it was made from")


def arguments(model: Callable[..., Any], inputs: Any, what: str) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the positional and the keyword arguments that ``inputs`` describes.

    Raises ListingError, starting with ``what``, for invalid inputs.
    """
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
        return (), dict(inputs)
    if _is_both(model, inputs):
        args, kwargs = inputs
        return tuple(args), dict(kwargs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise ListingError(
        f"{what} is of type {type(inputs).__name__}; accepted: a tuple of the model's arguments, a dict of "
        "keyword arguments, a tuple of both, or one tensor"
    )


def _is_both(model: Callable[..., Any], inputs: Any) -> bool:
    """Whether ``inputs`` is ``(args, kwargs)``, and not two arguments, the second a dict."""
    match inputs:
        case (tuple() | list(), Mapping()) if all(isinstance(key, str) for key in inputs[1]):
            return _takes(model, *inputs[0], **inputs[1]) or not _takes(model, *inputs)
    return False


def _takes(model: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether the signature of ``model`` accepts these arguments."""
    try:
        inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a built-in function has no signature
        return not kwargs
    return True
