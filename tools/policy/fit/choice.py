"""Which option of each decision: exactly, by integer linear programming."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import isfinite

from fxamp.errors import OptionError
from fxamp.tools.policy.fit.prices import Price

#: What is minimised, by its place among a price's numbers. It counts by its share of the base's. Time and error also
#: count by the first share below, each option beside the base's by the second; memory does not: what fits, fits.
PREFERENCES = ("memory", "time", "error")
_SECOND, _RULE = 1e-3, 1e-5


#: What options bring, by decision and place; those of a choice bring at least 1.
Cut = Mapping[tuple[int, int], float]


@dataclass(frozen=True)
class Limits:
    """The most bytes, and the most squared error."""

    memory: float
    square: float

    def hold(self, price: Price) -> bool:
        """Whether a price is within them."""
        return price.memory <= self.memory and price.square <= self.square


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


def missed(prices: Sequence[Sequence[Price]], price: Price, limits: Limits, chosen: Sequence[int]) -> list[Cut]:
    """Return what another choice needs where ``price``, of the whole policy that is ``chosen``, misses ``limits``.

    Of each moment that is too high, options that are not chosen lower as much as is missing: none lowers more beside
    others than alone. Of an error, one option has less than the one that is chosen.
    """
    every = [(d, o, added) for d, own in enumerate(prices) for o, added in enumerate(own) if o != chosen[d]]
    cuts: list[Cut] = [
        {(d, o): min(max(-added.held - added.moments.get(name, 0.0), 0.0) / missing, 1.0) for d, o, added in every}
        for name, bytes_ in price.moments.items()
        if (missing := price.held + bytes_ - limits.memory) > 0
    ]
    if price.square > limits.square:
        cuts.append({(d, o): 1.0 for d, o, added in every if added.square < prices[d][chosen[d]].square})
    return cuts


def choose(
    prices: Sequence[Sequence[Price]], base: Price, limits: Limits, prefer: str, cuts: Sequence[Cut] = ()
) -> tuple[int, ...] | None:
    """Return the option of each decision whose sum costs least within ``limits``; None if there is none.

    ``prices``: what each option adds to ``base``; one that is not finite is never taken. Each of ``cuts``
    holds. Memory is a variable of its own, no less than the bytes in use at any moment.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    every = [(d, o, price) for d, own in enumerate(prices) for o, price in enumerate(own)]
    finite = [isfinite(price.held) for *_, price in every]
    added = [price if fine else Price() for (*_, price), fine in zip(every, finite, strict=True)]
    costs = [cost(price, base, prefer, o == 0) for price, (_, o, _) in zip(added, every, strict=True)]
    whole, memory = base.memory or 1.0, float(prefer == "memory")
    one = [[*(float(d == at) for d, *_ in every), 0.0] for at in range(len(prices))]
    rows, most = [], []
    for name in dict.fromkeys(name for price in (base, *added) for name in price.moments):
        rows.append([*((price.held + price.moments.get(name, 0.0)) / whole for price in added), -1.0])
        most.append(-(base.held + base.moments.get(name, 0.0)) / whole)
    if isfinite(limits.square):
        rows.append([*(price.square / (limits.square or 1.0) for price in added), 0.0])
        most.append((limits.square - base.square) / (limits.square or 1.0))
    for cut in cuts:
        rows.append([*(-cut.get((d, o), 0.0) for d, o, _ in every), 0.0])
        most.append(-1.0)
    constraints = [LinearConstraint(np.array(one), 1, 1), LinearConstraint(np.array(rows), -np.inf, most)]
    done = milp(
        np.array([*costs, memory]),
        integrality=[*(1 for _ in every), 0],
        bounds=Bounds(0, [*map(float, finite), limits.memory / whole]),
        constraints=constraints,
        options={"mip_rel_gap": 0.0},
    )
    if done.x is None:
        return None
    taken = {decision: option for (decision, option, _), share in zip(every, done.x, strict=False) if share > 0.5}
    return tuple(taken[decision] for decision in range(len(prices)))


def predicted(prices: Sequence[Sequence[Price]], base: Price, chosen: Sequence[int]) -> Price:
    """Return the sum of ``base`` and what the options add."""
    return sum((own[at] for own, at in zip(prices, chosen, strict=True)), base)
