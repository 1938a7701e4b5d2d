"""The machine-readable comments of a dump: ``# fxamp: key=value key="a value with spaces"``, one line.

A value is not quoted if it holds no space, quote or control character; otherwise it is a JSON string. Keys may repeat.
"""

import json
import re
from collections.abc import Iterable

PREFIX = "# fxamp: "

_FIELD = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)=("(?:[^"\\]|\\.)*"|[^\s"]*)(?:\s+|$)')
_BARE = re.compile(r"[^\s\"\\\x00-\x1f\x7f\ud800-\udfff]+")
_JSON = json.JSONDecoder(strict=False)
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def write_comment(fields: Iterable[tuple[str, str]]) -> str:
    """Return the comment that holds ``fields`` in order; empty values are left out."""
    return PREFIX + " ".join(f"{key}={_value(value)}" for key, value in fields if value != "")


def read_comment(line: str) -> list[tuple[str, str]]:
    """Return the fields of a line that :func:`write_comment` wrote, without its indentation.

    Raises ValueError with the position of the mistake.
    """
    text = line.strip()
    if not text.startswith(PREFIX.strip()):
        raise ValueError(f"not an fxamp comment: {text[:60]!r}")
    text = text[len(PREFIX.strip()) :].strip()
    fields: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        match = _FIELD.match(text, at)
        if match is None:
            raise ValueError(f"expected key=value at {text[at : at + 40]!r}")
        fields.append((match[1], _unquoted(match[2])))
        at = match.end()
    return fields


def _value(value: str) -> str:
    if _BARE.fullmatch(value):
        return value
    # A lone surrogate, as in the name of a file that is not UTF-8, can only be written as an escape.
    return json.dumps(value, ensure_ascii=bool(_SURROGATE.search(value)))


def _unquoted(text: str) -> str:
    if not text.startswith('"'):
        return text
    return str(_JSON.decode(text)) if "\\" in text else text[1:-1]
