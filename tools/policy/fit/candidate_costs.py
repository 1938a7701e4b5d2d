"""What a step costs under a policy: bytes in use and estimated time, counted for a GPU, and the gradient's error."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from fxamp.errors import FxampError, ListingError
from fxamp.policy import Policy
from fxamp.policy.model.optimizer_table import OptimizerPrecision
from fxamp.tools.bench.cost.rates import Rates
from fxamp.tools.bench.cost.row import Row, extrapolated
from fxamp.tools.common.formatting import size
from fxamp.tools.common.progress import bar
from fxamp.tools.inputs.measurement import state_of
from fxamp.tools.policy.fit.candidates import LOSS_ONLY, Candidate
from fxamp.tools.policy.fit.counts import Counting, Form
from fxamp.tools.policy.fit.depth import DEPTHS
from fxamp.tools.policy.fit.errors import Measuring
from fxamp.tools.policy.patch import as_run_on

#: Bytes an element of the state that each form takes, with its scales; AdamW has two states.
_STATE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1 + 4 / 256, "float8_e4m3fn": 1 + 4 / 256}
_STATES = 2


@dataclass(frozen=True)
class Price:
    """What a step costs.

    ``held``: bytes of parameters, buffers and the optimizer's state. ``gradients``: bytes of all gradients. ``peak``:
    the most bytes of activations, results and gradients at once; ``kept``: bytes saved for the backward.
    ``milliseconds``: an estimate. ``error``: the gradient's relative error in the 2-norm, against float64.
    """

    held: float
    gradients: float
    peak: float
    kept: float
    milliseconds: float
    error: float = 0.0

    @property
    def memory(self) -> float:
        """The most bytes in use."""
        return self.held + max(self.peak, self.gradients)

    def summary(self, base: "Price") -> str:
        """Return memory, time and error, the latter two over those of ``base``."""
        time = f"{self.milliseconds / base.milliseconds:.3f} of the time"
        error = f"{self.error / base.error:.3f} of the error" if base.error else f"an error of {self.error:.1e}"
        return f"{size(round(self.memory))}, {time}, {error}"


@dataclass(frozen=True)
class Limits:
    """The most bytes, milliseconds, and error of the gradient."""

    memory: float = inf
    milliseconds: float = inf
    error: float = inf

    def excesses(self, price: Price) -> Iterator[str]:
        """Yield a word for each limit that ``price`` exceeds."""
        for word, limit, number in (
            ("too large", self.memory, price.memory),
            ("too inexact", self.error, price.error),
            ("too slow", self.milliseconds, price.milliseconds),
        ):
            if number > limit:
                yield word

    def hold(self, price: Price) -> bool:
        """Whether ``price`` is within all limits."""
        return not any(self.excesses(price))


@dataclass
class Pricing:
    """Counts ``model`` under policies, at two depths if ``depth`` is not 0, and measures errors on ``measuring``'s."""

    model: Any
    depth: int
    counting: Counting
    measuring: Measuring
    rates: Rates
    say: Callable[[str], None]

    def prices(self, candidates: Sequence[Candidate]) -> dict[str, tuple[Candidate, Price]]:
        """Return each candidate with its price, by name. What cannot be counted or run is left out, with a message.

        Raises FxampError if that is the first one, the base.
        """
        self._check_depth(candidates[0].policy)
        steps = [self._counts(candidate.policy) for candidate in candidates]
        priced = {}
        with bar("priced", len(candidates), "policy") as progress:
            for candidate, counts in zip(candidates, steps, strict=True):
                try:
                    error = self.measuring.error(as_run_on(self.measuring.work.device(), _whole(candidate.policy)))
                    price = replace(self._price(candidate.policy, counts), error=error)
                    if not price.milliseconds:
                        raise ListingError("a step launches no kernel on a GPU; accepted: a model that computes")
                except FxampError as failed:
                    if candidate is candidates[0]:
                        raise
                    self.say(f"{candidate.name}: left out: {failed}")
                else:
                    priced[candidate.name] = candidate, price
                    self.say(f"{candidate.name}: {price.summary(next(iter(priced.values()))[1])}")
                progress.update()
        return priced

    def memory(self, policy: Policy, batch: int) -> float:
        """Return the bytes in use with another batch, by a count."""
        return self._price(policy, self._counts(policy, batch)).memory

    def _check_depth(self, policy: Policy) -> None:
        """Fall back to counting the whole model if it does not run with fewer layers."""
        try:
            self._counts(policy)[0].result()
        except FxampError as failed:
            if not self.depth:
                raise
            self.say(
                f"counting the whole model, since it does not run with {DEPTHS[0]} of its {self.depth} layers: {failed}"
            )
            self.depth = 0

    def _counts(self, policy: Policy, batch: int = 0) -> "list[Future[Row]]":
        depths = DEPTHS if self.depth else (0,)
        return [self.counting.row(_plain(policy), Form(depth, batch)) for depth in depths]

    def _price(self, policy: Policy, counts: "Sequence[Future[Row]]") -> Price:
        rows = [count.result() for count in counts]
        row = extrapolated(DEPTHS, rows, self.depth) if len(rows) > 1 else rows[0]
        trained, others = self._parameters()
        held = trained + others + trained / 4 * _STATES * _state_bytes(policy.optimizer)
        return Price(held, trained, row.peak, row.kept, row.milliseconds(self.rates))

    def _parameters(self) -> tuple[float, float]:
        """Return the bytes of the parameters that are trained, and of all other state of the model."""
        every = state_of(self.model)
        trained = sum(value.nbytes for value in every if value.requires_grad)
        return float(trained), float(sum(value.nbytes for value in every) - trained)


def _state_bytes(precision: OptimizerPrecision | None) -> float:
    forms = precision.state.values() if precision is not None else ["float32"]
    return max(_STATE_BYTES[form] for form in forms)


def _whole(policy: Policy) -> Policy:
    """Return what is measured of ``policy``: with all results, so that any of them can be the loss."""
    return replace(_plain(policy), rules=tuple(rule for rule in policy.rules if rule != LOSS_ONLY))


def _plain(policy: Policy) -> Policy:
    """Return ``policy`` without the precision of the optimizer, which neither the count nor the gradient reads."""
    return replace(policy, optimizer=None)
