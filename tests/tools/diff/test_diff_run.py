"""``fxamp-diff --run``: errors against float64, and the first op that differs by more than rounding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import MODEL, defined
from torch import nn

from fxamp.tools.diff.command import main
from fxamp.tools.diff.diverge import _apart
from fxamp.tools.diff.numbers import start
from fxamp.tools.inputs.measurement import Batch, Copy

EXACT = """
extends = ["cpu-bfloat16.toml"]

[[rule]]
id = "matrix-products"
cast = "fp32"
ops = ["linear"]
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    Path("model.py").write_text(MODEL)
    Path("exact.toml").write_text(EXACT)


def numbers(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*arguments, "--format", "json"]) in (0, 1)
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert isinstance(run, dict)
    return run


def error(values: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    one, other = (torch.cat([value.double().flatten() for value in side]) for side in (values, exact))
    return float((one - other).norm() / other.norm())


def test_the_errors_are_those_of_eager_autocast_and_float32(capsys: pytest.CaptureFixture[str]) -> None:
    """Autocast in bfloat16 is the one policy and float32 the other; both are run here without fxamp."""
    run = numbers("cpu-bfloat16", "exact.toml", "--run", "model.py", capsys=capsys)
    model, inputs = defined("model.py")
    exact = defined("model.py")[0].double()
    exact(inputs[0].double(), inputs[1]).backward()
    reference = [parameter.grad for parameter in exact.parameters()]
    for side, lowered in (("old", True), ("new", False)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            loss = model(*inputs)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        expected = error(gradients, reference)
        # float32's own error is a sum of roundings whose order the lowering may change
        assert run[side]["gradient"] == pytest.approx(expected, rel=0, abs=64 * torch.finfo(torch.float32).eps)
        assert run[side]["loss_scale"] is None
        worst = {name: error([p.grad], [q.grad]) for (name, p), q in zip(model.named_parameters(), exact.parameters())}  # noqa: B905
        if lowered:
            assert list(run[side]["worst_parameters"]) == sorted(worst, key=lambda name: -worst[name])[:5]
    assert run["random"] is False
    assert run["old"]["output"] > 10 * run["new"]["output"]


ROTARY = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 16)
        self.filter = torch.nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.register_buffer("turns", torch.polar(torch.ones(4, 8), torch.randn(4, 8)))

    def forward(self, x, offset):
        pairs = torch.view_as_complex(self.up(x).float().reshape(4, 8, 2))
        return pairs * self.turns * self.filter + offset

torch.manual_seed(0)
model = Net()
inputs = (torch.randn(4, 16), torch.randn(8, dtype=torch.complex64))
"""


def test_complex_numbers_are_complex_in_float64_too(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rotary.py").write_text(ROTARY)
    run = numbers("cpu-bfloat16", "exact.toml", "--run", "rotary.py", capsys=capsys)
    model, inputs = defined("rotary.py")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        lowered = model(*inputs)
    with torch.no_grad():
        expected = error([torch.view_as_real(lowered)], [torch.view_as_real(model(*inputs))])
    assert run["old"]["output"] == pytest.approx(expected, rel=0.01)
    assert run["new"]["output"] < 1e-6 and run["new"]["gradient"] < 1e-6
    assert set(run["old"]["worst_parameters"]) == {"up.weight", "up.bias", "filter"}
    assert 1e-4 < run["old"]["worst_parameters"]["filter"] < 0.1


def test_a_copy_in_float64_keeps_imaginary_parts() -> None:
    weight = nn.Parameter(torch.tensor([1 + 2j]))
    exact = Copy.of(nn.ParameterList([weight]), [Batch((torch.tensor([1j]),), {})], dtype=torch.float64)
    (own,), (batch,) = exact.model.parameters(), exact.batches
    assert (own.dtype, own.tolist()) == (torch.complex128, [1 + 2j])
    assert (batch.args[0].dtype, batch.args[0].tolist()) == (torch.complex128, [1j])
    results = exact.run(lambda value: own * value, start)
    assert results.outputs[0].tolist() == [[-2.0, 1.0]]
    assert results.gradients["0"].shape == (1, 2)


def test_where_they_first_diverge(capsys: pytest.CaptureFixture[str]) -> None:
    text = EXACT.replace('ops = ["linear"]', 'ops = ["linear"]\nmodules = ["lm_head"]')
    Path("head.toml").write_text(text.replace("matrix-products", "head"))
    run = numbers("cpu-bfloat16", "head.toml", "--run", "model.py", capsys=capsys)
    where = run["diverges"]
    assert (where["node"], where["module"], where["op"]) == ("linear_1", "lm_head", "aten::linear.default")
    assert where["source"].endswith("model.py:13")
    assert where["dtype"] == {"old": "bf16", "new": "f32"}
    assert 2**-12 < where["difference"] < 2**-6  # about bfloat16's roundoff, 2**-8


def test_the_same_policies_do_not_diverge(capsys: pytest.CaptureFixture[str]) -> None:
    run = numbers("cpu-float16", "cpu-float16", "--run", "model.py", capsys=capsys)
    assert run["old"] == run["new"]
    assert run["diverges"] is None
    assert run["old"]["loss_scale"] == 65536.0


def test_the_scale_backs_off_until_gradients_are_finite(capsys: pytest.CaptureFixture[str]) -> None:
    Path("big.py").write_text(MODEL.replace("target)\n\n", "target) * 64.0\n\n"))
    run = numbers("cpu-float16", "cpu-bfloat16", "--run", "big.py", capsys=capsys)
    assert 0 < run["old"]["loss_scale"] < 65536.0
    assert run["old"]["gradient"] < run["new"]["gradient"] < 0.1


def test_text_and_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cpu-bfloat16", "cpu-float16", "--run", "model.py"]) == 1
    out, err = capsys.readouterr()
    assert err == "fxamp-diff: running model.py to get its model and inputs\n"
    assert "they first diverge at linear (linear) at model.py:12 in up: bf16 -> f16, relative difference" in out
    assert "loss scale                         none    65536" in out.splitlines()
    main(["cpu-bfloat16", "cpu-float16", "--run", "model.py", "--format", "markdown"])
    assert "| loss scale | none | 65536 |" in capsys.readouterr().out.splitlines()


def test_keywords_and_outputs_that_are_no_losses(capsys: pytest.CaptureFixture[str]) -> None:
    source = "import torch\nmodel = torch.nn.Linear(8, 4)\ninputs = {'input': torch.randn(3, 8, requires_grad=True)}\n"
    Path("keywords.py").write_text(f"import torch; torch.manual_seed(0)\n{source}")
    run = numbers("cpu-bfloat16", "exact.toml", "--run", "keywords.py", capsys=capsys)
    assert set(run["old"]["worst_parameters"]) == {"weight", "bias", "input 0"}
    assert run["new"]["gradient"] < 1e-6 < 1e-4 < run["old"]["gradient"]
    assert run["diverges"]["node"] == "linear"


def test_the_backward_starts_at_losses() -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.float64))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self) -> dict[str, torch.Tensor]:
            return {"logits": self.weight * 100.0, "loss": (self.weight**2).sum()}

    copy = Copy.of(Both(), [Batch((), {})])
    assert copy.run(copy.model, start).gradients["weight"].tolist() == [4.0, 6.0]


def test_a_model_of_several_graphs_has_numbers_but_no_place(capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.py").write_text(MODEL.replace("        return", "        torch._dynamo.graph_break()\n        return"))
    run = numbers("cpu-bfloat16", "exact.toml", "--run", "broken.py", capsys=capsys)
    assert run["diverges"].startswith("unknown: ")
    assert run["old"]["gradient"] > 100 * run["new"]["gradient"]


def test_random_models_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("drop.py").write_text(
        MODEL.replace("self.norm(self.up(x))", "torch.dropout(self.norm(self.up(x)), 0.5, True)")
    )
    main(["cpu-bfloat16", "exact.toml", "--run", "drop.py"])
    assert "the model draws random numbers (dropout?)" in capsys.readouterr().out


def test_rounding_is_no_divergence() -> None:
    exact = torch.cat([torch.randn(4096, dtype=torch.float64) * 2.0**e for e in range(-30, 14, 4)])
    half, brain, full = exact.half(), exact.bfloat16(), exact.float()
    for one, other in ((half, brain), (brain, full), (half, full), (full, full)):
        assert not _apart(one, other)
        nudged = other.clone()
        nudged[-100] = exact[-100] * 1.05
        assert _apart(one, nudged)
    assert _apart(torch.tensor([1e9]).half(), torch.tensor([1e9]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mtia-float16", "cpu-float16", "--run", "model.py"], "--run: policy 'mtia-float16' is for mtia, which this "),
        (["cpu-float16", "cpu-float16", "--run", "none.py"], "none.py does not exist (did you mean "),
        (["cpu-float16", "cpu-float16", "--run", "wrong.py"], "wrong.py: SyntaxError: "),
        (["cpu-float16", "cpu-float16", "--run", "baked.py"], "baked.py: the model does not run in float64: "),
        (
            ["cpu-float16", "cpu-float16", "--run", "lazy.py"],
            "lazy.py: model, a LazyLinear, has no sizes yet; accepted",
        ),
        (["cpu-float16", "banned.toml", "--run", "model.py"], "model.py: Use gelu."),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("wrong.py").write_text("model = (\n")
    Path("baked.py").write_text(MODEL.replace("self.up(x)", "self.up(x.float())"))
    Path("lazy.py").write_text("import torch\nmodel = torch.nn.LazyLinear(4)\ninputs = torch.ones(1, 2)\n")
    banned = '[[rule]]\nid = "no"\ncast = "banned"\nops = ["relu"]\nadvice = "Use gelu."\n'
    Path("banned.toml").write_text(f'extends = ["cpu-bfloat16.toml"]\n{banned}')
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith(f"fxamp-diff: {message}"), err
    assert "Traceback" not in err
