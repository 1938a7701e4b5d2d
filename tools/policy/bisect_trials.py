"""Trials: the model under a policy with some units widened, compiled, run on all batches, and measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxamp.backend import registry
from fxamp.dtypes import SCALED_DTYPES
from fxamp.errors import FxampError, ListingError
from fxamp.listing import KeptValue
from fxamp.policy import LossScale, Policy
from fxamp.policy.model.keep import KEPT
from fxamp.scaler import GradScaler
from fxamp.tools.common.progress import bar
from fxamp.tools.common.quiet import quiet
from fxamp.tools.common.unlogged import unlogged
from fxamp.tools.policy.batches import Batch, Workload, failed
from fxamp.tools.policy.bisect_run import Copy, Errors, Results
from fxamp.tools.policy.bisect_units import KEPT_AS_IS, OUT_OF_FP8, Unit, Widening, with_units
from fxamp.tools.policy.places import ModuleOp, watched

#: Give up below this loss scale: a gradient that overflows there would overflow unscaled.
_LEAST_SCALE = 2.0**-24


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
            self.known[key] = found = self._try(with_units(self.policy, units))
            self.shown.update()
            verdict = "meets it" if found.worst <= self.tolerance else "misses it"
            self.progress(f"trial {len(self.known)}: {_named(units, self.to.words)}: {found}: {verdict}")
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
        found: dict[ModuleOp, None] = {}

        def collect(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            uses = (use for uses in watched(gm, inputs, self.policy).uses for use in uses)
            found.update({use.place: None for use in uses if (use.recipe if self.to is OUT_OF_FP8 else not use.raised)})
            return gm.forward

        self._compiled(Copy.of(self.work, self.batches), collect, {}, None)
        return list(found)

    def packed(self) -> list[KeptValue]:
        """Return the values that the policy keeps in another form than the forward's, in graph order."""
        since, here = registry.count(), Copy.of(self.work, self.batches)
        self._compiled(here, "fxamp", self._options(self.policy), None)
        values = [value for record in registry.recent(since) for value in record.kept]
        return [value for value in values if value.rule is not None and value.form != value.dtype]

    def _float64(self) -> Results:
        exact = Copy.of(self.work, self.batches, torch.float64)
        try:
            with quiet():
                reference = exact.run(self.work, exact.model, self._start, 0)
                again = exact.run(self.work, exact.model, self._start, 1000)
        except FxampError:
            raise
        except Exception as error:
            raise failed(self.work.file, "running model in float64", error) from error
        file = self.work.file
        if self.measure != "gradient" and not reference.outputs:
            raise ListingError(f"{file}: model returns no floating-point tensor: there is no output to measure")
        if self.measure != "output" and not any(bool(g.any()) for g in reference.gradients.values()):
            raise ListingError(
                f"{file}: there are no gradients, or all are zero; accepted: a loss that depends on parameters, or "
                "--measure output"
            )
        if not reference.finite:
            raise ListingError(f"{file}: gradients are not finite in float64 already")
        if any(one.shape != other.shape or one.ne(other).any() for one, other in _pairs(reference, again)):
            self.progress(
                "the outputs are random: every run has the same fixed seeds, but an op that draws other numbers in "
                "other dtypes counts as error; model.eval() turns dropout off"
            )
        return reference

    @property
    def _start(self) -> Callable[[Tensor], Tensor] | None:
        return None if self.measure == "output" else _itself

    def _try(self, policy: Policy) -> Errors:
        here = Copy.of(self.work, self.batches)
        wanted = policy.loss_scale or LossScale(enabled=policy.lower_precision_fp in SCALED_DTYPES)
        options = self._options(policy)
        if self.measure == "output" or not wanted.enabled or policy.outputs == "keep":
            return self._compiled(here, "fxamp", options, None).errors(self._reference, self.measure)
        scaler = GradScaler(policy.device, init_scale=wanted.init_scale)
        found = self._compiled(here, "fxamp", options | {"scaler": scaler}, (scaler, wanted))
        return found.errors(self._reference, self.measure)

    def _options(self, policy: Policy) -> dict[str, Any]:
        lowered = any(policy.has_rules_for(region) for region in ("backward", KEPT))
        return {"policy": policy, "lowering": "aot_eager" if lowered else "eager"}

    def _compiled(
        self, here: Copy, backend: Any, options: dict[str, Any], scaling: tuple[GradScaler, LossScale] | None
    ) -> Results:
        torch._dynamo.reset()
        try:
            with (
                quiet(),
                # Silence the warning about a rule that matches no op: most graphs contain only some of the units.
                unlogged("fxamp.backend"),
                torch._dynamo.config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16),
            ):
                compiled = torch.compile(here.callable(), backend=backend, options=options or None)
                if scaling is None:
                    return here.run(self.work, compiled, self._start, 0)
                return self._scaled(here, compiled, *scaling)
        except FxampError:
            raise
        except Exception as error:
            inner = getattr(error, "inner_exception", None)
            if isinstance(inner, FxampError):
                raise type(inner)(f"{self.work.file}: {' '.join(str(inner).split())}") from error
            raise failed(self.work.file, f"running model under policy {self.policy.name!r}", error) from error
        finally:
            torch._dynamo.reset()

    def _scaled(self, here: Copy, compiled: Callable[..., Any], scaler: GradScaler, wanted: LossScale) -> Results:
        """Run with the loss scale, backed off as in training until all gradients are finite."""
        scale = wanted.init_scale
        while True:
            found = here.run(self.work, compiled, scaler.scale, 0)
            scale *= wanted.backoff_factor
            hopeless = not all(bool(output.isfinite().all()) for output in found.outputs)
            if found.finite or hopeless or scale < max(_LEAST_SCALE, wanted.min_scale or 0.0):
                return found
            scaler.update(scale)


def _itself(loss: Tensor) -> Tensor:
    return loss


def _pairs(one: Results, other: Results) -> list[tuple[Tensor, Tensor]]:
    return [(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one.outputs, other.outputs, strict=True)]


def _named(units: Sequence[Unit], wide: str) -> str:
    if not units:
        return "the policy as it is"
    shown = "; ".join(map(str, units[:3]))
    return f"{wide} for {shown}{f' and {len(units) - 3} more' if len(units) > 3 else ''}"
