"""What a scaler saves, restores and shows to other libraries, against torch's."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from support.oracles.side_by_side import SCALERS, Scaler, assert_same
from torch import nn

from fxamp.errors import OptionError
from fxamp.scaler import GradScaler, StepResult

INHERITED = {
    "_check_scale_growth_tracker",
    "_found_inf_per_device",
    "_get_growth_tracker",
    "_get_scale_async",
    "_lazy_init_scale_growth_tracker",
    "get_backoff_factor",
    "get_growth_factor",
    "get_growth_interval",
    "is_enabled",
    "load_state_dict",
    "set_backoff_factor",
    "set_growth_factor",
    "set_growth_interval",
}
"""Plain data. Whatever touches losses, gradients or optimizers must be fxamp's own."""

TUNED = {"init_scale": 512.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}


def used(kind: type[Scaler]) -> Scaler:
    """A scaler whose every saved value differs from the default."""
    scaler = kind("cpu", **TUNED)
    train(scaler, 2)
    return scaler


def train(scaler: Scaler, iterations: int, bad: bool = False) -> None:
    parameter = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(iterations):
        scaler.scale(parameter.sum()).backward()
        if bad:
            assert parameter.grad is not None
            parameter.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()


def test_only_plain_data_is_inherited() -> None:
    methods = {name for name, value in vars(Scaler).items() if inspect.isfunction(value)}
    assert methods - set(vars(GradScaler)) == INHERITED


@pytest.mark.parametrize(("source", "target"), [SCALERS, SCALERS[::-1], (GradScaler, GradScaler)])
@pytest.mark.parametrize("initialised", [False, True])
def test_states_load_both_ways(source: type[Scaler], target: type[Scaler], initialised: bool) -> None:
    saved = used(source).state_dict()
    assert saved == {
        "scale": 512.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 3,
        "_growth_tracker": 2,
    }
    loaded = target("cpu")
    if initialised:
        train(loaded, 1)
    loaded.load_state_dict(saved)
    assert loaded.state_dict() == saved
    train(loaded, 1)
    assert loaded.get_scale() == 2048.0


@pytest.mark.parametrize("copier", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy])
def test_pickle_restores_lazily(copier: Any) -> None:
    scaler = used(GradScaler)
    train(scaler, 1, bad=True)
    assert isinstance(scaler, GradScaler)
    again = copier(scaler)
    assert again._scale is None and again._growth_tracker is None
    assert again.state_dict() == scaler.state_dict()
    assert again.skipped_steps == scaler.skipped_steps == 1
    assert again.overflowed() == {}
    train(again, 3)
    assert again.get_scale() == 512.0


def test_a_disabled_scaler_pickles() -> None:
    again = pickle.loads(pickle.dumps(GradScaler("cpu", enabled=False)))
    assert not again.is_enabled()
    assert again.state_dict() == {}


def test_state_is_made_on_the_first_scaled_tensors_device() -> None:
    for kind in SCALERS:
        scaler = kind("cpu", **TUNED)
        assert scaler._scale is None
        assert scaler.get_scale() == 512.0
        scaler.scale(torch.ones(()))
        assert_same(scaler._scale, torch.tensor(512.0))
        assert_same(scaler._growth_tracker, torch.tensor(0, dtype=torch.int32))


def test_disabled_does_nothing() -> None:
    for kind in SCALERS:
        scaler = kind("cpu", enabled=False)
        parameter = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        outputs = (object(), 3)
        assert scaler.scale(outputs) is outputs
        parameter.grad = torch.full((2,), float("inf"))
        scaler.unscale_(optimizer)
        scaler.update()
        assert scaler.get_scale() == 1.0
        scaler.load_state_dict({})
        assert scaler.state_dict() == {}
        assert scaler.step(optimizer, closure=lambda: 5.0) == 5.0
        assert not parameter.isfinite().any()


def test_cuda_without_cuda_warns_and_disables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True)
    for kind in SCALERS:
        with pytest.warns(UserWarning, match="CUDA is not available"):
            scaler = kind()
        assert not scaler.is_enabled()


def test_what_other_libraries_reach_for() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scalers = [kind("cpu", **TUNED) for kind in SCALERS]
    for scaler in scalers:
        assert isinstance(scaler, torch.amp.GradScaler)
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
        assert_same(scaler._get_scale_async(), torch.tensor(512.0))
        parameter.grad = torch.tensor([1.0, float("inf")])
        assert_same(scaler._check_inf_per_device(optimizer), {torch.device("cpu"): torch.tensor(1.0)})
        assert_same(parameter.grad, torch.tensor([1.0, float("inf")]))
        flags = scaler._unscale_grads_(optimizer, torch.tensor(0.5), torch.tensor(0.0), allow_fp16=False)
        assert_same(flags, {torch.device("cpu"): torch.tensor(1.0)})
        assert_same(parameter.grad, torch.tensor([0.5, float("inf")]))
        state = scaler._per_optimizer_states[id(optimizer)]
        assert state["found_inf_per_device"] == scaler._found_inf_per_device(optimizer)
        assert state["stage"] is torch.amp.grad_scaler.OptState.READY
        scaler.unscale_(optimizer)
        assert state["stage"] is torch.amp.grad_scaler.OptState.UNSCALED
        scaler.update()
        assert len(scaler._per_optimizer_states) == 0
    assert_same(scalers[1].state_dict(), scalers[0].state_dict())


def test_other_libraries_write_to_an_optimizers_state() -> None:
    states = []
    for kind in SCALERS:
        parameter = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        scaler = kind("cpu", **TUNED)
        scaler.scale(parameter.sum()).backward()
        state = scaler._per_optimizer_states[id(optimizer)]
        assert "note" not in state and state.get("note", 1) == 1
        state["note"] = "theirs"
        assert state["note"] == "theirs" and {"stage", "found_inf_per_device", "note"} <= {**state}.keys()
        del state["note"]
        with pytest.raises(KeyError):
            state["note"]
        state["found_inf_per_device"] = {torch.device("cpu"): torch.tensor(1.0)}
        state["stage"] = torch.amp.grad_scaler.OptState.UNSCALED
        # Their flag skips the step, and gradients are theirs to unscale.
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
            scaler.step(optimizer)
        scaler.update()
        states.append((parameter.detach(), parameter.grad, scaler.state_dict()))
    assert_same(states[1], states[0])
    assert_same(states[1][0], torch.ones(2))


def test_a_pickle_remembers_a_scaled_loss() -> None:
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones((), requires_grad=True))
    again = pickle.loads(pickle.dumps(scaler))
    with pytest.raises(OptionError, match="after it had scaled a loss itself"):
        again.attach()


def test_saved_are_settings_not_parts() -> None:
    scaler = GradScaler("cpu", skip="device", step_lowering="aot_eager")
    saved = scaler.__getstate__()
    assert {"_skip_settings", "_bounds", "_skips", "_ranks", "graph_norm"} <= saved.keys()
    assert not {"graphs", "_ledger", "_outcomes"} & saved.keys()
    again = GradScaler.__new__(GradScaler)
    again.__setstate__(saved)
    again.attach()
    assert again.__getstate__()["_skip_settings"] == saved["_skip_settings"]


def test_step_returns_what_the_optimizer_returns() -> None:
    class Answering(torch.optim.SGD):
        def step(self, closure: Any = None) -> float:  # type: ignore[override]
            super().step()
            return 42.0

    for kind in SCALERS:
        parameter = torch.ones(2, requires_grad=True)
        optimizer = Answering([parameter], lr=0.1)
        scaler = kind("cpu")
        for bad, value in ((False, 42.0), (True, None)):
            optimizer.zero_grad()
            scaler.scale(parameter.sum()).backward()
            if bad:
                assert parameter.grad is not None
                parameter.grad.fill_(float("nan"))
            assert scaler.step(optimizer) == value
            scaler.update()


@pytest.mark.parametrize("enabled", [False, True])
def test_step_returns_whether_it_skipped(enabled: bool) -> None:
    parameter = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = GradScaler("cpu", enabled=enabled)
    scaler.scale(parameter.sum()).backward()
    assert scaler.step(optimizer, return_skipped=True) == StepResult(None, False)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(parameter.sum() * float("inf")).backward()
    assert scaler.step(optimizer, return_skipped=True) == StepResult(None, enabled)
    assert scaler.skipped_steps == int(enabled)
