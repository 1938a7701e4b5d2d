"""fxamp-policy calibrate under policies with products in fp8: the operands that kernels round, and what must leave."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracles.torchao_beside import multiplied
from torch import Tensor
from torch.fx import Graph
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp
from fxamp.kernels.products import float4, scaled_experts, scaled_linear
from fxamp.kernels.products.float4 import packed
from fxamp.policy import Category, Policy, Recipe
from fxamp.tools.policy.command import main
from fxamp.tools.policy.operands import operands

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, outlier):
        super().__init__()
        self.up, self.down, self.outlier = nn.Linear(32, 64), nn.Linear(64, 32), outlier

    def forward(self, x):
        hidden = torch.relu(self.up(x))
        hidden = torch.cat([hidden[:, :1] * self.outlier, hidden[:, 1:]], -1)
        return torch.nn.functional.layer_norm(x + self.down(hidden), (32,))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(outlier) for outlier in ({outliers})])
        self.lm_head = nn.Linear(32, 16)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)

torch.manual_seed(0)
model = Net()
batches = [(torch.randn(16, 32),) for _ in range(2)]
loss = lambda output: output.square().mean()
"""


def calibrated(tmp_path: Path, outliers: str, *more: str) -> tuple[Policy, str]:
    """The policy that calibrating writes, and its rules' ids beyond the given policy's."""
    model, patch = tmp_path / "model.py", tmp_path / "patch.toml"
    model.write_text(MODEL.format(outliers=outliers))
    assert main(("calibrate", str(model), "--policy", "cpu-bfloat16-fp8", "--output", str(patch), *more)) == 0
    return Policy.load(patch), str(model)


def added(policy: Policy) -> list[tuple[Category | None, tuple[str, ...], tuple[str, ...]]]:
    known = {rule.id for rule in Policy.load("cpu-bfloat16-fp8").rules}
    return [(rule.cast, rule.ops, rule.modules) for rule in policy.rules if rule.id not in known]


@pytest.mark.exhaustive
def test_a_product_whose_operand_underflows_leaves_fp8_and_that_cures_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, file = calibrated(tmp_path, "1.0, 3e5, 3e5")
    assert added(policy) == [(Category.LOWER_PRECISION_FP, ("aten::linear",), ("layers.1.down", "layers.2.down"))]
    assert "input, with one scale, are below float8_e4m3fn's normal 0.0156 after scaling" in policy.rules[-1].why
    err = capsys.readouterr().err
    assert "16 bits for 2 of 3" in err and "gradient at the result, with one scale  float8_e5m2" in err
    scope: dict[str, Any] = {}
    exec(Path(file).read_text(), scope)
    model, x = scope["model"], scope["batches"][0][0]
    with torch.no_grad():
        exact = model.double()(x.double())
        model.float()
        errors = [
            (fxamp.rewrite(model, (x,), policy=candidate)(x) - exact).norm()
            for candidate in (policy, Policy.load("cpu-bfloat16-fp8"))
        ]
    assert errors[0] < errors[1]


def test_scales_for_rows_keep_small_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of very different size: too much for one scale, nothing for a scale for each row."""
    text = "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))\n"
    text += "inputs = torch.randn(64, 16) * torch.logspace(0, 8, 64)[:, None]\nloss = lambda y: y.tanh().sum()\n"
    model = tmp_path / "model.py"
    model.write_text(text)
    for policy, rules in (("cpu-bfloat16-fp8", 1), ("cpu-bfloat16-fp8-rowwise", 0)):
        assert main(("calibrate", str(model), "--policy", policy, "--inference")) == 0
        printed = capsys.readouterr()
        assert printed.out.count("[[rule]]") == rules and "gradient at the result, with" not in printed.err


def test_what_a_later_rule_has_in_float32_is_not_lowered(tmp_path: Path) -> None:
    """A rule for a module is for all inside, here for a layer that another rule keeps in float32."""
    text = """
import torch
from torch import nn

class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.eye(16)), nn.Linear(16, 16)

    def forward(self, x):
        return self.inner(nn.functional.linear(x, self.weight))

model = nn.Sequential(Outer())
inputs = torch.cat([torch.full((1, 16), 1e9), torch.ones(31, 16)])
"""
    (tmp_path / "model.py").write_text(text)
    base = tmp_path / "base.toml"
    base.write_text(
        'extends = ["cpu-bfloat16-fp8"]\n[[rule]]\nid = "i"\ncast = "fp32"\nops = ["linear"]\nmodules = ["inner"]\n'
    )
    patch = tmp_path / "patch.toml"
    assert main(("calibrate", str(tmp_path / "model.py"), "--policy", str(base), "--output", str(patch))) == 0
    assert Policy.load(patch).rules[-1].cast is Category.FP32


ROUNDED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Rounded(TorchDispatchMode):
    """Collects what is rounded to 8 bits, or by :meth:`pack` to 4 bits, before it is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[tuple[torch.dtype, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = (kwargs or {}).get("dtype")
        cast = func is torch.ops.aten._to_copy.default and dtype in ROUNDED
        if cast and args[0].shape[-1] >= 32:  # fewer are the scales of blocks of 16
            self.values.append((dtype, args[0].clone()))
        return func(*args, **kwargs or {})

    def pack(self, values: Tensor, stochastic: bool) -> Tensor:
        """As ``float4.packed``."""
        self.values.append((torch.float4_e2m1fn_x2, values.clone()))
        return packed(values, stochastic)


def test_4_bits_are_counted_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of blocks of normal values, a quarter is below the least normal one: they stay. Next to outliers, most are."""
    text = (
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))\ninputs = torch.randn(64, 32)"
    )
    model = tmp_path / "model.py"
    for outliers, rules in (("", 0), (" + 50 * (torch.arange(32) % 16 == 0)", 1)):
        model.write_text(text + outliers)
        assert main(("calibrate", str(model), "--policy", "cpu-bfloat16-nvfp4", "--inference")) == 0
        printed = capsys.readouterr()
        assert printed.out.count("[[rule]]") == rules and "a scale for 16 values of a row" in printed.err
        assert ("float4_e2m1fn_x2's normal 1 after scaling" in printed.out) == bool(rules)


@pytest.mark.parametrize("recipe", multiplied(*Recipe))
@pytest.mark.parametrize("op", ["linear", "mm"])
def test_operands_are_what_the_kernel_rounds(recipe: Recipe, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()
    target = {"linear": torch.ops.aten.linear.default, "mm": torch.ops.aten.mm.default}[op]
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = graph.call_function(target, (x, w))
    input = torch.randn(2, 16, 32, requires_grad=True)
    weight = torch.randn(64, 32, requires_grad=True)
    gradient = torch.randn(2, 16, 64).bfloat16()
    values_by_name = {"x": input, "w": weight if op == "linear" else weight.t(), product.name: gradient}
    with Rounded() as rounded, monkeypatch.context() as patched:
        patched.setattr(float4, "packed", rounded.pack)
        scaled_linear(input, weight, None, recipe, torch.bfloat16).backward(gradient)
    operand_values = [
        (getattr(torch, operand.form.dtype), operand.scaled(values_by_name[operand.value]))
        for operand in operands(product, recipe)
    ]
    assert all(any(same(one, other) for other in rounded.values) for one in operand_values)
    assert all(any(same(one, other) for other in operand_values) for one in rounded.values)


def same(one: tuple[torch.dtype, Tensor], other: tuple[torch.dtype, Tensor]) -> bool:
    """Whether it is the same matrix, perhaps transposed, in the same dtype."""
    return one[0] is other[0] and (torch.equal(one[1], other[1]) or torch.equal(one[1], other[1].t()))


@pytest.mark.parametrize("recipe", [Recipe.ROWWISE, Recipe.FLOOR, Recipe.RCEIL])
def test_operands_of_experts_are_what_the_kernel_rounds(recipe: Recipe) -> None:
    """With one expert; scales of rows of more experts are made for each of them."""
    graph = Graph()
    x, w, ends = (graph.placeholder(name) for name in ("x", "w", "ends"))
    product = graph.call_function(torch.ops.aten._grouped_mm.default, (x, w, ends))
    input, weight = torch.randn(32, 32, requires_grad=True), torch.randn(1, 32, 64, requires_grad=True)
    gradient, offsets = torch.randn(32, 64).bfloat16(), torch.tensor([32], dtype=torch.int32)
    with Rounded() as rounded:
        scaled_experts(input, weight, offsets, None, recipe, torch.bfloat16).backward(gradient)
    values_by_name = {"x": input, "w": weight, product.name: gradient}
    operand_values = [operand.scaled(values_by_name[operand.value]) for operand in operands(product, recipe)]
    for value in operand_values:
        near = [other for _, other in rounded.values if other[:, : value.shape[1]].shape == value.shape]
        assert any(torch.equal(value, other[:, : value.shape[1]]) for other in near)


def test_products_of_experts_are_considered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
import torch
from torch import nn

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 32, 32))

    def forward(self, x):
        ends = torch.tensor([6, 16], dtype=torch.int32)
        return nn.functional.grouped_mm(x.bfloat16(), self.weight.bfloat16(), offs=ends)

model = Experts()
inputs = torch.randn(16, 32)
loss = lambda output: output.float().square().mean()
"""
    (tmp_path / "model.py").write_text(text)
    assert main(("calibrate", str(tmp_path / "model.py"), "--policy", "cpu-bfloat16-mxfp8-moe")) == 0
    assert "weight, with a scale for 32 values of a row" in capsys.readouterr().err
