"""The choice within limits is that of looking at every policy, and what nothing reaches is named."""

import random
from dataclasses import replace
from typing import Any

import pytest

from fxamp.policy import Policy
from fxamp.tools.policy.fit.candidate_costs import Limits, Price
from fxamp.tools.policy.fit.candidates import STATE, Candidate
from fxamp.tools.policy.fit.choice import PREFERENCES, PricedPolicies

#: No limit.
ANY = Limits()

BASE = Policy.load("cuda-bfloat16")


def choice(*prices: Price, limits: Limits = ANY, prefer: str = "time", states: tuple[int, ...] = ()) -> PricedPolicies:
    """Candidates called "0", "1" and so on; ``states``: those that round the optimizer's state."""
    candidates = [
        Candidate(str(at), (), replace(BASE, optimizer=STATE if at in states else None), BASE.name)
        for at in range(len(prices))
    ]
    return PricedPolicies(
        {own.name: (own, price) for own, price in zip(candidates, prices, strict=True)}, limits, prefer
    )


def price(peak: float, time: float, error: float) -> Price:
    return Price(10.0, 0.0, peak, 0.0, time, error)


def best(made: PricedPolicies) -> str | None:
    return None if made.best is None else made.best[0].name


@pytest.mark.parametrize("prefer", PREFERENCES)
@pytest.mark.parametrize("seed", range(20))
def test_the_answer_is_the_least_of_those_within_the_limits(seed: int, prefer: str) -> None:
    draw = random.Random(seed)
    prices = [price(*(draw.choice([1.0, 2.0, 3.0, 4.0]) for _ in range(3))) for _ in range(8)]
    limits = Limits(10 + draw.choice([1.0, 2.5, 4.0]), draw.choice([1.5, 3.0]), draw.choice([1.5, 3.0]))
    made = choice(*prices, limits=limits, prefer=prefer)
    fitting = [
        p
        for p in prices
        if p.memory <= limits.memory and p.milliseconds <= limits.milliseconds and p.error <= limits.error
    ]
    if not fitting:
        assert made.best is None
        return
    assert made.best is not None and made.best[1] in fitting
    assert PREFERENCES[prefer](made.best[1]) == min(map(PREFERENCES[prefer], fitting))
    frontier = [made.priced[name][1] for name in made.frontier()]
    numbers = [(p.memory, p.milliseconds, p.error) for p in prices]
    undominated = {
        n for n in numbers if not any(o != n and all(a <= b for a, b in zip(o, n, strict=True)) for o in numbers)
    }
    assert {(p.memory, p.milliseconds, p.error) for p in frontier} == undominated and len(frontier) == len(undominated)


def test_the_state_of_the_optimizer_is_rounded_only_where_memory_is_short() -> None:
    prices = price(5.0, 1.0, 1.0), price(3.0, 1.0, 1.0)
    assert best(choice(*prices, states=(1,))) == "0"
    assert best(choice(*prices, states=(1,), limits=Limits(memory=14.0))) == "1"
    assert choice(*prices, states=(1,)).frontier() == ["1", "0"]
    assert choice(*prices).frontier() == ["1"]


def shortage(made: PricedPolicies) -> str:
    return "\n".join(made.shortage())


def test_what_is_missing_is_named_with_what_would_bring_most() -> None:
    prices = price(9.0, 1.0, 1.0), price(5.0, 1.1, 1.4), price(2.0, 1.5, 1.8)
    text = shortage(choice(*prices, limits=Limits(memory=11.0, error=1.5)))
    assert text.startswith("nothing fits: 1, the smallest policy within the other limits, needs 4 B more\n")
    assert "it takes 10 B of parameters and optimizer state, and 5 B of activations and gradients at the peak" in text
    assert text.endswith("2 would save most: 12 B, 1.500 of the time, 1.800 of the error; it is too inexact")
    alone = shortage(choice(*prices[:2], limits=Limits(memory=11.0, error=1.5)))
    assert alone.endswith("no other policy takes less: a smaller batch, or parameters on several GPUs, would save more")
    exact = shortage(choice(*prices, limits=Limits(error=0.5)))
    assert exact == "nothing fits: 0, which has the least error, is too inexact"


def test_gradients_are_named_where_they_take_more_than_the_peak() -> None:
    made: Any = choice(Price(10.0, 8.0, 2.0, 0.0, 1.0, 1.0), limits=Limits(memory=3.0))
    assert made.base.memory == 18.0 and "8 B of gradients" in shortage(made)
