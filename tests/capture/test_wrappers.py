"""Tensors made of other tensors: autocast casts the whole, and what looks inside of one is kept as it was captured."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.checks.equality import assert_equal
from support.oracles.like_autocast import compile_with
from support.programs.small_models import Perceptron
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fxamp

LOWERINGS = ["eager", "aot_eager"]


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_tensor_of_two(lowering: str) -> None:
    net = Perceptron(8, 8, 4, torch.relu)
    net.first.weight = nn.Parameter(TwoTensor(torch.randn(8, 8), torch.randn(8, 8)), requires_grad=False)
    x = torch.randn(3, 8)
    twin = compile_with(net, lowering)
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(x)
    got = twin(x)
    assert type(got) is type(expected) is TwoTensor
    assert torch.equal(got.a, expected.a.float()) and torch.equal(got.b, expected.b.float())
    assert not torch.equal(got.a, got.b)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_view_of_a_tensor_of_two(lowering: str, dynamic: bool) -> None:
    def program(view: Tensor) -> Tensor:
        if lowering == "eager" or not dynamic:  # else AOTAutograd of torch 2.11 fails
            view.mul_(2)
        return view @ view.transpose(-1, -2)

    parts = torch.randn(4, 6), torch.randn(4, 6)
    results = []
    for run in (program, torch.compile(program, backend="fxamp", dynamic=dynamic, options={"lowering": lowering})):
        leaf: Any = TwoTensor(*parts).requires_grad_()
        base: Any = leaf * 1
        with torch.autocast("cpu", torch.bfloat16):
            product: Any = run(base.narrow(-1, 1, 4))
        product.float().square().sum().backward()
        results.append([part for both in (product.float(), base, leaf.grad) for part in (both.a, both.b)])
    assert_equal(*results)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_nested_tensor(lowering: str) -> None:
    net, twin = Perceptron(8, 8, 4, torch.relu), Perceptron(8, 8, 4, torch.relu)
    x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
    twin.compile(backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": lowering})
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(x).values().float()
    got = twin(x).values()
    expected.square().sum().backward()
    got.square().sum().backward()
    assert torch.equal(got, expected)
    for ours, theirs in zip(twin.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_nested_tensor_that_the_program_makes(lowering: str) -> None:
    def program(net: nn.Module, x: Tensor, offsets: Tensor) -> Tensor:
        values: Tensor = net(torch.nested.nested_tensor_from_jagged(x, offsets)).values()
        return values

    net, x, offsets = Perceptron(8, 8, 4, torch.relu), torch.randn(9, 8), torch.tensor([0, 3, 5, 9])
    with torch.autocast("cpu", torch.bfloat16):
        expected = program(net, x, offsets).float()
    compiled = torch.compile(program, backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": lowering})
    got = compiled(net, x, offsets)
    assert torch.equal(got, expected)
    ours, theirs = (torch.autograd.grad(result.square().sum(), net.parameters()) for result in (got, expected))
    assert_equal(ours, theirs)


class Scaled(Tensor):
    """Integers and what they are multiplied by; ``linear`` is computed from what is inside."""

    @staticmethod
    def __new__(cls, integers: Tensor, scale: Tensor) -> "Scaled":
        return Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype, device=integers.device)

    def __init__(self, integers: Tensor, scale: Tensor) -> None:
        self.integers, self.scale = integers, scale

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Scaled({self.integers}, {self.scale})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> "Scaled":
        return Scaled(inner["integers"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = args
            return F.linear(x, weight.integers.float(), bias) * weight.scale
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Scaled(func(args[0].integers), func(args[0].scale))
        raise NotImplementedError(f"{func} of a Scaled")


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_call_that_looks_inside_is_kept(lowering: str) -> None:
    net = Perceptron(8, 8, 4, torch.relu)
    net.first.weight = nn.Parameter(Scaled(torch.randint(-9, 9, (8, 8)), torch.tensor(0.1)), requires_grad=False)
    x = torch.randn(3, 8)
    expected = F.linear(x, net.first.weight, net.first.bias).relu()
    net.compile(backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": lowering})
    got = net(x)
    assert type(got) is Tensor
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(got, net.last(expected).float())
    assert "reads tensors inside" in str(fxamp.report(net))
