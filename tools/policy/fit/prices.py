"""What a policy costs: bytes in use, estimated time, the gradient's error; and what each option adds to the base."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from torch import nn

from fxamp.errors import FxampError
from fxamp.policy import Policy
from fxamp.policy.model.keep import Keep
from fxamp.policy.model.optimizer_table import OptimizerPrecision
from fxamp.tools.bench.cost.row import Rates, Row
from fxamp.tools.common.progress import bar
from fxamp.tools.policy.fit.counts import Counting
from fxamp.tools.policy.fit.decisions import Decision, Language, Option
from fxamp.tools.policy.fit.errors import Measuring

#: Bytes an element of the state that each form takes, with its scales; AdamW has two states.
_STATE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1 + 4 / 256, "float8_e4m3fn": 1 + 4 / 256}
_STATES = 2


@dataclass(frozen=True)
class Price:
    """What a step costs, or adds.

    ``memory``: bytes of parameters, of the optimizer's state, and the larger of the peak and of all gradients; ``peak``
    and ``kept``: of activations, as ``fxamp-bench cost`` counts them; ``milliseconds``: an estimate; ``square``: of the
    gradient's relative error.
    """

    memory: float = 0.0
    milliseconds: float = 0.0
    square: float = 0.0
    peak: float = 0.0
    kept: float = 0.0

    @property
    def error(self) -> float:
        """The gradient's relative error."""
        return math.sqrt(max(self.square, 0.0))

    def __add__(self, other: "Price") -> "Price":
        return Price(*(a + b for a, b in zip(self.numbers, other.numbers, strict=True)))

    def __sub__(self, other: "Price") -> "Price":
        return Price(*(a - b for a, b in zip(self.numbers, other.numbers, strict=True)))

    @property
    def numbers(self) -> tuple[float, ...]:
        """The fields, in order."""
        return self.memory, self.milliseconds, self.square, self.peak, self.kept


@dataclass
class Pricing:
    """Counts and measures policies. ``base``: as it is counted; ``here``: as the model's own device runs it."""

    base: Policy
    here: Policy
    language: Language
    counting: Counting
    measuring: Measuring
    rates: Rates
    say: Callable[[str], None]

    def of(self, options: Sequence[Option]) -> Price:
        """Return the price of the base with ``options``."""
        return self.price(self.language.policy(self.base, options), self.language.policy(self.here, options))

    def price(self, there: Policy, here: Policy) -> Price:
        """Return the price of a policy. Raises FxampError where it cannot be counted or run."""
        counting = self.counting.row(_plain(there))
        square = self._square(here)
        counted = self._counted(counting.result())
        return replace(counted, memory=counted.memory + self._state(there.optimizer), square=square)

    def _square(self, here: Policy) -> float:
        return self.measuring.error(_plain(here)) ** 2

    def _counted(self, counted: Row) -> Price:
        """Return what was counted as a price, without the optimizer's state."""
        trained, others = self._parameters()
        memory = trained + others + max(counted.peak, trained)
        return Price(memory, counted.milliseconds(self.rates), 0.0, counted.peak, counted.kept)

    def _parameters(self) -> tuple[float, float]:
        """Return the bytes of the parameters that are trained, and of all other state of the model."""
        model = self.measuring.work.model
        if not isinstance(model, nn.Module):
            return 0.0, 0.0
        every = [*model.parameters(), *model.buffers()]
        trained = sum(value.nbytes for value in every if value.requires_grad)
        return float(trained), float(sum(value.nbytes for value in every) - trained)

    def _state(self, precision: OptimizerPrecision | None) -> float:
        forms = precision.state.values() if precision is not None else ["float32"]
        return _STATES * self._parameters()[0] / 4 * max(_STATE_BYTES[form] for form in forms)

    def options(self, decisions: Sequence[Decision], short: Sequence[Decision], base: Price) -> list[tuple[Price, ...]]:
        """Return what each option of each decision adds to ``base``; what cannot be counted or run is never taken.

        ``short``: the same decisions for the model with few layers, which is counted.
        """
        plain = {few: self.counting.row(_plain(self.base), few) for few in (False, True)}
        counts = self._counts(short)
        prices: list[tuple[Price, ...]] = []
        with bar("priced", sum(map(len, counts)), "option") as shown:
            for decision, futures in zip(decisions, counts, strict=True):
                own = [Price()]
                for option, future in zip(decision.options[1:], futures, strict=True):
                    try:
                        before = self._counted(plain[bool(decision.scope.modules)].result())
                        counted = self._counted(future.result()) - before
                        own.append(self._added(option, counted, base))
                    except FxampError as error:
                        self.say(f"{decision.name}, {decision.scope.name}, {option.name}: left out: {error}")
                        own.append(NEVER)
                    shown.update()
                prices.append(tuple(own))
        return prices

    def _counts(self, short: Sequence[Decision]) -> "list[list[Future[Row]]]":
        """Count each option but the first of each decision; layers that are alike are counted once."""
        taken: dict[tuple[str, str], list[Future[Row]]] = {}
        for own in sorted(short, key=lambda decision: "middle" not in decision.scope.word):
            if (own.scope.kind, own.name) not in taken:
                policies = [self.language.policy(self.base, [option]) for option in own.options[1:]]
                taken[own.scope.kind, own.name] = [
                    self.counting.row(_plain(policy), bool(own.scope.modules)) for policy in policies
                ]
        return [taken[own.scope.kind, own.name] for own in short]

    def _added(self, option: Option, counted: Price, base: Price) -> Price:
        """Return what ``option`` adds; ``counted``: to one layer of its scope."""
        if option.optimizer is not None:
            return Price(memory=self._state(option.optimizer) - self._state(self.base.optimizer))
        if not any(counted.numbers):
            return counted
        added = Price(*(option.scope.size * number for number in counted.numbers))
        if all(rule.keep in _EXACT for rule in option.rules):
            return added
        return replace(added, square=max(self._square(self.language.policy(self.here, [option])) - base.square, 0.0))


def _plain(policy: Policy) -> Policy:
    """Return ``policy`` without the precision of the optimizer, which neither the count nor the gradient reads."""
    return replace(policy, optimizer=None)


#: Kept so, values are those of the forward, bit for bit.
_EXACT = (Keep.RECOMPUTE, Keep.AS_IS)

#: The price of an option that cannot be taken.
NEVER = Price(memory=math.inf)
