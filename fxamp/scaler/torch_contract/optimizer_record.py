"""The scaler's record of one optimizer between two updates, and which calls may follow which."""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from fxamp.torch_devices import moved


class StepResult(NamedTuple):
    """What ``scaler.step(optimizer, return_skipped=True)`` returns."""

    value: Any
    """The return value of ``optimizer.step``; None if it was not called."""
    skipped: bool
    """Whether the step was skipped: the parameters and the optimizer's state are unchanged."""


@dataclass(eq=False)
class OptimizerRecord(MutableMapping[str, Any]):
    """The scaler's record of one optimizer between two updates.

    It is also a mapping from the attributes' names, because other libraries read torch's keys ``record["stage"]`` and
    ``record["found_inf_per_device"]``, and may add their own keys.

    Attributes:
        stage: READY, UNSCALED or STEPPED.
        found_inf_per_device: device -> 0-dim float32 flag, nonzero if a gradient there overflowed; empty until checked.
        skipped: whether the step was skipped; a 0-dim tensor, nonzero for a skip, if only the device knows.
        coefficient: the clip coefficient that ``clip_grad_norm_`` computed and that was not applied yet: 0-dim float32,
            or None.
        clipped: whether ``clip_grad_norm_`` was called.
        half_unscaled: the class of the optimizer whose fused step raised, and may have unscaled only some of the
            gradients; empty if none did.
    """

    stage: OptState = OptState.READY
    found_inf_per_device: dict[torch.device, Tensor] = field(default_factory=dict)
    skipped: bool | Tensor = False
    coefficient: Tensor | None = None
    clipped: bool = False
    half_unscaled: str = ""

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        vars(self)[key] = value

    def __delitem__(self, key: str) -> None:
        del vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))

    def require(self, call: str) -> None:
        """Raise RuntimeError if ``call``, "unscale_", "clip_grad_norm_" or "step", may not come now."""
        if self.half_unscaled:
            raise RuntimeError(
                f"{self.half_unscaled}.step raised, and may have unscaled some of the gradients: call zero_grad()"
                " on the optimizer and update() on the scaler, and compute the gradients again"
            )
        if self.stage is OptState.READY and not self.clipped:
            return
        again = "has already been called on this optimizer since the last update()."
        stepped = self.stage is OptState.STEPPED
        misuses = {
            "unscale_": (
                (self.clipped, "is being called after clip_grad_norm_(), which unscales."),
                (self.stage is OptState.UNSCALED, again),
                (stepped, "is being called after step()."),
            ),
            "clip_grad_norm_": ((stepped, "is being called after step()."), (self.clipped, again)),
            "step": ((stepped, "has already been called since the last update()."),),
        }
        for misuse, what in misuses[call]:
            if misuse:
                raise RuntimeError(f"{call}() {what}")

    def found_inf(self, device: torch.device) -> Tensor:
        """Sum the flags: 0-dim float32 on ``device``, nonzero after an overflow; waits for no device."""
        flags = [moved(flag, device) for flag in self.found_inf_per_device.values()]
        return reduce(torch.add, flags) if flags else torch.zeros((), dtype=torch.float32, device=device)


def fresh_optimizer_state() -> OptimizerRecord:
    """Return the record of an unused optimizer; saved scalers refer to this function by its name."""
    return OptimizerRecord()
