"""clip_grad_norm_: torch's norm and coefficient, out of the check, for steps of the host's and the device's."""

import logging
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once
from support.oracles.guarded_runs import INF, SCENARIOS, Scenario, Training, assert_agree, by_torch, on_device
from support.programs.every_optimizer import OPTIMIZERS, arguments_of_step
from torch import nn

import fxamp
from fxamp.errors import OptionError

ALONE: dict[str, Any] = {"growth_interval": 2}
SCALERS = {
    "host": lambda: fxamp.GradScaler("cpu", **ALONE),
    "device": on_device,
}


@each_once("max_norm, name, skip", [0.5, 1e9], ["AdamW", "SGD", "fused AdamW", "Adafactor"], SCALERS)
def test_it_clips_as_torch_does(skip: str, name: str, max_norm: float) -> None:
    scenario = Scenario(bad=(0, 3), max_norm=max_norm)
    ours, theirs = Training(OPTIMIZERS[name], SCALERS[skip]()), Training(OPTIMIZERS[name], by_torch())
    for training in (ours, theirs):
        training.run(scenario)
    assert_agree(ours, theirs, Training(OPTIMIZERS[name], by_torch(), torch.float64).run(scenario))
    assert ours.norms == pytest.approx(theirs.norms, rel=4 * torch.finfo(torch.float32).eps)
    assert ours.scaler.skipped_steps == 2


@pytest.mark.parametrize("skip", SCALERS)
def test_gradients_in_memory(skip: str) -> None:
    """The host's are unscaled and clipped in place, as torch's; the device's stay as backward left them."""
    ours, theirs = Training(OPTIMIZERS["AdamW"], SCALERS[skip]()), Training(OPTIMIZERS["AdamW"], by_torch())
    for training in (ours, theirs):
        training.run(SCENARIOS["clean"], steps=[0])
        training.optimizer.zero_grad()
        training.backward(1, SCENARIOS["clean"])
    before = [p.grad.clone() for p in ours.parameters]
    norm = ours.scaler.clip_grad_norm_(ours.optimizer, 0.5)
    theirs.scaler.unscale_(theirs.optimizer)
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(theirs.parameters, 0.5).item(), rel=1e-6)
    expected = before if skip == "device" else [p.grad for p in theirs.parameters]
    for parameter, gradient in zip(ours.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=0)


@pytest.mark.parametrize("skip", SCALERS)
def test_unscale_may_come_before(skip: str) -> None:
    ours, theirs = Training(OPTIMIZERS["SGD"], SCALERS[skip]()), Training(OPTIMIZERS["SGD"], by_torch())
    for step in range(3):
        for training in (ours, theirs):
            training.optimizer.zero_grad()
            training.backward(step, Scenario(bad=(1,)))
            training.scaler.unscale_(training.optimizer)
            if training is theirs:
                nn.utils.clip_grad_norm_(training.parameters, 0.5)
            else:
                ours.scaler.clip_grad_norm_(ours.optimizer, 0.5)
            training.scaler.step(training.optimizer)
            training.scaler.update()
            training.scales.append(training.scaler.get_scale())
    assert_agree(ours, theirs, None)


@pytest.mark.parametrize("skip", SCALERS)
def test_the_order_of_calls(skip: str) -> None:
    ours = Training(OPTIMIZERS["SGD"], SCALERS[skip]())
    with pytest.raises(AssertionError):
        ours.scaler.clip_grad_norm_(ours.optimizer, 1.0)
    ours.run(SCENARIOS["clean"], steps=[0])
    ours.backward(1, SCENARIOS["clean"])
    ours.scaler.clip_grad_norm_(ours.optimizer, 1.0)
    with pytest.raises(RuntimeError, match="already been called"):
        ours.scaler.clip_grad_norm_(ours.optimizer, 1.0)
    with pytest.raises(RuntimeError, match="after clip_grad_norm_"):
        ours.scaler.unscale_(ours.optimizer)
    ours.scaler.step(ours.optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        ours.scaler.clip_grad_norm_(ours.optimizer, 1.0)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), "1", None, True])
def test_a_norm_that_is_none(bad: Any) -> None:
    ours = Training(OPTIMIZERS["SGD"], on_device())
    with pytest.raises(OptionError, match="max_norm"):
        ours.scaler.clip_grad_norm_(ours.optimizer, bad)


def test_a_disabled_scaler_clips_as_torch_does() -> None:
    ours = Training(OPTIMIZERS["SGD"], on_device(enabled=False))
    ours.backward(0, SCENARIOS["clean"])
    gradients = [p.grad.clone() for p in ours.parameters]
    norm = ours.scaler.clip_grad_norm_(ours.optimizer, 0.5)
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(ours.parameters[0].grad, gradients[0] * (0.5 / (expected + 1e-6)))


@pytest.mark.parametrize("skip", SCALERS)
def test_a_norm_beyond_float32_skips_the_step_and_backs_off(skip: str) -> None:
    """1e25 is finite, its square is not: torch would multiply by 0 and step."""
    ours = Training(OPTIMIZERS["SGD"], SCALERS[skip]())
    ours.scaler.scale(torch.zeros(()))
    before = [p.detach().clone() for p in ours.parameters]
    for parameter in ours.parameters:
        parameter.grad = torch.full_like(parameter, 1e25)
    assert ours.scaler.clip_grad_norm_(ours.optimizer, 1.0).item() == INF
    ours.scaler.step(ours.optimizer)
    ours.scaler.update()
    assert ours.scaler.skipped_steps == 1 and ours.scaler.get_scale() == 2.0**15
    assert_equal(ours.parameters, before)


def test_a_step_that_needs_a_closure_is_known_before_it_is_called(caplog: pytest.LogCaptureFixture) -> None:
    ours = Training(OPTIMIZERS["LBFGS"], on_device())
    ours.backward(0, SCENARIOS["clean"])
    with caplog.at_level(logging.WARNING, logger="fxamp.optim"):
        ours.scaler.clip_grad_norm_(ours.optimizer, 1.0)
        ours.scaler.step(ours.optimizer, *arguments_of_step(ours.optimizer))
    (record,) = caplog.records
    assert "closure" in record.message


def test_no_gradients_have_no_norm() -> None:
    ours = Training(OPTIMIZERS["SGD"], on_device())
    ours.scaler.scale(torch.zeros(()))
    assert ours.scaler.clip_grad_norm_(ours.optimizer, 1.0).item() == 0.0
