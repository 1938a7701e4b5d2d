"""Load a Python file that defines ``model`` and ``batches`` (or ``inputs``, one batch), and optionally ``loss``.

The commands run the file, and the model on the file's data.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor

from fxamp.errors import ListingError
from fxamp.tools.common.silence import quiet
from fxamp.tools.inputs.measurement import Batch, device_of, floating, state_of
from fxamp.tools.inputs.model_file import arguments, callable_model, guarded, require_own_tensors, run_file, value_of

ACCEPTED = (
    "model (an nn.Module or function, or model() that makes it) and batches (an iterable, or batches() that returns "
    "one; each batch a tuple of model's arguments, a dict of keyword arguments, or a tuple of both) or inputs (one "
    "batch)"
)

LOSSES = "loss(output) that returns one floating-point number, or an output that is one or has one as .loss"


class Loss:
    """The number that the backward starts from: what MODEL.py's ``function`` returns, or, without one, a substitute.

    ``notice`` gets a message once: which value it is.
    """

    def __init__(self, file: str, function: Callable[[Any], Any] | None, notice: Callable[[str], None]) -> None:
        self.function = function
        self._file = file
        self._notice: Callable[[str], None] | None = notice

    def __call__(self, output: Any) -> Tensor:
        """Return the loss, a tensor with one number. Raises ListingError if there is none."""
        loss, words = self._of(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            kind = f"a tensor of shape {list(loss.shape)} and {loss.dtype}" if isinstance(loss, Tensor) else _type(loss)
            raise ListingError(f"{self._file}: {words} is {kind}; accepted: {LOSSES}")
        if self._notice is not None:
            self._notice(f"the loss is {words}")
            self._notice = None
        return loss.reshape(())

    def _of(self, output: Any) -> tuple[Any, str]:
        if self.function is not None:
            return self.function(output), "loss(output)"
        if isinstance(output, Tensor) and output.numel() == 1:
            return output, "the output itself"
        named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if named is not None:
            return named, "output.loss"
        floats = floating(output)
        if not floats:
            raise ListingError(f"{self._file}: the output holds no floating-point tensor; accepted: {LOSSES}")
        return floats[0].sum(), "the sum of the output" if len(floats) == 1 else "the sum of the first float output"


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
        values = guarded(self.file, self.source) if inspect.isfunction(self.source) else self.source
        if isinstance(values, (str, bytes, Tensor, Mapping)) or not isinstance(values, Iterable):
            raise ListingError(f"{self.file}: batches is {_type(values)}; accepted: an iterable of batches")
        iterator = iter(values)
        for at in count() if self.most is None else range(self.most):
            batch = guarded(self.file, lambda: list(islice(iterator, 1)))
            if not batch:
                return
            yield Batch(*arguments(self.model, batch[0], f"{self.file}: batch {at}"))

    def start(self, output: Any) -> list[tuple[Tensor, None]]:
        """Return the loss as the value at which the backward starts."""
        return [(self.loss(output), None)]

    def device(self) -> str:
        """Return the device type of the model's tensors; "cpu" if it has none."""
        return device_of(state_of(self.model))


def load_work(file: str, notice: Callable[[str], None], most: int | None = None) -> Workload:
    """Run ``file`` and return what it defines; ``notice`` gets a message first. Takes at most ``most`` batches.

    Raises ListingError as :func:`~fxamp.tools.inputs.model_file.run_file`; also for a model whose parameters are not
    float32 (or float64): 16-bit parameters hide their original range.
    """
    kind = f"a Python file, whose name ends in .py, that defines {ACCEPTED}"
    with quiet(), run_file(file, kind, [("model",), ("batches", "inputs")], ACCEPTED, notice) as defined:
        model = _model(file, defined["model"])
        source = defined["batches"] if "batches" in defined else (value_of(file, defined["inputs"]),)
    loss = defined.get("loss")
    if loss is not None and not callable(loss):
        raise ListingError(f"{file}: loss is {_type(loss)}; accepted: a function loss(output)")
    return Workload(file, model, source, Loss(file, loss, notice), most)


def _model(file: str, value: Any) -> Callable[..., Any]:
    model = callable_model(file, value_of(file, value))
    require_own_tensors(file, model)
    parameters = dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else {}
    for name, parameter in parameters.items():
        if parameter.is_floating_point() and parameter.element_size() < 4:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ListingError(
                f"{file}: parameter {name} is {dtype}, which hides its original values; accepted: model.float()"
            )
        if parameter.device.type == "meta":
            raise ListingError(f"{file}: parameter {name} is on meta, without values; accepted: a model that can run")
    return model


def _type(value: Any) -> str:
    return f"of type {type(value).__name__}"
