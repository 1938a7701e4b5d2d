"""Find the line of each key and list item in a TOML text, which tomllib does not report.

The scanner assumes valid TOML, because tomllib has parsed the text before.
"""

import re
import tomllib
from bisect import bisect_left
from dataclasses import dataclass, field

Path = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|' r"'''.*?'{3,5}|" r'"(?:[^"\\\n]|\\.)*"|' r"'[^'\n]*'",
    re.DOTALL,
)
_KEY_PART = re.compile(r"[ \t]*(\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[A-Za-z0-9_-]+)[ \t]*")
_SCALAR = re.compile(r"[^,\]}#\n]+")


@dataclass
class LineIndex:
    """The line (from 1) of every key, table and list item, by its path: ``("rule", 2, "ops", 0)``."""

    lines: dict[Path, int] = field(default_factory=dict)

    def line(self, path: Path) -> int:
        """Return the line of ``path``, or of the nearest enclosing key that the text holds."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return 1


def index_lines(text: str) -> LineIndex:
    """Return the line of every key and item in a valid TOML text."""
    return _Scanner(text).document()


class _Scanner:
    """Scans the text once; ``at`` is the current position."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.index = LineIndex()
        self.table_counts: dict[Path, int] = {}
        self.ends = [end.start() for end in re.finditer("\n", text)]

    def document(self) -> LineIndex:
        table: Path = ()
        self.skip_blank()
        while self.at < len(self.text):
            if self.text[self.at] == "[":
                table = self.header()
            else:
                self.assignment(table)
            self.skip_blank()
        return self.index

    def header(self) -> Path:
        """Read ``[table]`` or ``[[table]]`` and return its path; each ``[[table]]`` is one more item of a list."""
        start = self.at
        listed = self.text.startswith("[[", self.at)
        self.at += 2 if listed else 1
        path: Path = ()
        keys = self.key()
        for key in keys[:-1]:
            path = self.inside_last((*path, key))
        path = (*path, keys[-1])
        if listed:
            self.table_counts[path] = self.table_counts.get(path, 0) + 1
            self.note(path, start)
            path = self.inside_last(path)
        self.note(path, start)
        self.at += 2 if listed else 1
        return path

    def inside_last(self, path: Path) -> Path:
        return (*path, self.table_counts[path] - 1) if path in self.table_counts else path

    def assignment(self, table: Path) -> None:
        start = self.at
        path = table
        for key in self.key():
            path = (*path, key)
            self.note(path, start)
        self.at += 1
        self.value(path)

    def key(self) -> list[str]:
        parts = []
        while match := _KEY_PART.match(self.text, self.at):
            parts.append(_unquoted(match[1]))
            self.at = match.end()
            if not self.text.startswith(".", self.at):
                break
            self.at += 1
        return parts

    def value(self, path: Path) -> None:
        self.skip_blank()
        if self.text[self.at] == "[":
            self.items(path)
        elif self.text[self.at] == "{":
            self.inline_table(path)
        else:
            match = _STRING.match(self.text, self.at) or _SCALAR.match(self.text, self.at)
            self.at = match.end() if match else self.at + 1

    def items(self, path: Path) -> None:
        self.at += 1
        position = 0
        while not self.closes("]"):
            self.note((*path, position), self.at)
            self.value((*path, position))
            position += 1

    def inline_table(self, path: Path) -> None:
        self.at += 1
        while not self.closes("}"):
            self.assignment(path)

    def closes(self, bracket: str) -> bool:
        """Skip blanks and a comma; if ``bracket`` follows, skip it too and return True."""
        self.skip_blank()
        if self.text.startswith(",", self.at):
            self.at += 1
            self.skip_blank()
        closed = self.text.startswith(bracket, self.at)
        self.at += closed
        return closed

    def skip_blank(self) -> None:
        match = _BLANK.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def note(self, path: Path, position: int) -> None:
        self.index.lines.setdefault(path, bisect_left(self.ends, position) + 1)


def _unquoted(part: str) -> str:
    if part[0] not in "\"'":
        return part
    return str(tomllib.loads(f"key = {part}")["key"])
