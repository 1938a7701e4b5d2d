"""The keys of a policy file as data: what a value is, what is accepted, and which form it has in a policy.

A field of a rule holds its key: ``block: int = key(BLOCK, "How many elements share a scale.", default=0)``. The loader,
the JSON Schema, the writer and comparisons of policies read it there.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any

from fxamp.policy.model.comparisons import size_condition
from fxamp.policy.model.conditions import DTYPES, ArgCondition, Objection, number_objection, plain
from fxamp.policy.model.settings import unknown_value
from fxamp.policy.model.site import Site


@dataclass(frozen=True)
class Kind:
    """What a value is: in words; its types, and those of the items of a list or table; as JSON Schema."""

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

    ``about``: what it is for. ``choices``: the accepted values, if they are few. ``parse``: returns the canonical form
    of a value, or of each item of a list or table, or raises ValueError.
    """

    kind: Kind
    about: str = ""
    choices: tuple[str, ...] = ()
    parse: Callable[[Any], Any] | None = None

    def canonical(self, name: str, value: Any) -> Any:
        """Return the form in which a rule holds a value that Python code gives: a tuple for a list, pairs for a table.

        Raises ValueError, which calls the key ``name``, if the value is not accepted.
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
        """Return a value of a rule as a policy file has it."""
        if dict in self.kind.types:
            return {name: item.content() if isinstance(item, ArgCondition) else item for name, item in value}
        return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Condition(Key):
    """A key that must hold for a call, or the rule does not cover it.

    ``objection``: why its value fails for a call, or None. ``words``: its value as reports name it.
    """

    objection: Callable[[Any, Site], Objection | None] = lambda value, site: None
    words: Callable[[Any], Iterator[str]] = lambda value: iter(())


def key(kind: Kind, about: str, choices: tuple[str, ...] = (), parse: Any = None, default: Any = MISSING) -> Any:
    """Return a rule's field for a key; it is optional if it has a ``default``."""
    return field(default=default, metadata={"key": Key(kind, about, choices, parse)})


def condition(
    kind: Kind,
    about: str,
    parse: Callable[[Any], Any],
    objection: Callable[[Any, Site], Objection | None],
    words: Callable[[Any], Iterator[str]],
) -> Any:
    """Return a rule's field for a condition; see :class:`Condition`."""
    default = "" if kind is SIZE else ()
    return field(default=default, metadata={"key": Condition(kind, about, (), parse, objection, words)})


def size(fact: str, about: str, what: str, words: str) -> Any:
    """Return the field for a condition on a number: the field ``fact`` of :class:`Site`.

    ``what``: the number in words, for objections. ``words`` has ``{}`` for the condition: ``"reduces {}"``.
    """
    return condition(
        SIZE,
        about,
        size_condition,
        lambda value, site: number_objection(what, getattr(site, fact), value),
        lambda value: iter([words.format(plain(value))]),
    )


def comparisons(number: str, signs: str = "") -> str:
    """Return the pattern of comparisons of ``number``, a pattern; ``signs``: further operators, as a pattern."""
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
