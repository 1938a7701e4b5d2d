"""Rules with ``drop``: results that a training graph need not compute besides its loss."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fxamp.argument_names import named_arguments
from fxamp.policy.model.keys import Key, Kind, declared
from fxamp.policy.model.rule import ELEMENTS, ID, OPS, Mistake, Rule
from fxamp.policy.model.site import RESULTS

_TRUE = Kind("true or false", (bool,), {"const": True})


@named_arguments
@dataclass(frozen=True)
class DropRule(Rule):
    """A graph that returns a loss does not compute the results that meet all conditions, which training does not read.

    ``elements`` is a condition on the size of the result.
    """

    main_key = "drop"
    regions: ClassVar[Mapping[str, str]] = {RESULTS: "it is computed"}

    id: str = ID
    drop: bool = declared(
        Key(_TRUE, "true: results that meet the conditions, besides the loss, are not computed; instead of cast."),
        default=False,
    )
    ops: tuple[str, ...] = OPS
    elements: str = ELEMENTS

    @property
    def asks(self) -> str:
        """The key, which has one value."""
        return self.main_key

    @classmethod
    def _mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        if given.get("drop") is False:
            yield ("drop",), "drop = false has no effect; accepted: true, or enabled = false"
