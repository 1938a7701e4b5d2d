"""Custom autograd.Functions, with and without custom_fwd and custom_bwd."""

import pytest
import torch
from exhaustive import each_once
from like_autocast import assert_like_autocast, compile_with, leaf
from torch.amp import custom_bwd, custom_fwd

LOWERINGS = ("eager", "aot_eager")


class Product(torch.autograd.Function):
    """A matrix product whose backward marks its gradients: they are three times the true ones."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return 3 * grad.mm(b.t()), 3 * a.t().mm(grad)


class PlainProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return 3 * grad.mm(b.t()), 3 * a.t().mm(grad)


class Float32Product(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return 3 * grad.mm(b.t()), 3 * a.t().mm(grad)


class OtherDevice(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a.mm(a)

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        return grad.mm(a.t()) + a.t().mm(grad)


@each_once("function, lowering", [Product, Float32Product], LOWERINGS)
def test_a_decorated_function_is_as_under_autocast(function, lowering: str) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return function.apply(a @ b, b + 1) @ a

    assert_like_autocast(program, leaf(4, 4), leaf(4, 4), lowering=lowering)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_function_that_asks_for_float32_runs_in_float32(lowering: str) -> None:
    a = torch.full((4, 4), 1 + 2**-12)
    compiled = compile_with(lambda x: Float32Product.apply(x, x), lowering)
    assert torch.equal(compiled(a), a @ a)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_undecorated_function_runs_under_the_rules_in_both_directions(lowering: str) -> None:
    """Eager autocast fails in its backward (float32 meets bfloat16); here it is as if it were decorated."""

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return PlainProduct.apply(a @ b, b + 1) @ a

    def oracle(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return Product.apply(a @ b, b + 1) @ a

    assert_like_autocast(program, leaf(4, 4), leaf(4, 4), lowering=lowering, oracle=oracle)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_under_an_ambient_autocast_dynamo_has_done_the_decorators_work(lowering: str) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return Float32Product.apply(a @ b, b + 1) @ a + Product.apply(a + 2, b)

    assert_like_autocast(program, leaf(4, 4), leaf(4, 4), lowering=lowering, around=True)


def test_decorators_for_another_device_ask_for_nothing_here() -> None:
    compiled = compile_with(lambda a: OtherDevice.apply(a) + 0, "eager")
    a = torch.full((4, 4), 1 + 2**-12)
    assert not torch.equal(compiled(a), a @ a)
    assert torch.equal(compiled(a), (a.bfloat16() @ a.bfloat16()).float())
