"""Which option of each decision: exactly, by integer linear programming."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf, isfinite

from fxamp.errors import OptionError
from fxamp.tools.policy.fit.prices import Price

#: What is minimised, by its place among a price's numbers. It counts by its share of the base's. Time and error also
#: count by the first share below, each option beside the base's by the second; memory does not: what fits, fits.
PREFERENCES = ("memory", "time", "error")
_SECOND, _RULE = 1e-3, 1e-5


@dataclass(frozen=True)
class Limits:
    """The most bytes, the most squared error, and the most time."""

    memory: float = inf
    square: float = inf
    milliseconds: float = inf

    def hold(self, price: Price) -> bool:
        """Whether a price is within them."""
        return not any(self.excesses(price))

    def excesses(self, price: Price) -> Iterator[str]:
        """Yield a word for each limit that a price is beyond."""
        for word, limit, number in (
            ("too large", self.memory, price.memory),
            ("too inexact", self.square, price.square),
            ("too slow", self.milliseconds, price.milliseconds),
        ):
            if number > limit:
                yield word


def require_solver() -> None:
    """Raise OptionError where scipy is missing."""
    if find_spec("scipy") is None:
        raise OptionError("fit chooses by scipy, which is not installed; pip install scipy, or 'fxamp[fit]'")


def cost(added: Price, base: Price, prefer: str, plain: bool) -> float:
    """What one option adds to what is minimised, beside memory; ``plain``: it is the base's own option."""
    time = added.milliseconds / base.milliseconds if base.milliseconds else 0.0
    error = added.square / base.square if base.square else 0.0
    weights = [1.0 if prefer == name else _SECOND for name in ("time", "error")]
    return weights[0] * time + weights[1] * error + (0.0 if plain else _RULE)


def choose(
    prices: Sequence[Sequence[Price]], base: Price, limits: Limits, prefer: str, past: Sequence[Sequence[int]] = ()
) -> tuple[int, ...] | None:
    """Return the option of each decision whose sum costs least within ``limits``; None if there is none.

    ``prices``: what each option adds to ``base``; one that is not finite is never taken, nor one that adds what an
    earlier option of its decision does, and no choice of ``past``.
    Memory is a variable of its own, no less than the bytes in use at any moment.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    every = [(d, o, price) for d, own in enumerate(prices) for o, price in enumerate(own)]
    finite = [isfinite(price.held) and price not in prices[d][:o] for d, o, price in every]
    added = [price if fine else Price() for (*_, price), fine in zip(every, finite, strict=True)]
    costs = [cost(price, base, prefer, o == 0) for price, (_, o, _) in zip(added, every, strict=True)]
    whole, memory = base.memory or 1.0, float(prefer == "memory")
    one = [[*(float(d == at) for d, *_ in every), 0.0] for at in range(len(prices))]
    rows, most = [], []
    for name in dict.fromkeys(name for price in (base, *added) for name in price.moments):
        rows.append([*((price.held + price.moments.get(name, 0.0)) / whole for price in added), -1.0])
        most.append(-(base.held + base.moments.get(name, 0.0)) / whole)
    for name in ("square", "milliseconds"):
        limit = getattr(limits, name)
        if isfinite(limit):
            rows.append([*(getattr(price, name) / (limit or 1.0) for price in added), 0.0])
            most.append((limit - getattr(base, name)) / (limit or 1.0))
    for choice in past:
        rows.append([*(float(o == choice[d]) for d, o, _ in every), 0.0])
        most.append(len(prices) - 1.0)
    constraints = [LinearConstraint(np.array(one), 1, 1), LinearConstraint(np.array(rows), -np.inf, most)]
    solution = milp(
        np.array([*costs, memory]),
        integrality=[*(1 for _ in every), 0],
        bounds=Bounds(0, [*map(float, finite), limits.memory / whole]),
        constraints=constraints,
        options={"mip_rel_gap": 0.0},
    )
    if solution.x is None:
        return None
    places = {decision: option for (decision, option, _), share in zip(every, solution.x, strict=False) if share > 0.5}
    return tuple(places[decision] for decision in range(len(prices)))


def sum_of(prices: Sequence[Sequence[Price]], base: Price, choice: Sequence[int]) -> Price:
    """Return the sum of ``base`` and what the options add."""
    return sum((own[at] for own, at in zip(prices, choice, strict=True)), base)
