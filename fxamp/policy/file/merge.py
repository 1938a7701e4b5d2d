"""Merges the contents of several files, first to last."""

from typing import Any

from fxamp.errors import PolicyError, nearest
from fxamp.policy.file.check_file import PolicyFile
from fxamp.policy.file.check_rule import Removal
from fxamp.policy.model.loss_scale import LossScale, mistakes
from fxamp.policy.model.match import match_problems
from fxamp.policy.model.optimizer_precision import OptimizerPrecision
from fxamp.policy.model.rule import Origin, Rule


class Merge:
    """The merged content of the files so far. A rule with a known id replaces that rule in its place; others go last.

    ``part``: the files make up a table for others to extend, not a whole policy.
    """

    def __init__(self, part: bool = False) -> None:
        self._part = part
        self.sources: dict[str, None] = {}
        self._fields: dict[str, Any] = {}
        self._loss_scale: dict[str, Any] | None = None
        self._optimizer: dict[str, Any] | None = None
        self._origins: dict[str, Origin] = {}
        self._rules: dict[str, Rule] = {}
        self._mistakes: list[str] = []

    def add(self, file: PolicyFile) -> None:
        """Add the content of ``file``, which wins over all files before."""
        self._fields |= file.fields
        self._origins |= file.origins
        if file.loss_scale is not None:
            self._loss_scale = (self._loss_scale or {}) | file.loss_scale
        if file.optimizer is not None:
            self._optimizer = (self._optimizer or {}) | file.optimizer
        for rule in file.rules:
            if isinstance(rule, Rule):
                self._rules[rule.id] = rule
            else:
                self._remove(file, rule)
        self._mistakes += file.mistakes

    def arguments(self, name: str, shown: str) -> dict[str, Any]:
        """Return the arguments of :class:`fxamp.Policy`; raise PolicyError with every mistake."""
        found = self.mistakes(shown)
        if found:
            raise PolicyError("\n".join(found))
        return {
            "name": name,
            **self._fields,
            "loss_scale": None if self._loss_scale is None else LossScale(**self._loss_scale),
            "optimizer": None if self._optimizer is None else OptimizerPrecision(**self._optimizer),
            "rules": tuple(self._rules.values()),
            "sources": tuple(self.sources),
            "origins": self._origins,
        }

    def mistakes(self, shown: str) -> list[str]:
        """Return every mistake in the files; if there is none, what is missing in the merged result."""
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
        if "lower_precision_fp" not in self._fields:
            self._mistakes.append(
                f"{name}:1: lower_precision_fp is not set: this is an op table, not a policy; extend it in a file that "
                'sets lower_precision_fp = "float16" or "bfloat16"'
            )
        if "device" not in self._fields:
            self._mistakes.append(f'{name}:1: [match] device is not set; add, for example, [match] and device = "cuda"')
        else:
            given = self._fields.get("capability", ""), *(self._fields.get(key, ()) for key in ("cpu_features", "arch"))
            for key, problem in match_problems(self._fields["device"], "", *given):
                self._mistakes.append(f"{self._origins[key]}: {problem}")
        for key, message in mistakes(self._loss_scale or {}):
            origin = self._origins.get(f"loss_scale.{key}", self._origins.get("loss_scale"))
            self._mistakes.append(f"{origin}: {message}")
