"""Collect the mistakes in one parsed file, each with its line."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fxamp.errors import nearest
from fxamp.policy.file.lines import LineIndex, Path
from fxamp.policy.model.keys import Key
from fxamp.policy.model.rule import Origin
from fxamp.policy.model.settings import unknown_value

_Result = TypeVar("_Result")


class Checker:
    """The state that all checks of a file share; ``mistakes`` are ``file:line: message``."""

    def __init__(self, shown: str, lines: LineIndex) -> None:
        self.shown = shown
        self.lines = lines
        self.mistakes: list[str] = []

    def mistake(self, path: Path, message: str) -> None:
        """Record a mistake at ``path``."""
        self.mistakes.append(f"{self.shown}:{self.lines.line(path)}: {message}")

    def origin(self, path: Path) -> Origin:
        """Return where ``path`` is written."""
        return Origin(self.shown, self.lines.line(path))

    def keys(self, path: Path, table: dict[str, Any], keys: Mapping[str, Key], where: str) -> dict[str, Any]:
        """Return the entries of ``table`` with an accepted key and value; record the others as mistakes."""
        return {key: value for key, value in table.items() if self._entry((*path, key), value, keys, where)}

    def parsed(self, path: Path, table: dict[str, Any], keys: Mapping[str, Key]) -> dict[str, Any]:
        """Return ``table``, of accepted keys, in canonical form; values that have none are recorded and left out."""
        values = {key: self._parsed((*path, key), value, keys[key].parse) for key, value in table.items()}
        return {key: value for key, value in values.items() if value is not None}

    def valid(self, path: Path, parse: Callable[[Any], _Result], value: Any) -> _Result | None:
        """Return ``parse(value)``; None after recording why parsing failed."""
        try:
            return parse(value)
        except ValueError as error:
            self.mistake(path, str(error))
            return None

    def items(self, path: Path, parse: Callable[[Any], _Result], values: list[Any]) -> tuple[_Result, ...]:
        """Return ``parse`` of every item of a list; record items that fail, and an empty list."""
        if not values:
            self.mistake(path, f"{path[-1]} = [] is empty; accepted: a list with at least one item")
        items = [self.valid((*path, at), parse, value) for at, value in enumerate(values)]
        return tuple(item for item in items if item is not None)

    def _parsed(self, path: Path, value: Any, parse: Callable[[Any], Any] | None) -> Any:
        if parse is None:
            return value
        if isinstance(value, list):
            return self.items(path, parse, value)
        if isinstance(value, dict):
            return {name: self.valid((*path, name), parse, item) for name, item in value.items()}
        return self.valid(path, parse, value)

    def _entry(self, path: Path, value: object, keys: Mapping[str, Key], where: str) -> bool:
        key = str(path[-1])
        if key not in keys:
            message = f"unknown key {key!r} in {where}; accepted: {', '.join(keys)}{nearest(key, keys)}"
        elif not keys[key].kind.holds(value):
            message = f"{key} = {value!r} has the wrong type; accepted: {keys[key].kind.words}"
        elif keys[key].choices and value not in keys[key].choices:
            message = unknown_value(key, value, keys[key].choices)
        else:
            return True
        self.mistake(path, message)
        return False
