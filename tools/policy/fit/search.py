"""Choose by the sum of prices, verify the whole policy, take the prices from there, and choose again."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from fxamp.errors import FxampError
from fxamp.policy import Policy
from fxamp.tools.common.formatting import size
from fxamp.tools.policy.fit.choice import PREFERENCES, Limits, choose, sum_of
from fxamp.tools.policy.fit.decisions import Decision, Option
from fxamp.tools.policy.fit.prices import NEVER, Price, Pricing

#: Choices that are verified for one pair of limits, at most.
ROUNDS = 8

#: Of the memory of what was verified: what is sought where memory is to be least. Of its time or error: what has to be
#: promised, beside which a difference is the rounding of sums.
_LESS, _BETTER = 0.999, 1 - 1e-9


@dataclass(frozen=True)
class Candidate:
    """A whole policy, counted and measured.

    ``options``: what it adds to the base, none if it was not put together. ``choice``: the place of an option of each
    decision; for a shipped policy, of the nearest one. ``sum``: of the base's price and of those options' own.
    """

    name: str
    policy: Policy
    price: Price
    options: tuple[Option, ...]
    choice: tuple[int, ...]
    sum: Price


@dataclass
class Search:
    """Looks for policies within limits. ``prices``: what each option of ``decisions`` adds to ``base``."""

    pricing: Pricing
    decisions: Sequence[Decision]
    prices: Sequence[Sequence[Price]]
    base: Price
    say: Callable[[str], None]
    candidates: dict[str, Candidate] = field(default_factory=dict)

    def look(self, limits: Limits, prefer: str, rounds: int = ROUNDS) -> None:
        """Add what is best within ``limits`` by sums of prices, counted and measured, and what its own price leads to.

        What an option adds differs from policy to policy: several lower the same moment. So the prices are taken to
        start from the latest policy, then from the best one, then from the base, until none of them promises a better
        one. Where nothing is within the limits, the smallest is looked for. It ends after ``rounds`` policies.
        """
        latest = self.base
        past: list[tuple[int, ...]] = []
        for _ in range(rounds):
            choice = self._next(latest, limits, prefer, past)
            if choice is None:
                return
            past.append(choice)
            candidate = self.compose(choice)
            if candidate is not None:
                latest = self._start(candidate)

    def _next(
        self, latest: Price, limits: Limits, prefer: str, past: Sequence[tuple[int, ...]]
    ) -> tuple[int, ...] | None:
        """Return the choice to compose next, none of ``past``; None if no start promises one."""
        at, best = PREFERENCES.index(prefer), self.best(limits, prefer)
        nearest = self.base if best is None else self._start(best)
        for start in (latest, nearest, self.base):
            choice = choose(self.prices, start, self._aim(limits, prefer), prefer, past)
            if choice is not None and (
                best is None or sum_of(self.prices, start, choice).numbers[at] < _BETTER * best.price.numbers[at]
            ):
                return choice
        if best is not None:
            return None
        return choose(self.prices, latest, replace(limits, memory=inf), "memory", past)

    def _aim(self, limits: Limits, prefer: str) -> Limits:
        """Return ``limits``, with less memory than the best candidate takes if memory is to be least."""
        best = self.best(limits, prefer)
        return limits if best is None or prefer != "memory" else replace(limits, memory=_LESS * best.price.memory)

    def _start(self, candidate: Candidate) -> Price:
        """Return the base to which the options of ``candidate`` would add up to its price."""
        return self.base + candidate.price - candidate.sum

    def ship(self, name: str, policy: Policy, price: Price) -> None:
        """Add a shipped policy."""
        places = [decision.nearest(policy) for decision in self.decisions]
        choice = tuple(0 if own[at] is NEVER else at for own, at in zip(self.prices, places, strict=True))
        self.add(Candidate(name, policy, price, (), choice, sum_of(self.prices, self.base, choice)))

    def compose(self, choice: Sequence[int]) -> Candidate | None:
        """Return the policy of ``choice``, counted and measured; None if that cannot be done."""
        options = tuple(own.options[at] for own, at in zip(self.decisions, choice, strict=True) if at)
        policy = self.pricing.language.policy(self.pricing.base, options)
        if policy.digest in self.candidates:
            return self.candidates[policy.digest]
        name = f"fit {1 + sum(bool(candidate.options) for candidate in self.candidates.values())}"
        try:
            price = self.pricing.of(options)
        except FxampError as error:
            self.say(f"{name}: {error}")
            return None
        self.say(f"{name}: {summary(price, self.base)}")
        total = sum_of(self.prices, self.base, choice)
        return self.add(Candidate(name, policy, price, options, tuple(choice), total))

    def add(self, candidate: Candidate) -> Candidate:
        """Add a candidate, and return it, or the one that decides the same."""
        return self.candidates.setdefault(candidate.policy.digest, candidate)

    @property
    def shipped(self) -> list[Candidate]:
        """The base, and the shipped policies."""
        return [candidate for candidate in self.candidates.values() if not candidate.options]

    @property
    def composed(self) -> list[Candidate]:
        """The base, and what this search has put together."""
        return [one for one in self.candidates.values() if one.options or one.price == self.base]

    def best(self, limits: Limits, prefer: str, among: Iterable[Candidate] | None = None) -> Candidate | None:
        """Return the best candidate within ``limits``, or the best ``among`` some; of equals, that of fewest rules.

        The optimizer's state is rounded where memory is least, or short: its rounding is not in the gradient's error.
        """
        every = self.candidates.values() if among is None else among
        good = [candidate for candidate in every if limits.hold(candidate.price)]

        def order(one: Candidate) -> tuple[float, ...]:
            memory, time, square = one.price.numbers
            first = one.price.numbers[PREFERENCES.index(prefer)]
            return first, time, square, self._rounds_state(one), memory, len(one.policy.rules)

        return min(good, key=order, default=None)

    def frontier(self) -> list[Candidate]:
        """Return the candidates that no other one matches or beats in time, memory and error, the fastest first.

        Of two with the same time and error, one that rounds the optimizer's state does not beat the other: that
        rounding is not in the gradient's error.
        """
        every = list(enumerate(self.candidates.values()))
        best = [one for at, one in every if not any(self._beats(other, one, o < at) for o, other in every)]
        return sorted(best, key=lambda candidate: (candidate.price.milliseconds, candidate.price.memory))

    def _rounds_state(self, candidate: Candidate) -> bool:
        return candidate.policy.optimizer != self.pricing.base.optimizer

    def _beats(self, other: Candidate, one: Candidate, earlier: bool) -> bool:
        """Whether ``other`` is no worse than ``one`` in all, and better in some number or ``earlier``."""
        better, worse = other.price.numbers, one.price.numbers
        if better[1:] == worse[1:] and self._rounds_state(other) and not self._rounds_state(one):
            return False
        return (better != worse or earlier) and all(a <= b for a, b in zip(better, worse, strict=True))

    def next_smaller(self, candidate: Candidate) -> tuple[Decision, Option, Candidate] | None:
        """Return the decision that would lower the memory of ``candidate`` most, whatever its error, and that policy.

        ``candidate`` is the base with options, or none; None if no other decision would lower its memory.
        """
        places, start = candidate.choice, self._start(candidate)
        others = [
            (sum_of(self.prices, start, other).memory, (decision, option, other))
            for d, decision in enumerate(self.decisions)
            for o, option in enumerate(decision.options)
            if o != places[d] and self.prices[d][o] is not NEVER
            for other in [[*places[:d], o, *places[d + 1 :]]]
        ]
        memory, step = min(others, key=lambda one: one[0], default=(inf, None))
        if step is None or memory >= candidate.price.memory:
            return None
        decision, option, other = step
        smaller = self.compose(other)
        return None if smaller is None else (decision, option, smaller)


def summary(price: Price, base: Price) -> str:
    """Return memory, time and error of ``price``, the latter two over those of ``base``."""
    time = f"{price.milliseconds / base.milliseconds:.3f} of the time" if base.milliseconds else "no time"
    error = f"{price.error / base.error:.3f} of the error" if base.error else f"an error of {price.error:.1e}"
    return f"{size(round(price.memory))}, {time}, {error}"
