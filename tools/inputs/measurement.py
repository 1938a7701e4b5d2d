"""Run a copy of a model, in float64 or compiled under a policy: its outputs and gradients, and their errors."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import fxamp
from fxamp.dtypes import SCALED_DTYPES
from fxamp.errors import FxampError, ListingError
from fxamp.policy import LossScale, Policy
from fxamp.policy.model.site import KEPT
from fxamp.scaler import GradScaler
from fxamp.tools.common.restoration import restored
from fxamp.tools.common.silence import one_line, quiet
from fxamp.tools.inputs.model_file import place
from fxamp.tools.inputs.wide_groups import in_float64

#: Give up below this loss scale: a gradient that overflows there would overflow unscaled.
_LEAST_SCALE = 2.0**-24

#: Returns the values of an output at which the backward starts, each with its gradient (None: 1, of a number).
Start = Callable[[Any], Sequence[tuple[Tensor, Tensor | None]]]

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def leaves(self) -> list[Any]:
        """Return the tensors and other values in the arguments."""
        return pytree.tree_leaves((self.args, dict(self.kwargs)))


@dataclass(frozen=True)
class Results:
    """The floating-point outputs of a run, in order, and its gradients by name; all float64, on the CPU.

    Complex numbers are pairs of real ones in the last dimension.
    """

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor]

    @property
    def finite(self) -> bool:
        """Whether all gradients are finite."""
        return all(bool(gradient.isfinite().all()) for gradient in self.gradients.values())

    def gradients_of(self, reference: "Results") -> dict[str, Tensor]:
        """Return the gradients that ``reference`` has; zeros for those that are missing here."""
        return {name: self.gradients.get(name, torch.zeros_like(g)) for name, g in reference.gradients.items()}

    def same_outputs(self, other: "Results") -> bool:
        """Whether all outputs are equal; NaN equals NaN."""
        pairs = zip(self.outputs, other.outputs, strict=True)
        return all(a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def relative(values: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return |values - exact| / |exact| over all numbers; |values| if exact is zero. Equal infinities are no error.

    inf if a value is not finite but is finite in ``exact``, or if the shapes differ.
    """
    if [value.shape for value in values] != [value.shape for value in exact]:
        return math.inf
    pairs = list(zip(values, exact, strict=True))
    off = math.hypot(*(float(torch.where(a == b, 0.0, a - b).norm()) for a, b in pairs))
    whole = math.hypot(*(float(b[b.isfinite()].norm()) for _, b in pairs))
    error = off / whole if whole else off
    return error if math.isfinite(error) else math.inf


@dataclass(frozen=True)
class Copy:
    """A copy of a model, and its batches; every run starts with the same tensors. ``wide``: they are in float64."""

    model: Callable[..., Any]
    batches: tuple[Batch, ...]
    wide: bool = False

    @staticmethod
    def of(
        model: Callable[..., Any],
        batches: Sequence[Batch],
        device: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> "Copy":
        """Copy a model and its batches, with tensors on ``device`` and floating-point ones in ``dtype`` if given.

        Complex ones have the complex dtype of that precision.
        """

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return copy.deepcopy(value)
            there = value.detach().to(device, _of_precision(dtype, value), copy=True)
            return there.requires_grad_(value.requires_grad)

        own = copy.deepcopy(model)
        if isinstance(own, torch.nn.Module):
            # Module.to would cast complex tensors to a real dtype
            own._apply(lambda tensor: tensor.to(device, _of_precision(dtype, tensor)))  # type: ignore[no-untyped-call]
            own.zero_grad()
        moved = (pytree.tree_map(move, (batch.args, dict(batch.kwargs))) for batch in batches)
        return Copy(own, tuple(Batch(*both) for both in moved), dtype is torch.float64)

    def run(
        self,
        call: Callable[..., Any],
        start: Start | None,
        scaled: Callable[[Tensor], Tensor] | None = None,
        seed: int = 0,
        beside: Any = None,
    ) -> Results:
        """Run ``call``, which computes the model, on all batches, each with its own fixed seed.

        The backward of each starts at ``scaled`` of the values of ``start``; without ``start`` there is no backward.
        The tensors of the model, of the batches and of ``beside`` have their previous values afterwards.
        """
        outputs: list[Tensor] = []
        kept = restored(self.model, beside, [(batch.args, dict(batch.kwargs)) for batch in self.batches])
        with kept, in_float64() if self.wide else contextlib.nullcontext():
            for at, batch in enumerate(self.batches):
                torch.manual_seed(seed + at)
                with torch.enable_grad() if start is not None else torch.no_grad():
                    output = call(*batch.args, **batch.kwargs)
                    outputs += map(_exact, floating(output))
                    begin = [pair for pair in start(output) if pair[0].requires_grad] if start is not None else []
                if begin:
                    torch.autograd.backward(
                        [value if scaled is None else scaled(value) for value, _ in begin], [g for _, g in begin]
                    )
            gradients = {name: _exact(leaf.grad) for name, leaf in self._differentiable() if leaf.grad is not None}
        return Results(tuple(outputs), gradients)

    def _differentiable(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's parameters and the inputs that require a gradient."""
        named: list[tuple[str, Tensor]] = []
        if isinstance(self.model, torch.nn.Module):
            named += self.model.named_parameters()
        for at, batch in enumerate(self.batches):
            end = f" of batch {at}" if len(self.batches) > 1 else ""
            named += [(f"input {i}{end}", value) for i, value in enumerate(batch.leaves) if isinstance(value, Tensor)]
        yield from ((name, value) for name, value in named if value.requires_grad)


def _of_precision(dtype: torch.dtype | None, tensor: Tensor) -> torch.dtype | None:
    """Return the dtype of a copy of ``tensor`` in the precision of ``dtype``; None: its own."""
    if dtype is None or tensor.is_floating_point():
        return dtype
    return dtype.to_complex() if tensor.is_complex() else None


def real(value: Tensor) -> Tensor:
    """Return the numbers of a tensor as real ones: of a complex tensor, its real and imaginary parts."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _exact(value: Tensor) -> Tensor:
    return real(value.detach()).to("cpu", torch.float64, copy=True)


def floating(output: Any) -> list[Tensor]:
    """Return the floating-point tensors in an output, in order; dataclass-like outputs of transformers work too.

    Complex ones are returned as pairs of real numbers.
    """
    leaves = pytree.tree_leaves(output)
    if len(leaves) == 1 and not isinstance(leaves[0], Tensor) and hasattr(leaves[0], "__dict__"):
        leaves = pytree.tree_leaves(vars(leaves[0]))
    numbers = [real(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    return [number for number in numbers if number.is_floating_point()]


def state_of(model: Any) -> list[Tensor]:
    """Return the parameters and buffers of a model; none if it is a function."""
    return [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []


def device_of(tensors: Iterable[Tensor]) -> str:
    """Return the device type of ``tensors``: "cpu" only if all are on the CPU."""
    return min({tensor.device.type for tensor in tensors} - {"cpu"}, default="cpu")


def calling(mod: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``mod``: Dynamo skips modules of torch.nn that are compiled directly.

    Because of the name ``mod``, module paths in its graphs start at the model.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return mod(*args, **kwargs)

    return call


def run_compiled(
    file: str, here: Copy, policy: Policy, backend: Any, options: Mapping[str, Any], run: Callable[[Any], T]
) -> T:
    """Return ``run`` of the compiled model of ``file``; raises FxampError with the file for errors of the model."""
    torch._dynamo.reset()
    try:
        with quiet(), unlimited_recompiles():
            return run(torch.compile(calling(here.model), backend=backend, options=dict(options) or None))
    except Exception as error:
        raise failure(file, f"running model under policy {policy.name!r}", error) from error
    finally:
        torch._dynamo.reset()


def lowering_of(policy: Policy) -> str:
    """Return the lowering that runs all of ``policy``: with torch's own kernels and backward where they are enough."""
    return "aot_eager" if any(policy.has_rules_for(region) for region in ("backward", KEPT)) else "eager"


def under_policy(
    file: str, here: Copy, policy: Policy, lowering: str, start: Start | None, beside: Any = None
) -> tuple[Results, float | None]:
    """Run the model under ``policy``; also return its loss scale, None without one.

    The scale is backed off as in training until all gradients are finite.
    """
    (outcome,) = each_under_policy(file, here, policy, lowering, start, [contextlib.nullcontext()], beside)
    return outcome


def each_under_policy(
    file: str,
    here: Copy,
    policy: Policy,
    lowering: str,
    start: Start | None,
    settings: Sequence[AbstractContextManager[Any]],
    beside: Any,
) -> list[tuple[Results, float | None]]:
    """Compile the model once, and run it as :func:`under_policy` within each of ``settings``, which change values."""
    scale = policy.loss_scale or LossScale(enabled=policy.lower_precision_fp in SCALED_DTYPES)
    unscaled = start is None or not scale.enabled or policy.outputs == "keep"  # which the backend refuses
    scaler = None if unscaled else GradScaler(policy.device, init_scale=scale.init_scale)

    def run(compiled: Callable[..., Any]) -> list[tuple[Results, float | None]]:
        outcomes = []
        for setting in settings:
            with setting:
                outcomes.append(_backed_off(file, here, compiled, start, scaler, scale, beside))
        return outcomes

    options = {"policy": policy, "lowering": lowering, "scaler": scaler}
    return run_compiled(file, here, policy, "fxamp", options, run)


def _backed_off(
    file: str,
    here: Copy,
    compiled: Callable[..., Any],
    start: Start | None,
    scaler: GradScaler | None,
    settings: LossScale,
    beside: Any,
) -> tuple[Results, float | None]:
    """Return the results, with finite gradients if a scale gives them, and that scale."""
    scale = None if scaler is None else settings.init_scale
    while True:
        results = here.run(compiled, start, None if scaler is None else scaler.scale, beside=beside)
        if not fxamp.report(compiled).graphs:
            raise ListingError(f"{file}: Dynamo makes no graph of model: no policy would change anything")
        lower = 0.0 if scale is None else scale * settings.backoff_factor
        hopeless = not all(bool(output.isfinite().all()) for output in results.outputs)
        if results.finite or hopeless or lower < max(_LEAST_SCALE, settings.min_scale or 0.0):
            if scaler is not None and scale != settings.init_scale:
                scaler.update(settings.init_scale)  # for the next setting
            return results, scale
        assert scaler is not None
        scaler.update(scale := lower)


def failure(file: str, doing: str, error: BaseException) -> FxampError:
    """Return the one-line error for an exception that the model, or compiling it, raised."""
    inner = getattr(error, "inner_exception", None) or error
    if isinstance(inner, FxampError):
        text = " ".join(str(inner).split())
        return type(inner)(text if text.startswith(f"{file}:") else f"{file}: {text}")
    return ListingError(f"{place(file, error)}: {doing} failed: {one_line(inner)}")


def unlimited_recompiles() -> AbstractContextManager[None]:
    """Allow any number of recompilations: beyond its limit Dynamo would run batches uncompiled."""
    limits = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}
    patched: AbstractContextManager[None] = torch._dynamo.config.patch(limits)
    return patched
