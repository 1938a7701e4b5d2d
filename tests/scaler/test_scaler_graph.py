"""The protocol between the scaler and compiled backwards, played by a small backend made by hand."""

import gc
import pickle
import weakref
from collections.abc import Sequence

import pytest
import torch
from support.oracles.scaled_runs import finish
from support.oracles.side_by_side import assert_same
from torch import Tensor

from fxamp.errors import OptionError
from fxamp.scaler import GradScaler

INF = float("inf")


class Graph:
    """A compiled backward: scales the tangent, returns true gradients, and reports one flag for each."""

    def __init__(self, scaler: GradScaler, owners: Sequence[Tensor | None], flags: torch.dtype = torch.int32) -> None:
        self.scaler = scaler
        self.owners = [None if owner is None else weakref.ref(owner) for owner in owners]
        self.flags = flags

    def backward(self, bad: Sequence[int] = ()) -> None:
        """Add 2 to every owner's gradient, through the scale; those numbered in ``bad`` overflow on the way."""
        scale = self.scaler.graph_scale(torch.device("cpu"))
        scales, gradients = [], []
        for i, reference in enumerate(self.owners):
            scaled = torch.full((2,), 2.0) * scale * (INF if i in bad else 1.0)
            true = scaled / scale
            scales.append(not true.isfinite().all())
            owner = None if reference is None else reference()
            gradients.append(true)
            if owner is not None:
                owner.grad = true if owner.grad is None else owner.grad + true
        self.scaler.graphs.record(lambda: self.owners, torch.tensor(scales).to(self.flags), gradients)


def parameters(count: int) -> list[Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(count)]


def attached(**arguments: float) -> GradScaler:
    scaler = GradScaler("cpu", **arguments)  # type: ignore[arg-type]
    scaler.attach()
    return scaler


def test_a_gradient_that_is_none_is_skipped() -> None:
    scaler = attached()
    own = parameters(2)
    optimizer = torch.optim.SGD(own, lr=0.5)
    scaler.scale(torch.ones(()))
    Graph(scaler, own).backward([1])
    own[1].grad = None
    assert finish(scaler, optimizer) == [False]
    Graph(scaler, own).backward()
    optimizer.zero_grad(set_to_none=True)
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)


def test_a_flag_counts_for_the_optimizer_that_owns_the_parameter() -> None:
    scaler = attached()
    own = parameters(3)
    first, second = torch.optim.SGD(own[:1], lr=0.5), torch.optim.SGD(own[1:], lr=0.5)
    scaler.scale(torch.ones(()))
    Graph(scaler, own).backward(bad=[2])
    skips = [scaler.step(optimizer, return_skipped=True).skipped for optimizer in (first, second)]
    scale = scaler.loss_scale
    scaler.update()
    assert skips == [False, True]
    assert scaler.loss_scale == scale / 2
    assert scaler.overflowed() == {"optimizer1.group0.param1": 1}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_parameters_that_no_graph_covers_are_checked_and_never_divided(bad: bool, fused: bool) -> None:
    scaler = attached()
    covered, eager = parameters(2)
    optimizer = torch.optim.SGD([covered, eager], lr=0.5, fused=fused)
    scaler.scale(torch.ones(()))
    Graph(scaler, [covered]).backward()
    eager.grad = torch.tensor([4.0, INF if bad else 4.0])
    before = eager.grad.clone()
    skipped = scaler.step(optimizer, return_skipped=True).skipped
    assert skipped is bad
    assert_same(eager.grad, before)
    assert_same(covered.detach(), torch.full((2,), 1.0 if bad else 0.0))
    assert scaler.overflowed() == ({"group0.param1": 1} if bad else {})


@pytest.mark.parametrize("bad", [False, True])
def test_a_fused_optimizer_does_not_unscale_again(bad: bool) -> None:
    scaler = attached()
    own, reference = parameters(1), parameters(1)
    optimizer = torch.optim.AdamW(own, lr=0.1, fused=True)
    alone = torch.optim.AdamW(reference, lr=0.1, fused=True)
    for overflow in (False, bad, False):
        scaler.scale(torch.ones(()))
        Graph(scaler, own).backward([0] if overflow else [])
        assert finish(scaler, optimizer) == [overflow]
        if not overflow:
            reference[0].grad = torch.full((2,), 2.0)
            alone.step()
    assert_same(own, reference)
    assert_same(optimizer.state_dict(), alone.state_dict())


def test_an_optimizer_that_would_divide_by_the_scale_is_not_passed_the_scaler() -> None:
    class Asking(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: object = None, *, grad_scaler: object = None) -> None:  # type: ignore[override]
            assert grad_scaler is None
            super().step()

    scaler = attached()
    own = parameters(1)
    scaler.scale(torch.ones(()))
    Graph(scaler, own).backward()
    assert finish(scaler, Asking(own, lr=0.5)) == [False]
    assert_same(own[0].detach(), torch.zeros(2))


def test_flags_that_cannot_be_right_are_refused() -> None:
    own = parameters(2)
    owners = [weakref.ref(parameter) for parameter in own]
    with pytest.raises(OptionError, match="call attach"):
        GradScaler("cpu").graphs.record(lambda: owners, torch.zeros(2, dtype=torch.bool), own)
    with pytest.raises(OptionError, match=r"2 parameters, 2 gradients, flags of shape \(3,\)"):
        attached().graphs.record(lambda: owners, torch.zeros(3, dtype=torch.bool), own)
    with pytest.raises(OptionError, match=r"2 parameters, 1 gradients, flags of shape \(2,\)"):
        attached().graphs.record(lambda: owners, torch.zeros(2, dtype=torch.bool), own[:1])


def test_a_gradient_that_was_another_parameters_is_read() -> None:
    """Its flag is the other one's, which another optimizer has."""
    scaler = attached()
    one, other = parameters(2)
    scaler.scale(torch.ones(()))
    Graph(scaler, [one, other]).backward([1])
    one.grad = other.grad
    assert finish(scaler, torch.optim.SGD([one], lr=0.5)) == [True]
    assert_same(one.detach(), torch.ones(2))


def test_a_model_that_is_freed_reports_nothing() -> None:
    scaler = attached()
    own = parameters(2)
    optimizer = torch.optim.SGD(own[:1], lr=0.5)
    graph = Graph(scaler, own)
    del own[1]
    gc.collect()
    scaler.scale(torch.ones(()))
    graph.backward([1])
    assert finish(scaler, optimizer) == [False]


def test_a_pickled_scaler_stands_alone() -> None:
    again = pickle.loads(pickle.dumps(attached(init_scale=8.0)))
    assert again.scale(torch.ones(())).item() == 8.0
