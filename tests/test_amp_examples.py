"""Mixed precision's uses in torch's manual, each against the same program in float32.

Without any low precision, scaling by powers of two must change nothing at all.
"""

import math

import pytest
import torch
from support.checks.exhaustive import exhaustive
from support.programs.amp_examples import EXAMPLES, MAX_NORM, Runner

from fxamp.errors import DoubleBackwardError

FLOAT32 = Runner(None, scaling=False)
RUNNERS = {
    "no autocast": Runner(None),
    "bfloat16": Runner(torch.bfloat16),
    "float16": Runner(torch.float16),
    "aot_eager": Runner(torch.float16, lowering="aot_eager"),
}
CASES = [(example, runner) for runner in RUNNERS for example in EXAMPLES]
CASES.remove(("gradient_penalty", "aot_eager"))
RUNNERS |= {name: Runner(torch.float16, lowering=name) for name in ("eager", "inductor")}
CASES += [("gradient_penalty", "eager"), ("several", "eager")]
#: Every example compiled, and one example in every other way.
ALWAYS = [case for case in CASES if case[1] in ("aot_eager", "eager") or case[0] == "typical"]

ROUNDINGS = 16
"""A value that crosses both layers forward and back is rounded at each layer's input, weight, product, activation.
Errors of independent roundings add up in quadrature."""

SLACK = {"clip_norm_scaled": 1e-6 / MAX_NORM}
"""clip_grad_norm_ adds 1e-6 to the norm, scaled or not: relative to the norm clipped to, that is what it may differ."""


def tolerance(example: str, runner: Runner) -> float:
    """Largest relative difference from float32: a rounding's largest error is half an eps."""
    lowered = 0.0 if runner.dtype is None else math.sqrt(ROUNDINGS) * torch.finfo(runner.dtype).eps / 2
    return lowered + SLACK.get(example, 0.0)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "case",
    [*exhaustive(CASES, ALWAYS), pytest.param(("accumulation", "inductor"), marks=pytest.mark.exhaustive)],
    ids="-".join,
)
def test_an_example_trains_as_in_float32(case: tuple[str, str]) -> None:
    """Losses, relative to the largest; parameters, relative to the way that training moved them."""
    example, runner = case
    expected, trained = EXAMPLES[example](FLOAT32), EXAMPLES[example](RUNNERS[runner])
    bound = tolerance(example, RUNNERS[runner])
    losses, reference = torch.tensor(trained.losses), torch.tensor(expected.losses)
    assert (expected.end - expected.start).norm() > 0
    assert (losses - reference).abs().max() <= bound * reference.abs().max()
    assert (trained.end - expected.end).norm() <= bound * (expected.end - expected.start).norm()


def test_a_gradient_penalty_over_a_compiled_backward_names_the_lowering_that_can() -> None:
    with pytest.raises(DoubleBackwardError, match="'lowering': 'eager'"):
        EXAMPLES["gradient_penalty"](RUNNERS["aot_eager"])
