"""The scale update against torch's own op, and the two rules that torch's op lacks."""

import itertools
import math

import pytest
import torch
from kernel_cases import same_bits
from torch import Tensor

from fxamp.errors import OptionError
from fxamp.kernels import ScaleRule, update_scale_

pytestmark = pytest.mark.usefixtures("implementation")

LARGEST = torch.finfo(torch.float32).max
SCALES = (65536.0, 3.3, 0.0, 1e-45, LARGEST, LARGEST / 2, 2.0**127, math.inf, math.nan)
RULES = ((2.0, 0.5, 1), (2.0, 0.5, 3), (1.1, 0.9, 2), (1.0000001, 1 / 3, 2000), (2.0, 0.0, 2))


def state(scale: float, tracker: int, found_inf: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32), torch.tensor(found_inf)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_equals_torchs_op_below_the_interval(rule: tuple[float, float, int]) -> None:
    interval = rule[2]
    for scale, tracker, found_inf in itertools.product(SCALES, {0, interval - 1}, (0.0, 1.0, 2.0, math.nan)):
        ours, theirs = state(scale, tracker, found_inf), state(scale, tracker, found_inf)
        update_scale_(*ours, ScaleRule(*rule))
        torch._amp_update_scale_(*theirs, *rule)
        assert same_bits(ours[0], theirs[0]), (scale, tracker, found_inf)
        assert ours[1].equal(theirs[1]), (scale, tracker, found_inf)
        assert ours[2].item() == found_inf or math.isnan(found_inf)


def test_a_run_of_steps_equals_torchs_op() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = state(65536.0, 0, 0.0), state(65536.0, 0, 0.0)
    for bad in (torch.rand(200, generator=generator) < 0.2).float():
        ours[2].copy_(bad)
        update_scale_(*ours, ScaleRule(1.7, 0.6, 3))
        torch._amp_update_scale_(theirs[0], theirs[1], bad, 1.7, 0.6, 3)
        assert ours[0].equal(theirs[0])
        assert ours[1].equal(theirs[1])


@pytest.mark.parametrize("tracker", [5, 6, 100])
def test_a_tracker_at_or_beyond_the_interval_grows(tracker: int) -> None:
    scale, growth_tracker, found_inf = state(8.0, tracker, 0.0)
    update_scale_(scale, growth_tracker, found_inf, ScaleRule(2.0, 0.5, 6))
    assert (scale.item(), growth_tracker.item()) == (16.0, 0)


def test_growth_never_passes_float32() -> None:
    scale, growth_tracker, found_inf = state(LARGEST, 0, 0.0)
    update_scale_(scale, growth_tracker, found_inf, ScaleRule(2.0, 0.5, 1))
    assert (scale.item(), growth_tracker.item()) == (LARGEST, 0)


@pytest.mark.parametrize(
    ("scale", "found_inf", "held"),
    [(1.5, 1.0, 1.0), (0.0, 1.0, 1.0), (0.0, 0.0, 1.0), (90.0, 0.0, 100.0), (math.inf, 1.0, 100.0), (40.0, 0.0, 80.0)],
)
def test_floor_and_ceiling(scale: float, found_inf: float, held: float) -> None:
    tensors = state(scale, 0, found_inf)
    update_scale_(*tensors, ScaleRule(2.0, 0.5, 1, min_scale=1, max_scale=100.0))
    assert tensors[0].item() == held


def test_one_bound_alone_and_nan() -> None:
    tensors = state(math.nan, 0, 0.0)
    update_scale_(*tensors, ScaleRule(2.0, 0.5, 1, min_scale=1.0))
    assert tensors[0].isnan()
    tensors = state(1e6, 0, 1.0)
    update_scale_(*tensors, ScaleRule(2.0, 0.5, 1, max_scale=10.0))
    assert tensors[0].item() == 10.0


@pytest.mark.parametrize("bound", [0.1, 3.3, 1e-40])
def test_bounds_are_rounded_to_float32(bound: float) -> None:
    tensors = state(bound / 8, 0, 1.0)
    update_scale_(*tensors, ScaleRule(2.0, 0.5, 1, min_scale=bound, max_scale=math.inf))
    assert tensors[0].equal(torch.tensor(bound))
    tensors = state(bound * 8, 0, 0.0)
    update_scale_(*tensors, ScaleRule(2.0, 0.5, 1, min_scale=0.0, max_scale=bound))
    assert tensors[0].equal(torch.tensor(bound))


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_factors_that_are_not_finite_are_refused(factor: float) -> None:
    with pytest.raises(OptionError, match=f"growth_factor: expected a finite number, got {factor}"):
        update_scale_(*state(1.0, 0, 0.0), ScaleRule(factor, 0.5, 1))
    with pytest.raises(OptionError, match="backoff_factor"):
        update_scale_(*state(1.0, 0, 0.0), ScaleRule(2.0, factor, 1))


def test_one_element_vectors_serve() -> None:
    scale, tracker, found_inf = (tensor.reshape(1) for tensor in state(4.0, 0, 1.0))
    version = scale._version
    update_scale_(scale, tracker, found_inf, ScaleRule(2.0, 0.5, 1))
    assert scale.tolist() == [2.0]
    assert scale._version > version
