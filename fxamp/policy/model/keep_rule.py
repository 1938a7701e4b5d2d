"""Rules with ``keep``: the form in which the forward saves a value for the backward."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from fxamp.argument_names import named_arguments
from fxamp.policy.model.conditions import Mismatch
from fxamp.policy.model.keys import STRING, STRINGS, Condition, Key, Kind, declared
from fxamp.policy.model.op_names import aten_ops, canonical, covers, is_glob
from fxamp.policy.model.rule import ELEMENTS, ID, OPS, Mistake, Rule
from fxamp.policy.model.site import KEPT, Site

BLOCK = 128
"""The default number of elements that share a scale."""

SMALLEST_BLOCK = 16


class Keep(StrEnum):
    """The form in which a value is stored for the backward. The forward computes with the original value."""

    INT8 = "int8"
    """8-bit integers and a 16-bit scale for each block; infinities and NaN survive."""
    FLOAT8_E4M3FN = "float8_e4m3fn"
    """8-bit floats with 3 bits of mantissa and a scale for each block; infinities and NaN survive."""
    FLOAT8_E5M2 = "float8_e5m2"
    """8-bit floats with 2 bits of mantissa and a scale for each block; infinities and NaN survive."""
    BFLOAT16 = "bfloat16"
    """Rounded to bfloat16, if it is wider."""
    FLOAT16 = "float16"
    """Rounded to float16, if it is wider; what exceeds its range becomes infinite."""
    HOST = "host"
    """In the host's memory, bit for bit: copied there by the forward, and back by the backward."""
    RECOMPUTE = "recompute"
    """Not stored: the backward recomputes it."""
    AS_IS = "as-is"
    """As the forward computed it."""


EIGHT_BITS = (Keep.INT8, Keep.FLOAT8_E4M3FN, Keep.FLOAT8_E5M2)
"""The forms with a scale for each block."""

RANDOM = aten_ops("""
    alpha_dropout bernoulli dropout feature_alpha_dropout feature_dropout multinomial native_dropout normal poisson rand
    rand_like randint randint_like randn randn_like randperm rrelu rrelu_with_noise
""")
"""Ops that draw random numbers; recomputed, they would draw different ones."""

_BLOCK = Kind("a whole number", (int,), {"type": "integer", "minimum": SMALLEST_BLOCK})


def _reader_mismatch(names: tuple[str, ...], site: Site) -> Mismatch | None:
    if any(covers(name, op) for name in names for op in site.readers):
        return None
    return Mismatch(f"none of {', '.join(names)} is known to read it", unknown=site.partial and not site.readers)


@named_arguments
@dataclass(frozen=True)
class KeepRule(Rule):
    """The results of calls that meet all conditions are saved for the backward in this form.

    ``block`` elements share a scale; it is 0 for forms without scales. ``elements`` is a condition on the number of
    elements of the result. At least one of the ops in ``read_by`` must read the result in the forward.
    """

    main_key = "keep"
    regions: ClassVar[Mapping[str, str]] = {KEPT: "its result is kept as it is"}

    id: str = ID
    keep: Keep = declared(
        Key(STRING, "How the forward saves a value for the backward; instead of cast.", tuple(map(str, Keep)), Keep),
        default=None,
    )
    ops: tuple[str, ...] = OPS
    block: int = declared(Key(_BLOCK, "How many elements share a scale in 8 bits."), default=0)
    elements: str = ELEMENTS
    read_by: tuple[str, ...] = declared(
        Condition(
            STRINGS,
            "At least one of these ops reads the saved value in the forward.",
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
