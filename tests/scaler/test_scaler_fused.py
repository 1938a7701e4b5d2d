"""The protocol between the scaler and optimizers that decide on the device, torch's and others'."""

from typing import Any

import pytest
import torch
from support.machines.lacks import needs_scaled_adagrad
from support.oracles.side_by_side import SCALERS, Scaler, assert_same

from fxamp.scaler import GradScaler


class Recording(torch.optim.SGD):
    """Writes down what it is lent."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.seen: list[tuple[Any, Any]] = []

    def step(self, closure: Any = None) -> None:
        self.seen.append((self.grad_scale, self.found_inf))  # type: ignore[attr-defined]


class Asking(torch.optim.SGD):
    """Follows the older form: is passed the scaler and unscales by itself."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Scaler | None = None) -> None:
        assert grad_scaler is not None
        grad_scaler.unscale_(self)
        if not sum(flag.item() for flag in grad_scaler._found_inf_per_device(self).values()):
            super().step()


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("own_scale", [None, 3.0])
def test_what_the_optimizer_is_lent(bad: bool, unscale: bool, own_scale: float | None) -> None:
    results = []
    for kind in SCALERS:
        parameter = torch.ones(2, requires_grad=True)
        optimizer = Recording([parameter])
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros(2)
        scaler = kind("cpu", init_scale=8.0)
        if own_scale is not None:
            optimizer.grad_scale = torch.tensor(own_scale)  # type: ignore[attr-defined]
        scaler.scale(parameter.sum() * (float("inf") if bad else 1.0)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
        scaler.update()
        results.append((optimizer.seen, parameter.grad, scaler.state_dict()))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("bad", [False, True])
def test_an_optimizer_that_takes_the_scaler(bad: bool) -> None:
    results = []
    for kind in SCALERS:
        parameter = torch.ones(2, requires_grad=True)
        optimizer = Asking([parameter], lr=0.1)
        scaler = kind("cpu")
        scaler.scale(parameter.sum() * (float("inf") if bad else 1.0)).backward()
        with pytest.warns(FutureWarning) as warned:
            scaler.step(optimizer)
        assert warned[0].filename == __file__
        scaler.update()
        results.append((parameter, scaler.state_dict()))
    assert_same(results[1], results[0])
    assert isinstance(scaler, GradScaler)
    assert scaler.skipped_steps == int(bad)


def test_what_is_lent_is_a_copy() -> None:
    class Scribbling(Recording):
        def step(self, closure: Any = None) -> None:
            self.grad_scale.zero_()  # type: ignore[attr-defined]
            self.found_inf.fill_(1.0)  # type: ignore[attr-defined]

    for kind in SCALERS:
        parameter = torch.ones(2, requires_grad=True)
        scaler = kind("cpu", init_scale=8.0)
        scaler.scale(parameter.sum()).backward()
        scaler.step(Scribbling([parameter]))
        scaler.update()
        assert scaler.get_scale() == 8.0


FUSED = [torch.optim.AdamW, torch.optim.SGD, pytest.param(torch.optim.Adagrad, marks=needs_scaled_adagrad)]


def two_groups(kind: Any) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    own = [torch.ones(2, requires_grad=True), torch.ones(2, 2, requires_grad=True)]
    arguments = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return own, kind([{"params": [parameter]} for parameter in own], lr=0.1, fused=True, **arguments)


def backward(own: list[torch.Tensor], scaler: Any = None) -> None:
    loss = own[0].sum() + own[1].square().sum()
    (loss if scaler is None else scaler.scale(loss)).backward()


def spoil(own: list[torch.Tensor]) -> None:
    """The second group's gradient is one that fused steps refuse, when the first group is done."""
    assert own[1].grad is not None
    own[1].grad = own[1].grad.to_sparse()


def mend(own: list[torch.Tensor]) -> None:
    assert own[1].grad is not None
    own[1].grad = own[1].grad.to_dense()


@pytest.mark.parametrize("kind", FUSED[:2])
def test_a_first_step_that_raises_unscales_once(kind: Any) -> None:
    """Not Adagrad's, whose state is there from the start: its steps are all alike."""
    (own, optimizer), (alone, reference) = two_groups(kind), two_groups(kind)
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(own, scaler)
    backward(alone)
    for parameters, step in ((own, lambda: scaler.step(optimizer)), (alone, reference.step)):
        spoil(parameters)
        with pytest.raises(RuntimeError, match="sparse"):
            step()
        mend(parameters)
        step()
    scaler.update()
    assert_same(own, alone)
    assert_same([p.grad for p in own], [p.grad for p in alone])
    assert_same(optimizer.state_dict()["state"], reference.state_dict()["state"])


@pytest.mark.parametrize("kind", FUSED)
def test_a_later_step_that_raises_may_not_be_repeated(kind: Any) -> None:
    """It may have unscaled some of the gradients. New gradients are scaled again, and the next step is right."""
    own, optimizer = two_groups(kind)
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(own, scaler)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    backward(own, scaler)
    spoil(own)
    with pytest.raises(RuntimeError, match="sparse"):
        scaler.step(optimizer)
    mend(own)
    calls = (scaler.step, scaler.unscale_, lambda parameter: scaler.clip_grad_norm_(parameter, 1.0))
    for call in calls:
        with pytest.raises(RuntimeError, match=rf"{kind.__name__}\.step raised.*zero_grad\(\).*update\(\)"):
            call(optimizer)
    scaler.update()
    optimizer.zero_grad()
    for parameters, divisor in ((own, scaler), (alone := [p.detach().clone().requires_grad_() for p in own], None)):
        backward(parameters, divisor)
    scaler.step(optimizer)
    assert_same([p.grad for p in own], [p.grad for p in alone])
