"""Rules with ``chunks``: a linear layer and its loss are computed a chunk of rows at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fxamp.argument_names import named_arguments
from fxamp.policy.model.keys import COUNT, STRING, Key, Kind, declared
from fxamp.policy.model.rule import ELEMENTS, ID, OPS, Rule
from fxamp.policy.model.site import LOSS

AUTO = "auto"
"""The number of rows of a chunk: twice the hidden size, rounded up to a power of two.

A chunk's logits are then two to four times as large as the layer's weight, and the weight's gradient, which each chunk
reads and writes, takes less time than the products.
"""

Chunks = int | str
"""The rows of a chunk, or "auto"."""

GRADIENTS = ("forward", "backward")
"""Which part computes a chunk's gradients: the forward, which saves them, or the backward, from recomputed logits."""


def chunks_of(value: object) -> Chunks:
    """Return the value of ``chunks``. Raises ValueError if it is not accepted."""
    if value == AUTO or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f"chunks = {value!r} is not accepted; accepted: 'auto', or a whole number of rows from 1 on")


_COUNT_OR_AUTO = Kind("a whole number, or a string", (int, str), {"anyOf": [COUNT.json, {"const": AUTO}]})


@named_arguments
@dataclass(frozen=True)
class ChunkRule(Rule):
    """The losses that meet all conditions are computed in chunks of rows.

    ``chunks``: how many rows of logits exist at a time, or "auto". ``gradients``: whether the forward or the backward
    computes the gradients of a chunk. ``elements`` is a condition on the number of logits.
    """

    main_key = "chunks"
    regions: ClassVar[Mapping[str, str]] = {LOSS: "it is computed as a whole"}

    id: str = ID
    chunks: Chunks = declared(
        Key(
            _COUNT_OR_AUTO,
            "How many rows of logits exist at a time, or 'auto'; instead of cast, for losses of linear layers.",
            parse=chunks_of,
        ),
        default=None,
    )
    ops: tuple[str, ...] = OPS
    gradients: str = declared(
        Key(STRING, "Whether the forward or the backward computes a chunk's gradients.", GRADIENTS), default=""
    )
    elements: str = ELEMENTS

    @property
    def asks(self) -> str:
        """The rows of a chunk."""
        return f"chunks of {self.chunks}"
