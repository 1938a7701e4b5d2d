"""Relations between the conditions of rules: one follows from others, or two exclude each other.

True is proven; False means unknown.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import lcm

from fxamp.policy.diff.glob_overlap import common_name
from fxamp.policy.model.comparisons import MULTIPLE, size_meets, size_terms
from fxamp.policy.model.conditions import ArgCondition
from fxamp.policy.model.rule import Rule
from fxamp.policy.model.site import Plain


def implied(rule: Rule, by: Sequence[Rule]) -> bool:
    """Return whether the conditions of ``rule``, except op and region, follow from those of all rules in ``by``."""
    if not rule.ops and all(other.ops for other in by):
        return False
    for listed in ("modules", "module_classes", "read_by"):
        globs = set(getattr(rule, listed))
        narrower = (set(getattr(other, listed)) for other in by)
        if globs and not any(names and names <= globs for names in narrower):
            return False
    for name, condition in _args(rule):
        others = [other_condition for other in by for argument, other_condition in _args(other) if argument == name]
        if not any(_argument_implied(condition, other) for other in others):
            return False
    return all(
        not getattr(rule, size) or any(_size_implied(getattr(rule, size), getattr(other, size)) for other in by)
        for size in _SIZES
    )


_SIZES = ("reduces", "elements")


def exclusive(first: Rule, second: Rule) -> bool:
    """Return whether the conditions of two rules, except ops and regions, never hold together.

    Conditions on a tensor never exclude each other: different members of a list of tensors can meet them.
    """
    for size in _SIZES:
        one, other = getattr(first, size), getattr(second, size)
        if one and other and not _sizes_meeting(one, other):
            return True
    if first.modules and second.modules and all(_apart(*pair) for pair in product(first.modules, second.modules)):
        return True
    values = dict(_args(first))
    return any(name in values and _values_apart(values[name], other) for name, other in _args(second))


def _args(rule: Rule) -> Iterator[tuple[str, ArgCondition]]:
    return ((name, ArgCondition.of(condition)) for name, condition in dict(rule.args).items())


def _argument_implied(condition: ArgCondition, premise: ArgCondition) -> bool:
    if condition == premise or (condition.value is not None and premise.value == (condition.value,)):  # [1] is 1 too
        return True
    if condition.value is not None or premise.value is not None:
        return False
    sizes = ((condition.rank, premise.rank), (condition.size, premise.size))
    return (
        all(_size_implied(one, other) for one, other in sizes)
        and (not condition.dtype or (bool(premise.dtype) and set(premise.dtype) <= set(condition.dtype)))
        and condition.shape in (None, premise.shape)
    )


def _size_implied(condition: str, premise: str) -> bool:
    """Return whether every number that meets ``premise`` also meets ``condition``; "" is no condition."""
    if not condition:
        return True
    if not premise:
        return False
    telling = _telling(condition, premise)
    return telling is not None and all(size_meets(condition, n) for n in telling if size_meets(premise, n))


def _sizes_meeting(first: str, second: str) -> bool:
    telling = _telling(first, second)
    return telling is None or any(size_meets(first, number) and size_meets(second, number) for number in telling)


def _telling(*conditions: str) -> list[int] | None:
    """Return numbers that stand for all numbers, None if they are too many.

    Between two neighbouring bounds the conditions repeat with the common multiple of those that ask for a multiple.
    """
    terms = [term for condition in conditions for term in size_terms(condition)]
    period = lcm(*(bound[0] for sign, bound in terms if sign == MULTIPLE))
    if period > _LONGEST_PERIOD:
        return None
    bounds = {0, *(bound[0] for sign, bound in terms if sign != MULTIPLE)}
    return sorted({number for bound in bounds for number in range(max(bound - 1, 0), bound + period + 1)})


#: Beyond it two conditions are not proven to be related: too many numbers would have to be looked at.
_LONGEST_PERIOD = 4096


def _values_apart(first: ArgCondition, second: ArgCondition) -> bool:
    """Return whether two plain values differ; a value equals a list that holds only it."""
    if first.value is None or second.value is None:
        return False
    return _spelled(first.value) != _spelled(second.value)


def _spelled(value: Plain | tuple[Plain, ...]) -> tuple[tuple[bool, Plain], ...]:
    """Return the value in a form where True is not 1."""
    items = value if isinstance(value, tuple) else (value,)
    return tuple((isinstance(item, bool), item) for item in items)


def _apart(first: str, second: str) -> bool:
    """Return whether no module matches both globs: both start at the root and differ in a part that both have."""
    if not (first.startswith(".") and second.startswith(".")):
        return False
    for one, other in zip(first[1:].split("."), second[1:].split("."), strict=False):
        if "**" in (one, other):
            return False
        if common_name(one, other) is None:
            return True
    return False
