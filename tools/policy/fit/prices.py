"""What a policy costs: bytes in use, estimated time, the gradient's error; and what each option adds to the base."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from fxamp.errors import FxampError
from fxamp.policy import Policy
from fxamp.policy.model.optimizer_table import OptimizerPrecision
from fxamp.tools.bench.cost.row import Rates
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
        counted = self.counting.row(replace(there, optimizer=None))
        parameters = self._parameters()
        resident = sum(parameters) + self._state(there.optimizer)
        memory = resident + max(counted.peak, parameters[0])
        square = self.measuring.error(replace(here, optimizer=None)) ** 2
        return Price(memory, counted.milliseconds(self.rates), square, counted.peak, counted.kept)

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

    def options(self, decisions: Sequence[Decision], base: Price) -> list[tuple[Price, ...]]:
        """Return what each option of each decision adds to ``base``."""
        total = sum(len(decision.options) - 1 for decision in decisions)
        prices: list[tuple[Price, ...]] = []
        with bar("priced", total, "option") as shown:
            for decision in decisions:
                own = [Price()]
                for option in decision.options[1:]:
                    own.append(self._added(decision, option, base))
                    shown.update()
                prices.append(tuple(own))
        return prices

    def _added(self, decision: Decision, option: Option, base: Price) -> Price:
        if option.optimizer is not None:
            return Price(memory=self._state(option.optimizer) - self._state(self.base.optimizer))
        try:
            added = self.of([option]) - base
        except FxampError as error:
            self.say(f"{decision.name} of {decision.scope.name}, {option.name}: left out: {error}")
            return _NEVER
        return replace(added, square=max(added.square, 0.0))


_NEVER = Price(memory=float("inf"))
