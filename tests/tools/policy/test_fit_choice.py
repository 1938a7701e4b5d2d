"""The chosen options are those of exhaustive search, and what is printed was verified, not predicted."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from exhaustive import exhaustive

from fxamp.policy import Policy
from fxamp.policy.model.keep import KEPT, Keep
from fxamp.policy.model.optimizer_table import OptimizerPrecision
from fxamp.tools.policy.fit.batch import MOST, largest
from fxamp.tools.policy.fit.choice import Limits, choose, cost, sum_of
from fxamp.tools.policy.fit.decisions import Decision, Language, Option
from fxamp.tools.policy.fit.layers import Scope
from fxamp.tools.policy.fit.prices import NEVER, Price
from fxamp.tools.policy.fit.search import ROUNDS, Candidate, Search

BASE = Price(held=100.0, milliseconds=100.0, square=1e-4, moments={"loss": 900.0, "layers": 700.0})


def saving(bytes_: float, milliseconds: float = 0.0, square: float = 0.0) -> Price:
    return Price(0.0, milliseconds, square, 0.0, {"loss": -bytes_, "layers": -bytes_})


def random_table(seed: int) -> list[tuple[Price, ...]]:
    draw = random.Random(seed)

    def price() -> Price:
        if draw.random() < 0.1:
            return NEVER
        moments = {name: draw.choice([0.0, draw.uniform(-200, 50)]) for name in BASE.moments}
        square = draw.choice([0.0, draw.uniform(0, 1e-4)])
        return Price(draw.uniform(-20, 5), draw.uniform(-10, 20), square, 0.0, moments)

    return [(Price(), *(price() for _ in range(draw.randint(1, 3)))) for _ in range(6)]


def objective(table: Sequence[Sequence[Price]], chosen: Sequence[int], total: Price, prefer: str) -> float:
    """What is minimised: as the linear program has it, but of the whole policy's memory."""
    parts = sum(cost(own[at], BASE, prefer, at == 0) for own, at in zip(table, chosen, strict=True))
    return parts + (total.memory / BASE.memory if prefer == "memory" else 0.0)


def searched(
    table: Sequence[Sequence[Price]], limits: Limits, prefer: str, price: Callable[[Sequence[int]], Price]
) -> tuple[float, list[tuple[int, ...]]]:
    """Return the least objective within ``limits``, and every choice that holds them."""
    every = product(*(range(len(own)) for own in table))
    finite = [c for c in every if all(own[at] is not NEVER for own, at in zip(table, c, strict=True))]
    fitting = [chosen for chosen in finite if limits.hold(price(chosen))]
    return min((objective(table, chosen, price(chosen), prefer) for chosen in fitting), default=math.inf), fitting


@pytest.mark.parametrize("prefer", ["time", "memory", "error"])
@pytest.mark.parametrize("seed", range(12))
def test_the_choice_equals_exhaustive_search(seed: int, prefer: str) -> None:
    table = random_table(seed)
    limits = Limits(random.Random(seed).uniform(500, 1000), 2e-4, random.Random(seed).choice([math.inf, 105.0]))
    least, fitting = searched(table, limits, prefer, lambda chosen: sum_of(table, BASE, chosen))
    chosen = choose(table, BASE, limits, prefer)
    if not fitting:
        assert chosen is None
        return
    assert chosen is not None and chosen in fitting
    total = objective(table, chosen, sum_of(table, BASE, chosen), prefer)
    assert math.isclose(total, least, rel_tol=0, abs_tol=1e-6)
    other = choose(table, BASE, limits, prefer, [chosen])
    assert other != chosen and (other is None) == (len(fitting) == 1)


class Pretended:
    """Prices of whole policies by ``whole``, of the choice that their options are; ``asked`` counts them."""

    def __init__(self, whole: Callable[[Sequence[int]], Price], decisions: Sequence[Decision]) -> None:
        self.base = Policy.load("cuda-bfloat16")
        self.language = Language(self.base)
        self.asked = 0
        self._whole, self._decisions = whole, decisions

    def of(self, options: Sequence[Option]) -> Price:
        self.asked += 1
        names = {option.name for option in options}
        return self._whole(
            [max(o for o, option in enumerate(own.options) if not o or option.name in names) for own in self._decisions]
        )


def pretended(table: Sequence[Sequence[Price]], whole: Callable[[Sequence[int]], Price]) -> Search:
    scope = Scope("model")
    leanest = Policy.load("cuda-bfloat16-leanest").rules
    rules = iter(rule for rule in leanest if rule.region == KEPT and rule.keep is not Keep.AS_IS)
    decisions = [
        Decision(str(d), scope, tuple(Option(f"{d}.{o}", scope, (next(rules),) if o else ()) for o in range(len(own))))
        for d, own in enumerate(table)
    ]
    pricing: Any = Pretended(whole, decisions)
    search = Search(pricing, decisions, table, BASE, lambda _: None)
    search.ship("base", pricing.base, BASE)
    return search


def scaled(factor: float) -> Callable[[Sequence[int]], Price]:
    """Whole policies save ``factor`` of what their options save alone."""

    def whole(chosen: Sequence[int]) -> Price:
        total = sum_of(SAVINGS, Price(), chosen)
        return BASE + Price(0.0, total.milliseconds, total.square, 0.0, total.times(factor).moments)

    return whole


SAVINGS = [(Price(), saving(100.0, float(1 + at))) for at in range(6)]


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.5])
def test_limits_hold_for_what_was_measured_however_wrong_the_sum_is(factor: float) -> None:
    search, limits = pretended(SAVINGS, scaled(factor)), Limits(750.0, 2e-4)
    search.look(limits, "time")
    best = search.best(limits, "time")
    assert best is not None and limits.hold(best.price)
    assert best.price == search.pricing.of(best.options)
    assert len(best.options) == {0.6: 5, 1.0: 3, 1.5: 2}[factor]


def together(seed: int) -> tuple[list[tuple[Price, ...]], Callable[[Sequence[int]], Price]]:
    """Six decisions on values of three moments: two that lower the same value save it once, the larger part of it."""
    draw = random.Random(seed)
    values = {name: [draw.uniform(50, 200) for _ in range(3)] for name in ("forward", "loss", "backward")}
    effects = [
        {(name, at): draw.uniform(0.3, 0.9) for name in values for at in range(3) if draw.random() < 0.4}
        for _ in range(6)
    ]
    adds = [(draw.uniform(0.5, 6), draw.choice([0.0, draw.uniform(0, 6e-5)])) for _ in range(6)]

    def whole(chosen: Sequence[int]) -> Price:
        taken = [at for at, option in enumerate(chosen) if option]
        moments = {
            name: sum(v * (1 - max((effects[t].get((name, at), 0.0) for t in taken), default=0.0)) for at, v in own)
            for name, own in ((name, list(enumerate(own))) for name, own in values.items())
        }
        time, square = (sum(adds[at][part] for at in taken) for part in (0, 1))
        return Price(0.0, 100.0 + time, 1e-4 + square, 0.0, moments)

    alone = [whole([int(at == d) for at in range(6)]) - whole([0] * 6) for d in range(6)]
    return [(Price(), price) for price in alone], whole


@pytest.mark.parametrize("prefer", ["time", "memory", "error"])
@pytest.mark.parametrize("seed", exhaustive(range(20), always=range(4)))
def test_six_decisions_that_lower_the_same_moments_are_decided_as_by_exhaustive_search(seed: int, prefer: str) -> None:
    table, whole = together(seed)
    base = whole([0] * 6)
    draw = random.Random(seed)
    limits = Limits(draw.uniform(0.55, 0.95) * base.memory, 2e-4, draw.choice([math.inf, 108.0]))
    search = pretended(table, whole)
    search.base = base
    search.candidates.clear()
    search.ship("base", search.pricing.base, base)
    search.look(limits, prefer)
    best = search.best(limits, prefer)
    asked = search.pricing.asked  # type: ignore[attr-defined]
    every = [whole(chosen) for chosen in product(*(range(2) for _ in range(6)))]
    at = ("memory", "time", "error").index(prefer)
    fitting = [price.numbers[at] for price in every if limits.hold(price)]
    assert asked <= ROUNDS and (best is None) == (not fitting)
    less = 1e-3 if prefer == "memory" else 1e-6  # a smaller step is not looked for
    assert best is None or math.isclose(best.price.numbers[at], min(fitting), rel_tol=less)


def test_the_search_starts_from_a_shipped_policy_that_fits_where_no_sum_does() -> None:
    search, limits = pretended(SAVINGS, scaled(1.5)), Limits(300.0, 2e-4)
    options = [own.options[1] for own in search.decisions]
    shipped = replace(search.pricing.language.policy(search.pricing.base, options), unlisted="fp32")
    search.ship("shipped", shipped, search.pricing.of(options))
    search.look(limits, "time")
    best = search.best(limits, "time")
    assert best is not None and best.choice == (1, 1, 1, 1, 1, 0)


def test_nothing_fits_and_what_would_bring_most_is_counted() -> None:
    inexact = [*SAVINGS[:-1], (Price(), saving(250.0, square=5e-4))]
    search = pretended(inexact, lambda chosen: sum_of(inexact, BASE, chosen))
    limits = Limits(300.0, 2e-4)
    search.look(limits, "time")
    assert search.best(limits, "time") is None
    search.look(Limits(square=limits.square), "memory")
    smallest = search.best(Limits(math.inf, limits.square), "memory", search.composed)
    assert smallest is not None and smallest.price.memory == 500.0
    step = search.next_smaller(smallest)
    assert step is not None
    decision, option, policy = step
    assert (decision.name, option.name) == ("5", "5.1") and policy.price.memory == 250.0
    assert search.next_smaller(policy) is None


def test_what_another_policy_beats_is_not_on_the_frontier() -> None:
    search = pretended(SAVINGS, scaled(1.0))
    search.ship("worse", Policy.load("cuda-bfloat16-lean"), BASE + saving(-1.0, 1.0))
    search.look(Limits(850.0, 2e-4), "time")
    assert [candidate.name for candidate in search.frontier()] == ["base", "fit 1"]


def test_state_in_fewer_bits_alone_beats_no_policy() -> None:
    """The best within the limits, which keeps the state as it is, is not called beaten for the memory that it takes."""
    search = pretended([(Price(), Price())], lambda _: BASE)
    lean = Policy.load("cuda-bfloat16-lean")
    search.ship("rounds", replace(Policy.load("cuda-bfloat16"), optimizer=lean.optimizer), BASE + saving(50.0))
    assert [candidate.name for candidate in search.frontier()] == ["rounds", "base"]
    search.ship("faster", lean, BASE + saving(50.0, -1.0))
    assert [candidate.name for candidate in search.frontier()] == ["faster"]


def test_of_equal_policies_the_one_with_fewest_rules_is_best() -> None:
    table = [(Price(), Price())]
    search = pretended(table, lambda _: BASE)
    best = search.best(Limits(math.inf, math.inf), "memory")
    assert best is not None and best.name == "base"
    assert choose(table, BASE, Limits(math.inf, math.inf), "memory") == (0,)


def test_of_options_that_add_the_same_the_first_is_taken() -> None:
    table = [(Price(), saving(100.0, 1.0), saving(100.0, 1.0))]
    limits = Limits(950.0, 2e-4)
    assert choose(table, BASE, limits, "time") == (1,)
    assert choose(table, BASE, limits, "time", [(1,)]) is None


@pytest.mark.parametrize("factor", [1.05, 1.1, 1.3])
def test_what_the_rounding_of_sums_promises_is_not_measured(factor: float) -> None:
    faster = [(Price(), saving(0.0, -0.7 / at, 1e-6)) for at in range(1, 5)]
    table = [*faster, (Price(), saving(100.0)), (Price(), saving(50.0))]

    def whole(chosen: Sequence[int]) -> Price:
        total = sum_of(table, Price(), chosen)
        return BASE + replace(total, milliseconds=factor * total.milliseconds)

    search = pretended(table, whole)
    search.look(Limits(square=2e-4), "time")
    assert search.pricing.asked == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("limits", "prefer", "name"),
    [(Limits(), "time", "exact"), (Limits(950.0), "time", "rounded"), (Limits(), "memory", "rounded")],
)
def test_the_state_of_the_optimizer_is_rounded_only_where_memory_is_short(
    limits: Limits, prefer: str, name: str
) -> None:
    search, state = pretended(SAVINGS, scaled(1.0)), OptimizerPrecision({"*": "8bit"})
    for word, optimizer, saved in (("rounded", state, 100.0), ("exact", None, 0.0)):
        policy = replace(search.pricing.base, optimizer=optimizer, unlisted="fp32")
        search.add(Candidate(word, policy, BASE + saving(saved, -1.0), (), (), BASE))
    best = search.best(limits, prefer)
    assert best is not None and best.name == name


@pytest.mark.parametrize("limit", [5.0, 10.0, 11.0, 99.0, 1234.5, 1e6])
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("power", [1.0, 1.2])
def test_the_largest_batch_is_the_last_that_fits(limit: float, batch: int, power: float) -> None:
    def memory(size: int) -> float:
        return 7.0 + 3.0 * size**power

    counted = largest(memory, batch, limit)
    fits = max((size for size in counted if counted[size] <= limit), default=0)
    assert counted[fits + 1] > limit and (fits == 0 or memory(fits) <= limit < memory(fits + 1))
    assert all(bytes_ == memory(size) for size, bytes_ in counted.items()) and len(counted) <= 12


@pytest.mark.parametrize("batch", [1, 3, 40])
def test_a_batch_fits_that_is_followed_by_one_that_does_not_where_memory_shrinks_in_between(batch: int) -> None:
    def memory(size: int) -> float:
        return size if size < 64 else 0.5 * size

    bytes_of = largest(memory, batch, 50.0)
    fits = max(size for size in bytes_of if bytes_of[size] <= 50.0)
    assert bytes_of[fits + 1] > 50.0


@pytest.mark.parametrize("slope", [0.0, -1.0, 1e-9])
def test_batches_that_take_no_memory_end(slope: float) -> None:
    bytes_of = largest(lambda size: 7.0 + slope * size, 4, 10.0)
    assert max(bytes_of) == MOST and len(bytes_of) <= 6
