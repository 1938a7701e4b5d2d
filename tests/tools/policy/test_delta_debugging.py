"""ddmin: what it returns passes and is 1-minimal, whatever the test."""

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxamp.tools.policy.bisect.delta import ddmin, hierarchical, is_minimal

Sets = list[frozenset[int]]


def predicate(count: int, table: dict[frozenset[int], bool]) -> Callable[[tuple[int, ...]], bool]:
    """An arbitrary predicate: what the table says, and that all units together pass."""

    def passes(units: tuple[int, ...]) -> bool:
        return len(units) == count or table.get(frozenset(units), False)

    return passes


@given(
    st.integers(0, 7).flatmap(
        lambda n: st.tuples(
            st.just(n), st.dictionaries(st.frozensets(st.integers(0, max(0, n - 1)), max_size=n), st.booleans())
        )
    )
)
@settings(max_examples=300)
@pytest.mark.exhaustive
def test_any_predicate_gives_a_minimal_set(case: tuple[int, dict[frozenset[int], bool]]) -> None:
    count, table = case
    passes = predicate(count, table)
    subset = ddmin(range(count), passes)
    assert is_minimal(subset, passes)
    assert list(subset) == sorted(subset)


@given(st.integers(1, 40), st.data())
@settings(max_examples=100)
def test_needed_units_are_found_exactly(count: int, data: st.DataObject) -> None:
    needed = data.draw(st.sets(st.integers(0, count - 1)))
    asked: list[tuple[int, ...]] = []

    @cache
    def passes(units: tuple[int, ...]) -> bool:
        asked.append(units)
        return needed <= set(units)

    assert set(ddmin(range(count), passes)) == needed
    assert len(asked) <= count**2 + 3 * count + 1, "the worst case that the paper proves"


def test_one_needed_unit_of_many_takes_few_trials() -> None:
    asked: list[Sequence[int]] = []

    def passes(units: tuple[int, ...]) -> bool:
        asked.append(units)
        return 700 in units

    assert ddmin(range(1024), passes) == (700,)
    assert len(asked) <= 2 * 10 + 1


@given(st.integers(0, 3), st.data())
@settings(max_examples=100)
def test_trees_end_in_leaves_and_are_minimal(depth: int, data: st.DataObject) -> None:
    leaves = [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]
    needed = data.draw(st.sets(st.sampled_from(leaves), max_size=5))

    def parts(unit: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [] if len(unit) == 3 else [(*unit, at) for at in range(3)]

    def passes(units: tuple[tuple[int, ...], ...]) -> bool:
        return all(any(leaf[: len(unit)] == unit for unit in units) for leaf in needed)

    subset = hierarchical([()], parts, passes)
    assert set(subset) == needed and is_minimal(subset, passes)


def test_a_unit_whose_parts_do_not_pass_stays_whole() -> None:
    parts = {"a": ["a1", "a2"], "b": ["b1", "b2"]}

    def passes(units: tuple[str, ...]) -> bool:
        return "a" in units and ("b" in units or "b2" in units)

    assert hierarchical(["a", "b"], lambda unit: parts.get(unit, []), passes) == ("a", "b2")


@pytest.mark.parametrize(("units", "minimal"), [((1, 2), True), ((1, 2, 3), False), ((1,), False)])
def test_minimality_is_reported(units: tuple[int, ...], minimal: bool) -> None:
    assert is_minimal(units, lambda subset: {1, 2} <= set(subset)) is minimal
