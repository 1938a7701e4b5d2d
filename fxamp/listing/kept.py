"""What one graph's forward keeps for its backward, as plain values."""

from collections.abc import Iterable
from dataclasses import dataclass

from fxamp.listing.model import RuleRef


@dataclass(frozen=True)
class KeptValue:
    """One piece of memory that waits for the backward; parameters, inputs and results are none, they are there anyway.

    ``op`` made the value, in the code of ``module``; ``dtype`` and ``shape`` are its own, with short names ("bf16").
    ``form`` is how it waits: its dtype, or ``"int8/128"``. ``before`` and ``after`` are bytes, for the sizes that the
    graph was compiled for where these may change, None where nothing is known. ``rule`` decided, None if none did;
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


def total(sizes: Iterable[int | None]) -> int | None:
    """The sum, None if one of ``sizes`` is not known."""
    every = list(sizes)
    known = [size for size in every if size is not None]
    return sum(known) if len(known) == len(every) else None
