"""The oracle of the scaled backward: the same program under eager torch.autocast with torch's own GradScaler."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxamp

SCALE = 2.0**8
"""Far from overflow and underflow for gradients around 1: scaling by it must change no bit."""

Program = Callable[..., Any]
Gradients = dict[str, Tensor]


def leaf(*shape: int, seed: int = 0) -> Tensor:
    """Values of half the usual size, so that float16 has room for the scale."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).div(2).requires_grad_()


def make_scaler(scale: float = SCALE, **arguments: Any) -> fxamp.GradScaler:
    return fxamp.GradScaler("cpu", init_scale=scale, **arguments)


def compile_scaled(program: Program, scaler: fxamp.GradScaler, lowering: str, **options: Any) -> Program:
    """``program`` itself, compiled for float16 with a scaled backward; modules share their parameters."""
    choices = {"policy": "cpu-float16", "scaler": scaler, "lowering": lowering} | options
    return torch.compile(program, backend="fxamp", options=choices)


def finish(scaler: fxamp.GradScaler, *optimizers: torch.optim.Optimizer) -> list[bool]:
    """Step the optimizers, update the scale and drop the gradients; whether each step was skipped."""
    skips = [scaler.step(optimizer, return_skipped=True).skipped for optimizer in optimizers]
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return skips


def total(results: Any) -> Tensor:
    """A loss in float32 of all floating results that gradients flow through."""
    leaves = [r for r in pytree.tree_leaves(results) if isinstance(r, Tensor) and r.requires_grad]
    return torch.stack([leaf.float().square().sum() for leaf in leaves]).sum()


def named(program: Program, inputs: Sequence[Any]) -> Gradients:
    """Every gradient by name: of the program's parameters, and of the inputs by position."""
    tensors = dict(program.named_parameters()) if isinstance(program, nn.Module) else {}
    tensors |= {f"input {i}": value for i, value in enumerate(inputs) if isinstance(value, Tensor)}
    return {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}


def fresh(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), tuple(inputs))


def by_torch(program: Program, inputs: Sequence[Any], loss: Callable[[Any], Tensor] = total) -> Gradients:
    """True gradients of eager autocast to float16 with torch's scaler, after its unscaling."""
    program, inputs = copy.deepcopy(program), fresh(inputs)
    torch.manual_seed(7)
    alone = torch.amp.GradScaler("cpu", init_scale=SCALE)
    with torch.autocast("cpu", torch.float16):
        results = program(*inputs)
    alone.scale(loss(results)).backward()
    return {name: gradient / SCALE for name, gradient in named(program, inputs).items()}


def by_fxamp(
    program: Program, inputs: Sequence[Any], lowering: str, loss: Callable[[Any], Tensor] = total, **options: Any
) -> Gradients:
    """The gradients that a compiled, scaled backward leaves."""
    torch._dynamo.reset()
    program, inputs = copy.deepcopy(program), fresh(inputs)
    torch.manual_seed(7)
    scaler = make_scaler()
    compiled = compile_scaled(program, scaler, lowering, **options)
    scaler.scale(loss(compiled(*inputs))).backward()
    return named(program, inputs)


def assert_same_gradients(got: Gradients, reference: Gradients) -> None:
    assert reference, "a test without gradients shows nothing"
    assert got.keys() == reference.keys()
    for name, gradient in reference.items():
        assert gradient.isfinite().all() and gradient.any(), name
        assert torch.equal(got[name], gradient), f"{name}: {(got[name] - gradient).abs().max()}"
