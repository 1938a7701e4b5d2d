"""The data flow of a graph as plain data: enough to find the op that produced the first non-finite value.

A flow includes the ops inside checkpoints, conds and the forwards of Functions. An unmeasured value counts as finite if
its inputs are. :mod:`fxamp.nonfinite.flow_reader` reads flows from graphs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from fxamp.graph_text import Entry, Listing


class Kind(StrEnum):
    """Where a value comes from."""

    OP = "op"
    INPUT = "input"
    PARAMETER = "parameter"
    CONSTANT = "constant"
    SAVED = "value saved by the forward"
    GRADIENT = "gradient that enters the graph"
    KEPT = "value kept for the backward in fewer bits"


@dataclass(frozen=True)
class Value:
    """A value of a graph.

    ``entry`` records its op, or the input itself. ``inputs``: the positions of the values that it is computed from.
    ``number``: the position of its measurement; None if it has none. ``limit``: the largest finite number of its dtype,
    0 if it is not floating; a tuple of results has the limit of its first floating one. ``intended``: an infinite
    number is among the arguments of its op. ``fresh``: it is made of finite numbers alone.
    ``passes``: it holds the elements of its inputs, possibly converted. ``largest``: its largest magnitude as a
    function of its input's. ``forward``: in a backward, the name of the forward's node that it belongs to.
    """

    entry: Entry
    inputs: tuple[int, ...] = ()
    kind: Kind = Kind.OP
    number: int | None = None
    limit: float = 0.0
    intended: bool = False
    fresh: bool = False
    passes: bool = False
    largest: Callable[[float], float] | None = None
    forward: str = ""

    @property
    def op(self) -> str:
        """The op's name without namespace and overload: ``"softmax"``."""
        return self.entry.target.partition("::")[2].partition(".")[0].strip("_") or self.entry.target


@dataclass(frozen=True, eq=False)
class Flow:
    """The values of a graph in program order, the positions of its floating results, and the graph's listing.

    ``inputs`` are the names of a forward's inputs; parameters have their names in the model. ``owners``: the positions
    of results of a backward, each with the number of the input whose gradient it is. ``functions``: the flows of the
    backwards of Functions that are measured separately, by the names of the Functions' nodes. ``returned``: the
    position of each result of the graph, None if it is not floating. ``written``: for each input that the graph writes
    to, the positions of what it holds after the run, and of what it held before.
    """

    values: tuple[Value, ...]
    results: tuple[int, ...]
    listing: Listing
    inputs: tuple[str, ...] = ()
    owners: tuple[tuple[int, int], ...] = ()
    functions: Mapping[str, "Flow"] = field(default_factory=dict)
    returned: tuple[int | None, ...] = ()
    written: tuple[tuple[int, int], ...] = ()

    @property
    def numbers(self) -> int:
        """The number of measured values."""
        return sum(value.number is not None for value in self.values)

    @cached_property
    def _limits(self) -> tuple[float, Sequence[tuple[int, float]] | None]:
        """The smallest limit of all values; the measurement and limit of each result, None if one is not measured.

        What inputs hold after the run counts as a result.
        """
        results = [self.values[at] for at in (*self.results, *(after for after, _ in self.written))]
        known = [(value.number, value.limit) for value in results if value.number is not None]
        least = min((value.limit for value in self.values if value.limit), default=0.0)
        return least, known if len(known) == len(results) else None

    def is_finite(self, numbers: Sequence[float]) -> bool:
        """Whether a quick look at ``numbers`` shows that all results, or all values, of the run are finite."""
        least, results = self._limits
        if results is not None and all(numbers[number] <= limit for number, limit in results):
            return True
        return all(number <= least for number in numbers)

    def of_gradients(self, with_gradient: Sequence[bool]) -> "Flow":
        """Return the flow without the results that have no gradient, unless none of them has one."""
        kept = [at for at, has in zip(self.returned, with_gradient, strict=False) if has and at is not None]
        return replace(self, results=tuple(dict.fromkeys(kept))) if kept else self

    def position(self, name: str) -> int | None:
        """Return the position of the value of the node called ``name``."""
        return next((at for at, value in enumerate(self.values) if value.entry.name == name), None)

    def in_body(self, name: str) -> Entry | None:
        """Return the node called ``"body/name"`` of a body, whether it is among the values or not."""
        *path, own = name.split("/")
        listing = self.listing
        for body in path:
            listing = listing.bodies[body]
        return listing.entry(own) if path else None
