"""The data model of graphs, as plain values: dumps store it, reports count it, fxamp-show prints it. Imports no torch.

A listing is created from a graph when its decisions are made, or read back from a dump's text. Nothing in it is
computed again from other data.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

#: Bytes of one element, by the short dtype names of torch's printed graphs.
ITEM_BYTES = {
    "f64": 8,
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "c128": 16,
    "c64": 8,
    "c32": 4,
    "bc32": 4,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u64": 8,
    "u32": 4,
    "u16": 2,
    "u8": 1,
    "b8": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "f8e4m3fnuz": 1,
    "f8e5m2fnuz": 1,
    "f8e8m0fnu": 1,
    "f4e2m1fnx2": 1,
}

#: Ops that cast a tensor: as captured in a forward, and as AOTAutograd writes it in a backward.
_CASTS = ("aten::to.dtype", "prims::convert_element_type.default")

FP8 = ("fp8", "mxfp8", "nvfp4")
"""What :attr:`Entry.runs_in` says about products in 8 or 4 bits."""


FLOATS = frozenset(
    {"f64", "f32", "f16", "bf16", "f8e4m3fn", "f8e5m2", "f8e4m3fnuz", "f8e5m2fnuz", "f8e8m0fnu", "f4e2m1fnx2"}
)


def short_op(op: str) -> str:
    """Return ``"mm"`` for ``"aten::mm.default"``."""
    return op.removeprefix("aten::").removesuffix(".default")


@dataclass(frozen=True)
class TensorType:
    """A tensor's dtype by its short name (``f32``), its sizes (numbers, or text for symbolic ones), and its device."""

    dtype: str
    shape: tuple[int | str, ...]
    device: str = ""

    @property
    def elements(self) -> int | None:
        """Return the number of elements; None if a size is symbolic."""
        count = 1
        for size in self.shape:
            if isinstance(size, str):
                return None
            count *= size
        return count

    @property
    def bytes(self) -> int | None:
        """Return the bytes of a contiguous tensor of this type; None if a size is symbolic or the dtype is unknown."""
        item, count = ITEM_BYTES.get(self.dtype), self.elements
        return None if item is None or count is None else item * count

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Source:
    """A line of the user's program: file, line number, function, and the line's text."""

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class RuleRef:
    """A policy's rule in a record: id, location (``file:line``, "" if defined in Python), category, why."""

    id: str
    origin: str = ""
    cast: str = ""
    why: str = ""


@dataclass(frozen=True)
class KeptValue:
    """One piece of memory that is kept for the backward; not a parameter, input or result, which exist anyway.

    ``op`` computed the value, in the code of ``module``. ``dtype`` and ``shape`` are the value's, with short names
    ("bf16"). ``form`` is how it is stored: its dtype, or ``"int8/128"``. ``before`` and ``after`` are bytes; for
    dynamic sizes, those at compile time; None if unknown. ``rule`` is the rule that applies, None if there is none.
    ``reason`` says why it is kept so.
    """

    name: str
    op: str
    module: str
    dtype: str
    shape: tuple[int | str, ...]
    form: str
    before: int | None
    after: int | None
    rule: RuleRef | None = None
    reason: str = ""


@dataclass(frozen=True)
class Entry:
    """One node of a graph.

    ``name`` is the fx node's name, ``kind`` its ``op`` (``"placeholder"``, ``"get_attr"``, ``"call_function"``,
    ``"call_method"``, ``"call_module"``, ``"output"``). ``target`` names the operation as policies do
    (``"aten::mm.default"``, ``"higher_order::cond"``, ``"torch.nn.functional.linear"``, ``".view"``); for an input or
    an attribute it is its name. ``call`` is the call as Python text (for an output the returned value), ``""`` for an
    input. ``inputs`` are the names of the nodes that it reads, in order of first use. ``values`` are the types of its
    result tensors, ``()`` if unknown or none; ``was`` their dtypes when the program was captured, ``()`` if they are
    the same or unknown. ``symbol`` is the text of its symbolic result (``"s77"``). ``needs_grad`` means that it is a
    graph input for which the backward computes a gradient.

    ``module`` is the dotted path of the module whose forward made it, ``module_class`` that module's class.

    ``rule`` is the rule that applies, None if it follows its inputs; ``lost`` are the matching rules that were
    overridden, first to last. ``reason`` is the reason for the decision, as text; ``overruled`` says why the rule was
    not applied as it is. ``region`` is the lower-precision dtype of its autocast region, ``"off"`` if autocast is off,
    ``""`` if unknown. ``inserted`` says why fxamp inserted this node, ``""`` for the user's own. ``verbatim`` says why
    fxamp kept it as captured without looking inside. ``bodies`` names the listings of a higher-order op's bodies.
    ``not_fp8`` says why a product runs in 16 bits although a rule for fp8 names its op, ``""`` for every other node.
    """

    name: str
    kind: str
    target: str
    call: str = ""
    inputs: tuple[str, ...] = ()
    values: tuple[TensorType, ...] = ()
    was: tuple[str, ...] = ()
    symbol: str = ""
    needs_grad: bool = False
    module: str = ""
    module_class: str = ""
    source: Source | None = None
    rule: RuleRef | None = None
    lost: tuple[RuleRef, ...] = ()
    reason: str = ""
    overruled: str = ""
    region: str = ""
    inserted: str = ""
    verbatim: str = ""
    bodies: tuple[str, ...] = ()
    not_fp8: str = ""

    @property
    def is_cast(self) -> bool:
        """Whether this is a cast that fxamp inserted."""
        return bool(self.inserted) and self.target in _CASTS

    @property
    def is_call(self) -> bool:
        """Whether this is an operation, not an input, an attribute or the output."""
        return self.kind in ("call_function", "call_method", "call_module")

    @property
    def dtype(self) -> str:
        """Return the dtype of its first floating-point result, else of its first result; ``""`` if unknown."""
        dtypes = [value.dtype for value in self.values]
        return next((dtype for dtype in dtypes if dtype in FLOATS), dtypes[0] if dtypes else "")

    @property
    def runs_in(self) -> str:
        """Return the dtype that it computes in: that of its result, or one of :data:`FP8` for a product in few bits."""
        cast = "" if self.rule is None else self.rule.cast.partition(" ")[0]
        return cast if cast in FP8 and self.target.startswith("fxamp::") else self.dtype


@dataclass(frozen=True)
class Listing:
    """One graph: its nodes in order, the bodies of its higher-order ops by attribute name, and properties of the graph.

    ``stage`` names the last stage (``"captured"``, ``"cast"``, ``"forward"``, ``"backward"``, ``"joint"``), ``""`` if
    unknown. ``policy``, ``device`` and ``chosen`` (why this policy) are ``""`` if no policy was applied. ``counts`` are
    named numbers from the passes (``shared``, ``folded``). ``unmatched`` are the rules that matched nothing. ``ended``
    is the reason for the graph break that ended the graph, ``""`` without one. ``kept_before`` and ``kept_after`` are
    the bytes that autograd keeps for the backward, without and with the casts; for a partitioned forward, without and
    with the rules for kept values. ``kept`` lists these values.
    """

    name: str
    entries: tuple[Entry, ...]
    bodies: Mapping[str, "Listing"] = field(default_factory=dict)
    stage: str = ""
    policy: str = ""
    device: str = ""
    chosen: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    unmatched: tuple[RuleRef, ...] = ()
    ended: str = ""
    kept_before: int | None = None
    kept_after: int | None = None
    kept: tuple[KeptValue, ...] = ()

    @property
    def has_tangents(self) -> bool:
        """Whether it is a backward or joint graph, by AOTAutograd's names of the incoming gradients."""
        return any(entry.kind == "placeholder" and entry.name.startswith("tangents_") for entry in self.entries)

    def walk(self) -> Iterator[tuple["Listing", Entry]]:
        """Yield every entry with its listing, in order; a higher-order op is followed by its bodies."""
        for entry in self.entries:
            yield self, entry
            for body in entry.bodies:
                if body in self.bodies:
                    yield from self.bodies[body].walk()

    def entry(self, name: str) -> Entry | None:
        """Return the node of this graph (not of its bodies) called ``name``, or None."""
        return next((entry for entry in self.entries if entry.name == name), None)


@dataclass(frozen=True)
class Document:
    """The contents of one input: graphs in order, and warnings about what could not be read."""

    graphs: tuple[Listing, ...]
    warnings: tuple[str, ...] = ()
