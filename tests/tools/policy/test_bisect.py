"""fxamp-policy bisect: a planted loss of digits is traced to the module that has it, and to nothing else."""

from pathlib import Path

import pytest
import torch
from policy_runs import run, written

from fxamp.policy import Policy
from fxamp.tools.inputs.measurement import relative
from fxamp.tools.policy.bisect.units import FLOAT32, OUT_OF_FP8, ModuleTree, rule_units, with_units
from fxamp.tools.policy.command import main
from fxamp.tools.policy.places import ModuleOp

MODEL = """
import torch
from torch import nn

class Fine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.linear(x))

class Cancels(Fine):
    def forward(self, x):
        return (self.linear(x) + 300.0) - 300.0

class Net(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.layers = nn.ModuleList([kind() for kind in kinds])
        self.head = nn.Linear(8, 4)
        self.drop = nn.Dropout({drop})

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.drop(self.head(x))

torch.manual_seed(0)
model = Net([{kinds}])
torch.manual_seed(1)
batches = [(torch.randn(16, 8),), (torch.randn(16, 8),)]

def loss(output):
    return output.square().mean()
"""


def planted(tmp_path: Path, kinds: str, drop: str = "0.0") -> str:
    return written(tmp_path, MODEL.format(kinds=kinds, drop=drop))


@pytest.mark.exhaustive
def test_a_planted_loss_of_digits_is_found_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = planted(tmp_path, "Fine, Fine, Cancels, Fine")
    status, out, err = run(capsys, "bisect", file, "--tolerance", "0.02")
    assert status == 0
    (rule,) = Policy.loads(out).rules[len(Policy.load("cpu-float16").rules) :]
    assert (rule.ops, rule.modules) == (("aten::add.Tensor", "aten::sub.Tensor"), ("layers.2",))
    assert rule.why.startswith("Bisected; without this rule: output error 0.") and "at most 0.02." in rule.why
    assert "1 piece in float32" in err and "float32 for the whole model" in err
    again, same, _ = run(capsys, "bisect", file, "--tolerance", "0.02")
    assert (again, same) == (0, out)


@pytest.mark.exhaustive
def test_the_patch_meets_the_tolerance_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, patch = planted(tmp_path, "Cancels, Cancels"), tmp_path / "patch.toml"
    status, out, _ = run(capsys, "bisect", file, "--tolerance", "0.02", "--output", str(patch))
    assert (status, out) == (0, "")
    added = Policy.load(patch).rules[len(Policy.load("cpu-float16").rules) :]
    # The linear layer's own float32 result does as well as the sums after it: they follow their inputs.
    assert [rule.modules[0].removesuffix(".linear") for rule in added] == ["layers.0", "layers.1"]
    status, out, err = run(capsys, "bisect", file, "--tolerance", "0.02", "--policy", str(patch))
    assert status == 0 and "the policy meets the tolerance as it is" in err and "1 trial\n" in err
    assert "[[rule]]" not in out and "no rule is needed" in out


def test_by_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = MODEL.format(kinds="Cancels, Fine", drop="0.0").replace("(torch.randn(16, 8),)]", '{"x": torch.ones(9, 8)}]')
    status, out, err = run(capsys, "bisect", written(tmp_path, text), "--tolerance", "0.01", "--by", "rules")
    policy = Policy.loads(out)
    changed = [rule.id for rule in policy.rules if rule.why.startswith("Bisected")]
    assert (status, changed) == (0, ["matrix-products"])
    assert len(policy.rules) == len(Policy.load("cpu-float16").rules)
    assert "needs float32: rule matrix-products" in err


def test_float32_that_misses_the_tolerance_ends_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(
        capsys, "bisect", planted(tmp_path, "Cancels"), "--tolerance", "1e-9", "--policy", "cpu-bfloat16"
    )
    assert (status, out) == (1, "")
    assert "float32 everywhere misses the tolerance 1e-09 too: output error " in err and "trial 3" not in err


@pytest.mark.exhaustive
def test_another_devices_policy_is_refused_or_emulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("the machine has the device")
    file = planted(tmp_path, "Cancels")
    status, out, err = run(capsys, "bisect", file, "--tolerance", "0.02", "--policy", "cuda-float16")
    assert (status, out) == (2, "") and "is for cuda, but the model is on cpu; accepted: " in err
    status, out, err = run(capsys, "bisect", file, "--tolerance", "0.02", "--policy", "cuda-float16", "--emulate")
    assert status == 0 and "cuda's casts, computed by cpu kernels" in err
    assert Policy.loads(out).device == "cuda" and 'modules = ["layers.0"]' in out


@pytest.mark.exhaustive
def test_dropout_draws_the_same_in_all_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = planted(tmp_path, "Cancels, Fine", "0.5")
    status, out, err = run(capsys, "bisect", file, "--tolerance", "0.02", "--measure", "output", "--by", "rules")
    assert status == 0 and "the outputs are random: every run has the same fixed seeds" in err
    assert 'id = "matrix-products"' in out and "gradient error" not in err
    assert "random" not in run(capsys, "bisect", planted(tmp_path, "Fine"), "--tolerance", "1")[2]


def test_overflowing_gradients_lower_the_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = planted(tmp_path, "Fine").replace("model.py", "steep.py")
    Path(file).write_text(MODEL.format(kinds="Fine", drop="0.0").replace(".mean()", ".mean() * 1e4"))
    status, _, err = run(capsys, "bisect", file, "--tolerance", "0.01", "--measure", "gradient")
    assert status == 0 and "the policy meets the tolerance as it is" in err and "output error" not in err


def test_units_name_what_they_are_for() -> None:
    places = [
        ModuleOp("", "aten::matmul.default"),
        ModuleOp("a.0", "aten::add.Tensor"),
        ModuleOp("a.0.b", "aten::mm.default"),
    ]
    tree = ModuleTree([*places, ModuleOp("b", "aten::mm.default")])
    own, a, b = tree.parts(tree.root)
    assert (str(own), str(a), str(b)) == ("matmul in the root module", "a", "b")
    assert b.modules == (".b",), "for a plain b would cover a.0.b too"
    assert own.modules == () and tree.parts(own) == tree.parts(b) == ()
    (inner,) = tree.parts(a)
    assert [str(unit) for unit in tree.parts(inner)] == ["add.Tensor in a.0", "a.0.b"]
    assert FLOAT32.rule(own, "x", "forward").ops == ("aten::matmul.default",)


def test_rules_that_have_nothing_to_do_are_no_units() -> None:
    policy = Policy.load("cpu-float16")
    (unit,) = rule_units(policy, [ModuleOp("", "aten::linear.default"), ModuleOp("", "aten::relu.default")])
    assert str(unit) == "rule matrix-products"
    patched = with_units(policy, (unit,), FLOAT32)
    assert [rule.id for rule in patched.rules] == [rule.id for rule in policy.rules]
    assert str(patched.rule_for("aten::linear").cast) == "fp32"  # type: ignore[union-attr]


def test_the_error_is_that_of_the_definition() -> None:
    exact = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    values = [torch.tensor([3.0, 0.3]), torch.tensor([4.4])]
    assert relative(values, exact) == pytest.approx(0.5 / 5)
    infinite = torch.tensor([-torch.inf, 2.0])
    assert relative([infinite], [infinite]) == 0
    assert relative([torch.tensor([torch.inf, 2.0])], [torch.tensor([1.0, 2.0])]) == torch.inf
    assert relative([torch.zeros(2)], [torch.zeros(3)]) == torch.inf
    assert relative([torch.tensor([2.0])], [torch.zeros(1)]) == 2.0


FP8_MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.linear, self.wide = nn.Linear(16, 16), wide

    def forward(self, x):
        # With an outlier, one scale for the whole input flushes all other values to zero.
        sizes = torch.ones(len(x), 1)
        sizes[0] = self.wide
        return torch.tanh(self.linear(x * sizes))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(1.0), Block(1e5), Block(1.0)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x

torch.manual_seed(0)
model = Net()
inputs = (torch.randn(16, 16),)
"""


def test_what_must_leave_fp8_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, patch = written(tmp_path, FP8_MODEL), tmp_path / "patch.toml"
    arguments = [model, "--policy", "cpu-bfloat16-fp8", "--measure", "output", "--output", str(patch)]
    assert main(["bisect", *arguments, "--tolerance", "0.15"]) == 0
    err = capsys.readouterr().err
    assert "needs 16 bits: layers.1" in err and "with 1 piece in 16 bits: " in err
    (rule,) = [rule for rule in Policy.load(patch).rules if rule.id.startswith("bisected")]
    assert (rule.cast.value, rule.modules) == (
        "lower_precision_fp",
        ("layers.1.linear",),
    ) and "aten::linear" in rule.ops


def test_rules_for_fp8_are_bisected_as_rules() -> None:
    policy = Policy.load("cpu-bfloat16-fp8")
    (unit,) = rule_units(policy, [ModuleOp("a", "aten::linear.default")])
    (changed,) = [rule for rule in with_units(policy, [unit], OUT_OF_FP8).rules if rule.id == "fp8-linear"]
    assert str(unit) == "rule fp8-linear" and (changed.cast.value, changed.recipe) == ("lower_precision_fp", "")
