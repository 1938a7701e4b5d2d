"""Whether the host or the device decides to skip a step, and how steps that the device decides on are compiled."""

from dataclasses import dataclass

from fxamp.errors import OptionError, nearest
from fxamp.lowerings import STEP_LOWERINGS, inductor_modes

SKIPS = ("host", "device")


@dataclass(frozen=True)
class SkipChoice:
    """``skip``: "host" or "device". ``lowering``, ``mode``: of compiled steps; see :class:`fxamp.scaler.GradScaler`."""

    skip: str
    lowering: str
    mode: str | None

    def __post_init__(self) -> None:
        """Raise OptionError for an unknown value."""
        _require("skip", self.skip, SKIPS)
        _require("step_lowering", self.lowering, STEP_LOWERINGS)
        if self.mode is not None:
            _require("step_mode", self.mode, inductor_modes())
            if self.lowering != "inductor":
                raise OptionError(f"step_mode={self.mode!r} is a mode of Inductor: it needs step_lowering='inductor'")


def _require(name: str, given: object, accepted: tuple[str, ...]) -> None:
    if given not in accepted:
        raise OptionError(
            f"{name}={given!r}: expected one of {', '.join(map(repr, accepted))}{nearest(str(given), accepted)}"
        )
