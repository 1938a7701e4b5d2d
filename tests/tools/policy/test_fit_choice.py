"""The chosen options are those of exhaustive search, and what is printed was verified, not predicted."""

import math
import random
from itertools import product
from typing import Any

import pytest

from fxamp.policy import Policy
from fxamp.tools.policy.fit.choice import Limits, choose, cost, predicted
from fxamp.tools.policy.fit.decisions import Decision, Language, Option
from fxamp.tools.policy.fit.layers import Scope
from fxamp.tools.policy.fit.prices import NEVER, Price
from fxamp.tools.policy.fit.search import Candidate, Search

BASE = Price(memory=1000.0, milliseconds=100.0, square=1e-4)


def random_table(seed: int) -> list[tuple[Price, ...]]:
    draw = random.Random(seed)

    def price() -> Price:
        if draw.random() < 0.1:
            return NEVER
        return Price(draw.uniform(-200, 50), draw.uniform(-10, 20), draw.choice([0.0, draw.uniform(0, 1e-4)]))

    return [(Price(), *(price() for _ in range(draw.randint(1, 3)))) for _ in range(6)]


@pytest.mark.parametrize("prefer", ["time", "memory", "error"])
@pytest.mark.parametrize("seed", range(12))
def test_the_choice_equals_exhaustive_search(seed: int, prefer: str) -> None:
    table = random_table(seed)
    limits = Limits(random.Random(seed).uniform(500, 1000), 2e-4)

    def total(chosen: tuple[int, ...]) -> float:
        return sum(cost(own[at], BASE, prefer, at == 0) for own, at in zip(table, chosen, strict=True))

    fitting = [
        chosen
        for chosen in product(*(range(len(own)) for own in table))
        if all(own[at] is not NEVER for own, at in zip(table, chosen, strict=True))
        and limits.hold(predicted(table, BASE, chosen))
    ]
    chosen = choose(table, BASE, limits, prefer)
    if not fitting:
        assert chosen is None
        return
    assert chosen is not None and chosen in fitting
    assert math.isclose(total(chosen), min(map(total, fitting)), rel_tol=0, abs_tol=1e-9)


class Pretended:
    """Prices of whole policies: the sum of their options', times ``factor`` where it saves memory."""

    def __init__(self, table: list[tuple[Price, ...]], decisions: list[Decision], factor: float) -> None:
        self.base = Policy.load("cuda-bfloat16")
        self.language = Language(self.base, fp8=False)
        self._added = {
            option.name: price
            for own, prices in zip(decisions, table, strict=True)
            for option, price in zip(own.options, prices, strict=True)
        }
        self._factor = factor

    def of(self, options: tuple[Option, ...]) -> Price:
        added = sum((self._added[option.name] for option in options), Price())
        return BASE + Price(self._factor * added.memory, added.milliseconds, added.square)


def pretended(table: list[tuple[Price, ...]], factor: float) -> Search:
    scope = Scope("model")
    rules = [rule for rule in Policy.load("cuda-bfloat16-lean").rules if rule.region == "kept"]
    names = iter(rules)
    decisions = [
        Decision(str(d), scope, tuple(Option(f"{d}.{o}", scope, (next(names),) if o else ()) for o in range(len(own))))
        for d, own in enumerate(table)
    ]
    pricing: Any = Pretended(table, decisions, factor)
    search = Search(pricing, decisions, table, BASE, lambda _: None)
    search.add(Candidate("base", pricing.base, BASE))
    return search


SAVINGS = [(Price(), Price(memory=-100.0, milliseconds=float(1 + at))) for at in range(6)]


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.5])
def test_limits_hold_for_what_was_measured_however_wrong_the_sum_is(factor: float) -> None:
    search, limits = pretended(SAVINGS, factor), Limits(750.0, 2e-4)
    assert search.look("chosen", limits, "time") is not None
    best = search.best(limits, "time")
    assert best is not None and limits.hold(best.price)
    assert best.price == search.pricing.of(best.options)
    assert len(best.options) == {0.6: 5, 1.0: 3, 1.5: 3}[factor]


def test_nothing_fits() -> None:
    search, limits = pretended(SAVINGS, 1.0), Limits(300.0, 2e-4)
    assert search.look("chosen", limits, "time") is None and search.best(limits, "time") is None


def test_what_another_policy_beats_is_not_on_the_frontier() -> None:
    search = pretended(SAVINGS, 1.0)
    search.add(Candidate("worse", Policy.load("cuda-bfloat16-lean"), BASE + Price(1.0, 1.0, 0.0)))
    smaller = search.look("smaller", Limits(850.0, 2e-4), "time")
    assert [candidate.name for candidate in search.frontier()] == ["base", "smaller"] and smaller is not None


def test_of_equal_policies_the_one_with_fewest_rules_is_best() -> None:
    search = pretended([(Price(), Price())], 1.0)
    best = search.best(Limits(math.inf, math.inf), "memory")
    assert best is not None and best.name == "base"
    assert choose(search.prices, BASE, Limits(math.inf, math.inf), "memory") == (0,)
