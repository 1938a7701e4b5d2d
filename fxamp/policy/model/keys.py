"""The keys of a policy file as data: the type of a value, the accepted values, and its form in a policy.

A field of a rule holds its key: ``block: int = declared(Key(BLOCK, "How many elements share a scale."), 0)``. The
loader, the JSON Schema, the writer and comparisons of policies read it there.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any

from fxamp.policy.model.comparisons import size_condition
from fxamp.policy.model.conditions import DTYPES, ArgCondition, Mismatch, number_mismatch, plain
from fxamp.policy.model.settings import unknown_value
from fxamp.policy.model.site import Site


@dataclass(frozen=True)
class Kind:
    """The type of a value: in words, as Python types (of the items of a list or table too), as JSON Schema."""

    words: str
    types: tuple[type, ...]
    json: Mapping[str, Any] = field(default_factory=dict)
    items: tuple[type, ...] = ()

    def holds(self, value: object) -> bool:
        """Return whether a parsed TOML value is of this kind."""
        if isinstance(value, bool) or not isinstance(value, self.types):
            return isinstance(value, bool) and bool in self.types
        items = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
        return not self.items or all(isinstance(item, self.items) for item in items)


@dataclass(frozen=True)
class Key:
    """One key.

    ``about``: its purpose. ``choices``: the accepted values, if they can be listed. ``parse`` returns the canonical
    form of a value, or of each item of a list or table, or raises ValueError.
    """

    kind: Kind
    about: str = ""
    choices: tuple[str, ...] = ()
    parse: Callable[[Any], Any] | None = None

    def canonical(self, name: str, value: Any) -> Any:
        """Return the form in which a rule holds a value from Python code: a tuple for a list, pairs for a table.

        Raises ValueError, with ``name`` as the name of the key, if the value is not accepted.
        """
        of_list, of_table = list in self.kind.types and not isinstance(value, str), dict in self.kind.types
        given = dict(value) if of_table else list(value) if of_list else value
        if not self.kind.holds(given):
            raise ValueError(f"{name} = {value!r} has the wrong type; accepted: {self.kind.words}")
        if self.choices and given not in self.choices:
            raise ValueError(unknown_value(name, value, self.choices))
        parse = self.parse or (lambda item: item)
        if of_table:
            return tuple((name, parse(given[name])) for name in sorted(given))
        return tuple(map(parse, given)) if of_list else parse(given)

    def written(self, value: Any) -> object:
        """Return a value of a rule in the form of a policy file."""
        if dict in self.kind.types:
            return {name: item.content() if isinstance(item, ArgCondition) else item for name, item in value}
        return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Condition(Key):
    """A key that is a condition: the rule covers only calls that meet it.

    ``mismatch`` returns why its value fails for a call, or None. ``words`` returns its value in words, for reports.
    """

    mismatch: Callable[[Any, Site], Mismatch | None] = lambda value, site: None
    words: Callable[[Any], Iterator[str]] = lambda value: iter(())


def declared(key: Key, default: Any = MISSING, compare: bool = True) -> Any:
    """Return a dataclass field of a rule for ``key``; it is optional if it has a ``default``."""
    return field(default=default, compare=compare, metadata={"key": key})


def size(fact: str, about: str, what: str, words: str) -> Any:
    """Return the dataclass field of a rule for a condition on a number, which is the field ``fact`` of :class:`Site`.

    ``what``: the number in words, for mismatches. ``words``: a text with ``{}`` for the condition: ``"reduces {}"``.
    """
    return declared(
        Condition(
            SIZE,
            about,
            parse=size_condition,
            mismatch=lambda value, site: number_mismatch(what, getattr(site, fact), value),
            words=lambda value: iter([words.format(plain(value))]),
        ),
        default="",
    )


def comparisons(number: str, signs: str = "") -> str:
    """Return a regular expression for comparisons with ``number``; ``signs``: more operators, both expressions."""
    term = rf"\s*({signs}>=|<=|==|!=|>|<)\s*{number}\s*"
    return f"^{term}(,{term})*$"


def enum(values: tuple[str, ...]) -> dict[str, Any]:
    """Return the schema of one of ``values``."""
    return {"enum": list(values)}


LIST: dict[str, Any] = {"type": "array"}
_PLAIN = {"type": ["boolean", "integer", "number", "string"]}
_SIZES = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": comparisons(r"\d+", signs="%|")}]}
_TENSOR = {
    "dtype": {"anyOf": [enum(DTYPES), LIST | {"items": enum(DTYPES)}]},
    "rank": _SIZES,
    "size": _SIZES,
    "shape": LIST | {"items": {"anyOf": [enum(("*", "...")), _SIZES]}},
}
_TABLE_OF_CONDITIONS = {"type": "object", "additionalProperties": False, "minProperties": 1, "properties": _TENSOR}
_ARGUMENT = {"anyOf": [_PLAIN, LIST | {"items": _PLAIN}, _TABLE_OF_CONDITIONS]}

STRING = Kind("a string", (str,), {"type": "string"})
VERSIONS = Kind("a string", (str,), {"type": "string", "pattern": comparisons(r"\d+(\.\d+)*")})
STRINGS = Kind("a list of strings", (list,), LIST | {"items": {"type": "string"}}, items=(str,))
COUNT = Kind("a whole number", (int,), {"type": "integer", "minimum": 1})
SIZE = Kind("a whole number, or a string such as '>64'", (int, str), _SIZES)
ARGUMENTS = Kind("a table", (dict,), {"type": "object", "minProperties": 1, "additionalProperties": _ARGUMENT})
