"""Write a policy as the text of one policy file."""

import json
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from fxamp.policy.file.schema import TABLES
from fxamp.policy.model.rule import Origin, Rule

_WIDTH = 120


def write_text(arguments: Mapping[str, Any], origins: bool) -> str:
    """Return the text of a policy file with the meaning of these arguments of :class:`fxamp.Policy`.

    With ``origins``, each line ends in a comment with the place where it was written.
    """
    lines = _lines(arguments)
    return "".join(f"{text}  # {origin}\n" if origins and origin is not None else f"{text}\n" for text, origin in lines)


def _lines(arguments: Mapping[str, Any]) -> Iterator[tuple[str, "Origin | str | None"]]:
    """Yield each line with its origin: "default" for values that no file sets, None for lines that need no origin."""
    origins = arguments["origins"]
    for key in ("lower_precision_fp", "unlisted", "outputs"):
        yield f"{key} = {_value(arguments[key])}", origins.get(key, "default")
    yield "", None
    yield "[match]", None
    for key in TABLES["match"]:
        if arguments[key]:
            yield f"{key} = {_value(arguments[key])}", origins.get(key, "default")
    for table in ("loss_scale", "optimizer"):
        if arguments[table] is not None:
            yield "", None
            yield f"[{table}]", None
            for key, value in arguments[table].content().items():
                yield f"{key} = {_value(value)}", origins.get(f"{table}.{key}", "default")
    for rule in arguments["rules"]:
        yield "", None
        yield "[[rule]]", rule.origin or "made in Python"
        yield from ((line, None) for line in _rule_lines(rule))


def _rule_lines(rule: Rule) -> Iterator[str]:
    content = rule.content()
    tables = {key: content.pop(key) for key in ("args", "inputs") if key in content}
    if rule.why:
        content["why"] = rule.why
    for key, value in content.items():
        yield from _assignment(key, value)
    for key, table in tables.items():
        assert isinstance(table, Mapping)
        yield f"[rule.{key}]"
        for name, value in table.items():
            yield f"{_key(name)} = {_value(value)}"


def _assignment(key: str, value: object) -> Iterator[str]:
    """Yield one line, or several for a list that does not fit one."""
    line = f"{key} = {_value(value)}"
    if len(line) <= _WIDTH or not isinstance(value, list):
        yield line
        return
    yield f"{key} = ["
    row = "   "
    for item in map(_value, value):
        if len(row) + len(item) + 2 > _WIDTH:
            yield row
            row = "   "
        row += f" {item},"
    yield row
    yield "]"


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _value(name)


def _value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {_value(item)}' for key, item in value.items())} }}"
    if isinstance(value, float) and not isfinite(value):
        return {"inf": "inf", "-inf": "-inf"}.get(str(value), "nan")
    # TOML's basic strings are JSON's, except for DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
