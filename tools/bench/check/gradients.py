"""The gradients of one compiled step under each policy, against eager autocast and against float64."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import fxamp
from fxamp.dtypes import DTYPES
from fxamp.errors import MachineError, PolicyError
from fxamp.policy import Policy, built_in_names, variant_names
from fxamp.reports.report import Report
from fxamp.tools.bench.check.check_line import Check, SkippedError, require
from fxamp.tools.bench.check.program import DRAWS, SCALE, Draw, Net, draw
from fxamp.tools.bench.check.yardstick import relative_error, require_as_exact


def gradient_checks(device: str, lowering: str) -> Iterator[Check]:
    """Yield a check for each shipped policy of the device, in float16 with a scaler in the graphs too."""
    for name in sorted((*built_in_names(), *variant_names())):
        if not name.startswith(f"{device}-"):
            continue
        yield Check(f"gradients {name}", partial(_gradients, name, device, lowering, scaled=False))
        if "-float16" in name:
            yield Check(f"gradients {name}, scaler", partial(_gradients, name, device, lowering, scaled=True))
    for dtype in DTYPES:
        yield Check(
            f"gradients {device}-{dtype}, reduce-overhead", partial(_graphed, f"{device}-{dtype}", device, lowering)
        )


def _gradients(policy: str, device: str, lowering: str, scaled: bool, **more: Any) -> str:
    exact = policy in built_in_names()
    draws = [draw(seed, "rowwise" in policy) for seed in range(DRAWS)]
    truths = [sample.truth() for sample in draws]
    try:
        ours, report = _compiled(policy, device, lowering, scaled, draws, **more)
    except (MachineError, PolicyError) as refused:
        raise SkippedError(str(refused).splitlines()[0]) from refused
    theirs = _eager(policy, device, draws) if exact else _compiled(policy, device, "aot_eager", scaled, draws)[0]
    require(all(sample.keys() == true.keys() for sample, true in zip(ours, truths, strict=True)), "a gradient is None")
    if "fp8" in policy:
        require("Products in fp8" in str(report), "no product ran in fp8")
    errors = [[relative_error(g, t) for g, t in zip(way, truths, strict=True)] for way in (ours, theirs)]
    yardstick = "eager autocast" if exact else "the same policy op by op"
    return require_as_exact(*errors).replace("the yardstick", yardstick)


def _compiled(
    policy: str, device: str, lowering: str, scaled: bool, draws: list[Draw], **more: Any
) -> tuple[list[dict[str, torch.Tensor]], Report]:
    """Return the gradients under the policy, true ones, and the report; with a scaler the graph scales by itself."""
    torch._dynamo.reset()
    model: nn.Module = Net("rowwise" in policy).to(device)
    options: dict[str, Any] = {"policy": policy, "lowering": lowering, **more}
    if scaled:
        scaler = fxamp.GradScaler(device, init_scale=SCALE)
        compiled = torch.compile(model, backend="fxamp", options=options | {"scaler": scaler})
        gradients = [sample.gradients(model, lambda *batch: scaler.scale(compiled(*batch))) for sample in draws]
    else:
        compiled = torch.compile(model, backend="fxamp", options=options)
        scale = SCALE if "-float16" in policy else 1.0
        gradients = [sample.gradients(model, compiled, scale) for sample in draws]
    return gradients, fxamp.report(compiled)


def _eager(policy: str, device: str, draws: list[Draw]) -> list[dict[str, torch.Tensor]]:
    model = Net().to(device)
    dtype = getattr(torch, Policy.load(policy).lower_precision_fp)

    def call(*batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=dtype):
            loss: torch.Tensor = model(*batch)
        return loss

    return [sample.gradients(model, call, SCALE) for sample in draws]


def _graphed(policy: str, device: str, lowering: str) -> str:
    if device == "cpu" or lowering != "inductor":
        raise SkippedError("CUDA graphs need a CUDA device and Inductor")
    return _gradients(policy, device, lowering, False, mode="reduce-overhead")
