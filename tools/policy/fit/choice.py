"""Which option of each decision: exactly, by integer linear programming."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import isfinite
from types import MappingProxyType

from fxamp.errors import OptionError
from fxamp.tools.policy.fit.prices import Price

#: What is minimised first. Time and error also count by the first share, each option beside the base's by the second;
#: memory does not: what fits, fits.
PREFERENCES: Mapping[str, int] = MappingProxyType({"memory": 0, "time": 1, "error": 2})
_SECOND, _RULE = 1e-3, 1e-5


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
    """What one option adds to what is minimised, in shares of the base; ``plain``: it is the base's own option."""
    shares = [part / whole if whole else 0.0 for part, whole in zip(added.numbers[:3], base.numbers[:3], strict=True)]
    at = PREFERENCES[prefer]
    rest = sum(share for other, share in enumerate(shares) if other not in (at, PREFERENCES["memory"]))
    return shares[at] + _SECOND * rest + (0.0 if plain else _RULE)


def choose(prices: Sequence[Sequence[Price]], base: Price, limits: Limits, prefer: str) -> tuple[int, ...] | None:
    """Return the option of each decision whose sum costs least within ``limits``; None if there is none.

    ``prices``: what each option adds to ``base``; one that is not finite is never taken.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    every = [(d, o, price) for d, own in enumerate(prices) for o, price in enumerate(own)]
    costs = np.array([cost(price, base, prefer, o == 0) if isfinite(price.memory) else 0.0 for _, o, price in every])
    finite = np.array([isfinite(price.memory) for *_, price in every])
    one = np.zeros((len(prices), len(every)))
    for at, (decision, *_) in enumerate(every):
        one[decision, at] = 1
    rows, most = [], []
    for limit, whole, parts in (
        (limits.memory, base.memory, [price.memory for *_, price in every]),
        (limits.square, base.square, [price.square for *_, price in every]),
    ):
        if isfinite(limit):
            rows.append(np.where(finite, parts, 0.0) / whole)
            most.append((limit - whole) / whole)
    constraints = [LinearConstraint(one, 1, 1)]
    if rows:
        constraints.append(LinearConstraint(np.array(rows), -np.inf, most))
    bounds = Bounds(0, finite.astype(float))
    done = milp(
        costs, integrality=np.ones(len(every)), bounds=bounds, constraints=constraints, options={"mip_rel_gap": 0.0}
    )
    if done.x is None:
        return None
    taken = {decision: option for (decision, option, _), share in zip(every, done.x, strict=True) if share > 0.5}
    return tuple(taken[decision] for decision in range(len(prices)))


def predicted(prices: Sequence[Sequence[Price]], base: Price, chosen: Sequence[int]) -> Price:
    """Return the sum of ``base`` and what the options add."""
    return sum((own[at] for own, at in zip(prices, chosen, strict=True)), base)
