"""Comparisons in policies: ``">4096"``, ``">=2.11,<2.13"``, ``"%16"``, or a plain number for equality.

They apply to sizes, versions of torch, and compute capabilities.
"""

import operator
import re
from collections.abc import Callable
from functools import cache
from importlib import metadata
from math import lcm

from fxamp.errors import PolicyError

Numbers = tuple[int, ...]
Comparison = tuple[str, Numbers]

MULTIPLE = "%"
"""The operator for multiples of a number; only sizes accept it."""

_SIGNS: dict[str, Callable[[Numbers, Numbers], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    MULTIPLE: lambda numbers, bound: numbers[0] % bound[0] == 0,
}
_FROM = (">", ">=", "==")
_TERM = re.compile(r"\s*(>=|<=|==|!=|>|<|%)\s*(\d+(?:\.\d+)*)\s*")

_SIZE = "size"
SIZES = "a whole number, or conditions joined by commas, such as '>4096', '>=64,<1024' or '%16' for a multiple of 16"
VERSIONS = "comparisons with >=, >, <=, <, == or != joined by commas, such as '>=2.12' or '>=2.11,<2.13'"


def parse(text: str, kind: str, accepted: str) -> tuple[Comparison, ...]:
    """Return the comparisons in ``text``, all of which must hold, with dotted numbers as tuples.

    Other text raises ValueError, whose message names ``kind`` and ``accepted``. Only a size may be a multiple.
    """
    terms = []
    for part in text.split(","):
        match = _TERM.fullmatch(part)
        if match is None or (match[1] == MULTIPLE and kind != _SIZE):
            raise ValueError(f"{part.strip()!r} is not a {kind}; accepted: {accepted}")
        terms.append((match[1], tuple(int(number) for number in match[2].split("."))))
    return tuple(terms)


def meets(comparisons: tuple[Comparison, ...], numbers: Numbers) -> bool:
    """Return whether ``numbers`` meet all comparisons, each of which compares only as many parts as its bound has."""
    return all(_SIGNS[sign]((numbers + (0,) * len(bound))[: len(bound)], bound) for sign, bound in comparisons)


def size_condition(size: int | str) -> str:
    """Return a size condition in canonical form: 64 and ``" == 64"`` become ``"==64"``; ValueError if malformed."""
    text = f"=={size}" if isinstance(size, int) and not isinstance(size, bool) else size
    if not isinstance(text, str):
        raise ValueError(f"{size!r} is not a size; accepted: {SIZES}")
    terms = size_terms(text)
    if any(len(bound) > 1 or (sign == MULTIPLE and bound == (0,)) for sign, bound in terms):
        raise ValueError(f"{text!r} is not a size; accepted: {SIZES}")
    _require_possible(text, terms, SIZES)
    return ",".join(f"{sign}{bound[0]}" for sign, bound in terms)


def size_meets(condition: str, size: int) -> bool:
    """Return whether ``size`` meets a condition in the form of :func:`size_condition`."""
    return meets(size_terms(condition), (size,))


def size_terms(text: str) -> tuple[Comparison, ...]:
    """Return the terms of a size condition, all of which must hold; raise ValueError if it is malformed."""
    return parse(text, _SIZE, SIZES)


def parse_version(text: str) -> tuple[Comparison, ...]:
    """Return the terms of a condition on a version, all of which must hold; raise ValueError if it is malformed."""
    return parse(text, "version comparison", VERSIONS)


def version_condition(text: str) -> str:
    """Return ``text`` if it is a condition on a version; raise ValueError otherwise."""
    _require_possible(text, parse_version(text), VERSIONS)
    return text


def _require_possible(text: str, terms: tuple[Comparison, ...], accepted: str) -> None:
    """Raise ValueError if the least numbers that every lower bound allows do not meet an upper bound.

    Exclusions (``!=``) are not considered.
    """
    starts = [(*bound[:-1], bound[-1] + 1) if sign == ">" else bound for sign, bound in terms if sign in _FROM]
    least = max(starts, default=(0,))
    step = lcm(*(bound[0] for sign, bound in terms if sign == MULTIPLE))
    least = (-(-least[0] // step) * step, *least[1:])
    if not meets(tuple(term for term in terms if term[0] != "!="), least):
        raise ValueError(f"no number meets {text!r}; accepted: {accepted}")


def holds(condition: str, version: str) -> bool:
    """Return whether ``version`` meets ``condition``.

    Only the parts that the condition writes are compared: ``==2.13`` and ``<=2.13`` hold on 2.13.1. Local and
    pre-release suffixes (``+cpu``, ``a0``) are ignored.
    """
    return meets(parse_version(condition), version_parts(version))


def version_parts(version: str) -> Numbers:
    """Return the numbers that a version begins with: ``"2.13.0+cpu"`` gives ``(2, 13, 0)``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    if match is None:
        raise PolicyError(f"{version!r} is not a torch version; accepted: numbers such as '2.13.0'")
    return tuple(int(number) for number in match[0].split("."))


@cache
def installed_torch_version() -> str:
    """Return the version of the installed torch, without importing it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError as missing:
        raise PolicyError("torch is not installed: pass torch_version= to resolve the policy") from missing
