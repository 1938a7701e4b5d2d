"""300 steps of the demo's GPT on its text: where the loss ends if more is rounded."""

import io

import pytest
import torch
from support.machines.lacks import needs_quick_fp8_products

from fxamp.tools.demo.sizes import Size
from fxamp.tools.demo.text import VOCABULARY, standard_library
from fxamp.tools.demo.train import TrainingSettings, train

GPT = TrainingSettings(Size(2, 4, 64, 32, VOCABULARY), batch=8, steps=300, rate=3e-3, device="cpu", seed=0)

#: How far the last loss may lie above that of cpu-bfloat16.
SHARE = 0.01


@pytest.fixture(scope="module")
def bfloat16() -> float:
    """The mean loss of the last ten steps under cpu-bfloat16."""
    return last_loss("cpu-bfloat16")


def last_loss(policy: str) -> float:
    torch._dynamo.reset()
    options = {"policy": policy, "lowering": "aot_eager"}
    return train(policy, GPT, standard_library(), {"backend": "fxamp", "options": options}, io.StringIO()).last


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=needs_quick_fp8_products) for kind in ("fp8", "fp8-rowwise")), "lean", "leanest"],
)
def test_a_gpt_learns_as_much(kind: str, bfloat16: float) -> None:
    ours = last_loss(f"cpu-bfloat16-{kind}")
    assert bfloat16 < 3.5  # an untrained one has 5.55
    assert ours <= (1 + SHARE) * bfloat16
