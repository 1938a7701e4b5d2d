"""One run over all batches: outputs, and the gradient of the sum of the losses, in float64 on the CPU."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxamp.tools.common.restored import restored
from fxamp.tools.policy.batches import Batch, Workload, calling
from fxamp.tools.policy.losses import floating


@dataclass(frozen=True)
class Errors:
    """Relative errors in the 2-norm: of all outputs of all batches as one vector, and of the gradient as one vector.

    inf if a value is not finite but is finite in float64; None if it was not measured.
    """

    output: float | None
    gradient: float | None

    @property
    def worst(self) -> float:
        """Return the largest of the measured errors."""
        return max(error for error in (self.output, self.gradient) if error is not None)

    def __str__(self) -> str:
        named = {"output": self.output, "gradient": self.gradient}
        return ", ".join(f"{name} error {error:.3g}" for name, error in named.items() if error is not None)


@dataclass(frozen=True)
class Results:
    """The results of a run; gradients by name, of the parameters and of inputs that require one."""

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor]

    @property
    def finite(self) -> bool:
        """Whether all gradients are finite."""
        return all(bool(gradient.isfinite().all()) for gradient in self.gradients.values())

    def errors(self, reference: "Results", measure: str) -> Errors:
        """Return the errors against ``reference``; ``measure`` is "output", "gradient" or "both"."""
        gradients = [self.gradients.get(name, torch.zeros_like(g)) for name, g in reference.gradients.items()]
        return Errors(
            relative(self.outputs, reference.outputs) if measure != "gradient" else None,
            relative(gradients, tuple(reference.gradients.values())) if measure != "output" else None,
        )


def relative(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return |found - exact| / |exact| over all numbers; |found| if exact is zero. Equal infinities are no error.

    inf if a value is not finite but is finite in ``exact``, or if the shapes differ.
    """
    if [value.shape for value in found] != [value.shape for value in exact]:
        return math.inf
    pairs = list(zip(found, exact, strict=True))
    off = math.hypot(*(float(torch.where(a == b, 0.0, a - b).norm()) for a, b in pairs))
    whole = math.hypot(*(float(b[b.isfinite()].norm()) for _, b in pairs))
    error = off / whole if whole else off
    return error if math.isfinite(error) else math.inf


@dataclass(frozen=True)
class Copy:
    """A copy of a model, and the batches, in one dtype; every run starts with the same tensors."""

    model: Callable[..., Any]
    batches: tuple[Batch, ...]

    @staticmethod
    def of(work: Workload, batches: Sequence[Batch], dtype: torch.dtype | None = None) -> "Copy":
        """Copy ``work``'s model, and ``batches``, with floating-point tensors in ``dtype`` if it is given."""
        model = copy.deepcopy(work.model)
        if isinstance(model, torch.nn.Module):
            model.to(dtype=dtype).zero_grad()
        there = tuple(Batch(*pytree.tree_map(lambda v: _moved(v, dtype), (b.args, dict(b.kwargs)))) for b in batches)
        return Copy(model, there)

    def run(
        self, work: Workload, call: Callable[..., Any], scaled: Callable[[Tensor], Tensor] | None, seed: int
    ) -> Results:
        """Run ``call``, which computes the model, on all batches, each with its own fixed seed.

        The backward of each starts at ``scaled(loss)``; without ``scaled`` there is no backward.
        """
        with restored(self.model, work.loss, [(batch.args, dict(batch.kwargs)) for batch in self.batches]):
            return self._run(work, call, scaled, seed)

    def _run(
        self, work: Workload, call: Callable[..., Any], scaled: Callable[[Tensor], Tensor] | None, seed: int
    ) -> Results:
        outputs: list[Tensor] = []
        for at, batch in enumerate(self.batches):
            torch.manual_seed(seed + at)
            with torch.enable_grad() if scaled is not None else torch.no_grad():
                found = call(*batch.args, **batch.kwargs)
                outputs += [value.detach().to("cpu", torch.float64, copy=True) for value in floating(found)]
                loss = None if scaled is None else work.loss(found)
            if loss is not None and scaled is not None and loss.requires_grad:
                scaled(loss).backward()  # type: ignore[no-untyped-call]
        gradients = {name: leaf.grad for name, leaf in self._leaves() if leaf.grad is not None}
        return Results(tuple(outputs), {name: g.detach().to("cpu", torch.float64) for name, g in gradients.items()})

    def callable(self) -> Callable[..., Any]:
        """Return a function that calls the model, for torch.compile."""
        return calling(self.model)

    def _leaves(self) -> Iterator[tuple[str, Tensor]]:
        if isinstance(self.model, torch.nn.Module):
            yield from ((name, value) for name, value in self.model.named_parameters() if value.requires_grad)
        for at, batch in enumerate(self.batches):
            yield from ((f"batch {at} {i}", value) for i, value in enumerate(batch.tensors) if value.requires_grad)


def _moved(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    there = value.detach().to(dtype=dtype if value.is_floating_point() else None, copy=True)
    return there.requires_grad_(value.requires_grad)
