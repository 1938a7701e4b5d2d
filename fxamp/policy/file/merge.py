"""Merge the contents of several files, first to last."""

from typing import Any

from fxamp.errors import PolicyError, nearest
from fxamp.policy.file.check_file import PolicyFile
from fxamp.policy.file.check_rule import Removal
from fxamp.policy.model.loss_scale import LossScale, mistakes
from fxamp.policy.model.match import Match
from fxamp.policy.model.optimizer_table import OptimizerPrecision
from fxamp.policy.model.rule import Origin, Rule


class Merge:
    """The merged content of the files so far. A rule with a known id replaces that rule in its place; others go last.

    ``part``: the files make up an op table for others to extend, not a whole policy.
    """

    def __init__(self, part: bool = False) -> None:
        self._part = part
        self.sources: dict[str, None] = {}
        self._tables: dict[str, dict[str, Any]] = {}
        self._origins: dict[str, Origin] = {}
        self._rules: dict[str, Rule] = {}
        self._mistakes: list[str] = []

    def add(self, file: PolicyFile) -> None:
        """Add the content of ``file``, which wins over all files before."""
        for name, table in file.tables.items():
            self._tables[name] = self._tables.get(name, {}) | table
        self._origins |= file.origins
        for rule in file.rules:
            if isinstance(rule, Rule):
                self._rules[rule.id] = rule
            else:
                self._remove(file, rule)
        self._mistakes += file.mistakes

    def arguments(self, name: str, shown: str) -> dict[str, Any]:
        """Return the arguments of :class:`fxamp.Policy`; raise PolicyError with every mistake."""
        mistakes = self.mistakes(shown)
        if mistakes:
            raise PolicyError("\n".join(mistakes))
        scale, optimizer = self._tables.get("loss_scale"), self._tables.get("optimizer")
        return {
            "name": name,
            **self._tables[""],
            **self._tables["match"],
            "loss_scale": None if scale is None else LossScale(**scale),
            "optimizer": None if optimizer is None else OptimizerPrecision(**optimizer),
            "rules": tuple(self._rules.values()),
            "sources": tuple(self.sources),
            "origins": self._origins,
        }

    def mistakes(self, shown: str) -> list[str]:
        """Return every mistake in the files; or, if there is none, every setting that the merged result lacks."""
        if not self._mistakes and not self._part:
            self._check_complete(shown)
        return self._mistakes

    def _remove(self, file: PolicyFile, removal: Removal) -> None:
        if removal.id not in self._rules and not removal.own and not self._part:
            hint = nearest(removal.id, self._rules)
            message = f"enabled = false, but no file that this one extends has a rule {removal.id!r}{hint}"
            file.mistake(removal.line, f"{message}; accepted: the id of an inherited rule")
        self._rules.pop(removal.id, None)

    def _check_complete(self, name: str) -> None:
        """Record what is missing in the merged result, and values of different files that contradict each other."""
        if "lower_precision_fp" not in self._tables.get("", {}):
            self._mistakes.append(
                f"{name}:1: lower_precision_fp is not set: this is an op table, not a policy; extend it in a file that "
                'sets lower_precision_fp = "float16" or "bfloat16"'
            )
        match = self._tables.get("match", {})
        if "device" not in match:
            self._mistakes.append(f'{name}:1: [match] device is not set; add, for example, [match] and device = "cuda"')
        else:
            self._mistakes += [f"{self._origins[key]}: {problem}" for key, problem in Match(**match).problems()]
        for key, message in mistakes(self._tables.get("loss_scale", {})):
            origin = self._origins.get(f"loss_scale.{key}", self._origins.get("loss_scale"))
            self._mistakes.append(f"{origin}: {message}")
