"""A few steps of training under two policies, beside float32: whether the losses part."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn

import fxamp
from fxamp.dtypes import SCALED_DTYPES
from fxamp.errors import ListingError
from fxamp.policy import Policy
from fxamp.scaler import GradScaler
from fxamp.tools.common.progress import bar
from fxamp.tools.common.silence import unlogged
from fxamp.tools.inputs.measurement import Copy, run_compiled
from fxamp.tools.policy.fit.errors import Measuring

#: Of AdamW.
RATE = 1e-3


@dataclass(frozen=True)
class Training:
    """Losses of each step, before its update, from equal seeds: under the base, under the result, and in float32."""

    base: list[float]
    result: list[float]
    float32: list[float]

    @property
    def parted(self) -> int | None:
        """The first step at which the result is further from the base than the base ever was from float32 until then.

        None if there is none.
        """
        most = 0.0
        for at, (base, result, exact) in enumerate(zip(self.base, self.result, self.float32, strict=True)):
            most = max(most, abs(base - exact))
            if not abs(result - base) <= most:
                return at
        return None

    def text(self, base: str, result: str) -> str:
        """Say how the losses went, and where they part."""
        first, last = [(own[at], own[at]) for own in (self.base,) for at in (0, -1)]
        lines = [
            f"{len(self.base)} steps of AdamW at {RATE:g}, on the batches in turn, from equal seeds: loss "
            f"{first[0]:.4f} to {last[0]:.4f} under {base}, {self.result[0]:.4f} to {self.result[-1]:.4f} under "
            f"{result}, {self.float32[0]:.4f} to {self.float32[-1]:.4f} in float32"
        ]
        at = self.parted
        if at is None:
            lines.append(f"{result} stays as near to {base} as that was to float32")
        else:
            lines.append(
                f"they part at step {at + 1}: {self.result[at]:.6g} beside {self.base[at]:.6g} and, in float32, "
                f"{self.float32[at]:.6g}"
            )
        return "\n".join(lines)


def train(measuring: Measuring, base: Policy, result: Policy, steps: int) -> Training:
    """Train the model that is measured for so many steps under each policy, and in float32."""
    with bar("trained", 3 * steps, "step") as progress:
        return Training(*(_losses(measuring, policy, steps, progress.update) for policy in (base, result, None)))


def _losses(measuring: Measuring, policy: Policy | None, steps: int, update: Callable[[], Any]) -> list[float]:
    work = measuring.work
    copy = Copy.of(work.model, measuring.batches)
    if not isinstance(copy.model, nn.Module):
        raise ListingError(f"{work.file}: --steps: model is a function, without parameters; accepted: an nn.Module")
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(copy.model.parameters(), lr=RATE)
    scaled = policy is not None and policy.lower_precision_fp in SCALED_DTYPES and policy.outputs != "keep"
    scaler = GradScaler(policy.device) if policy is not None and scaled else None
    if policy is not None and policy.optimizer is not None:
        optimizer = fxamp.compile_optimizer(optimizer, policy, lowering="aot_eager")

    def run(call: Any) -> list[float]:
        losses = []
        for at, batch in enumerate(islice(cycle(copy.batches), steps)):
            torch.manual_seed(at)
            loss = work.loss(call(*batch.args, **batch.kwargs))
            (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            optimizer.zero_grad()
            losses.append(float(loss))
            update()
        return losses

    if policy is None:
        return run(copy.callable())
    options = {"policy": policy, "lowering": measuring.lowering(policy), "scaler": scaler}
    with unlogged("fxamp"):
        return run_compiled(work.file, copy, policy, "fxamp", options, run)
