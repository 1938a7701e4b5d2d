"""Choose by the sum of prices, verify the whole policy, take the prices from there, and choose again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from fxamp.errors import FxampError
from fxamp.policy import Policy
from fxamp.tools.common.formatting import size
from fxamp.tools.policy.fit.choice import PREFERENCES, Cut, Limits, choose, missed, predicted
from fxamp.tools.policy.fit.decisions import Decision, Option
from fxamp.tools.policy.fit.prices import NEVER, Price, Pricing

#: Choices that are verified for one pair of limits, at most.
ROUNDS = 6

#: Of the memory of what was verified: what is sought where memory is to be least.
_LESS = 0.999


@dataclass(frozen=True)
class Candidate:
    """A whole policy, counted and measured. ``options``: what it adds to the base; ``sum``: of their own prices."""

    name: str
    policy: Policy
    price: Price
    options: tuple[Option, ...] = ()
    sum: Price | None = None


@dataclass
class Search:
    """Looks for policies within limits. ``prices``: what each option of ``decisions`` adds to ``base``."""

    pricing: Pricing
    decisions: Sequence[Decision]
    prices: Sequence[Sequence[Price]]
    base: Price
    say: Callable[[str], None]
    candidates: dict[str, Candidate] = field(default_factory=dict)

    def look(self, name: str, limits: Limits, prefer: str, rounds: int = ROUNDS) -> None:
        """Add what is chosen within ``limits``, verified, to the candidates, and what its own sums lead to.

        What an option adds differs from policy to policy: several lower the same moment. So the prices are taken to
        start from the policy verified last, until they lead nowhere else; then from the base, where sums promise most.
        It ends where these promise nothing better, where the smallest policy is too large, or after ``rounds``.
        """
        start, known = self.base, set[tuple[int, ...]]()
        cuts: list[Cut] = []
        for _ in range(rounds):
            aim = self._aim(limits, prefer)
            chosen = choose(self.prices, start, aim, prefer, cuts)
            if chosen is None and start is not self.base and self.best(limits, prefer) is None:
                chosen = choose(self.prices, start, Limits(inf, limits.square), "memory", cuts)
                if chosen is None or chosen in known:
                    return
            if chosen is None or chosen in known:
                chosen = choose(self.prices, self.base, aim, prefer, cuts)
                if chosen is None or chosen in known or not self._promising(chosen, limits, prefer):
                    return
            known.add(chosen)
            candidate = self.verified(name, chosen)
            if candidate is None:
                others = ((d, o) for d, own in enumerate(self.prices) for o in range(len(own)) if o != chosen[d])
                cuts.append(dict.fromkeys(others, 1.0))
                continue
            cuts += missed(self.prices, candidate.price, self._aim(limits, prefer), chosen)
            start = self._start(candidate.price, chosen)

    def _aim(self, limits: Limits, prefer: str) -> Limits:
        """Return ``limits``, within which memory is less than what was verified if it is to be least."""
        best = self.best(limits, prefer)
        return limits if best is None or prefer != "memory" else replace(limits, memory=_LESS * best.price.memory)

    def _promising(self, chosen: Sequence[int], limits: Limits, prefer: str) -> bool:
        """Whether the sum of a choice is better than what was verified."""
        at, best = PREFERENCES.index(prefer), self.best(limits, prefer)
        total = predicted(self.prices, self.base, chosen)
        return best is None or total.numbers[at] < best.price.numbers[at]

    def _start(self, price: Price, chosen: Sequence[int]) -> Price:
        """Return the base to which the options that are ``chosen`` would add up to ``price``."""
        return price - predicted(self.prices, Price(), chosen)

    def verified(self, name: str, chosen: Sequence[int]) -> Candidate | None:
        """Return the policy with the options that are ``chosen``, counted and measured; None if that cannot be done."""
        options = tuple(own.options[at] for own, at in zip(self.decisions, chosen, strict=True) if at)
        policy = self.pricing.language.policy(self.pricing.base, options)
        if policy.digest in self.candidates:
            return self.candidates[policy.digest]
        others = sum(candidate.name.partition(", trial")[0] == name for candidate in self.candidates.values())
        label = f"{name}, trial {others + 1}" if others else name
        try:
            price = self.pricing.of(options)
        except FxampError as error:
            self.say(f"{label}: {error}")
            return None
        self.say(f"{label}: {summary(price, self.base)}")
        return self.add(Candidate(label, policy, price, options, predicted(self.prices, self.base, chosen)))

    def add(self, candidate: Candidate) -> Candidate:
        """Add a candidate, and return it, or the one that decides the same."""
        return self.candidates.setdefault(candidate.policy.digest, candidate)

    def best(self, limits: Limits, prefer: str, shipped: bool = True) -> Candidate | None:
        """Return the best of all candidates within ``limits``; of equals, the one with the fewest rules.

        Without ``shipped`` the best of the base and of those that this search has put together.
        """
        good = [candidate for candidate in self.candidates.values() if limits.hold(candidate.price)]
        if not shipped:
            good = [candidate for candidate in good if candidate.options or candidate.price == self.base]
        first = PREFERENCES.index(prefer)
        order = [first, *(at for at in (1, 2, 0) if at != first)]
        return min(
            good, key=lambda one: (*(one.price.numbers[at] for at in order), len(one.policy.rules)), default=None
        )

    def frontier(self) -> list[Candidate]:
        """Return the candidates that no other one matches or beats in time, memory and error, the fastest first."""
        every = list(self.candidates.values())
        return sorted(
            (one for one in every if not any(_dominates(other, one) for other in every)),
            key=lambda candidate: (candidate.price.milliseconds, candidate.price.memory),
        )

    def next_smaller(self, candidate: Candidate) -> tuple[Decision, Option, Candidate] | None:
        """Return the decision that would lower the memory of ``candidate`` most, whatever its error, verified.

        ``candidate`` is the base with options, or none; None if no other decision would lower its memory.
        """
        places = [
            next((at for at, option in enumerate(own.options) if at and option in candidate.options), 0)
            for own in self.decisions
        ]
        start = self._start(candidate.price, places)
        others = [
            (predicted(self.prices, start, other).memory, (decision, option, other))
            for d, decision in enumerate(self.decisions)
            for o, option in enumerate(decision.options)
            if o != places[d] and self.prices[d][o] is not NEVER
            for other in [[*places[:d], o, *places[d + 1 :]]]
        ]
        memory, step = min(others, key=lambda one: one[0], default=(inf, None))
        if step is None or memory >= candidate.price.memory:
            return None
        decision, option, other = step
        smaller = self.verified("beyond the limits", other)
        return None if smaller is None else (decision, option, smaller)


def summary(price: Price, base: Price) -> str:
    """Return memory, time and error of ``price``, the latter two over those of ``base``."""
    time = f"{price.milliseconds / base.milliseconds:.3f} of the time" if base.milliseconds else "no time"
    error = f"{price.error / base.error:.3f} of the error" if base.error else f"an error of {price.error:.1e}"
    return f"{size(round(price.memory))}, {time}, {error}"


def _dominates(other: Candidate, one: Candidate) -> bool:
    better, worse = other.price.numbers, one.price.numbers
    return better != worse and all(a <= b for a, b in zip(better, worse, strict=True))
