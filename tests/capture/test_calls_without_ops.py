"""What Dynamo puts into graphs that is no ATen op runs as torch runs it, under every lowering."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter

from fxamp.capture import capture
from fxamp.errors import CaptureError

LOWERINGS = ("eager", "aot_eager")


class Net(nn.Module):
    def __init__(self, call: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call, self.linear = call, nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def _written(net: Net, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z.data[1:].copy_(x[1:])
    return net.linear(z)


def _averaged(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x)
    net.mean.data.lerp_(y.data.float().mean(0), 0.1)
    return y * net.mean


def _clipped(net: Net, x: Tensor) -> Tensor:
    net.linear.weight.data.clamp_(max=0.1)
    return net.linear(x)


def _replaced(net: Net, x: Tensor) -> Tensor:
    net.mean.data = x[0] * 3
    return net.linear(x) * net.mean


def _straight_through(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x)
    return y + (y.round() - y).data


def _inferred(net: Net, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = net.linear(x)
        with torch.inference_mode(False):
            z = net.linear(x)
    return net.linear(x) * y.clone() + z


def _taken_over(net: Net, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    source = x.clone()
    z.set_(source)
    source.mul_(2)
    return net.linear(z)


def _sized(net: Net, x: Tensor) -> Tensor:
    return net.linear(x) * torch.tensor(x.shape[0])


CALLS = (_written, _averaged, _clipped, _replaced, _straight_through, _inferred, _taken_over, _sized)


def _outcome(call: Callable[[Net, Tensor], Tensor], lowering: str | None, dynamic: bool | None = None) -> list[Tensor]:
    torch._dynamo.reset()
    net, x = Net(call), torch.arange(12.0).view(3, 4) / 10
    options = {"policy": "auto", "lowering": lowering}
    run = net if lowering is None else torch.compile(net, backend="fxamp", options=options, dynamic=dynamic)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(x)
    y.float().square().sum().backward()
    weight, bias = net.linear.weight.grad, net.linear.bias.grad
    assert weight is not None and bias is not None
    return [y.detach(), weight, bias, *net.state_dict().values()]


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("call", CALLS)
def test_it_runs_as_under_autocast(call: Callable[[Net, Tensor], Tensor], lowering: str) -> None:
    for ours, theirs in zip(_outcome(call, lowering), _outcome(call, None), strict=True):
        assert type(ours) is type(theirs) and torch.equal(ours, theirs)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_sizes_as_tensors_may_be_dynamic(lowering: str) -> None:
    assert_equal(_outcome(_sized, lowering, dynamic=True), _outcome(_sized, None))


def test_no_tensor_of_the_capture_stays_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule for results, the capture's own FakeTensor would become a constant."""
    module: Any = import_module("fxamp.capture.aten_trace")
    monkeypatch.setattr(module, "follows_input", lambda node: False)
    monkeypatch.setattr(module._AtenTrace, "_traced", lambda self, n: Interpreter.run_node(self, n))
    with pytest.raises(CaptureError, match="reads a tensor that fxamp could not follow"):
        _outcome(_straight_through, "aot_eager")


def test_a_call_for_its_effect_alone_is_kept() -> None:
    names: list[str] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        names.extend(node.name for node in capture(gm, inputs).module.graph.nodes)
        return gm.forward

    torch.compile(Net(_replaced), backend=backend)(torch.ones(3, 4))
    assert {"_lower_version_count_by_1", "shallow_copy_data_"} & set(names), "torch 2.14 calls the latter"


@pytest.mark.parametrize(
    "lowering", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.exhaustive])]
)
def test_sizes_that_depend_on_values_are_those_that_dynamo_bound(lowering: str) -> None:
    def masked(x: Tensor) -> Tensor:
        y = linear(x)
        i = torch.nonzero(x[:, 0] > 0).squeeze(1)
        return y[x > 0].sum() + torch.zeros_like(x).index_add(0, i, linear(y[i]).float()).sum() * x.sum().item()

    linear, x = nn.Linear(4, 4), torch.randn(6, 4)
    options = {"policy": "cpu-bfloat16", "lowering": lowering}
    result = torch.compile(masked, backend="fxamp", options=options, fullgraph=True)(x)
    result.backward()
    with torch.autocast("cpu", torch.bfloat16):
        expected = masked(x)
    torch.testing.assert_close(result, expected.to(result.dtype), rtol=2**-6, atol=2**-6)


def _share(x: Tensor, w: Tensor, like: Tensor) -> Tensor:
    product = (x @ w).detach().clone()
    fresh = torch.empty_like(product if like is w else like)
    fresh.set_(product)
    product.mul_(2)
    return fresh.sum() + (x @ w).sum()


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_memory_is_shared_with_a_product_in_16_bits(lowering: str) -> None:
    compiled = torch.compile(_share, backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": lowering})
    x, w = torch.ones(2, 4), torch.ones(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = _share(x, w, w)
    assert torch.equal(compiled(x, w, w), expected.float())


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_memory_of_a_cast_is_refused(lowering: str) -> None:
    """The float32 tensor would share the memory of a cast, so that a later write to the product would miss it."""
    compiled = torch.compile(_share, backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": lowering})
    x = torch.ones(2, 4)
    with pytest.raises(CaptureError, match=r"set_.* shares memory with .* bfloat16 under the policy cpu-bfloat16"):
        compiled(x, torch.ones(4, 4), x)
