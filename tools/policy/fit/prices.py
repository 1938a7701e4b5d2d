"""What a policy costs: bytes in use, estimated time, the gradient's error; and what each option adds to the base."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from operator import add, sub
from typing import Any

from torch import nn

from fxamp.errors import FxampError, ListingError
from fxamp.policy import Policy
from fxamp.policy.model.keep import Keep
from fxamp.policy.model.optimizer_table import OptimizerPrecision
from fxamp.tools.bench.cost.row import Rates
from fxamp.tools.common.progress import bar
from fxamp.tools.policy.fit.counts import Counting, Form, Step
from fxamp.tools.policy.fit.decisions import Decision, Language, Option
from fxamp.tools.policy.fit.errors import Measuring
from fxamp.tools.policy.fit.layers import Scope, as_of, by_scope

#: Bytes an element of the state that each form takes, with its scales; AdamW has two states.
_STATE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1 + 4 / 256, "float8_e4m3fn": 1 + 4 / 256}
_STATES = 2

#: The moment after the backward, of which the count knows the gradients of one graph alone.
_GRADIENTS = "step"


@dataclass(frozen=True)
class Price:
    """What a step costs, or adds.

    ``held``: bytes of parameters and of the optimizer's state; ``moments``: other bytes in use, at each moment of the
    step; ``kept``: bytes from forward to backward; ``milliseconds``: an estimate; ``square``: of the gradient's
    relative error. A price that is added lowers or raises each moment by itself.
    """

    held: float = 0.0
    milliseconds: float = 0.0
    square: float = 0.0
    kept: float = 0.0
    moments: Mapping[str, float] = field(default_factory=dict)

    @property
    def memory(self) -> float:
        """The most bytes in use."""
        return self.held + max(self.moments.values(), default=0.0)

    @property
    def peak(self) -> float:
        """The most bytes of activations, as ``fxamp-bench cost`` counts them."""
        return max((bytes_ for name, bytes_ in self.moments.items() if name != _GRADIENTS), default=0.0)

    @property
    def fullest(self) -> str:
        """The moment with most bytes in use."""
        return max(self.moments, key=self.moments.__getitem__, default="")

    @property
    def error(self) -> float:
        """The gradient's relative error."""
        return math.sqrt(max(self.square, 0.0))

    @property
    def numbers(self) -> tuple[float, float, float]:
        """What policies are compared by: memory, time, error."""
        return self.memory, self.milliseconds, self.square

    def __add__(self, other: "Price") -> "Price":
        return self._with(other, add)

    def __sub__(self, other: "Price") -> "Price":
        return self._with(other, sub)

    def _with(self, other: "Price", of: Callable[[float, float], float]) -> "Price":
        names = dict.fromkeys((*self.moments, *other.moments))
        return Price(
            of(self.held, other.held),
            of(self.milliseconds, other.milliseconds),
            of(self.square, other.square),
            of(self.kept, other.kept),
            {name: of(self.moments.get(name, 0.0), other.moments.get(name, 0.0)) for name in names},
        )

    def times(self, factor: float) -> "Price":
        """Return what so many of it add."""
        moments = {name: factor * bytes_ for name, bytes_ in self.moments.items()}
        return Price(factor * self.held, factor * self.milliseconds, factor * self.square, factor * self.kept, moments)


@dataclass
class Pricing:
    """Counts and measures policies of ``model``. ``base``: as it is counted; ``here``: as what is measured runs it.

    ``parts``: of the model, then of the one with few layers. ``twins``: the options of the model that is measured, by
    scope and name.
    """

    model: Any
    base: Policy
    here: Policy
    language: Language
    counting: Counting
    measuring: Measuring
    parts: tuple[Sequence[Scope], Sequence[Scope]]
    twins: Mapping[tuple[str, str], Option]
    rates: Rates
    say: Callable[[str], None]

    def of(self, options: Sequence[Option]) -> Price:
        """Return the price of the base with ``options``."""
        return self.price(self.language.policy(self.base, options), self.runs(options))

    def runs(self, options: Sequence[Option]) -> Policy:
        """Return the base with ``options`` as the model that is measured runs it. Raises ListingError if it cannot."""
        twins = []
        for option in options:
            twin = self.twins.get((option.scope.name, option.name))
            if twin is None:
                raise ListingError(f"{self.measuring.work.file}: {option.name} changes nothing of {option.scope.name}")
            twins.append(twin)
        return self.language.policy(self.here, twins)

    def price(self, there: Policy, here: Policy) -> Price:
        """Return the price of a policy. Raises FxampError where it cannot be counted or run."""
        step = self.counting.step(_plain(there))
        square = self._square(here)
        return replace(self._counted(step.result()), held=self._held(there.optimizer), square=square)

    def memory(self, there: Policy, batch: int) -> float:
        """Return the bytes in use with another batch, by a count."""
        step = self.counting.step(_plain(there), Form(batch=batch)).result()
        return replace(self._counted(step), held=self._held(there.optimizer)).memory

    @property
    def _shortens(self) -> bool:
        """Whether the model with few layers is another one."""
        return self.parts[0] != self.parts[1]

    def _square(self, here: Policy) -> float:
        return self.measuring.error(_plain(here)) ** 2

    def _counted(self, step: Step, short: bool = False) -> Price:
        """Return what was counted as a price, without what is held."""
        moments = by_scope(self.parts[short], step.moments) | {_GRADIENTS: self._parameters()[0]}
        return Price(0.0, step.row.milliseconds(self.rates), 0.0, step.row.kept, moments)

    def _parameters(self) -> tuple[float, float]:
        """Return the bytes of the parameters that are trained, and of all other state of the model."""
        if not isinstance(self.model, nn.Module):
            return 0.0, 0.0
        every = [*self.model.parameters(), *self.model.buffers()]
        trained = sum(value.nbytes for value in every if value.requires_grad)
        return float(trained), float(sum(value.nbytes for value in every) - trained)

    def _held(self, precision: OptimizerPrecision | None) -> float:
        forms = precision.state.values() if precision is not None else ["float32"]
        trained, others = self._parameters()
        return trained + others + _STATES * trained / 4 * max(_STATE_BYTES[form] for form in forms)

    def options(self, decisions: Sequence[Decision], short: Sequence[Decision], base: Price) -> list[tuple[Price, ...]]:
        """Return what each option of each decision adds to ``base``; what cannot be counted or run is never taken.

        ``short``: the same decisions for the model with few layers, which is counted.
        """
        plain = {few: self.counting.step(_plain(self.base), Form(few)) for few in (False, self._shortens)}
        counts = self._counts(short)
        prices: list[tuple[Price, ...]] = []
        with bar("priced", sum(map(len, counts)), "option") as progress:
            for decision, futures in zip(decisions, counts, strict=True):
                own = [Price()]
                few = self._shortens and bool(decision.scope.modules)
                for option, future in zip(decision.options[1:], futures, strict=True):
                    try:
                        before = self._counted(plain[few].result(), few)
                        own.append(self._added(option, self._counted(future.result(), few) - before, base))
                    except FxampError as error:
                        self.say(f"{decision.name}, {decision.scope.name}, {option.name}: left out: {error}")
                        own.append(NEVER)
                    progress.update()
                prices.append(tuple(own))
        return prices

    def _counts(self, short: Sequence[Decision]) -> "list[list[Future[Step]]]":
        """Count each option but the first of each decision; layers that are alike are counted once."""
        steps: dict[tuple[str, str], list[Future[Step]]] = {}
        for own in sorted(short, key=lambda decision: "middle" not in decision.scope.word):
            if (own.scope.kind, own.name) not in steps:
                policies = [self.language.policy(self.base, [option]) for option in own.options[1:]]
                form = Form(self._shortens and bool(own.scope.modules))
                steps[own.scope.kind, own.name] = [self.counting.step(_plain(policy), form) for policy in policies]
        return [steps[own.scope.kind, own.name] for own in short]

    def _added(self, option: Option, counted: Price, base: Price) -> Price:
        """Return what ``option`` adds; ``counted``: to one layer of its scope."""
        if option.optimizer is not None:
            return Price(held=self._held(option.optimizer) - self._held(self.base.optimizer))
        if not any((counted.milliseconds, counted.kept, *counted.moments.values())):
            return counted
        moments = as_of(option.scope, self.parts[0], counted.moments)
        added = replace(counted, moments=moments).times(option.scope.size)
        if all(rule.keep in _EXACT for rule in option.rules):
            return added
        return replace(added, square=max(self._square(self.runs([option])) - base.square, 0.0))


def _plain(policy: Policy) -> Policy:
    """Return ``policy`` without the precision of the optimizer, which neither the count nor the gradient reads."""
    return replace(policy, optimizer=None)


#: Kept so, values are those of the forward, bit for bit.
_EXACT = (Keep.RECOMPUTE, Keep.AS_IS)

#: The price of an option that cannot be taken.
NEVER = Price(held=math.inf)
