"""Bodies that read the whole size of an outer tensor whose dimensions are dynamic: it is one value, not numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Reshaped(torch.autograd.Function):
    """Its backward reads a size that the forward saved, as a whole and number by number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: torch.Size) -> Tensor:
        ctx.shape, ctx.numbers = x.shape, x.T.shape
        return x.reshape(shape) * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.reshape(ctx.shape) * ctx.shape.numel() * len(ctx.shape) * ctx.numbers[0], None


def function(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = Reshaped.apply(x, w.shape)  # type: ignore[no-untyped-call]
    return (y * w).sum()


def checkpointed(x: Tensor, w: Tensor) -> Tensor:
    size = x.shape
    y: Tensor = checkpoint(lambda x: (x.T @ w.T.reshape(size)).sin(), x, use_reentrant=False)
    return y.sum()


def checkpoint_of_a_size(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = checkpoint(lambda x, size: (x.T @ w.T.reshape(size)).sin(), x, x.shape, use_reentrant=False)
    return y.sum()


def hooked(x: Tensor, w: Tensor) -> Tensor:
    size, y = x.shape, x.T * w
    y.register_hook(lambda gradient: gradient * w.reshape(size).T * size[0])  # type: ignore[no-untyped-call]
    return y.sum()


def picked(x: Tensor, w: Tensor) -> Tensor:
    """Only the values show the number of rows."""
    rows = x[(x.sum(1) > -1e9).nonzero().flatten()]
    size, square = rows.shape, w @ w.T
    y: Tensor = checkpoint(lambda rows: (rows @ square).reshape(size) * 2, rows, use_reentrant=False)
    return y.sum()


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", [function, checkpointed, checkpoint_of_a_size, hooked, picked])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_body_reads_a_dynamic_size(program: Any, lowering: str) -> None:
    options: dict[str, Any] = {"policy": "cpu-bfloat16", "lowering": lowering}
    compiled = torch.compile(program, backend="fxamp", options=options, dynamic=True, fullgraph=True)
    for rows in (3, 4):
        x, w = torch.randn(rows, 5, requires_grad=True), torch.randn(5, rows, requires_grad=True)
        eager, own = (torch.autograd.grad(run(x, w), (x, w)) for run in (program, compiled))
        for expected, actual in zip(eager, own, strict=True):
            assert (actual - expected).norm() < 2e-2 * expected.norm()
