"""The result of ``fxamp-diff``, before it is written in one of the formats."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fxamp.policy.diff.policy_diff import PolicyDiff, diff_policies
from fxamp.policy.diff.rule_changes import KeyChange
from fxamp.tools.diff.sides import Side

if TYPE_CHECKING:
    from fxamp.tools.diff.cost import Cost
    from fxamp.tools.diff.effect import Effect
    from fxamp.tools.diff.numbers import Numbers


@dataclass(frozen=True)
class Comparison:
    """The difference of two policies, its effect on graphs, on numbers and costs of models, by the files' names."""

    old: Side
    new: Side
    diff: PolicyDiff
    effects: "tuple[Effect, ...]" = ()
    runs: "tuple[Numbers, ...]" = ()
    costs: "tuple[Cost, ...]" = ()

    @cached_property
    def settings(self) -> tuple[KeyChange, ...]:
        """Return the settings that differ; a setting that a side does not define counts as not set."""
        return tuple(self._settings(self.diff.settings))

    @cached_property
    def loss_scale(self) -> tuple[KeyChange, ...]:
        """Return the differences in loss scaling; without settings, the policies' dtypes decide."""
        open_dtype = "lower_precision_fp" in self.old.open | self.new.open
        written = self.diff.old.loss_scale or self.diff.new.loss_scale
        return () if open_dtype and written is None else self.diff.loss_scale

    @property
    def same(self) -> bool:
        """Whether both policies decide the same."""
        return not (self.settings or self.loss_scale or self.diff.ops)

    def _settings(self, changes: Sequence[KeyChange]) -> Iterator[KeyChange]:
        differ = {change.key: (change.old, change.new) for change in changes}
        for key in (*differ, *sorted((self.old.open | self.new.open) - differ.keys())):
            values = differ.get(key) or (getattr(self.diff.old, key) or None, getattr(self.diff.new, key) or None)
            sides = zip((self.old, self.new), values, strict=True)
            before, after = (None if key in side.open else value for side, value in sides)
            if before != after:
                yield KeyChange(key, before, after)


def compare(old: Side, new: Side) -> Comparison:
    """Compare two policies."""
    return Comparison(old, new, diff_policies(old.policy, new.policy))
