"""Relations between the conditions of rules: one follows from others, or two exclude each other.

True is proven; False means unknown.
"""

from collections.abc import Sequence
from itertools import product
from math import lcm
from typing import Any

from fxamp.policy.diff.glob_overlap import common_name
from fxamp.policy.model.comparisons import MULTIPLE, size_meets, size_terms
from fxamp.policy.model.conditions import ArgCondition
from fxamp.policy.model.keys import SIZE, STRINGS, Condition
from fxamp.policy.model.rule import Rule
from fxamp.policy.model.site import Plain


def implied(rule: Rule, by: Sequence[Rule]) -> bool:
    """Return whether the conditions of ``rule``, except op and region, follow from those of all rules in ``by``."""
    if not rule.ops and all(other.ops for other in by):
        return False
    conditions = [
        (condition, value, [getattr(other, name) for other in by]) for name, condition, value in rule.conditions()
    ]
    return all(_follows(*one) for one in conditions)


def _follows(condition: Condition, value: Any, premises: Sequence[Any]) -> bool:
    """Return whether the value of a condition follows from the values that it has in other rules, empty without one."""
    if condition.kind is STRINGS:
        return any(globs and set(globs) <= set(value) for globs in premises)
    if condition.kind is SIZE:
        return any(_size_implied(value, premise) for premise in premises)
    pairs = [pair for premise in premises for pair in premise]
    return all(any(name == own and _argument_implied(one, other) for own, other in pairs) for name, one in value)


def exclusive(first: Rule, second: Rule) -> bool:
    """Return whether the conditions of two rules, except ops and regions, never hold together.

    Conditions on a tensor never exclude each other: different members of a list of tensors can meet them.
    """
    conditions = [(condition, value, getattr(second, name)) for name, condition, value in first.conditions()]
    if any(other and not _sizes_meeting(one, other) for condition, one, other in conditions if condition.kind is SIZE):
        return True
    if first.modules and second.modules and all(_disjoint(*pair) for pair in product(first.modules, second.modules)):
        return True
    values = dict(first.args)
    return any(name in values and _values_differ(values[name], other) for name, other in second.args)


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
    numbers = _representatives(condition, premise)
    return numbers is not None and all(size_meets(condition, n) for n in numbers if size_meets(premise, n))


def _sizes_meeting(first: str, second: str) -> bool:
    numbers = _representatives(first, second)
    return numbers is None or any(size_meets(first, number) and size_meets(second, number) for number in numbers)


def _representatives(*conditions: str) -> list[int] | None:
    """Return numbers that together stand for all numbers; None if that takes too many.

    Between two neighbouring bounds the conditions are periodic; the period is the least common multiple of their
    multiples.
    """
    terms = [term for condition in conditions for term in size_terms(condition)]
    period = lcm(*(bound[0] for sign, bound in terms if sign == MULTIPLE))
    if period > _LONGEST_PERIOD:
        return None
    bounds = {0, *(bound[0] for sign, bound in terms if sign != MULTIPLE)}
    return sorted({number for bound in bounds for number in range(max(bound - 1, 0), bound + period + 1)})


#: The longest period for which conditions are compared; beyond it nothing is proven.
_LONGEST_PERIOD = 4096


def _values_differ(first: ArgCondition, second: ArgCondition) -> bool:
    """Return whether two plain values differ; a value equals a list that holds only it."""
    if first.value is None or second.value is None:
        return False
    return _spelled(first.value) != _spelled(second.value)


def _spelled(value: Plain | tuple[Plain, ...]) -> tuple[tuple[bool, Plain], ...]:
    """Return the value in a form where True is not 1."""
    items = value if isinstance(value, tuple) else (value,)
    return tuple((isinstance(item, bool), item) for item in items)


def _disjoint(first: str, second: str) -> bool:
    """Return whether no module matches both globs: both start at the root and differ in a part that both have."""
    if not (first.startswith(".") and second.startswith(".")):
        return False
    for one, other in zip(first[1:].split("."), second[1:].split("."), strict=False):
        if "**" in (one, other):
            return False
        if common_name(one, other) is None:
            return True
    return False
