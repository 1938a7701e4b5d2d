"""Convert the fields of a dump's comments to the values of an entry or of a whole listing."""

import re
from collections.abc import Iterable
from typing import Any

from fxamp.graph_text.annotations import tensor_type
from fxamp.graph_text.model import KeptValue, RuleRef, TensorType
from fxamp.graph_text.write import FORMAT

Fields = list[tuple[str, str]]

_TEXTS = {
    "name": "name",
    "module": "module",
    "class": "module_class",
    "reason": "reason",
    "overruled": "overruled",
    "region": "region",
    "inserted": "inserted",
    "verbatim": "verbatim",
    "not_fp8": "not_fp8",
}
#: A part of a rule up to the next unescaped ``|``.
_PART = re.compile(r"(?:^|(?<=\|))((?:[^|\\]|\\.)*)(?:\||$)", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_OF_A_RULE = ("rule", "at", "cast", "why")
_OF_A_GRAPH = ("stage", "policy", "device", "chosen", "ended")


def entry_fields(fields: Fields) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of Entry from a node's comment, and the unknown keys in it."""
    values: dict[str, Any] = {}
    lost: list[RuleRef] = []
    rule: dict[str, str] = {}
    unknown: list[str] = []
    for key, value in fields:
        if key in _TEXTS:
            values[_TEXTS[key]] = value
        elif key in _OF_A_RULE:
            rule[key] = value
        elif key == "lost":
            lost.append(_rule(value))
        elif key == "was":
            values["was"] = tuple(value.split(","))
        elif key == "needs_grad":
            values["needs_grad"] = value == "1"
        elif key == "values":
            values["values"] = _types(value)
        elif key != "input":
            unknown.append(key)
    if "rule" in rule:
        values["rule"] = RuleRef(rule["rule"], rule.get("at", ""), rule.get("cast", ""), rule.get("why", ""))
        values.setdefault("reason", rule.get("why", ""))
    if lost:
        values["lost"] = tuple(lost)
    return values, unknown


def graph_fields(fields: Fields) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of Listing from the comments above a class, and the unknown keys in them.

    Raises ValueError for another format version, or an invalid number.
    """
    values: dict[str, Any] = {}
    counts: dict[str, int] = {}
    unmatched: list[RuleRef] = []
    kept_values: list[KeptValue] = []
    unknown: list[str] = []
    for key, value in fields:
        if key in _OF_A_GRAPH:
            values[key] = value
        elif key in ("kept_before", "kept_after"):
            values[key] = _number(key, value)
        elif key == "count":
            name, _, number = value.rpartition(" ")
            counts[name] = _number(f"count {name}", number)
        elif key == "unmatched":
            unmatched.append(_rule(value))
        elif key == "kept":
            kept_values.append(_kept(value))
        elif key == "format":
            if value != FORMAT:
                raise ValueError(f"format={value} was written by another version of fxamp; accepted: format={FORMAT}")
        elif key != "graph":
            unknown.append(key)
    return {**values, "counts": counts, "unmatched": tuple(unmatched), "kept": tuple(kept_values)}, unknown


def _number(what: str, text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{what} is {text!r}, not a number")
    return int(text)


def _rule(text: str) -> RuleRef:
    """Read a rule that :func:`fxamp.graph_text.write.write_rule` wrote."""
    name, origin, cast, why = [*_parts(text), "", "", "", ""][:4]
    return RuleRef(name, origin, cast, why)


def _kept(text: str) -> KeptValue:
    """Read a kept value that :func:`fxamp.graph_text.write.write_kept` wrote."""
    parts = _parts(text)
    if len(parts) not in (9, 13):
        raise ValueError(f"kept has {len(parts)} parts; accepted: 9, or 13 with a rule")
    name, op, module, dtype, shape, form, before, after, reason, *of_rule = parts
    sizes = tuple(int(size) if size.isdecimal() else size for size in shape.split(",") if size)
    known = [_number(f"bytes of {name}", count) if count else None for count in (before, after)]
    rule = RuleRef(*of_rule) if of_rule else None
    return KeptValue(name, op, module, dtype, sizes, form, known[0], known[1], rule, reason)


def _parts(text: str) -> list[str]:
    return [_ESCAPED.sub(r"\1", part) for part in _PART.findall(text)]


def _types(text: str) -> tuple[TensorType, ...]:
    types: Iterable[TensorType | None] = (tensor_type(part) for part in text.split("; "))
    return tuple(kind for kind in types if kind is not None)
