"""Choose, verify the whole policy, correct the limits by what was measured, and choose again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fxamp.errors import FxampError
from fxamp.policy import Policy
from fxamp.tools.policy.fit.choice import PREFERENCES, Limits, choose, predicted
from fxamp.tools.policy.fit.decisions import Decision, Option
from fxamp.tools.policy.fit.prices import Price, Pricing

ROUNDS = 4


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

    def look(self, name: str, limits: Limits, prefer: str) -> Candidate | None:
        """Return a verified policy within ``limits``; None if none was verified. Every trial stays a candidate."""
        aim = limits
        for trial in range(1, ROUNDS + 1):
            chosen = choose(self.prices, self.base, aim, prefer)
            if chosen is None:
                return None
            candidate = self._verified(name if trial == 1 else f"{name}, trial {trial}", chosen)
            if candidate is None:
                return None
            if limits.hold(candidate.price):
                return candidate
            aim = _corrected(aim, limits, candidate)
        return None

    def _verified(self, name: str, chosen: Sequence[int]) -> Candidate | None:
        options = tuple(own.options[at] for own, at in zip(self.decisions, chosen, strict=True) if at)
        policy = self.pricing.language.policy(self.pricing.base, options)
        if policy.digest in self.candidates:
            return self.candidates[policy.digest]
        try:
            price = self.pricing.of(options)
        except FxampError as error:
            self.say(f"{name}: {error}")
            return None
        total = predicted(self.prices, self.base, chosen)
        return self.add(Candidate(name, policy, price, options, total))

    def add(self, candidate: Candidate) -> Candidate:
        """Add a candidate, and return it, or the one that decides the same."""
        return self.candidates.setdefault(candidate.policy.digest, candidate)

    def best(self, limits: Limits, prefer: str) -> Candidate | None:
        """Return the best of all candidates within ``limits``; of equals, the one with the fewest rules."""
        good = [candidate for candidate in self.candidates.values() if limits.hold(candidate.price)]
        at = PREFERENCES[prefer]
        rest = [other for other in (PREFERENCES[name] for name in ("time", "error", "memory")) if other != at]

        def order(candidate: Candidate) -> tuple[float, ...]:
            numbers = candidate.price.numbers
            return (numbers[at], *(numbers[other] for other in rest), len(candidate.policy.rules))

        return min(good, key=order, default=None)

    def frontier(self) -> list[Candidate]:
        """Return the candidates that no other one matches or beats in time, memory and error, the fastest first."""
        every = list(self.candidates.values())
        return sorted(
            (one for one in every if not any(_dominates(other, one) for other in every)),
            key=lambda candidate: (candidate.price.milliseconds, candidate.price.memory),
        )


def _dominates(other: Candidate, one: Candidate) -> bool:
    better, worse = other.price.numbers[:3], one.price.numbers[:3]
    return better != worse and all(a <= b for a, b in zip(better, worse, strict=True))


def _corrected(aim: Limits, limits: Limits, candidate: Candidate) -> Limits:
    """Return limits for the sums of prices such that what was measured would be within ``limits``."""
    assert candidate.sum is not None
    memory, square = aim.memory, aim.square
    if candidate.price.memory > limits.memory:
        memory = min(memory, candidate.sum.memory) * limits.memory / candidate.price.memory
    if candidate.price.square > limits.square:
        square = min(square, candidate.sum.square) * limits.square / candidate.price.square
    return Limits(memory, square)
