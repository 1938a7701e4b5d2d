"""The facts about one call of an op that a rule's conditions can test, as plain values. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

KEPT = "kept"
"""The region of rules on the tensors that the forward saves for the backward."""

LOSS = "loss"
"""The region of rules on losses that a linear layer's results go into."""

RESULTS = "results"
"""The region of rules on the results that a graph returns besides a loss."""

REGIONS = ("forward", "backward", KEPT, LOSS, RESULTS)

RESULT = "result"
"""The argument name under which conditions test a saved value or a result itself."""


@dataclass(frozen=True)
class Symbol:
    """A number that is not known at compile time, by its text: ``"s77"``."""

    text: str

    def __str__(self) -> str:
        return self.text


Number = int | Symbol


@dataclass(frozen=True)
class TensorFacts:
    """A tensor's dtype by its full name (``"float32"``), and its sizes; "" and None mean unknown.

    ``rank`` and ``size`` (the number of elements) follow from ``shape`` where they are not given.
    """

    dtype: str = ""
    shape: tuple[Number, ...] | None = None
    rank: int | None = None
    size: Number | None = None

    def __post_init__(self) -> None:
        if self.shape is None:
            return
        if self.rank is None:
            object.__setattr__(self, "rank", len(self.shape))
        if self.size is None:
            object.__setattr__(self, "size", product(self.shape))


def product(sizes: tuple[Number, ...]) -> Number:
    """Return the product of ``sizes``; a symbol if one of them is a symbol."""
    symbols = [str(size) for size in sizes if isinstance(size, Symbol)]
    if symbols:
        return Symbol("*".join(symbols))
    return prod(size for size in sizes if isinstance(size, int))


Plain = bool | int | float | str
Value = Plain | Symbol | TensorFacts | tuple["Value", ...] | None


@dataclass(frozen=True)
class Site:
    """One call of an op.

    ``op``: its name, ``"aten::mm.default"``. ``module``: the dotted path of the module whose code calls it, ``""`` for
    the root; ``module_classes``: the qualified class names of the modules around it. ``args``: what it is called with,
    by the names of the op's schema, defaults included. ``region``: one of :data:`REGIONS`. ``reduces``: how many
    elements go into one result of a reduction, None for other ops. ``computes``: False for a call that only moves or
    views values, or names its dtype itself. ``elements``: the number of elements of the result, for the regions "kept"
    and "results"; for "loss", the number of logits. ``readers``: for "kept", the ops that read the result in the
    forward. ``partial``: missing facts are unknown, not absent.
    """

    op: str
    module: str = ""
    module_classes: tuple[str, ...] = ()
    args: Mapping[str, Value] = field(default_factory=dict)
    region: str = "forward"
    reduces: Number | None = None
    computes: bool = True
    partial: bool = False
    elements: Number | None = None
    readers: tuple[str, ...] = ()


def tensors_in(value: Value) -> tuple[TensorFacts, ...]:
    """Return the tensors in one argument: the argument itself, or those in a list."""
    if isinstance(value, TensorFacts):
        return (value,)
    return tuple(item for item in value if isinstance(item, TensorFacts)) if isinstance(value, tuple) else ()
