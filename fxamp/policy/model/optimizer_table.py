"""The ``[optimizer]`` table of a policy: the precision of a compiled step's state and weights, and when it steps."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fxamp.errors import PolicyError
from fxamp.policy.model.settings import unknown_value

log = logging.getLogger(__name__)

EIGHT_BIT = "8bit"
"""Small floats with a scale for each block, named like torchao's ``OptimState8bit``; ``keep = "int8"`` is integers."""

STATE = ("float32", "bfloat16", EIGHT_BIT, "float8_e4m3fn")
ROUNDING = ("nearest", "stochastic")
WEIGHTS = ("as-is", "kahan")

OLD_WORDS = {"int8": EIGHT_BIT}
"""Older words for :data:`STATE` that are still accepted, with a log message that names the new one."""

OTHERS = "*"
"""In a table of states, the key for all states that the table does not name."""


@dataclass(frozen=True)
class OptimizerPrecision:
    """The ``[optimizer]`` table; see ``policies/README.md``.

    ``state``: the dtype in which each state of the parameter's size is stored between steps, by the state's name;
    ``"*"`` is for the others. ``rounding``: how state and bfloat16 parameters are rounded when they are written.
    ``weights``: "kahan" stores the rounding error of each 16-bit parameter beside it. ``in_backward``: compiled
    backwards step each parameter as soon as its gradient is computed; state and weights then stay as the optimizer has
    them.

    Raises PolicyError, naming every mistake, for values that are not accepted.
    """

    state: Mapping[str, str] = field(default_factory=lambda: {OTHERS: "float32"})
    rounding: str = "nearest"
    weights: str = "as-is"
    in_backward: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.state, str):
            object.__setattr__(self, "state", {OTHERS: self.state})
        messages = [f"optimizer: {message}" for _, message in mistakes(asdict(self))]
        if messages:
            raise PolicyError("\n".join(messages))
        for word in OLD_WORDS.keys() & set(self.state.values()):
            log.warning("optimizer.state = %r is now called %r, and does the same", word, OLD_WORDS[word])
        state = {name: OLD_WORDS.get(form, form) for name, form in self.state.items()}
        object.__setattr__(self, "state", state)

    def __hash__(self) -> int:
        return hash((tuple(sorted(self.state.items())), self.rounding, self.weights, self.in_backward))

    def stored_as(self, name: str) -> str:
        """Return the dtype in which the state of this name is stored."""
        return self.state.get(name, self.state.get(OTHERS, "float32"))

    def content(self) -> dict[str, Any]:
        """Return the table as a policy file contains it."""
        named = dict(self.state)
        return {
            "state": named[OTHERS] if [*named] == [OTHERS] else named,
            "rounding": self.rounding,
            "weights": self.weights,
            **({"in_backward": True} if self.in_backward else {}),
        }


def mistakes(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield ``(key, message)`` for every value that is not accepted; missing keys have their defaults."""
    state = values.get("state", {})
    forms = state.items() if isinstance(state, Mapping) else [("", state)]
    for name, value in forms:
        if value not in STATE and value not in OLD_WORDS:
            yield "state", unknown_value(f"state.{name}" if name else "state", value, STATE)
    for key, accepted in (("rounding", ROUNDING), ("weights", WEIGHTS)):
        if key in values and values[key] not in accepted:
            yield key, unknown_value(key, values[key], accepted)
    if values.get("in_backward"):
        for key, value in {"state": "float32", "rounding": "nearest", "weights": "as-is"}.items():
            own = values.get(key, value)
            if own != value and own != {OTHERS: value}:
                yield key, f"{key} = {own!r} does not go with in_backward = true; accepted with it: {value!r}"
