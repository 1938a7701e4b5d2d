"""Run a model under a policy with its loss scaling, as torch.compile runs it with the lowering "aot_eager"."""

from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import fxamp
from fxamp.dtypes import SCALED_DTYPES
from fxamp.errors import FxampError, ListingError
from fxamp.policy import LossScale, Policy
from fxamp.scaler import GradScaler
from fxamp.tools.common.quiet import one_line
from fxamp.tools.diff.measured import Measured, moved, run
from fxamp.tools.inputs.model_file import Program

#: Give up below this scale: a gradient that overflows there would overflow unscaled.
_LEAST_SCALE = 2.0**-24


def run_under(file: str, given: Program, policy: Policy) -> tuple[Measured, float | None]:
    """Run under ``policy``; also return its loss scale, backed off as in training until all gradients are finite."""
    wanted = policy.loss_scale or LossScale(enabled=policy.lower_precision_fp in SCALED_DTYPES)
    if not wanted.enabled or policy.outputs == "keep":  # the backend refuses a scaler with outputs = "keep"
        return _compiled(file, given, policy, None), None
    scale = wanted.init_scale
    while True:
        found = _compiled(file, given, policy, GradScaler(policy.device, init_scale=scale))
        lower = scale * wanted.backoff_factor
        if found.finite or lower < max(_LEAST_SCALE, wanted.min_scale or 0.0):
            return found, scale
        scale = lower


def _compiled(file: str, given: Program, policy: Policy, scaler: GradScaler | None) -> Measured:
    there = moved(given, policy.device)
    options: dict[str, Any] = {"policy": policy, "lowering": "aot_eager", "scaler": scaler}

    def call(*args: Any, **kwargs: Any) -> Any:
        return there.model(*args, **kwargs)  # Dynamo skips torch.nn's own modules when they are compiled by themselves

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="fxamp", dynamic=False, options=options)
    try:
        found = run(there, compiled, unscaled if scaler is None else scaler.scale)
    except Exception as error:
        raise _failure(file, policy, error) from error
    graphs = fxamp.report(compiled).graphs
    torch._dynamo.reset()
    if not graphs:
        raise ListingError(f"{file}: Dynamo makes no graph of model(inputs): no policy would change anything")
    return found


def _failure(file: str, policy: Policy, error: Exception) -> FxampError:
    inner = getattr(error, "inner_exception", error) if isinstance(error, BackendCompilerFailed) else error
    if isinstance(inner, FxampError):
        return type(inner)(f"{file}: {' '.join(str(inner).split())}")
    return ListingError(f"{file}: calling model on inputs under policy {policy.name!r} failed: {one_line(inner)}")


def unscaled(value: Tensor) -> Tensor:
    """Return ``value`` itself; used where there is no scaler."""
    return value
