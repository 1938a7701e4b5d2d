"""Trials: the model under a policy with some units widened, compiled, run on all batches, and measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxamp.errors import ListingError
from fxamp.graph_text import KeptValue
from fxamp.policy import Policy
from fxamp.reports import registry
from fxamp.tools.common.progress import bar
from fxamp.tools.common.silence import quiet, unlogged
from fxamp.tools.inputs.measurement import (
    Batch,
    Copy,
    Results,
    Start,
    failure,
    lowering_of,
    relative,
    run_compiled,
    under_policy,
)
from fxamp.tools.policy.batches import Workload
from fxamp.tools.policy.bisect.units import KEPT_AS_IS, OUT_OF_FP8, Unit, Widening, with_units
from fxamp.tools.policy.places import ModuleOp, watched


@dataclass(frozen=True)
class Errors:
    """Relative errors in the 2-norm: of all outputs of all batches as one vector, and of the gradient as one vector.

    inf if a value is not finite but is finite in float64; None if it was not measured.
    """

    output: float | None
    gradient: float | None

    @property
    def worst(self) -> float:
        """Return the largest of the measured errors."""
        return max(error for error in (self.output, self.gradient) if error is not None)

    def __str__(self) -> str:
        named = {"output": self.output, "gradient": self.gradient}
        return ", ".join(f"{name} error {error:.3g}" for name, error in named.items() if error is not None)


@dataclass
class Trials:
    """Runs and caches trials: ``errors`` are cached by the widened units.

    ``to``: what a widened unit becomes. ``shown``: the bar.
    """

    work: Workload
    batches: tuple[Batch, ...]
    policy: Policy
    tolerance: float
    measure: str
    to: Widening
    progress: Callable[[str], None]
    known: dict[frozenset[Unit], Errors] = field(default_factory=dict)
    shown: Any = field(default_factory=lambda: bar("trials", None, "trial"))

    def __post_init__(self) -> None:
        self._reference = self._float64()

    def errors(self, units: Sequence[Unit]) -> Errors:
        """Return the errors with ``units`` widened; each set is tried once."""
        key = frozenset(units)
        if key not in self.known:
            self.known[key] = errors = self._try(with_units(self.policy, units, self.to))
            self.shown.update()
            verdict = "meets it" if errors.worst <= self.tolerance else "misses it"
            self.progress(f"trial {len(self.known)}: {_named(units, self.to.words)}: {errors}: {verdict}")
        return self.known[key]

    def passes(self, units: tuple[Unit, ...]) -> bool:
        """Whether the larger error is within the tolerance."""
        return self.errors(units).worst <= self.tolerance

    def places(self) -> list[ModuleOp]:
        """Return the places that the policy runs in 16 bits, or in fp8 if it has rules for it, in graph order.

        In the region "kept" these are the places whose values the policy packs or recomputes.
        """
        if self.to is KEPT_AS_IS:
            return list(dict.fromkeys(ModuleOp(value.module, value.op) for value in self.packed()))
        places: dict[ModuleOp, None] = {}

        def collect(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            uses = (use for uses in watched(gm, inputs, self.policy).uses for use in uses)
            places.update(
                {use.place: None for use in uses if (use.recipe if self.to is OUT_OF_FP8 else not use.raised)}
            )
            return gm.forward

        here = self._copy()

        def run(compiled: Callable[..., Any]) -> Results:
            return here.run(compiled, self._start, beside=self._beside)

        run_compiled(self.work.file, here, self.policy, collect, {}, run)
        return list(places)

    def packed(self) -> list[KeptValue]:
        """Return the values that the policy keeps in a different form than the forward's, in graph order."""
        since = registry.count()
        self._under(self.policy)
        values = [value for record in registry.recent(since) for value in record.kept]
        return [value for value in values if value.rule is not None and value.form != value.dtype]

    def _float64(self) -> Results:
        file, exact = self.work.file, Copy.of(self.work.model, self.batches, dtype=torch.float64)
        try:
            with quiet():
                reference, again = (
                    exact.run(exact.model, self._start, seed=seed, beside=self._beside) for seed in (0, 1000)
                )
        except Exception as error:
            raise failure(file, "running model in float64", error) from error
        if self.measure != "gradient" and not reference.outputs:
            raise ListingError(f"{file}: model returns no floating-point tensor: there is no output to measure")
        if self.measure != "output" and not any(bool(g.any()) for g in reference.gradients.values()):
            raise ListingError(
                f"{file}: there are no gradients, or all are zero; accepted: a loss that depends on parameters, or "
                "--measure output"
            )
        if not reference.finite:
            raise ListingError(f"{file}: gradients are not finite even in float64")
        if not reference.same_outputs(again):
            self.progress(
                "the outputs are random: every run has the same fixed seeds, but an op that draws other numbers in "
                "other dtypes counts as error; model.eval() turns dropout off"
            )
        return reference

    @property
    def _start(self) -> Start | None:
        return None if self.measure == "output" else self.work.start

    @property
    def _beside(self) -> Any:
        return self.work.loss.function

    def _copy(self) -> Copy:
        return Copy.of(self.work.model, self.batches)

    def _try(self, policy: Policy) -> Errors:
        results = self._under(policy)
        reference = self._reference
        gradients = results.gradients_of(reference)
        return Errors(
            relative(results.outputs, reference.outputs) if self.measure != "gradient" else None,
            relative([*gradients.values()], [*reference.gradients.values()]) if self.measure != "output" else None,
        )

    def _under(self, policy: Policy) -> Results:
        # Silence the warning about a rule that matches no op: most graphs contain only some of the units.
        with unlogged():
            return under_policy(self.work.file, self._copy(), policy, lowering_of(policy), self._start, self._beside)[0]


def _named(units: Sequence[Unit], wide: str) -> str:
    if not units:
        return "the policy as it is"
    names = "; ".join(map(str, units[:3]))
    return f"{wide} for {names}{f' and {len(units) - 3} more' if len(units) > 3 else ''}"
