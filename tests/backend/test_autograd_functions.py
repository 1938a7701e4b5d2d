"""Custom autograd.Functions, with and without custom_fwd and custom_bwd."""

import pytest
import torch
from support.checks.exhaustive import each_once
from support.oracles.like_autocast import assert_like_autocast, compile_with, leaf
from torch.amp import custom_bwd, custom_fwd
from torch.utils.checkpoint import checkpoint

from fxamp.errors import CaptureError

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


def multiply(ctx, a, b):
    ctx.save_for_backward(a, b)
    return a.mm(b)


def derivative(ctx, grad):
    a, b = ctx.saved_tensors
    return 3 * grad.mm(b.t()), 3 * a.t().mm(grad)


def sharing(cast_inputs: torch.dtype | None, decorated: bool = True) -> type[torch.autograd.Function]:
    """A Function whose code others have too; only its decorators are its own."""
    forward = custom_fwd(multiply, device_type="cpu", cast_inputs=cast_inputs) if decorated else multiply
    backward = custom_bwd(derivative, device_type="cpu") if decorated else derivative
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Sharing", (torch.autograd.Function,), methods)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_function_that_asks_for_float32_runs_in_float32(lowering: str) -> None:
    a = torch.full((4, 4), 1 + 2**-12)
    compiled = compile_with(lambda x: Float32Product.apply(x, x), lowering)
    assert torch.equal(compiled(a), a @ a)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_forward_that_dynamo_compiles_by_itself_keeps_its_cast_inputs(lowering: str) -> None:
    """Dynamo breaks where a Function gets the same tensor twice."""
    a = torch.full((4, 4), 1 + 2**-12, requires_grad=True)
    assert torch.equal(compile_with(lambda x: Float32Product.apply(x, x), lowering)(a), a @ a)
    rounded = (a.bfloat16() @ a.bfloat16()).float()
    assert torch.equal(compile_with(lambda x: Product.apply(x, x), lowering)(a).float(), rounded)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_undecorated_function_runs_under_the_rules_in_both_directions(lowering: str) -> None:
    """Eager autocast fails in its backward (float32 meets bfloat16); here it is as if it were decorated."""

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return PlainProduct.apply(a @ b, b + 1) @ a

    def oracle(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return Product.apply(a @ b, b + 1) @ a

    assert_like_autocast(program, leaf(4, 4), leaf(4, 4), lowering=lowering, oracle=oracle)


def test_decorators_for_another_device_ask_for_nothing_here() -> None:
    compiled = compile_with(lambda a: OtherDevice.apply(a) + 0, "eager")
    a = torch.full((4, 4), 1 + 2**-12)
    assert not torch.equal(compiled(a), a @ a)
    assert torch.equal(compiled(a), (a.bfloat16() @ a.bfloat16()).float())


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("grads", [True, False])
def test_of_functions_that_share_their_code_each_runs_as_its_decorators_ask(lowering: str, grads: bool) -> None:
    plain, float32 = sharing(None, decorated=False), sharing(torch.float32)
    a = torch.full((4, 4), 1 + 2**-12, requires_grad=grads)
    b = (a.bfloat16() @ a.bfloat16()).float()
    assert torch.equal(compile_with(lambda x: float32.apply(x, x + 0), lowering)(a), a @ a)
    assert torch.equal(compile_with(lambda x: plain.apply(x, x + 0), lowering)(a).float(), b)


def test_functions_that_share_their_code_and_ask_for_different_casts_are_refused() -> None:
    functions = sharing(torch.float32), sharing(torch.float16)
    with pytest.raises(CaptureError, match=r"cast_inputs=torch\.float16.* and .*cast_inputs=torch\.float32"):
        compile_with(lambda x: functions[0].apply(x, x + 0), "eager")(leaf(4, 4))


class Rounding(torch.autograd.Function):
    """Its result has the dtype of what it gets."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx, a):
        result = a.softmax(-1)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        return grad * result


class Nesting(torch.autograd.Function):
    """Undecorated; what it calls has decorators."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(b)
        return a @ b + Rounding.apply(a) + Float32Product.apply(a, b)

    @staticmethod
    def backward(ctx, grad):
        (b,) = ctx.saved_tensors
        return grad * b, grad


@each_once("grad, lowering", [True, False], LOWERINGS)
def test_the_decorators_of_a_function_hold_for_what_it_calls_alone(grad: bool, lowering: str) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return Nesting.apply(a, b) @ b

    assert_like_autocast(program, leaf(4, 4).requires_grad_(grad), leaf(4, 4).requires_grad_(grad), lowering=lowering)


@each_once("grad, lowering", [True, False], LOWERINGS)
@pytest.mark.parametrize("around", [False, True])
def test_cast_inputs_ask_for_nothing_where_autocast_is_off(grad: bool, lowering: str, around: bool) -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            b = Rounding.apply(a)
        return b @ b.t()

    assert_like_autocast(program, leaf(4, 8).requires_grad_(grad), lowering=lowering, around=around)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_cast_inputs_hold_in_a_checkpoint_where_nothing_needs_a_gradient(lowering: str) -> None:
    """Dynamo inlines the forward, and gives the checkpoint's inputs the stack of the call that reads them."""

    def program(a: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(Rounding.apply, a, use_reentrant=False)
        return result

    assert_like_autocast(program, leaf(4, 8).requires_grad_(False), lowering=lowering)
