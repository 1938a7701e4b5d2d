"""Calls that Dynamo leaves whole, inside which an autograd.Function or a hook decides the gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from support.checks.equality import assert_equal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.errors import CaptureError

LOWERINGS = ["eager", "aot_eager"]


class Tripled(torch.autograd.Function):
    """A product with a rounded weight, which gets three times the gradient that it would have without rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ (weight * 4).round().t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.to(gradient.dtype), 3 * (gradient.t() @ x.to(gradient.dtype))


def calls_a_function(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = Tripled.apply(x, weight)
    return result * 2


def writes_by_a_function(x: Tensor, weight: Tensor) -> Tensor:
    copy = x * 1
    copy.copy_(Tripled.apply(x, weight))
    return copy


def writes_to_its_input(x: Tensor, weight: Tensor) -> Tensor:
    return calls_a_function(x.mul_(2), weight)


def registers_a_hook(x: Tensor, weight: Tensor) -> Tensor:
    result = x @ weight.t()
    if result.requires_grad:
        result.register_hook(lambda gradient: gradient * 5)
    return result * 2


class Overriding(Tensor):
    """A weight for which ``linear`` is a Function."""

    @staticmethod
    def __new__(cls, held: Tensor) -> "Overriding":
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Overriding({self.held})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> "Overriding":
        return Overriding(inner["held"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return Tripled.apply(*args[:2])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = [arg.held if isinstance(arg, Overriding) else arg for arg in args]
        result = func(*held, **(kwargs or {}))
        return Overriding(result) if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default) else result


def gradients(run: Callable[..., Tensor], inputs: tuple[Tensor, ...], of: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    with torch.autocast("cpu", torch.bfloat16):
        result = run(*inputs)
    return torch.autograd.grad(result.float().square().sum(), of)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("left_whole", [torch.compiler.allow_in_graph, torch._dynamo.nonstrict_trace])
@pytest.mark.parametrize("call", [calls_a_function, writes_by_a_function, registers_a_hook])
def test_the_gradient_of_a_call_that_is_left_whole(
    call: Callable[..., Tensor], left_whole: Callable[..., Any], lowering: str
) -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        return left_whole_call(x * 1, weight) + x @ weight

    inputs = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    left_whole_call = call
    expected = gradients(program, inputs, inputs)
    left_whole_call = left_whole(call)
    compiled = torch.compile(program, backend="fxamp", options={"lowering": lowering})
    assert_equal(gradients(compiled, inputs, inputs), expected)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_gradient_of_a_weight_that_overrides_the_product(lowering: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8, bias=False)
            self.first.weight = nn.Parameter(Overriding(torch.randn(8, 8)))
            self.last = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(self.first(x))
            return result

    net = Net()
    inputs, parameters = (torch.randn(3, 8),), tuple(net.parameters())
    expected = gradients(net, inputs, parameters)
    compiled = torch.compile(net, backend="fxamp", options={"lowering": lowering})
    assert_equal(gradients(compiled, inputs, parameters), expected)
    assert expected[0].any() and "TripledBackward" in str(fxamp.report(compiled))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_hook_that_compiled_autograd_would_run_is_refused(checkpointed: bool) -> None:
    """Dynamo passes the hook in an object, which is an input of the graph and, under a checkpoint, of its body."""

    def body(x: Tensor, weight: Tensor) -> Tensor:
        result = x @ weight
        result.register_hook(lambda gradient: gradient * 5)
        return result * 2

    def program(x: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(body, x, weight, use_reentrant=False)) if checkpointed else body(x, weight)

    given = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(CaptureError, match="would lose the hooks"):
        torch.compile(program, backend="fxamp", options={"lowering": "eager"})(*given)


def test_a_call_with_the_gradient_of_its_ops_is_traced() -> None:
    @torch.compiler.allow_in_graph
    def call(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    x, weight = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    options = {"policy": "cpu-bfloat16", "lowering": "eager"}
    program = torch.compile(lambda x, weight: call(x, weight) * 2, backend="fxamp", options=options)
    assert torch.equal(program(x, weight), (x.bfloat16() @ weight.bfloat16()).float() * 2)
    assert "verbatim" not in str(fxamp.report(program))


@dataclass(frozen=True)
class Pair:
    x: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Nested:
    pair: Pair
    factor: float = 1.0


@pytest.mark.parametrize("call", [torch.matmul, calls_a_function, writes_to_its_input, registers_a_hook])
def test_a_call_that_is_left_whole_gets_its_tensors_in_a_dataclass(call: Callable[..., Tensor]) -> None:
    """Dynamo records the dataclass's constructor as a call, which returns an object that holds tensors."""

    def unpacked(nested: Nested) -> Tensor:
        return call(nested.pair.x, nested.pair.weight) * nested.factor

    def program(x: Tensor, weight: Tensor) -> Tensor:
        hidden = x * 1
        return left_whole(Nested(Pair(hidden, weight))) + hidden @ weight

    inputs = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    left_whole = unpacked
    expected = gradients(program, inputs, inputs)
    left_whole = torch.compiler.allow_in_graph(unpacked)
    compiled = torch.compile(program, backend="fxamp", fullgraph=True, options={"lowering": "eager"})
    assert_equal(gradients(compiled, inputs, inputs), expected)
