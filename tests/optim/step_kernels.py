"""Generated steps to look at and to run: an optimizer's step as a kernel, and its values in eager ops."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from support.oracles.guarded_runs import parts_of
from support.programs.every_optimizer import Make
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter

from fxamp.kernels import Implementation, forced
from fxamp.kernels.launch_plan import CHUNK
from fxamp.optim import CompiledOptimizer, StepOptions
from fxamp.optim.programs.kind_step import KindStep

aten = torch.ops.aten

SHAPES = ((CHUNK + 4097,), (3, 5), (1,), (40, 60))


def prepared(
    make: Make, scaled: bool = True, clipped: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[CompiledOptimizer, torch.optim.Optimizer, KindStep]:
    """An optimizer after its first step, and its next one as a kernel for the interpreter; keep the first of them."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    optimizer = make(parameters)
    optimizer.step()
    with forced(Implementation.INTERPRETER):
        step = CompiledOptimizer.of(optimizer)
        assert step.prepare(StepOptions(scaled, clipped)) is not None
    (part,) = parts_of(step)
    assert isinstance(part, KindStep)
    return step, optimizer, part


class OneByOne(Interpreter):
    """Runs a graph in eager ops that round once each, and correctly.

    torch's own composites use fused multiply-adds on some CPUs, and its float32 roots are one unit off now and then:
    through float64 they are exact.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        alpha = kwargs.get("alpha", 1)
        if target in (aten.add.Tensor, aten.sub.Tensor) and alpha != 1:
            return target(args[0], args[1] * alpha)
        return _SIMPLE.get(target, target)(*args, **kwargs)


def _lerp(a: Tensor, b: Tensor, weight: Any) -> Tensor:
    weight = torch.as_tensor(weight, dtype=a.dtype)
    return torch.where(weight.abs() < 0.5, a + weight * (b - a), b - (b - a) * (1 - weight))


def _sqrt(a: Tensor) -> Tensor:
    return torch.from_numpy(np.sqrt(np.atleast_1d(a.double().numpy()))).view(a.shape).to(a.dtype)


def _once(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What rounds to 16 bits once, at its end."""

    def rounded(first: Tensor, *others: Any, **more: Any) -> Tensor:
        if first.dtype not in (torch.bfloat16, torch.float16):
            return function(first, *others, **more)
        wide = (o.float() if isinstance(o, Tensor) else o for o in others)
        return function(first.float(), *wide, **more).to(first.dtype)

    return rounded


_SIMPLE: dict[Any, Callable[..., Any]] = {
    aten.sqrt.default: _sqrt,
    aten.rsqrt.default: lambda a: 1 / _sqrt(a),
    aten.lerp.Tensor: _once(_lerp),
    aten.lerp.Scalar: _once(_lerp),
    aten.addcmul.default: _once(lambda a, b, c, value=1: a + value * b * c),
    aten.addcdiv.default: _once(lambda a, b, c, value=1: a + value * b / c),
}


def by_eager_ops(gm: GraphModule, rows: list[list[Tensor]], shared: list[Any]) -> None:
    """Run the graph on each row's tensors, flat, in place."""
    for row in rows:
        with torch.no_grad():
            OneByOne(gm).run(*(tensor.view(-1) if tensor.dim() else tensor for tensor in row), *shared)
