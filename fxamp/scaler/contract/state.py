"""What a scaler stores besides the scale: each optimizer's stage, the bounds of the scale, the skipped steps."""

import math
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from fxamp.devices import DEVICES
from fxamp.errors import OptionError, nearest
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
        half_unscaled: whether a fused step raised and may have unscaled only some of the gradients.
    """

    stage: OptState = OptState.READY
    found_inf_per_device: dict[torch.device, Tensor] = field(default_factory=dict)
    skipped: bool | Tensor = False
    coefficient: Tensor | None = None
    clipped: bool = False
    half_unscaled: bool = False

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

    def require_whole(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError if it is unknown which of the optimizer's gradients are unscaled."""
        if self.half_unscaled:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step raised, and may have unscaled some of the gradients: call zero_grad()"
                " on the optimizer and update() on the scaler, and compute the gradients again"
            )

    def found_inf(self, device: torch.device) -> Tensor:
        """Sum the flags: 0-dim float32 on ``device``, nonzero after an overflow; waits for no device."""
        flags = [moved(flag, device) for flag in self.found_inf_per_device.values()]
        return reduce(torch.add, flags) if flags else torch.zeros((), dtype=torch.float32, device=device)


def fresh_optimizer_state() -> OptimizerRecord:
    """Return the record of an unused optimizer; saved scalers refer to this function by its name."""
    return OptimizerRecord()


@dataclass(frozen=True)
class ScaleBounds:
    """The lower and upper bound of the scale; None for no bound."""

    min_scale: float | None
    max_scale: float | None

    def __post_init__(self) -> None:
        for name, bound in (("min_scale", self.min_scale), ("max_scale", self.max_scale)):
            if bound is not None and not (math.isfinite(bound) and bound > 0):
                raise OptionError(f"{name}={bound!r}: expected a positive finite number, or None")
        if self.min_scale is not None and self.max_scale is not None and self.min_scale > self.max_scale:
            raise OptionError(f"min_scale={self.min_scale!r} is above max_scale={self.max_scale!r}")

    def require(self, init_scale: float) -> None:
        """Raise OptionError if a scaler cannot start at ``init_scale``."""
        low = -math.inf if self.min_scale is None else self.min_scale
        high = math.inf if self.max_scale is None else self.max_scale
        if not init_scale > 0:
            raise OptionError(f"init_scale={init_scale!r}: expected a number greater than 0")
        if not low <= init_scale <= high:
            raise OptionError(f"init_scale={init_scale!r}: expected a number from {low!r} to {high!r}")


def require_device(device: str) -> None:
    """Raise OptionError if torch knows no such device; it need not be there."""
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        hint = nearest(str(device), DEVICES)
        raise OptionError(f"device={device!r} is unknown{hint}; accepted: {', '.join(DEVICES)}, ...") from error


class SkipCount:
    """Counts skipped steps, including those that only the device knows; waits for the device only when read."""

    def __init__(self, known: int = 0) -> None:
        self._known = known
        self._on_device: Tensor | None = None

    def add(self, skipped: bool | Tensor) -> None:
        """Count one step: a bool, or a 0-dim tensor that is nonzero for a skip."""
        if isinstance(skipped, bool):
            self._known += skipped
            return
        if self._on_device is None or self._on_device.device != skipped.device:
            self._known = self.read()
            self._on_device = torch.zeros((), dtype=torch.int64, device=skipped.device)
        # Add in place: a replayed CUDA graph adds to the same memory.
        self._on_device.add_(skipped.ne(0))

    def read(self) -> int:
        """Return the count; waits for the device if necessary."""
        return self._known + (0 if self._on_device is None else int(self._on_device.item()))
