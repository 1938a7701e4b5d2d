"""Parameters for tests: a few run always, all run in the gate."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def exhaustive(values: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """``values``, some with marks, as parameters of a test; those not in ``always`` bear the marker "exhaustive" too.

    Raises:
        ValueError: ``always`` holds what is not among the values.
    """
    every = [_parameter(value) for value in values]
    if unknown := [value for value in always if all(value != known.values[0] for known in every)]:
        raise ValueError(f"{unknown} are not among {every}")
    return [
        one if one.values[0] in always else pytest.param(*one.values, marks=[*one.marks, pytest.mark.exhaustive])
        for one in every
    ]


def each_once(names: str, *columns: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with every combination of ``columns``; by default each value of each column runs once.

    The other combinations bear the marker "exhaustive". ``names``: one for each column, joined by commas.
    """
    values = [[_parameter(value) for value in column] for column in columns]
    always = _each_once([len(column) for column in values])
    rows = []
    for at in product(*(range(len(column)) for column in values)):
        chosen = [column[index] for column, index in zip(values, at, strict=True)]
        marks = [mark for one in chosen for mark in one.marks]
        more = [] if at in always else [pytest.mark.exhaustive]
        rows.append(pytest.param(*(one.values[0] for one in chosen), marks=[*marks, *more]))
    return pytest.mark.parametrize(names, rows)


def _each_once(lengths: list[int]) -> set[tuple[int, ...]]:
    """Rows of indices that hold every index of every column: the longest column advances, the others count."""
    longest = lengths.index(max(lengths))
    missing = {(at, index) for at, length in enumerate(lengths) for index in range(length)}
    rows: list[tuple[int, ...]] = []
    while missing:
        row, left = [], len(rows)
        for at, length in enumerate(lengths):
            row.append((len(rows) if at == longest else left) % length)
            left //= 1 if at == longest else length
        rows.append(tuple(row))
        missing -= set(enumerate(row))
    return set(rows)


def _parameter(value: Any) -> Any:
    """``value`` as what pytest.param makes, which may bear marks already."""
    return value if hasattr(value, "marks") and hasattr(value, "values") else pytest.param(value)
