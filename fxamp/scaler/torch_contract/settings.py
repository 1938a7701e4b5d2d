"""The settings of a scaler: the bounds of its scale, who skips steps, and the settings that a policy gives."""

import math
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from fxamp.devices import DEVICES
from fxamp.dtypes import SCALED_DTYPES
from fxamp.errors import OptionError, nearest, require_choice
from fxamp.lowering_names import STEP_LOWERINGS
from fxamp.policy import Policy

SKIPS = ("host", "device")


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


@dataclass(frozen=True)
class SkipSettings:
    """``skip``: "host" or "device". ``lowering``: of compiled steps; see :class:`fxamp.GradScaler`."""

    skip: str
    lowering: str

    def __post_init__(self) -> None:
        """Raise OptionError for an unknown value."""
        require_choice("skip", self.skip, SKIPS)
        require_choice("step_lowering", self.lowering, STEP_LOWERINGS)


def require_device(device: str) -> None:
    """Raise OptionError if torch knows no such device; it need not be there."""
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        hint = nearest(str(device), DEVICES)
        raise OptionError(f"device={device!r} is unknown{hint}; accepted: {', '.join(DEVICES)}, ...") from error


def scaler_settings(policy: "Policy | str | PathLike[str]", device: str | None) -> dict[str, Any]:
    """Return the constructor arguments of a scaler for ``policy``, a built-in name, a path or a Policy.

    They come from the policy's ``[loss_scale]``. Without that table they are the defaults, and the scaler is enabled
    only for float16. Raises PolicyError if the policy does not exist or is invalid.
    """
    loaded = policy if isinstance(policy, Policy) else Policy.load(policy)
    settings: dict[str, Any] = {"device": loaded.device if device is None else device}
    if loaded.loss_scale is None:
        return settings | {"enabled": loaded.lower_precision_fp in SCALED_DTYPES}
    return settings | loaded.loss_scale.content()
