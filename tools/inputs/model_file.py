"""Load a Python file that defines ``model`` and ``inputs``, and capture its graphs as torch.compile would.

The file is run: naming it on the command line is consent. The model is not run: Dynamo traces it on FakeTensors, and
the code between its graphs runs on them too. A model may be larger than memory if the file creates it under
``torch.device("meta")``.
"""

import ast
import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fxamp.errors import ListingError, nearest
from fxamp.tools.common.silence import one_line
from fxamp.tools.inputs.kinds import bound_names, pair_functions

_NAME = "__fxamp_model__"

ACCEPTED = (
    "model (an nn.Module or function) and inputs (a tuple of its arguments, a dict of keyword arguments, or a tuple of "
    "both), "
    "functions model() and inputs(), or one function without arguments that returns (model, inputs)"
)


@dataclass(frozen=True)
class Program:
    """A model and its arguments."""

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def program(file: str, tree: ast.Module, run: Callable[[str], None]) -> Program:
    """Run ``file``, whose syntax tree is ``tree``, and return what it defines; ``run`` gets a message first.

    Raises ListingError with the line where the file raised; or, if it defines no model, with the names it does define.
    """
    pair = pair_functions(tree)
    bound = bound_names(tree)
    if not {"model", "inputs"} <= bound and len(pair) != 1:
        raise ListingError(_lacking(file, bound, pair))
    run(f"running {file} to get its model and inputs")
    with as_module(file) as module:
        guarded(file, lambda: exec(compile(tree, file, "exec"), vars(module)))
        if {"model", "inputs"} <= set(vars(module)):
            model, inputs = (_made(file, name, vars(module)[name]) for name in ("model", "inputs"))
        else:
            returned = guarded(file, vars(module)[pair[0]]) if pair else None
            if not isinstance(returned, (tuple, list)) or len(returned) != 2:
                raise ListingError(f"{file}: after running it, model and inputs are not there; accepted: {ACCEPTED}")
            model, inputs = returned
    checked = callable_model(file, model)
    return Program(checked, *arguments(checked, inputs, f"{file}: inputs"))


def _lacking(file: str, bound: set[str], pair: Sequence[str]) -> str:
    if len(pair) > 1:
        return f"{file}: several functions return two values ({', '.join(pair)}); name one's result model and inputs"
    missing = " and ".join(name for name in ("model", "inputs") if name not in bound)
    close = next((near for name in ("model", "inputs") if name not in bound and (near := nearest(name, bound))), "")
    defined = ", ".join(sorted(bound)[:12]) or "nothing"
    return f"{file}: it defines no {missing}{close}; it defines {defined}; accepted: {ACCEPTED}"


@contextlib.contextmanager
def as_module(file: str) -> Iterator[ModuleType]:
    """Create a module for the file, importable while it runs, with the file's folder on the path as Python does."""
    module = ModuleType(_NAME)
    module.__file__ = file
    before, argv = sys.path[:], sys.argv[:]
    sys.modules[_NAME] = module
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


def _made(file: str, name: str, value: Any) -> Any:
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
    """Whether ``inputs`` is ``(args, kwargs)``, and not two arguments of which the second is a dict."""
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
