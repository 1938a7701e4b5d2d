"""State, settings and parameters that come, go and move between compiled steps."""

import copy
import gc
import pickle
import weakref
from itertools import product
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once, exhaustive
from support.oracles.guarded_runs import SCENARIOS, Scenario, Training, assert_agree, by_torch, compilations, on_device
from support.oracles.side_by_side import assert_same
from support.programs.every_optimizer import OPTIMIZERS
from support.programs.user_optimizers import Counting
from torch import nn

STATEFUL = ("AdamW", "SGD", "Rprop", "Adagrad", "NAdam")


def pair(name: str, **arguments: Any) -> tuple[Training, Training]:
    return Training(OPTIMIZERS[name], on_device(**arguments)), Training(OPTIMIZERS[name], by_torch())


@pytest.mark.parametrize("name", STATEFUL)
def test_after_a_skipped_first_step_the_saved_state_is_as_if_it_had_not_been(name: str) -> None:
    ours, theirs = pair(name)
    for training in (ours, theirs):
        training.run(SCENARIOS["skipped first"], steps=[0])
    assert_same(ours.optimizer.state_dict(), theirs.optimizer.state_dict())


@each_once("steps, name", [1, 3], STATEFUL)
def test_state_moves_to_an_ordinary_optimizer_and_back(name: str, steps: int) -> None:
    """A skipped first step, and if there are more, two that were taken."""
    scenario = Scenario(bad=(0,))
    ours, theirs = pair(name)
    for training in (ours, theirs):
        training.run(scenario, steps=range(steps))
    for source, target in ((ours, theirs), (theirs, ours)):
        saved = pickle.loads(pickle.dumps(source.optimizer.state_dict()))
        fresh = Training(target.make, copy.deepcopy(target.scaler))
        for parameter, value in zip(fresh.parameters, source.parameters, strict=True):
            parameter.data.copy_(value)
        fresh.optimizer.load_state_dict(saved)
        source_again = copy.deepcopy(source.parameters)
        fresh.run(scenario, steps=[steps, steps + 1])
        source.run(scenario, steps=[steps, steps + 1])
        torch.testing.assert_close(fresh.parameters, source.parameters, rtol=1e-5, atol=1e-6)
        for parameter, value in zip(source.parameters, source_again, strict=True):
            parameter.data.copy_(value)
        source.optimizer.load_state_dict(saved)


def test_loading_into_a_compiled_optimizer_recompiles_nothing() -> None:
    ours, theirs = pair("SGD")
    for training in (ours, theirs):
        training.run(SCENARIOS["skipped first"])
        saved, values = copy.deepcopy(training.optimizer.state_dict()), copy.deepcopy(training.parameters)
        training.run(SCENARIOS["clean"])
        training.optimizer.load_state_dict(saved)
        for parameter, value in zip(training.parameters, values, strict=True):
            parameter.data.copy_(value)
        training.run(SCENARIOS["clean"])
    assert_agree(ours, theirs, None)
    assert compilations(ours) == 1


@pytest.mark.parametrize(
    "name, moved",
    [*product(["AdamW", "SGD", "RMSprop", "Rprop", "a user's own"], ["rate"]), ("AdamW", "rate and betas")],
)
def test_a_scheduler_that_moves_floats_recompiles_nothing(name: str, moved: str) -> None:
    make = OPTIMIZERS.get(name, Counting)
    ours, theirs = Training(make, on_device()), Training(make, by_torch())
    for training in (ours, theirs):
        schedule: Any = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.7)
        if moved == "rate and betas":
            schedule = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, 0.1, total_steps=10)
        for step in range(5):
            training.run(SCENARIOS["skipped later"], steps=[step])
            schedule.step()
    assert_agree(ours, theirs, None)
    assert compilations(ours) == 1
    assert all(isinstance(group["lr"], float) for group in ours.optimizer.param_groups)


def test_a_float_that_the_step_asks_about_recompiles_when_the_answer_changes() -> None:
    ours, theirs = pair("AdamW")
    for training in (ours, theirs):
        for step, decay in enumerate((0.1, 0.2, 0.0, 0.3)):
            training.optimizer.param_groups[0]["weight_decay"] = decay
            training.run(SCENARIOS["clean"], steps=[step])
    assert_agree(ours, theirs, None)
    assert compilations(ours) == 2


def test_schedules_follow_the_steps_that_were_taken() -> None:
    ours, _ = pair("SGD")
    taken = []
    for step in range(5):
        ours.run(SCENARIOS["skipped first"], steps=[step])
        stepped = ours.scaler.stepped
        assert stepped is not None and stepped.item() is (step > 1)
        taken += ours.scaler.poll_steps()
    assert taken == [False, False, True, True, True]
    assert ours.scaler.skipped_steps == 2 and ours.scaler.poll_steps() == []


def test_a_group_that_is_added_joins() -> None:
    ours, theirs = pair("SGD")
    for training in (ours, theirs):
        training.run(SCENARIOS["clean"])
        late = nn.Parameter(torch.ones(3))
        training.parameters.append(late)
        training.optimizer.add_param_group({"params": [late], "lr": 0.2})
        # The new parameter's first step is skipped.
        training.run(Scenario(bad=(5,)), steps=[5, 6, 7])
    assert_agree(ours, theirs, None)


def test_frozen_parameters_and_gradients_that_are_missing_now_and_then() -> None:
    ours, theirs = pair("SGD")
    for training in (ours, theirs):
        training.parameters[2].requires_grad_(False)
        for step in range(6):
            training.optimizer.zero_grad()
            training.backward(step, Scenario(bad=(0, 4)))
            if step in (1, 3):
                training.parameters[1].grad = None
            training.scaler.step(training.optimizer)
            training.scaler.update()
    assert_agree(ours, theirs, None)
    assert ours.parameters[2] not in ours.optimizer.state


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_may_be_kept_or_dropped(to_none: bool) -> None:
    ours, theirs = pair("AdamW")
    for training in (ours, theirs):
        for step in range(4):
            training.optimizer.zero_grad(set_to_none=to_none)
            training.backward(step, Scenario(bad=(1,)))
            training.scaler.step(training.optimizer)
            training.scaler.update()
    assert_agree(ours, theirs, None)
    assert compilations(ours) == 1


def test_sparse_gradients_are_left_to_the_host(caplog: pytest.LogCaptureFixture) -> None:
    results = []
    for scaler in (on_device(), by_torch()):
        torch.manual_seed(0)
        table = nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        for bad in (True, False):
            optimizer.zero_grad()
            scaler.scale(table(torch.tensor([1, 3])).sum() * (float("inf") if bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(table.weight.detach())
    assert torch.equal(*results)
    assert "a gradient is sparse" in caplog.text


def test_several_optimizers_with_one_scaler() -> None:
    results = []
    for scaler in (on_device(), by_torch()):
        first, second = Training(OPTIMIZERS["AdamW"], scaler), Training(OPTIMIZERS["SGD"], scaler)
        for step in range(4):
            for training in (first, second):
                training.optimizer.zero_grad()
                training.backward(step, Scenario(bad=(1,) if training is first else (2,)))
            for training in (first, second):
                scaler.step(training.optimizer)
            scaler.update()
        results.append([*first.parameters, *second.parameters])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_gradients_stay_scaled_unless_they_are_unscaled_first() -> None:
    ours, theirs = pair("AdamW")
    for training in (ours, theirs):
        for step in range(3):
            training.optimizer.zero_grad()
            training.backward(step, SCENARIOS["clean"])
            before = training.parameters[0].grad.clone()
            if step == 2:
                training.scaler.unscale_(training.optimizer)
            training.scaler.step(training.optimizer)
            scaled = torch.equal(training.parameters[0].grad, before)
            assert scaled is (training is ours and step == 1)
            training.scaler.update()
    assert_agree(ours, theirs, None)


def test_hooks_see_true_gradients() -> None:
    ours, theirs = pair("AdamW")
    states = []
    for training in (ours, theirs):
        training.optimizer.register_step_pre_hook(
            lambda o, a, k: states.append(o.param_groups[0]["params"][0].grad.clone())
        )
        training.run(SCENARIOS["clean"])
    assert_agree(ours, theirs, None)
    torch.testing.assert_close(states[:5], states[5:], rtol=1e-5, atol=1e-6)


def test_a_disabled_scaler_steps_the_optimizer_itself() -> None:
    ours = Training(OPTIMIZERS["AdamW"], on_device(enabled=False)).run(SCENARIOS["clean"])
    theirs = Training(OPTIMIZERS["AdamW"], torch.amp.GradScaler("cpu", enabled=False)).run(SCENARIOS["clean"])
    assert_equal(ours.parameters, theirs.parameters)
    assert compilations(ours) == 0


def test_a_gradient_that_is_dropped_is_freed() -> None:
    ours, _ = pair("AdamW")
    ours.run(SCENARIOS["clean"], steps=[0, 1])
    gradient = weakref.ref(ours.parameters[0].grad)
    ours.optimizer.zero_grad()
    assert gradient() is None


@pytest.mark.parametrize("place", exhaustive(["nowhere", "attribute", "setting"], always=["setting"]))
def test_an_optimizer_that_is_dropped_is_freed(place: str) -> None:
    """It may hold its schedule, which holds it."""
    ours, _ = pair("AdamW")
    schedule = torch.optim.lr_scheduler.StepLR(ours.optimizer, 1)
    if place == "attribute":
        ours.optimizer.schedules = [schedule]  # type: ignore[attr-defined]
    elif place == "setting":
        ours.optimizer.param_groups[0]["schedule"] = schedule
    ours.run(SCENARIOS["clean"], steps=[0, 1])
    assert compilations(ours) == 1
    optimizer = weakref.ref(ours.optimizer)
    del ours, schedule
    gc.collect()
    assert optimizer() is None


def test_parameters_of_another_dtype_are_compiled_anew() -> None:
    ours, theirs = pair("SGD")
    for training in (ours, theirs):
        training.run(SCENARIOS["clean"], steps=[0, 1])
        for parameter in training.parameters:
            parameter.data, parameter.grad = parameter.data.bfloat16(), None
        training.optimizer.state.clear()
        training.dtype = torch.bfloat16
        training.run(SCENARIOS["clean"], steps=[2, 3])
    torch.testing.assert_close(ours.parameters, theirs.parameters, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-3)
    assert compilations(ours) == 2


@pytest.mark.parametrize("bad", [(0,), ()])
def test_a_step_with_a_closure_finds_the_state_as_it_would_be(bad: tuple[int, ...]) -> None:
    """The first step is compiled, and skipped or not; the second is the host's: momentum starts there, or goes on."""
    ours, theirs = pair("SGD")
    for training in (ours, theirs):
        training.run(Scenario(bad=bad), steps=[0])
        training.optimizer.zero_grad()
        training.backward(1, SCENARIOS["clean"])
        training.scaler.step(training.optimizer, lambda: torch.zeros(()))
        training.scaler.update()
        training.run(SCENARIOS["clean"], steps=[2, 3])
    assert_agree(ours, theirs, None)


def test_state_that_comes_with_a_setting_is_made_then() -> None:
    ours, theirs = Training(plain_sgd, on_device()), Training(plain_sgd, by_torch())
    for training in (ours, theirs):
        training.run(SCENARIOS["clean"], steps=[0, 1])
        training.optimizer.param_groups[0]["momentum"] = 0.9
        training.run(Scenario(bad=(2,)), steps=[2, 3, 4])
        training.optimizer.state.clear()
        training.run(Scenario(bad=(5,)), steps=[5, 6, 7])
    assert_agree(ours, theirs, None)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.0, dampening=0.5)
