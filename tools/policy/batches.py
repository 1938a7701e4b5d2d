"""Load a Python file that defines ``model`` and ``batches`` (or ``inputs``, one batch), and optionally ``loss``.

The file is run, and so is the model, on the file's data.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxamp.errors import ListingError, nearest
from fxamp.tools.common.quiet import one_line, quiet
from fxamp.tools.inputs.kinds import program_syntax
from fxamp.tools.inputs.model_file import arguments, as_module, guarded, place
from fxamp.tools.policy.losses import Loss, given_loss

ACCEPTED = (
    "model (an nn.Module or function, or model() that makes it) and batches (an iterable, or batches() that returns "
    "one; each batch a tuple of model's arguments, a dict of keyword arguments, or a tuple of both) or inputs (one "
    "batch)"
)


@dataclass(frozen=True)
class Batch:
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors in the arguments."""
        return [leaf for leaf in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Workload:
    """A model, its batches, and its loss. ``batches`` makes a new iterator at each call; it ends after ``most``."""

    file: str
    model: Callable[..., Any]
    source: Any
    loss: Loss
    most: int | None = None

    def batches(self) -> Iterator[Batch]:
        """Yield the batches. Raises ListingError for an invalid batch, and for errors that the file raises."""
        source = self.source
        made = guarded(self.file, source) if inspect.isfunction(source) else source
        if isinstance(made, (str, bytes, Tensor, Mapping)) or not isinstance(made, Iterable):
            raise ListingError(
                f"{self.file}: batches is of type {type(made).__name__}; accepted: an iterable of batches"
            )
        given = iter(made)
        for at in count() if self.most is None else range(self.most):
            found = guarded(self.file, lambda: list(islice(given, 1)))
            if not found:
                return
            yield Batch(*arguments(self.model, found[0], f"{self.file}: batch {at}"))

    def callable(self) -> Callable[..., Any]:
        """Return a function that calls the model: Dynamo skips modules of torch.nn that are compiled directly.

        Because of the name ``mod``, module paths in its graphs start at the model.
        """
        return calling(self.model)

    def device(self) -> str:
        """Return the device type of the model's tensors; "cpu" if it has none."""
        model = self.model
        state = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []
        kinds = {tensor.device.type for tensor in state}
        return min(kinds - {"cpu"}, default="cpu")


def calling(mod: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``mod``; see :meth:`Workload.callable`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return mod(*args, **kwargs)

    return call


_numbers = count()


def load_work(file: str, notice: Callable[[str], None], most: int | None = None) -> Workload:
    """Run ``file`` and return what it defines; ``notice`` gets a message first. Takes at most ``most`` batches.

    Raises ListingError with the line where the file raised, or with the names that are missing and those that exist;
    also for a model whose parameters are not float32 (or float64): 16-bit parameters hide their original range.
    """
    tree = program_syntax(file, f"a Python file, whose name ends in .py, that defines {ACCEPTED}")
    notice(f"running {file} to get its model and batches")
    with as_module(file) as module, quiet():
        module.__name__ = f"__fxamp_batches_{next(_numbers)}__"  # Dynamo caches modules by name
        sys.modules[module.__name__] = module
        guarded(file, lambda: exec(compile(tree, file, "exec"), vars(module)))
        defined = {name: value for name, value in vars(module).items() if not name.startswith("__")}
        if "model" not in defined or not {"batches", "inputs"} & set(defined):
            raise ListingError(_lacking(file, defined))
        model = _model(file, defined["model"])
        source = defined["batches"] if "batches" in defined else (_called(file, defined["inputs"]),)
    return Workload(file, model, source, given_loss(file, defined.get("loss"), notice), most)


def failed(file: str, doing: str, error: BaseException) -> ListingError:
    """Return the one-line error for an exception that the model raised."""
    inner = getattr(error, "inner_exception", None) or error
    return ListingError(f"{place(file, error)}: {doing} failed: {one_line(inner)}")


def unlimited_recompiles() -> AbstractContextManager[None]:
    """Allow any number of recompilations: beyond its limit Dynamo would run batches uncompiled."""
    limits = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}
    patched: AbstractContextManager[None] = torch._dynamo.config.patch(limits)
    return patched


def _lacking(file: str, defined: Mapping[str, Any]) -> str:
    wanted = [] if "model" in defined else ["model"]
    wanted += [] if {"batches", "inputs"} & set(defined) else ["batches"]
    close = next((near for name in wanted if (near := nearest(name, defined))), "")
    shown = ", ".join(sorted(defined)[:12]) or "nothing"
    return f"{file}: it defines no {' and no '.join(wanted)}{close}; it defines {shown}; accepted: {ACCEPTED}"


def _model(file: str, given: Any) -> Callable[..., Any]:
    model = _called(file, given)
    if isinstance(model, type):
        raise ListingError(f"{file}: model is the class {model.__name__}; accepted: an instance, {model.__name__}(...)")
    if not callable(model):
        raise ListingError(f"{file}: model is of type {type(model).__name__}; accepted: an nn.Module or a function")
    parameters = dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else {}
    for name, value in parameters.items():
        if value.is_floating_point() and value.element_size() < 4:
            dtype = str(value.dtype).removeprefix("torch.")
            raise ListingError(
                f"{file}: parameter {name} is {dtype}, which hides what its values were; accepted: model.float()"
            )
        if value.device.type == "meta":
            raise ListingError(f"{file}: parameter {name} is on meta, without values; accepted: a model that can run")
    checked: Callable[..., Any] = model
    return checked


def _called(file: str, value: Any) -> Any:
    """Return ``value``, or its result if it is a function without arguments."""
    if inspect.isfunction(value) and not inspect.signature(value).parameters:
        return guarded(file, value)
    return value
