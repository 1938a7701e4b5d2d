"""A compiled step with all that one call of it takes: tensors, settings, factors and the flag."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxamp.optim.clip import coefficient, norm_of
from fxamp.optim.programs.step_parts import CompiledParts
from fxamp.optim.reading.layout import Layout
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
        layout: Layout,
        state: Sequence[Tensor] | None = None,
    ) -> None:
        """``state``: the layout's state tensors, where they are known from an earlier step."""
        self._optimizer, self._run, self._owners = optimizer, run, layout.owners
        self._gradients = layout.active()
        self._tensors, self._floats = layout.tensors(state, self._gradients), layout.floats()
        everywhere = len(self._gradients) == len(self._owners)
        self._written = layout.owners if everywhere else layout.with_gradients()

    @torch.no_grad()
    def clipping(self, max_norm: float | None, inv_scale: Tensor | None) -> Factors:
        """Return the factors that clip the gradients, times ``inv_scale``, to ``max_norm``; waits for no device.

        None: no clipping; ``inv_scale`` is 0-dim float32, or None if the gradients are not scaled.
        """
        if max_norm is None:
            return Factors(inv_scale)
        norm = norm_of(self._owners, self._gradients, self._run.tables)
        return Factors(inv_scale, coefficient(norm if inv_scale is None else norm * inv_scale, max_norm))

    def __call__(self, found_inf: Tensor | None, factors: Factors) -> None:
        """Step unless ``found_inf`` (0-dim float32 on the parameters' device) is nonzero; calls the step's hooks.

        ``found_inf`` is None for a step that is not guarded. Hooks are called for skipped steps too, because the host
        does not know that the step is skipped. Raises RuntimeError if a pre-hook gives the step arguments: a compiled
        step takes none.
        """
        optimizer = self._optimizer
        for hook in step_pre_hooks(optimizer):
            result: Any = hook(optimizer, (), {})
            if result is not None and result != ((), {}):
                raise RuntimeError(
                    f"a pre-hook passed arguments to the step, but a compiled step takes none: {result!r}"
                )
        self._run(self._tensors, self._floats, [*factors.present(), *([] if found_inf is None else [found_inf])])
        # Generated code writes through addresses. Tell autograd, which refuses a backward through changed weights.
        torch.autograd.graph.increment_version(self._written)
        for post in step_post_hooks(optimizer):
            post(optimizer, (), {})
        note_step(optimizer)


def has_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run just before the step: they must find unscaled gradients."""
    return bool(step_pre_hooks(optimizer))
