"""Collect the mistakes in one parsed file, each with its line."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fxamp.errors import nearest
from fxamp.policy.file import schema
from fxamp.policy.file.lines import LineIndex, Path
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

    def keys(self, path: Path, table: dict[str, Any], kinds: Mapping[str, str], where: str) -> dict[str, Any]:
        """Return the entries of ``table`` with an accepted key and value; record the others as mistakes."""
        return {key: value for key, value in table.items() if self._entry((*path, key), value, kinds, where)}

    def valid(self, path: Path, parse: Callable[[Any], _Result], value: Any) -> _Result | None:
        """Return ``parse(value)``; None for None, or after recording why parsing failed."""
        if value is None:
            return None
        try:
            return parse(value)
        except ValueError as error:
            self.mistake(path, str(error))
            return None

    def items(self, path: Path, parse: Callable[[Any], _Result], values: list[Any] | None) -> tuple[_Result, ...]:
        """Return ``parse`` of every item of a list; record items that fail, and an empty list."""
        if values == []:
            self.mistake(path, f"{path[-1]} = [] is empty; accepted: a list with at least one item")
        items = [self.valid((*path, at), parse, value) for at, value in enumerate(values or [])]
        return tuple(item for item in items if item is not None)

    def _entry(self, path: Path, value: object, kinds: Mapping[str, str], where: str) -> bool:
        key = str(path[-1])
        if key not in kinds:
            message = f"unknown key {key!r} in {where}; accepted: {', '.join(kinds)}{nearest(key, kinds)}"
        elif not schema.is_of_kind(value, kinds[key]):
            message = f"{key} = {value!r} has the wrong type; accepted: {kinds[key]}"
        elif key in schema.CHOICES and value not in schema.CHOICES[key]:
            message = unknown_value(key, value, schema.CHOICES[key])
        else:
            return True
        self.mistake(path, message)
        return False
