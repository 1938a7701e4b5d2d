"""Rules with ``chunks``: losses that a linear layer's results go into, computed a chunk of rows at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fxamp.argument_names import named_arguments
from fxamp.policy.model.chunks import AUTO, GRADIENTS, LOSS, Chunks, chunks_of
from fxamp.policy.model.keys import COUNT, STRING, Key, Kind, declared
from fxamp.policy.model.rule import ELEMENTS, ID, OPS, Rule

_COUNT_OR_AUTO = Kind("a whole number, or a string", (int, str), {"anyOf": [COUNT.json, {"const": AUTO}]})


@named_arguments
@dataclass(frozen=True)
class ChunkRule(Rule):
    """The losses that meet all conditions are computed in chunks of rows.

    ``chunks``: how many rows of logits exist at a time, or "auto". ``gradients``: whether the forward or the backward
    makes the gradients of a chunk. ``elements`` is a condition on the number of logits.
    """

    main_key = "chunks"
    regions: ClassVar[Mapping[str, str]] = {LOSS: "it is computed as a whole"}

    id: str = ID
    chunks: Chunks = declared(
        Key(
            _COUNT_OR_AUTO,
            "How many rows of logits exist at a time, or 'auto'; in place of cast, for losses of linear layers.",
            parse=chunks_of,
        ),
        default=None,
    )
    ops: tuple[str, ...] = OPS
    gradients: str = declared(
        Key(STRING, "Whether the forward or the backward makes a chunk's gradients.", GRADIENTS), default=""
    )
    elements: str = ELEMENTS

    @property
    def asks(self) -> str:
        """The rows of a chunk."""
        return f"chunks of {self.chunks}"
