"""fxamp-show and fxamp-diff on policies for fp8: which products run in it, how they scale, what kept the others out."""

import json
from pathlib import Path

import pytest

from fxamp.tools.diff.command import main as diff
from fxamp.tools.show.command import main as show

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.odd, self.lm_head = nn.Linear(32, 64), nn.Linear(64, 20), nn.Linear(64, 32)

    def forward(self, x):
        hidden = self.up(x)
        return (hidden @ hidden.t()).sum(), self.odd(hidden), self.lm_head(hidden)

model, inputs = Net(), (torch.ones(4, 32),)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    return str(path)


def test_show_lists_what_runs_in_fp8_and_why_the_rest_does_not(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert show([model, "--policy", "cpu-bfloat16-fp8"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "bf16 5, fp8 1 casts" in text and "products in fp8 tensorwise 1 in 16 bits" in text
    assert "in 16 bits, not in fp8 matmul: rule fp8-matmul does not apply: size 1 of other is 4, not %16" in text
    assert "in 16 bits, not in fp8 linear_1: rule fp8-linear does not apply: size 0 of weight is 20, not %16" in text
    assert "in 16 bits, not in fp8 linear_2: rule fp8-heads comes after fp8-linear; Logits over" in text
    assert show([model, "--policy", "cpu-bfloat16-fp8", "--why", "linear"]) == 0
    assert "fp8-linear policies/fp8.toml:7: fp8 tensorwise" in capsys.readouterr().out
    assert show([model, "--policy", "cpu-bfloat16-fp8", "--why", "linear_1"]) == 0
    assert "not fp8    rule fp8-linear does not apply: size 0 of weight is 20, not %16" in capsys.readouterr().out
    assert show([model, "--policy", "cpu-bfloat16-fp8", "--format", "json"]) == 0
    (graph,) = json.loads(capsys.readouterr().out)["graphs"]
    assert graph["totals"]["fp8"] == {"tensorwise": 1} and set(graph["totals"]["not_fp8"]) == {
        "linear_1", "linear_2", "matmul"
    }  # fmt: skip


def test_an_amd_gpus_formats_can_be_read_here(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The shipped policies take the formats that the GPU multiplies, and the recipe's name says which."""
    assert show([model, "--policy", "cpu-bfloat16-fp8-rowwise", "--arch", "gfx942", "--why", "linear"]) == 0
    out = capsys.readouterr().out
    assert "'rowwise_fnuz', torch.bfloat16)" in out and "policies/fp8-rowwise.toml:7: fp8 rowwise_fnuz" in out
    asked = [model, "--policy", "cuda-bfloat16-fp8", "--arch"]
    assert show([*asked, "gfx942"]) == 0 and show([*asked, "gfx90a"]) == 2 and show([*asked, "gfx94"]) == 2
    err = capsys.readouterr().err
    assert "gfx90a has no products in 8 bits" in err and "--arch: 'gfx94' is not an AMD GPU's arch" in err


def test_a_policy_for_gpus_can_be_read_here(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert show([model, "--policy", "cuda-bfloat16-fp8-rowwise"]) == 0
    assert (
        "linear, linear_2: rule fp8-small-linear-both comes after fp8-linear; Too small to gain"
        in capsys.readouterr().out
    )


def test_diff_shows_what_moves_to_fp8(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(["cpu-bfloat16", "cpu-bfloat16-fp8", "--graph", model]) == 1
    text = capsys.readouterr().out
    assert "lower_precision_fp -> fp8 tensorwise" in text and "net.py: graph_0: 1 op with another dtype or cast" in text
    (row,) = [line for line in text.splitlines() if line.startswith("linear ")]
    assert row.split()[-5:] == ["bf16", "fp8", "matrix-products", "->", "fp8-linear"]


@pytest.mark.parametrize("recipe", ["mxfp8 rceil", "nvfp4 pretraining"])
def test_show_lists_what_runs_in_blocks(recipe: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    cast = recipe.split()[0]
    assert show([model, "--policy", f"cpu-bfloat16-{cast}"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"bf16 5, {cast} 1 casts" in text and f"products in fp8 {recipe} 1 in 16 bits" in text
    assert f"linear_1: rule {cast}-linear does not apply: size 0 of weight is 20, not %32" in text
    assert diff(["cpu-bfloat16-fp8", f"cpu-bfloat16-{cast}", "--graph", model]) == 1
    assert f"fp8 tensorwise -> {recipe}" in " ".join(capsys.readouterr().out.split())
