"""Option "nonfinite" where a policy keeps values for the backward in fewer bits: what does not fit is named as such."""

from typing import Any

import pytest
import torch
from support.checks.exhaustive import exhaustive
from support.machines.lacks import needs_compiler
from support.oracles.like_autocast import compile_with
from torch import Tensor, nn

import fxamp
from fxamp.policy import Policy, Rule

BASE = Policy.load("cpu-bfloat16")


class Squared(nn.Module):
    """The squares of sums in float32, which their backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)
        nn.init.eye_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        large = torch.cumsum(self.linear(x).float(), 0)
        return (large * large).sum()


def stepped(keep: Any, lowering: str, size: float) -> tuple[nn.Module, Tensor]:
    """The model and its gradient after a step; ``size``: all numbers of the batch."""
    rules = (*BASE.rules, Rule("in-fewer-bits", keep=keep, region="kept", ops=("cumsum",)))
    policy = Policy("mine", "cpu", "bfloat16", rules=rules)
    model = compile_with(Squared(), lowering, policy=policy, nonfinite="log")
    assert isinstance(model, Squared)
    model(torch.full((64, 64), size)).backward()
    (graph,) = fxamp.report(model).graphs
    assert [value.rule.id for value in graph.kept if value.rule] == ["in-fewer-bits"]
    assert model.linear.weight.grad is not None
    return model, model.linear.weight.grad


@pytest.mark.parametrize(
    "lowering", ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.exhaustive])]
)
def test_what_16_bits_cannot_keep_is_named(lowering: str) -> None:
    assert fxamp.report(stepped("float16", lowering, 1e3)[0]).nonfinite == ()
    model, gradient = stepped("float16", lowering, 2e3)
    assert not torch.isfinite(gradient).all()
    (found,) = fxamp.report(model).nonfinite
    assert (found.kind, found.region, found.value) == ("value kept for the backward in fewer bits", "backward", "inf")
    assert found.headline.startswith("step 1: value kept for the backward in fewer bits")
    assert found.gradients == ("linear.weight",)
    assert found.source is not None and "large = torch.cumsum" in found.source.code


@pytest.mark.parametrize(
    "keep", exhaustive(["int8", "float8_e4m3fn", "float8_e5m2", "bfloat16"], always=["int8", "float8_e4m3fn"])
)
def test_what_scaled_8_bits_keep_stays_finite(keep: str) -> None:
    """Each block has a scale, so nothing saturates."""
    model, gradient = stepped(keep, "aot_eager", 1e12)
    assert torch.isfinite(gradient).all() and fxamp.report(model).nonfinite == ()
