"""Every misuse is refused by the same exception class as torch's, in words that mean the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.oracles.side_by_side import SCALERS, Raised, Scaler, outcome

from fxamp.scaler import GradScaler

Optimizer = torch.optim.Optimizer


def backward(scaler: Scaler, optimizer: Optimizer) -> None:
    (parameter,) = optimizer.param_groups[0]["params"]
    scaler.scale(parameter.square().sum()).backward()


def step_twice(scaler: Scaler, optimizer: Optimizer) -> None:
    backward(scaler, optimizer)
    scaler.step(optimizer)
    scaler.step(optimizer)


def unscale_twice(scaler: Scaler, optimizer: Optimizer) -> None:
    backward(scaler, optimizer)
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscale_after_step(scaler: Scaler, optimizer: Optimizer) -> None:
    backward(scaler, optimizer)
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def closure(scaler: Scaler, optimizer: Optimizer) -> None:
    backward(scaler, optimizer)
    scaler.step(optimizer, closure=lambda: 1.0)


def no_gradients(scaler: Scaler, optimizer: Optimizer) -> None:
    backward(scaler, optimizer)
    optimizer.zero_grad()
    scaler.step(optimizer)


def update_unchecked(scaler: Scaler, optimizer: Optimizer) -> None:
    backward(scaler, optimizer)
    scaler.update()


def half_gradients(scaler: Scaler, optimizer: Optimizer) -> None:
    parameter = torch.ones(2, dtype=torch.float16, requires_grad=True)
    scaler.scale(parameter.sum()).backward()
    scaler.step(torch.optim.SGD([parameter], lr=1.0))


def foreign_parameter(scaler: Scaler, optimizer: Optimizer) -> None:
    backward(scaler, optimizer)
    optimizer.param_groups[0]["params"].append("weight")
    scaler.step(optimizer)


def new_scale(make: Callable[[], Any]) -> Callable[[Scaler, Optimizer], None]:
    def misuse(scaler: Scaler, optimizer: Optimizer) -> None:
        backward(scaler, optimizer)
        scaler.update(make())

    return misuse


def load_empty(scaler: Scaler, optimizer: Optimizer) -> None:
    scaler.load_state_dict({})


def pickle_pending(scaler: Scaler, optimizer: Optimizer) -> None:
    backward(scaler, optimizer)
    scaler.unscale_(optimizer)
    scaler.__getstate__()


MISUSES: dict[str, tuple[Callable[[Scaler, Optimizer], object], str]] = {
    "unscale_ before scale": (lambda s, o: s.unscale_(o), "_scale is None"),
    "step before scale": (lambda s, o: s.step(o), "_scale is None"),
    "update before scale": (lambda s, o: s.update(), "_scale is None"),
    "step twice": (step_twice, "already been called since the last update"),
    "unscale_ twice": (unscale_twice, "already been called on this optimizer since the last update"),
    "unscale_ after step": (unscale_after_step, "called after step"),
    "closure": (closure, "Closure use is not currently supported"),
    "no gradients": (no_gradients, "No inf checks were recorded for this optimizer"),
    "update without a check": (update_unchecked, "No inf checks were recorded prior to update"),
    "float16 gradients": (half_gradients, "Attempting to unscale FP16 gradients"),
    "a parameter that is none": (foreign_parameter, "expected param to be torch.Tensor, got str"),
    "two scales": (new_scale(lambda: torch.ones(2)), "1-element"),
    "a scale with grad": (new_scale(lambda: torch.ones((), requires_grad=True)), "requires_grad=False"),
    "a scale elsewhere": (new_scale(lambda: torch.ones((), device="meta")), "1-element"),
    "an empty state": (load_empty, "state dict is empty"),
    "pickle in between": (pickle_pending, "may only be pickled at the beginning"),
    "scale a number": (lambda s, o: s.scale(3.0), "must be a Tensor or an iterable of Tensors"),
    "scale None": (lambda s, o: s.scale([None]), "must be a Tensor or an iterable of Tensors"),
}


def attached(device: str) -> Scaler:
    """A scaler as graphs use it, whose gradients need no unscaling."""
    scaler = GradScaler(device)
    scaler.attach()
    return scaler


@pytest.mark.parametrize("misuse", MISUSES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [GradScaler, attached])
def test_misuse_is_refused_alike(misuse: str, fused: bool, make: Callable[[str], Scaler]) -> None:
    call, means = MISUSES[misuse]
    results = []
    for scaler in (Scaler, make):
        optimizer = torch.optim.AdamW([torch.ones(2, requires_grad=True)], fused=fused)
        results.append(outcome(lambda scaler=scaler, optimizer=optimizer: call(scaler("cpu"), optimizer)))
    theirs, ours = results
    if not isinstance(theirs, Raised):
        # torch's fused optimizers step without any gradient; update() is where it finds that nothing was checked.
        assert (misuse, fused) == ("no gradients", True)
        assert ours is None
        return
    assert isinstance(ours, Raised)
    assert ours.kind is theirs.kind
    assert means in theirs.message
    assert means in ours.message


@pytest.mark.parametrize("arguments", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}])
def test_a_rule_that_cannot_work_is_refused(arguments: dict[str, float]) -> None:
    for scaler in SCALERS:
        with pytest.raises(AssertionError, match="factor must be"):
            scaler("cpu", **arguments)
        scaler("cpu", enabled=False, **arguments)


@pytest.mark.parametrize("bad", ["two", [1.0], True])
def test_new_scale_of_another_kind_is_refused(bad: Any) -> None:
    """torch fails with AttributeError here, or takes True for a number."""
    scaler = SCALERS[1]("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="should be a number or a 1-element cpu tensor"):
        scaler.update(bad)


def test_a_string_is_no_iterable_of_tensors() -> None:
    """torch recurses without end."""
    with pytest.raises(ValueError, match="not str"):
        SCALERS[1]("cpu").scale(["loss"])


def test_a_failing_step_leaves_nothing_behind() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise KeyError("broken")

    parameter = torch.ones(2, requires_grad=True)
    optimizer = Failing([parameter], lr=0.1, fused=True)
    scaler = SCALERS[1]("cpu")
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
