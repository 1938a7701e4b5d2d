"""Rules with ``keep``: the form in which the forward saves a value for the backward."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fxamp.argument_names import named_arguments
from fxamp.policy.model.conditions import Mismatch
from fxamp.policy.model.keep import BLOCK, EIGHT_BITS, KEPT, RANDOM, SMALLEST_BLOCK, Keep
from fxamp.policy.model.keys import STRING, STRINGS, Condition, Key, Kind, declared
from fxamp.policy.model.op_names import canonical, covers, is_glob
from fxamp.policy.model.rule import ELEMENTS, ID, OPS, Mistake, Rule
from fxamp.policy.model.site import Site

_BLOCK = Kind("a whole number", (int,), {"type": "integer", "minimum": SMALLEST_BLOCK})


def _reader_mismatch(names: tuple[str, ...], site: Site) -> Mismatch | None:
    if any(covers(name, op) for name in names for op in site.readers):
        return None
    return Mismatch(f"none of {', '.join(names)} is known to read it", unknown=site.partial and not site.readers)


@named_arguments
@dataclass(frozen=True)
class KeepRule(Rule):
    """The results of calls that meet all conditions are stored so for the backward.

    ``block`` elements share a scale, 0 without scales. ``elements`` is a condition on the size of the result. At least
    one of the ops in ``read_by`` must read it in the forward.
    """

    main_key = "keep"
    regions: ClassVar[Mapping[str, str]] = {KEPT: "its result is kept as it is"}

    id: str = ID
    keep: Keep = declared(
        Key(STRING, "How the forward saves a value for the backward; in place of cast.", tuple(map(str, Keep)), Keep),
        default=None,
    )
    ops: tuple[str, ...] = OPS
    block: int = declared(Key(_BLOCK, "How many elements share a scale in 8 bits."), default=0)
    elements: str = ELEMENTS
    read_by: tuple[str, ...] = declared(
        Condition(
            STRINGS,
            "Ops of which one at least reads the saved value in the forward.",
            parse=canonical,
            mismatch=_reader_mismatch,
            words=lambda names: iter([f"read by {' or '.join(name.removeprefix('aten::') for name in names)}"]),
        ),
        default=(),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep in EIGHT_BITS and not self.block:
            object.__setattr__(self, "block", BLOCK)

    @classmethod
    def _mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        keep, block = given.get("keep"), given.get("block", BLOCK)
        if block < SMALLEST_BLOCK:
            yield ("block",), f"block = {block!r} is too small; accepted: whole numbers from {SMALLEST_BLOCK} on"
        if "block" in given and keep is not None and keep not in EIGHT_BITS:
            accepted = " or ".join(repr(form.value) for form in EIGHT_BITS)
            yield ("block",), f"block goes with keep = {accepted}, but this rule has keep = {str(keep)!r}"
        for op in given.get("ops", ()) if keep == Keep.RECOMPUTE else ():
            if not is_glob(op) and op.partition(".")[0] in RANDOM:
                why = "which draws random numbers; recomputed, it would draw different ones"
                yield ("ops",), f"keep = 'recompute' of {op}, {why}"
