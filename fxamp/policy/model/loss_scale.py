"""The ``[loss_scale]`` table of a policy: arguments of fxamp.GradScaler, as plain values."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fxamp.errors import PolicyError

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
"""The largest scale: the largest finite float32."""


@dataclass(frozen=True)
class LossScale:
    """The ``[loss_scale]`` table, with the fields and defaults of :class:`fxamp.GradScaler`; 1024 becomes 1024.0.

    Raises PolicyError, naming every mistake, for values that a scaler does not accept.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float | None = None
    max_scale: float | None = None
    enabled: bool = True

    def __post_init__(self) -> None:
        problems = mistakes(asdict(self))
        if problems:
            raise PolicyError("\n".join(f"loss_scale: {message}" for _, message in problems))
        for key in _ACCEPTED.keys() - {"growth_interval"}:
            if (value := getattr(self, key)) is not None:
                object.__setattr__(self, key, float(value))

    def content(self) -> dict[str, float | int | bool]:
        """Return all values that are set, under the keys of the table."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def mistakes(values: Mapping[str, Any], alone: bool = False) -> list[tuple[str, str]]:
    """Return ``(key, message)`` for every value that is not accepted; missing keys have their defaults.

    ``alone``: check each value by itself, because the other values may be in other files.
    """
    problems = []
    for key, (accepted, words) in _ACCEPTED.items():
        value = values.get(key)
        if value is not None and not (math.isfinite(value) and accepted(value)):
            problems.append((key, f"{key} = {value!r} is out of range; accepted: {words}"))
    return problems if problems or alone else _out_of_bounds(values)


def _out_of_bounds(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    low, high = values.get("min_scale") or 0.0, values.get("max_scale") or FLOAT32_MAX
    if low > high:
        return [("min_scale", f"min_scale = {low!r} is above max_scale = {high!r}; accepted: at most max_scale")]
    init = values.get("init_scale", LossScale.init_scale)
    if low <= init <= high:
        return []
    return [("init_scale", f"init_scale = {init!r} is out of bounds; accepted: a number from {low!r} to {high!r}")]


_POSITIVE: tuple[Callable[[Any], bool], str] = (lambda value: value > 0, "a positive finite number")
_ACCEPTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "init_scale": _POSITIVE,
    "growth_factor": (lambda value: value > 1, "a finite number above 1"),
    "backoff_factor": (lambda value: 0 < value < 1, "a number between 0 and 1, exclusive"),
    "growth_interval": (lambda value: value >= 1, "a whole number of 1 or more"),
    "min_scale": _POSITIVE,
    "max_scale": _POSITIVE,
}
