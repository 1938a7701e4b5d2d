"""fxamp.rewrite: what it takes, what it gives back."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxamp
from fxamp.errors import CaptureError, OptionError, PolicyError
from fxamp.graph import format_graph, module_path, source_frames


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        hidden = self.block(x) * scale
        return {"hidden": hidden, "logits": self.head(hidden)}


def test_a_module_keeps_its_structure_and_shares_its_parameters() -> None:
    model, x = Net(), torch.randn(3, 4)
    rewritten = fxamp.rewrite(model, (x, 2.0), policy="cpu-bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x, 2.0)
    model.load_state_dict(Net().state_dict() | {"head.bias": torch.ones(2)})
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x, 2.0)
    model.zero_grad()
    result = rewritten(x, 2.0)
    assert_equal(result, expected)
    result["logits"].float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_every_node_carries_a_value_a_source_line_and_its_module() -> None:
    rewritten = fxamp.rewrite(Net(), (torch.randn(3, 4),), policy="cpu-bfloat16")
    calls = [node for node in rewritten.graph.nodes if node.op == "call_function"]
    assert all("val" in node.meta for node in calls)
    products = [node for node in calls if node.target is torch.ops.aten.linear.default]
    assert [module_path(node) for node in products] == ["block.0", "head"]
    assert "self.head(hidden)" in source_frames(products[1])[0].expression


def test_fake_tensors_of_a_device_that_is_not_there() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 4, device="cuda")
    rewritten = fxamp.rewrite(lambda a: torch.softmax(a @ a, -1), (x,), policy="cuda-float16")
    text = format_graph(rewritten)
    assert "f16[4, 4] = matmul" in text and "f32[4, 4] = softmax.int(%2, -1, dtype=f32)" in text
    (value,) = [node.meta["val"] for node in rewritten.graph.nodes if "softmax" in node.name]
    assert value.device.type == "cuda" and value.dtype is torch.float32


def squared() -> torch.fx.GraphModule:
    """A graph of ATen: a matrix's product with itself."""
    graph = torch.fx.Graph()
    a = graph.placeholder("a")
    graph.output(graph.call_function(torch.ops.aten.mm.default, (a, a)))
    return torch.fx.GraphModule(nn.Module(), graph)


def test_a_graph_module_is_taken_as_it_is() -> None:
    rewritten = fxamp.rewrite(squared(), (torch.ones(2, 2),), policy="cpu-float16")
    assert rewritten(torch.ones(2, 2)).dtype is torch.float16


@pytest.mark.parametrize("fake", [False, True])
def test_inputs_that_are_one_tensor_stay_two_inputs(fake: bool) -> None:
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output(graph.call_function(torch.mul, (graph.call_function(torch.exp, (a,)), b)))
    with FakeTensorMode() if fake else nullcontext():
        x = torch.ones(2)
    rewritten = fxamp.rewrite(torch.fx.GraphModule(nn.Module(), graph), (x, x), policy="cpu-bfloat16")
    assert torch.equal(rewritten(torch.zeros(2), torch.full((2,), 3.0)), torch.full((2,), 3.0))


def test_the_caller_s_fake_tensors_keep_their_shape() -> None:
    graph = torch.fx.Graph()
    a = graph.placeholder("a")
    graph.output(graph.call_method("t_", (a,)))
    with FakeTensorMode():
        x = torch.empty(2, 3)
    fxamp.rewrite(torch.fx.GraphModule(nn.Module(), graph), (x,), policy="cpu-bfloat16")
    assert x.shape == (2, 3)


def test_what_cannot_be_captured_as_one_graph_is_refused() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"broken could not be captured as one graph at .*test_rewrite.py:{line}: "):
        fxamp.rewrite(broken, (torch.ones(2),), policy="cpu-bfloat16")


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (lambda x, number: torch.native_layer_norm(x, [4], None, None, number)[0], (1e-5, 1e-3, 1.0)),
        (lambda x, number: torch.nn.functional.softshrink(x @ x, number), (0.5, 0.25, 1.0)),
        (lambda x, number: torch.poisson_nll_loss(x, x.abs(), True, False, number, 1), (1e-8, 1e-3, 1.0)),
        (lambda x, number: x.reshape(number, -1) * number, (2, 4, 1)),
    ],
)
def test_numbers_are_constants_whatever_was_captured_before(
    call: Callable[..., torch.Tensor], values: tuple[float, ...]
) -> None:
    x = torch.linspace(-1, 1, 16).reshape(4, 4)
    for number in values:
        rewritten = fxamp.rewrite(call, (x, number), policy="cpu-bfloat16")
        assert not any(node.target == "item" for node in rewritten.graph.nodes)
        with torch.autocast("cpu", torch.bfloat16):
            expected = call(x, number)
        result = rewritten(x, number)
        assert result.dtype is expected.dtype and torch.equal(result, expected)


def test_sizes_are_constants_whatever_was_captured_before() -> None:
    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ x.reshape(4, x.shape[0])

    for size in (2, 3, 5):
        rewritten = fxamp.rewrite(product, (torch.ones(size, 4),), policy="cpu-bfloat16")
        assert [node.op for node in rewritten.graph.nodes].count("placeholder") == 1
        assert f"reshape(%0, [4, {size}])" in format_graph(rewritten)


def _mixed_product(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x.bfloat16())


def _baked_dtype(x: torch.Tensor) -> torch.Tensor:
    h = x @ x
    return torch.ones(4).to(h.dtype) + torch.zeros(4, dtype=torch.softmax(h, -1).dtype)


def _asks_for_autocast(x: torch.Tensor) -> torch.Tensor:
    return x.double() if torch.is_autocast_enabled("cpu") else x


def _asks_for_the_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.get_autocast_dtype("cpu"))


def _region(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        inside = x @ x
    return torch.cat([inside, x @ x])


class _Doubled(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@pytest.mark.parametrize(
    "program",
    [_mixed_product, _baked_dtype, _asks_for_autocast, _asks_for_the_dtype, _region, lambda x: _Doubled.apply(x @ x)],
)
def test_a_program_is_captured_as_autocast_would_run_it(program: Callable[..., torch.Tensor]) -> None:
    x = torch.linspace(-1, 1, 16).reshape(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = program(x)
    result = fxamp.rewrite(program, (x,), policy="cpu-bfloat16")(x)
    assert result.dtype is expected.dtype and torch.equal(result, expected)


def test_the_callers_own_autocast_has_no_say_where_a_policy_is_named() -> None:
    x = torch.linspace(-1, 1, 16).reshape(4, 4)
    outside = format_graph(fxamp.rewrite(_baked_dtype, (x,), policy="cpu-bfloat16"))
    with torch.autocast("cpu", torch.float16):
        inside = format_graph(fxamp.rewrite(_baked_dtype, (x,), policy="cpu-bfloat16"))
        assert torch.get_autocast_dtype("cpu") is torch.float16 and torch.is_autocast_enabled("cpu")
    assert inside == outside
    assert torch.is_autocast_cache_enabled() and not torch.is_autocast_enabled("cpu")


def _writes(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0] = (x @ x)[0]
    return torch.where(x.sum() > 0, x, x @ x)


def _branches(x: torch.Tensor) -> torch.Tensor:
    taken: torch.Tensor = torch.cond(x.sum() > 0, lambda v: v @ v, lambda v: v.sin(), (x,))
    return taken


def _no_16_bit_kernel(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.det(x @ x + torch.eye(4))


def _mapped(x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row @ x)(x @ x)


@pytest.mark.parametrize("program", [_writes, _branches, _no_16_bit_kernel, _mapped])
def test_what_autocast_refuses_is_captured_without(program: Callable[..., torch.Tensor]) -> None:
    """The result is as precise as 16 bits, and float32 wherever fxamp does not look into a call."""
    x = torch.linspace(-1, 1, 16).reshape(4, 4)
    result = fxamp.rewrite(program, (x,), policy="cpu-bfloat16")(x)
    expected = program(x.double())
    torch.testing.assert_close(result.double(), expected, rtol=2e-2, atol=2e-2)


def test_of_two_refusals_the_one_under_autocast_is_raised() -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        h = torch.mm(x, x.bfloat16())
        torch._dynamo.graph_break()
        return h

    with pytest.raises(CaptureError, match=r"graph_break"):
        fxamp.rewrite(mixed, (torch.ones(2, 2),), policy="cpu-bfloat16")


def test_wrong_arguments() -> None:
    with pytest.raises(OptionError, match="example_inputs is of type Tensor; accepted: a tuple or list"):
        fxamp.rewrite(torch.relu, torch.ones(2), policy="cpu-bfloat16")
    with pytest.raises(CaptureError, match="cannot capture an object of type int"):
        fxamp.rewrite(3, (torch.ones(2),), policy="cpu-bfloat16")
    with pytest.raises(PolicyError, match="is for device 'cuda'"):
        fxamp.rewrite(torch.relu, (torch.ones(2),), policy="cuda-float16")


def test_a_call_that_cannot_be_traced_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"mm_default = aten\.mm\.default cannot be traced"):
        fxamp.rewrite(squared(), (torch.ones(2, 3),), policy="cpu-bfloat16")


class Averages(nn.Module):
    """Holds a mean of what it computed, in one of three ways."""

    def __init__(self, keep: Callable[["Averages", torch.Tensor], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.history: list[torch.Tensor] = []
        self._keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self._keep(self, y.detach().float().mean(0))
        return y


def _assigns_a_buffer(model: Averages, mean: torch.Tensor) -> None:
    model.mean = model.mean * 0.9 + mean


def _assigns_an_attribute(model: Averages, mean: torch.Tensor) -> None:
    model.last = mean  # type: ignore[assignment]


def _appends(model: Averages, mean: torch.Tensor) -> None:
    model.history.append(mean)


@pytest.mark.parametrize(
    ("keep", "changed"),
    [(_assigns_a_buffer, "self._buffers"), (_assigns_an_attribute, "self"), (_appends, "self.history")],
)
def test_changes_that_the_new_module_would_not_make_are_refused(
    keep: Callable[[Averages, torch.Tensor], object], changed: str
) -> None:
    with pytest.raises(CaptureError, match=f"it changes {changed}, which the new module would not; accepted: writes"):
        fxamp.rewrite(Averages(keep), (torch.ones(2, 4),), policy="cpu-bfloat16")


def test_a_buffer_that_is_written_in_place_is_written() -> None:
    model, x = Averages(lambda model, mean: model.mean.mul_(0.9).add_(mean)), torch.randn(2, 4)
    rewritten = fxamp.rewrite(model, (x,), policy="cpu-bfloat16")
    rewritten(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.mean, model.layer(x).float().mean(0))


def test_an_argument_of_a_graph_keeps_its_default() -> None:
    graph = torch.fx.symbolic_trace(lambda a, b=2.0, c=None: a @ a.t() * b)
    x = torch.randn(2, 4)
    rewritten = fxamp.rewrite(graph, (x,), policy="cpu-bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rewritten(x), graph(x))
    other = fxamp.rewrite(graph, (x, 3.0), policy="cpu-bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(other(x, 3.0), graph(x, 3.0))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
        other(x)


class WithKeyword(nn.Module):
    def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> torch.Tensor:
        return x @ y.t()


def test_the_number_of_a_graphs_inputs() -> None:
    x = torch.randn(2, 4)
    program = torch.export.export(WithKeyword(), (x,), {"y": x})
    assert fxamp.rewrite(program, (x, x), policy="cpu-bfloat16")(x, y=x).dtype is torch.bfloat16
    for inputs in ((x,), (x, x, x)):
        message = rf"have {len(inputs)} values; accepted: 2, in the order of the graph's inputs \(x, y\)"
        with pytest.raises(CaptureError, match=message):
            fxamp.rewrite(program, inputs, policy="cpu-bfloat16")
