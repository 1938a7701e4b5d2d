"""The groups of ops that the rules of policies distinguish, without a list of torch's ops.

A name without an overload stands for every overload that no rule names; a glob stands for every op that it covers and
no rule names. If a rule names no ops, one pattern stands for all other ops.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from fxamp.policy.diff.glob_overlap import ANY, common_name
from fxamp.policy.model.op_names import is_glob
from fxamp.policy.model.rule import Rule


@dataclass(frozen=True)
class OpPattern:
    """Ops that the same rules cover: their text, and one op to represent them."""

    text: str
    op: str


def op_patterns(rules: Sequence[Rule]) -> list[OpPattern]:
    """Return the patterns that ``rules`` distinguish, in the order of the rules, wider ones last."""
    names = list(dict.fromkeys(name for rule in rules for name in rule.ops))
    exact = [name for name in names if not is_glob(name)]
    globs = [name for name in names if is_glob(name)]
    patterns = [_named(name, exact) for name in exact]
    patterns += _common(globs)
    patterns += [_covered(glob, exact) for glob in globs]
    if any(not rule.ops for rule in rules):
        patterns.append(OpPattern("any other op" if names else "any op", f"{ANY}::{ANY}.{ANY}"))
    return list({pattern.op: pattern for pattern in reversed(patterns)}.values())[::-1]


def _named(name: str, exact: Sequence[str]) -> OpPattern:
    packet, dot, _ = name.partition(".")
    if dot:
        return OpPattern(_short(name), name)
    split = any(other.startswith(f"{packet}.") for other in exact)
    return OpPattern(f"{_short(name)} (other overloads)" if split else _short(name), f"{name}.{ANY}")


def _covered(glob: str, exact: Sequence[str]) -> OpPattern:
    op = common_name(glob, glob) or glob
    some = any(common_name(glob, name) or common_name(glob, name.partition(".")[0]) for name in exact)
    return OpPattern(f"{_short(glob)} (other ops)" if some else _short(glob), _with_overload(op))


def _common(globs: Sequence[str]) -> Iterator[OpPattern]:
    """Yield the ops that two globs cover; a glob without overload covers every overload."""
    for first, second in combinations(sorted(globs), 2):
        names = (common_name(one, other) for one in _spellings(first) for other in _spellings(second))
        op = next((name for name in names if name is not None), None)
        if op is not None:
            yield OpPattern(f"{_short(first)} and {_short(second)}", _with_overload(op))


def _spellings(glob: str) -> tuple[str, ...]:
    return (glob,) if "." in glob else (glob, f"{glob}.*")


def _with_overload(op: str) -> str:
    return op if "." in op else f"{op}.{ANY}"


def _short(name: str) -> str:
    return name.removeprefix("aten::")
