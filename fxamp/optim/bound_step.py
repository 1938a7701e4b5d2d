"""A compiled step, bound to the tensors, settings, factors and flag of one call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxamp.optim.clip import coefficient, norm_of
from fxamp.optim.precision.state_precision import unpack_state
from fxamp.optim.programs.step_parts import CompiledParts
from fxamp.optim.reading.layout import Layout
from fxamp.optim.tracing.stand_ins import plain_step
from fxamp.torch_private import note_step, step_post_hooks, step_pre_hooks


@dataclass(frozen=True)
class Factors:
    """The factors that a step multiplies gradients by as it reads them: 0-dim float32 tensors, or None."""

    inv_scale: Tensor | None = None
    coefficient: Tensor | None = None

    def present(self) -> list[Tensor]:
        """Return the factors that are not None, in the compiled step's order."""
        return [factor for factor in (self.inv_scale, self.coefficient) if factor is not None]


class BoundStep:
    """A compiled step with the tensors and settings that it runs on."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        run: CompiledParts,
        owners: tuple[Sequence[Tensor], Sequence[Tensor | None], Sequence[Tensor]],
        tensors: Sequence[Tensor],
        floats: Sequence[float],
    ) -> None:
        """``owners``: the parameters, the gradient of each, and the gradients that are not None."""
        self._optimizer, self._run = optimizer, run
        self._owners, every, self._gradients = owners
        self._tensors, self._floats = tensors, floats
        self._addresses: list[int] | None = None
        everywhere = len(self._gradients) == len(self._owners)
        self._written = (
            self._owners if everywhere else [o for o, g in zip(self._owners, every, strict=True) if g is not None]
        )

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, run: CompiledParts, layout: Layout) -> "BoundStep":
        """Return the step of a layout for which ``run`` was compiled."""
        owners = layout.owners, layout.gradients, layout.active()
        return cls(optimizer, run, owners, layout.tensors(), layout.floats())

    @torch.no_grad()
    def clipping(self, max_norm: float | None, inv_scale: Tensor | None) -> Factors:
        """Return the factors that unscale gradients by ``inv_scale`` and clip them to ``max_norm``; no host sync.

        ``max_norm`` is None for no clipping. ``inv_scale`` is 0-dim float32, or None if the gradients are not scaled.
        """
        if max_norm is None:
            return Factors(inv_scale)
        addresses = self._read_addresses()
        if addresses is not None:
            first = len(self._owners)
            addresses = addresses[first : first + len(self._gradients)]
        norm = norm_of(self._owners, self._gradients, self._run.tables, addresses)
        return Factors(inv_scale, coefficient(norm if inv_scale is None else norm * inv_scale, max_norm))

    def __call__(self, found_inf: Tensor | None, factors: Factors) -> None:
        """Step unless ``found_inf`` (0-dim float32 on the parameters' device) is nonzero; calls the hooks after it.

        ``found_inf`` is None for a step that is not guarded. Hooks are called for skipped steps too, because the host
        does not know that the step is skipped. The hooks before the step may replace what this object holds: call
        :func:`run_pre_hooks` before preparing it.
        """
        extras = [*factors.present(), *([] if found_inf is None else [found_inf])]
        self._run(self._tensors, self._floats, extras, self._read_addresses())
        # Generated code writes through addresses, so tell autograd, which must refuse a backward through changed
        # weights.
        torch.autograd.graph.increment_version(self._written)
        if self._run.writes_gradients:
            torch.autograd.graph.increment_version(self._gradients)
        for at, name in self._run.counts:
            self._optimizer.param_groups[at][name] += 1
        _note_step(self._optimizer)

    def _read_addresses(self) -> list[int] | None:
        """Return the address of each tensor; None if no part of the step can use the addresses."""
        if self._addresses is None and self._run.launches:
            self._addresses = list(map(Tensor.data_ptr, self._tensors))
        return self._addresses


def has_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run just before the step; they must find unscaled and clipped gradients."""
    return bool(step_pre_hooks(optimizer))


def run_pre_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call the hooks before a step, which may assign anything that the step reads; prepare a compiled step after them.

    Raises RuntimeError if a hook gives the step arguments: a compiled step takes none.
    """
    for hook in step_pre_hooks(optimizer):
        result: Any = hook(optimizer, (), {})
        if result is not None and result != ((), {}):
            raise RuntimeError(f"a pre-hook passed arguments to the step, but a compiled step takes none: {result!r}")


def own_step(optimizer: torch.optim.Optimizer) -> Any:
    """Run the optimizer's own code for a step whose pre-hooks have run, and the hooks after it; return its value."""
    unpack_state(optimizer)
    value = plain_step(optimizer)(optimizer)
    _note_step(optimizer)
    return value


def _note_step(optimizer: torch.optim.Optimizer) -> None:
    """Call the hooks after a step, and tell learning-rate schedulers of it."""
    for hook in step_post_hooks(optimizer):
        hook(optimizer, (), {})
    note_step(optimizer)
