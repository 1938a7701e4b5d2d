"""Where fxamp's scale departs from torch's on purpose: floor, ceiling, a lowered interval, an int."""

import math
from typing import Any

import pytest
import torch

from fxamp.errors import OptionError
from fxamp.scaler import GradScaler


def run(scaler: GradScaler, bad: bool) -> float:
    parameter = torch.ones(2, requires_grad=True)
    scaler.scale(parameter.sum()).backward()
    if bad:
        assert parameter.grad is not None
        parameter.grad.fill_(float("inf"))
    scaler.step(torch.optim.SGD([parameter], lr=0.1))
    scaler.update()
    return scaler.get_scale()


def test_back_off_stops_at_the_floor() -> None:
    scaler = GradScaler("cpu", init_scale=8.0, min_scale=3.0)
    assert [run(scaler, bad=True) for _ in range(4)] == [4.0, 3.0, 3.0, 3.0]


def test_growth_stops_at_the_ceiling() -> None:
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1, max_scale=20.0)
    assert [run(scaler, bad=False) for _ in range(4)] == [16.0, 20.0, 20.0, 20.0]


def test_without_a_floor_the_scale_ends_at_zero_as_torchs_does() -> None:
    scaler = GradScaler("cpu", init_scale=1e-44)
    for _ in range(5):
        last = run(scaler, bad=True)
    assert last == 0.0


def test_a_floor_lets_the_scale_recover() -> None:
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1, min_scale=1.0)
    for _ in range(300):
        run(scaler, bad=True)
    assert [run(scaler, bad=False) for _ in range(2)] == [2.0, 4.0]


def test_a_lowered_interval_still_grows() -> None:
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for _ in range(5):
        run(scaler, bad=False)
    scaler.set_growth_interval(2)
    assert run(scaler, bad=False) == 16.0


@pytest.mark.parametrize("new_scale", [128, 128.0, torch.tensor(128.0), torch.tensor([128], dtype=torch.int64)])
def test_new_scale_sets_the_scale_and_leaves_the_tracker(new_scale: float | torch.Tensor) -> None:
    scaler = GradScaler("cpu")
    run(scaler, bad=False)
    scaler.update(new_scale)
    assert scaler.get_scale() == 128.0
    assert scaler.state_dict()["_growth_tracker"] == 1
    if isinstance(new_scale, torch.Tensor):
        new_scale.fill_(1)
        assert scaler.get_scale() == 128.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_scale": 0.0}, "min_scale=0.0: expected a positive finite number"),
        ({"min_scale": math.nan}, "min_scale=nan"),
        ({"max_scale": math.inf}, "max_scale=inf"),
        ({"min_scale": 4.0, "max_scale": 2.0}, "min_scale=4.0 is above max_scale=2.0"),
        ({"min_scale": 2.0**17}, "init_scale=65536.0: expected a number from 131072.0 to inf"),
        ({"max_scale": 1024}, "init_scale=65536.0"),
        ({"ranks": "all"}, "ranks='all': expected 'world', a process group, or None"),
    ],
)
def test_options_that_cannot_hold_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        GradScaler("cpu", **options)
