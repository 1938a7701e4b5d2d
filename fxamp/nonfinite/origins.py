"""Find the ops that produced the first non-finite values, from the measurements of one run.

1. There is an alarm only if a result of the graph is non-finite and the program does not intend that, or if the graph
   makes an input non-finite that was finite before, such as a buffer. There is none if a later op makes the value
   finite, such as a ``where`` around the logarithm of zero. No gradient is intended to be infinite.
2. From such a result the search goes back through non-finite inputs: from a NaN to NaNs if there are any, else to
   infinities. A value without such inputs is an origin; the first one in program order is named.
3. An infinity is intended if the program writes an infinite number (``masked_fill(..., -inf)``) or an input holds one,
   and it reaches the value only through ops that pass a mask on: sums, selections, views, casts. The search does not go
   back to values that are intended. In a mask the lowest number of a dtype, which a narrower dtype cannot hold, counts
   as infinite. So the op that turns a mask into a NaN is named, such as a softmax over a masked row.
4. But if the mask comes from an input, and an op not in :data:`MASKED` turns it into a NaN, the input is named.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf, isnan, nan

from fxamp.graph.depth_first import depth_first
from fxamp.nonfinite.flow import Flow, Kind, Value


class State(IntEnum):
    """Whether a value is finite."""

    FINITE = 0
    INFINITE = 1
    NAN = 2


#: Ops that read masks with infinities and return finite numbers, unless a whole row is masked.
MASKED = frozenset(
    {
        *("softmax", "log_softmax", "safe_softmax", "logsumexp", "exp", "sigmoid", "scaled_dot_product_attention"),
        *("native_multi_head_attention", "scaled_dot_product_flash_attention_for_cpu", "amax", "max"),
    }
)

#: Ops that pass on an infinity that is intended.
_CARRY = frozenset(
    {
        *("add", "sub", "rsub", "where", "masked_fill", "maximum", "minimum", "max", "min", "clamp"),
        *("log_softmax", "scatter", "index_put", "copy", "fill", "full", "full_like", "new_full", "tril", "triu"),
        *("amax", "amin", "to", "to_copy", "convert_element_type", "index_fill", "masked_scatter", "constant_pad_nd"),
        *("pad", "cat", "stack", "add_", "select_scatter", "slice_scatter", "topk", "sort", "scalar_tensor"),
        *("aminmax", "cummax", "cummin", "detach", "diagonal_scatter", "fmax", "fmin", "index_add", "index_copy"),
        *("kthvalue", "median", "mode", "nanmedian", "scatter_add"),
    }
)

#: The same, if the other operand is a number: a gradient times an infinite value is not intended to be infinite.
_SCALE = frozenset({"mul", "div"})


@dataclass(frozen=True)
class Readings:
    """The measurements of one run, by value: its largest magnitude, its state, and whether an infinity is intended.

    An unmeasured value takes them from its inputs; an unknown magnitude is None. A conversion, or another op whose
    magnitude follows from its input's, overflows if that magnitude exceeds the limit of its dtype.
    """

    flow: Flow
    magnitudes: list[float | None] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    intended: list[bool] = field(default_factory=list)

    @staticmethod
    def of(flow: Flow, numbers: Sequence[float]) -> "Readings":
        """Return the readings for the numbers that a run returned."""
        readings = Readings(flow)
        for value in flow.values:
            readings._add(value, numbers)
        return readings

    def _add(self, value: Value, numbers: Sequence[float]) -> None:
        sources = value.inputs if value.limit and not value.fresh else ()
        if value.number is not None:
            magnitude: float | None = numbers[value.number]
            state = _state(numbers[value.number], value.limit)
        else:
            below = [self.magnitudes[source] for source in sources if self.flow.values[source].limit]
            known = [number for number in below if number is not None]
            follows = (value.passes or value.largest) and len(known) == len(below)
            magnitude = max(known, default=None) if follows else None
            state = max((self.states[source] for source in sources), default=State.FINITE)
            if magnitude is not None and value.largest is not None:
                magnitude = value.largest((magnitude, inf, nan)[state])  # a conversion before it may have overflowed
                state = _state(magnitude, value.limit)
            elif magnitude is not None and not state:  # a conversion
                state = _state(magnitude, value.limit)
        self.magnitudes.append(magnitude)
        self.states.append(state)
        self.intended.append(state is State.INFINITE and self._is_intended(value))

    def _is_intended(self, value: Value) -> bool:
        """Apply rule 3 to an infinite value."""
        if value.intended:
            return True
        if value.kind is not Kind.OP:
            return value.kind in (Kind.INPUT, Kind.CONSTANT, Kind.SAVED)
        own = (value.number is not None and not value.passes) or value.largest is not None
        if own and value.op not in _CARRY and not (value.op in _SCALE and len(value.inputs) == 1):
            return False
        sources = [source for source in value.inputs if self.states[source]]
        if sources:
            return all(self.intended[source] for source in sources)
        return any(self._is_lowest(source) for source in value.inputs)

    def _is_lowest(self, at: int) -> bool:
        """Whether a value holds the lowest number of its dtype, as masks do."""
        magnitude = self.magnitudes[at]
        return magnitude is not None and magnitude >= _LOWEST * self.flow.values[at].limit > 0

    def alarms(self) -> list[int]:
        """Return the results of the graph, and the inputs that it wrote to, neither finite nor intended (1)."""
        backward = any(value.kind is Kind.GRADIENT for value in self.flow.values)
        results = [at for at in self.flow.results if self._wrong(at) or (backward and self.states[at])]
        return results + [at for at, before in self.flow.written if self._wrong(at) and not self.states[before]]

    def origin(self) -> int | None:
        """Return the position of the first value in program order that is to blame (2 to 4); None without alarm."""
        wrong = depth_first(self.alarms(), self._causes)
        return min((self._named_value(at) for at in wrong if not self._causes(at)), default=None)

    def reached_from(self, origin: int) -> list[int]:
        """Return the values made of ``origin`` that are not finite, in program order."""
        reached = {origin}
        for at, value in enumerate(self.flow.values):
            if self.states[at] and not reached.isdisjoint(value.inputs):
                reached.add(at)
        return sorted(reached - {origin})

    def _wrong(self, at: int) -> bool:
        return bool(self.states[at]) and not self.intended[at]

    def _causes(self, at: int) -> list[int]:
        """Return the inputs that made a value non-finite (2)."""
        inputs = self.flow.values[at].inputs
        if self.states[at] is State.NAN:
            broken = [source for source in inputs if self.states[source] is State.NAN]
            if broken:
                return broken
        return [source for source in inputs if self._wrong(source)]

    def _named_value(self, at: int) -> int:
        """Return the input to name instead of the op at ``at`` (4), or ``at``."""
        if self.flow.values[at].op in MASKED:
            return at

        def intended(place: int) -> list[int]:
            return [source for source in self.flow.values[place].inputs if self.intended[source]]

        sources = depth_first(intended(at), intended)
        return next((source for source in sources if self.flow.values[source].kind is Kind.INPUT), at)


def _state(number: float, limit: float) -> State:
    return State.NAN if isnan(number) else State.INFINITE if number > limit else State.FINITE


#: The fraction of its dtype's limit above which a number counts as infinite in a mask.
_LOWEST = 0.99
