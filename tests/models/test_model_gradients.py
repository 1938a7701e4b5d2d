"""Loss and gradients of real models: equal to eager autocast's bit for bit, or no further from float64."""

import math
import statistics

import pytest
from error_rule import DEVIATIONS, excess, relative_errors, worse_parameters
from model_runs import Baseline, Run, same

#: Models whose programs differ from eager autocast's, always towards float32, and why.
_NOT_BITWISE = {
    "qwen3": "its norm's .to(input_dtype) is baked as float32",
    "mixtral-looped-experts": "Dynamo leaves the loop over experts out of the graphs, in float32",
    "mamba": "its .to(dtype) of the scan's operands is baked as float32",
    "wav2vec2": "what crosses its graph breaks is float32",
    "deberta-v2": "the logits cross a graph break in float32",
}


def test_every_bit_is_that_of_eager_autocast(base: Baseline, eager: list[Run]) -> None:
    equal = all(map(same, eager, base.autocast))
    assert equal == (base.name not in _NOT_BITWISE)


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_the_gradient_is_no_further_from_float64_than_autocast(
    base: Baseline, lowering: str, request: pytest.FixtureRequest
) -> None:
    subject: list[Run] = request.getfixturevalue(lowering)
    errors, autocast = relative_errors(subject, base.true), relative_errors(base.autocast, base.true)
    assert excess(errors, autocast) <= 1
    assert list(worse_parameters(subject, base.autocast, base.true)) == []


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_the_same_parameters_have_a_gradient(base: Baseline, lowering: str, request: pytest.FixtureRequest) -> None:
    subject: list[Run] = request.getfixturevalue(lowering)
    for ours, theirs in zip(subject, base.autocast, strict=True):
        assert ours.gradients.keys() == theirs.gradients.keys()


def test_the_yardstick_is_sharp(base: Baseline) -> None:
    """A rule that let errors grow threefold would prove nothing."""
    spread = statistics.stdev(map(math.log, relative_errors(base.autocast, base.true)))
    assert math.exp(DEVIATIONS * spread * math.sqrt(2 / len(base.autocast))) < 3
