"""The best of the priced policies within limits, and an explanation if there is none."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from fxamp.tools.common.formatting import size
from fxamp.tools.policy.fit.candidate_costs import Limits, Price
from fxamp.tools.policy.fit.candidates import Candidate

#: What is least among the policies within the limits, by the value of ``--prefer``.
PREFERENCES: Mapping[str, Callable[[Price], float]] = {
    "memory": lambda price: price.memory,
    "time": lambda price: price.milliseconds,
    "error": lambda price: price.error,
}


@dataclass(frozen=True)
class PricedPolicies:
    """The priced candidates by name, the base first; the limits; and what to minimize within them."""

    priced: Mapping[str, tuple[Candidate, Price]]
    limits: Limits
    prefer: str

    @property
    def base(self) -> Price:
        """The price of the base policy."""
        return next(iter(self.priced.values()))[1]

    @property
    def best(self) -> tuple[Candidate, Price] | None:
        """The best candidate within the limits; None if there is none."""
        return self.least(self.limits, self.prefer)

    def least(self, limits: Limits, prefer: str) -> tuple[Candidate, Price] | None:
        """Return the best candidate within ``limits``; of equals, the one with the fewest rules.

        The optimizer's state is rounded only where memory is short, since the gradient's error does not show it.
        """

        def order(pair: tuple[Candidate, Price]) -> tuple[float, ...]:
            candidate, price = pair
            rest = (price.milliseconds, price.error, candidate.rounds_state, price.memory, len(candidate.policy.rules))
            return PREFERENCES[prefer](price), *rest

        return min((pair for pair in self.priced.values() if limits.hold(pair[1])), key=order, default=None)

    def frontier(self) -> list[str]:
        """Return the names of candidates that no other one matches or beats in time, memory and error, fastest first.

        One that rounds the optimizer's state beats none by that alone.
        """
        names = [name for name in self.priced if not any(self._beats(other, name) for other in self.priced)]
        return sorted(names, key=lambda name: (self.priced[name][1].milliseconds, self.priced[name][1].memory))

    def _beats(self, one: str, other: str) -> bool:
        (winner, low), (loser, high) = self.priced[one], self.priced[other]
        if (
            winner.rounds_state
            and not loser.rounds_state
            and (low.milliseconds, low.error) == (high.milliseconds, high.error)
        ):
            return False
        own, theirs = ((price.memory, price.milliseconds, price.error) for price in (low, high))
        earlier = [*self.priced].index(one) < [*self.priced].index(other)
        return (own != theirs or earlier) and one != other and all(a <= b for a, b in zip(own, theirs, strict=True))

    def shortage(self) -> Iterator[str]:
        """Yield what is missing where nothing fits, what takes the bytes, and which policy would save most."""
        others = replace(self.limits, memory=inf)
        pair = self.least(others, "memory")
        smallest, least = self.least(Limits(), "memory") or next(iter(self.priced.values()))
        if pair is None:
            exact, price = self.least(Limits(), "error") or (smallest, least)
            yield f"nothing fits: {exact.name}, which has the least error, is {' and '.join(others.excesses(price))}"
            return
        candidate, price = pair
        more = size(round(price.memory - self.limits.memory))
        yield f"nothing fits: {candidate.name}, the smallest policy within the other limits, needs {more} more"
        yield f"it takes {breakdown(price)}"
        if smallest is candidate:
            yield "no other policy takes less: a smaller batch, or parameters on several GPUs, would save more"
        else:
            words = " and ".join(others.excesses(least))
            yield f"{smallest.name} would save most: {least.summary(self.base)}; it is {words}"


def breakdown(price: Price) -> str:
    """Say what a step's bytes consist of."""
    held, most = (size(round(bytes_)) for bytes_ in (price.held, max(price.peak, price.gradients)))
    what = "activations and gradients at the peak" if price.peak >= price.gradients else "gradients"
    return f"{held} of parameters and optimizer state, and {most} of {what}"
