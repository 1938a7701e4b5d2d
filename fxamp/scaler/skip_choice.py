"""Who decides whether a step is skipped, and how a step that the device decides on is made to run."""

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
        """Raise OptionError for a word that is not known."""
        _require("skip", self.skip, SKIPS)
        _require("step_lowering", self.lowering, STEP_LOWERINGS)
        if self.mode is not None:
            _require("step_mode", self.mode, inductor_modes())
            if self.lowering != "inductor":
                raise OptionError(f"step_mode={self.mode!r} is Inductor's: it needs step_lowering='inductor'")


def _require(name: str, given: object, accepted: tuple[str, ...]) -> None:
    if given not in accepted:
        raise OptionError(
            f"{name}={given!r}: expected one of {', '.join(map(repr, accepted))}{nearest(str(given), accepted)}"
        )
