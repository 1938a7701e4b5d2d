"""Steps that write to gradients: compiled, they leave in them what they leave uncompiled."""

from contextlib import nullcontext
from typing import Any

import torch
from support.checks.exhaustive import each_once
from support.programs.written_steps import LOWERINGS, Body, State, Written
from torch import Tensor, nn

import fxamp
from fxamp.kernels import Implementation, forced


def decayed(parameter: nn.Parameter, state: State, rate: float) -> None:
    """Weight decay as older optimizers write it: into the gradient."""
    parameter.grad.add_(parameter, alpha=0.1)  # type: ignore[union-attr]
    state["mean"].mul_(0.9).add_(parameter.grad)
    parameter.sub_(state["mean"], alpha=rate)


def kept_in_the_gradient(parameter: nn.Parameter, state: State, rate: float) -> None:
    """The gradient's memory holds the momentum, to which the next backward adds."""
    parameter.sub_(parameter.grad, alpha=rate)
    parameter.grad.mul_(0.9)  # type: ignore[union-attr]


def exchanged(parameter: nn.Parameter, state: State, rate: float) -> None:
    last = state["mean"].clone()
    state["mean"].copy_(parameter.grad)
    torch._foreach_copy_([parameter.grad], [last])  # type: ignore[list-item]
    parameter.sub_(state["mean"], alpha=rate)


@each_once("body, lowering, skip", [decayed, kept_in_the_gradient, exchanged], LOWERINGS, ["device", "host", None])
def test_a_step_may_write_to_gradients(body: Body, lowering: str, skip: Any) -> None:
    """Also of a parameter whose elements are in a different order than the gradient's. A scaler's are unscaled."""

    def run(compiled: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = ((5,), (2, 3, 2, 2), ())
        parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        parameters[1].data = parameters[1].data.to(memory_format=torch.channels_last)
        optimizer = Written(parameters, body, lambda p: {"mean": torch.zeros_like(p)})
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=skip is not None)
        if compiled:
            chosen = "aot_eager" if lowering == "aot_eager" else "inductor"
            fxamp.compile_optimizer(optimizer, lowering=chosen)
            if skip is not None:
                scaler = fxamp.GradScaler("cpu", init_scale=4.0, skip=skip, step_lowering=chosen)
        with forced(Implementation.INTERPRETER) if compiled and lowering == "interpreter" else nullcontext():
            for factor in (1.0, 2.0, 0.5):
                for parameter in parameters:
                    own = torch.randn(parameter.shape, generator=generator) * factor * scaler.get_scale()
                    parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)
                scaler.scale(torch.zeros(()))
                scaler.step(optimizer)
                scaler.update()
        return [*(p.detach() for p in parameters), *(p.grad for p in parameters if p.grad is not None)]

    torch.testing.assert_close(run(True), run(False))
