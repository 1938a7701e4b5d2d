"""fxamp-policy bisect --region kept: the one value that must not be packed is found, and nothing else."""

from pathlib import Path

import pytest
from policy_runs import run as run_policy
from policy_runs import written

from fxamp.policy import Policy

#: In a block with a large bias, small elements are rounded to zero, and their squares have no derivatives.
MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, largest):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        with torch.no_grad():
            self.linear.bias[0] = largest
        self.register_buffer("rest", torch.arange(64) > 0)

    def forward(self, x):
        return self.linear(x).square() * self.rest

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([{blocks}])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float()

torch.manual_seed(0)
model = Net()
inputs = (torch.randn(64, 64),)
"""
WIDE = "Block(1.0), Block(1e2)"
OPTIONS = ("--region", "kept", "--tolerance", "0.03")


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, *options: str) -> tuple[int, str, str]:
    return run_policy(capsys, "bisect", written(tmp_path, text), *OPTIONS, *options)


def added(text: str) -> list[tuple[str, tuple[str, ...]]]:
    before = {rule.id for rule in Policy.load("cpu-bfloat16-lean").rules}
    return [(rule.asks, rule.modules) for rule in Policy.loads(text).rules if rule.id not in before]


@pytest.mark.exhaustive
def test_the_module_at_fault_is_found_and_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(tmp_path, capsys, MODEL.format(blocks=WIDE))
    assert status == 0 and added(out) == [("as-is", ("layers.1.linear",))]
    assert "needs the forward's own form: layers.1.linear (without it: gradient error 0." in err
    assert "output error" not in err, "the outputs do not depend on what is kept"


@pytest.mark.exhaustive
def test_the_rule_at_fault_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(tmp_path, capsys, MODEL.format(blocks=WIDE), "--by", "rules")
    changed = [(rule.id, rule.asks, rule.block) for rule in Policy.loads(out).rules if rule.why.startswith("Bisected")]
    assert (status, changed, added(out)) == (0, [("kept-in-8-bits", "as-is", 0)], [])
    assert "needs the forward's own form: rule kept-in-8-bits" in err


def test_where_none_is_at_fault_nothing_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(tmp_path, capsys, MODEL.format(blocks="Block(1.0)"))
    assert status == 0 and "[[rule]]" not in out
    assert "nothing needs the forward's own form; 1 trial" in err


def test_an_error_that_packing_does_not_cause_ends_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, least = MODEL.format(blocks="Block(1.0)"), ("--tolerance", "1e-9", "--by", "rules")
    status, out, err = run(tmp_path, capsys, text, *least)
    assert (status, out) == (1, "")
    assert "the forward's own form for every rule that packs or recomputes something misses the tolerance" in err


def test_a_policy_with_kept_rules_is_bisected_by_casts_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lean = ("--region", "forward", "--policy", "cpu-bfloat16-lean", "--tolerance", "1")
    status, _, err = run(tmp_path, capsys, MODEL.format(blocks="Block(1.0)"), *lean)
    assert status == 0 and "the policy meets the tolerance as it is" in err
