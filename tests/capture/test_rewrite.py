"""fxamp.rewrite: what it takes, what it gives back."""

from collections.abc import Callable

import pytest
import torch
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
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert result[name].dtype is value.dtype and torch.equal(result[name], value)
    result["logits"].float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_every_node_carries_a_value_a_source_line_and_its_module() -> None:
    rewritten = fxamp.rewrite(Net(), (torch.randn(3, 4),), policy="cpu-bfloat16")
    calls = [node for node in rewritten.graph.nodes if node.op == "call_function"]
    assert all("val" in node.meta for node in calls)
    products = [node for node in calls if node.target is torch.ops.aten.linear.default]
    assert [module_path(node) for node in products] == ["block.0", "head"]
    assert "self.head(hidden)" in source_frames(products[1])[0].expression


def test_an_exported_program() -> None:
    model, x = Net().eval(), torch.randn(3, 4)
    exported = torch.export.export(model, (x,))
    rewritten = fxamp.rewrite(exported, (x,), policy="cpu-bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    result = rewritten(x)
    assert all(torch.equal(result[name], value) for name, value in expected.items())


def test_fake_tensors_of_a_device_that_is_not_there() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 4, device="cuda")
    rewritten = fxamp.rewrite(lambda a: torch.softmax(a @ a, -1), (x,), policy="cuda-float16")
    text = format_graph(rewritten)
    assert "f16[4, 4] = matmul" in text and "f32[4, 4] = softmax.int(%2, -1, dtype=f32)" in text
    (value,) = [node.meta["val"] for node in rewritten.graph.nodes if "softmax" in node.name]
    assert value.device.type == "cuda" and value.dtype is torch.float32


def test_a_graph_module_is_taken_as_it_is() -> None:
    graph = torch.fx.Graph()
    a = graph.placeholder("a")
    graph.output(graph.call_function(torch.ops.aten.mm.default, (a, a)))
    rewritten = fxamp.rewrite(torch.fx.GraphModule(nn.Module(), graph), (torch.ones(2, 2),), policy="cpu-float16")
    assert rewritten(torch.ones(2, 2)).dtype is torch.float16


def test_outputs_have_the_policys_dtypes() -> None:
    rewritten = fxamp.rewrite(lambda a: (a @ a, a + 1), (torch.ones(2, 2),), policy="cpu-bfloat16")
    assert [value.dtype for value in rewritten(torch.ones(2, 2))] == [torch.bfloat16, torch.float32]


def test_no_policy_casts_nothing() -> None:
    rewritten = fxamp.rewrite(lambda a: a @ a, (torch.ones(2, 2, dtype=torch.int64),), policy="cpu-bfloat16")
    assert rewritten(torch.ones(2, 2, dtype=torch.int64)).dtype is torch.int64


def test_what_cannot_be_captured_as_one_graph_is_refused() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        print("a break")
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(CaptureError, match="broken could not be captured as one graph"):
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


def test_wrong_arguments() -> None:
    with pytest.raises(OptionError, match="example_inputs is of type Tensor; accepted: a tuple or list"):
        fxamp.rewrite(torch.relu, torch.ones(2), policy="cpu-bfloat16")
    with pytest.raises(CaptureError, match="cannot capture an object of type int"):
        fxamp.rewrite(3, (torch.ones(2),), policy="cpu-bfloat16")
    with pytest.raises(PolicyError, match="is for device 'cuda'"):
        fxamp.rewrite(torch.relu, (torch.ones(2),), policy="cuda-float16")


def test_a_call_that_cannot_be_traced_is_refused() -> None:
    graph = torch.fx.Graph()
    a = graph.placeholder("a")
    graph.output(graph.call_function(torch.ops.aten.mm.default, (a, a)))
    with pytest.raises(CaptureError, match=r"mm_default = aten\.mm\.default cannot be traced"):
        fxamp.rewrite(torch.fx.GraphModule(nn.Module(), graph), (torch.ones(2, 3),), policy="cpu-bfloat16")
