"""Which parameter overflowed, and how often; and nothing of it waits for the device."""

import gc

import pytest
import torch
from torch import Tensor, nn

from fxamp.errors import OptionError
from fxamp.scaler import GradScaler
from fxamp.scaler.graphs.flag_table import MAX_INDICES, FlagTable
from fxamp.tools.bench.host_syncs import HostReads


def iterate(scaler: GradScaler, optimizers: list[torch.optim.Optimizer], bad: list[Tensor]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
        own = [p for group in optimizer.param_groups for p in group["params"]]
        scaler.scale(torch.stack([p.square().sum() for p in own]).sum()).backward()
    for parameter in bad:
        assert parameter.grad is not None
        parameter.grad.view(-1)[0] = float("inf")
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def test_names_given_by_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = GradScaler("cpu", growth_interval=1)
    scaler.name_parameters(model)
    assert scaler.overflowed() == {}
    for bad in ([model[1].weight], [model[1].weight, model[0].bias], []):
        iterate(scaler, [optimizer], bad)
    assert scaler.overflowed() == {"0.bias": 1, "1.weight": 2}


def test_names_given_to_the_optimizer_and_places() -> None:
    model = nn.Linear(2, 3)
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    free = [torch.ones(2, requires_grad=True) for _ in range(3)]
    placed = torch.optim.SGD([{"params": free[:1]}, {"params": free[1:]}], lr=0.1)
    scaler = GradScaler("cpu")
    iterate(scaler, [named, placed], [model.bias, free[2]])
    assert scaler.overflowed() == {"bias": 1, "optimizer1.group1.param1": 1}


def test_two_models_need_two_prefixes() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    scaler = GradScaler("cpu")
    scaler.name_parameters(first)
    scaler.name_parameters(first)
    with pytest.raises(OptionError, match="'weight' already names a parameter of another model"):
        scaler.name_parameters(second)
    scaler.name_parameters(second, prefix="second")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    iterate(scaler, optimizers, [second.weight])
    assert scaler.overflowed() == {"second.weight": 1}


def test_a_model_that_is_gone_leaves_its_names_free() -> None:
    scaler = GradScaler("cpu")
    scaler.name_parameters(nn.Linear(1, 1))
    gc.collect()
    second = nn.Linear(1, 1)
    scaler.name_parameters(second)
    iterate(scaler, [torch.optim.SGD(second.parameters(), lr=0.1)], [second.weight])
    assert scaler.overflowed() == {"weight": 1}


@pytest.mark.parametrize("fused", [False, True])
def test_unscaled_and_fused_gradients_are_counted_once(fused: bool) -> None:
    parameter = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.AdamW([parameter], fused=fused)
    scaler = GradScaler("cpu")
    for unscale in (False, True):
        scaler.scale(parameter.sum() * float("inf")).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.overflowed() == {"group0.param0": 2}


@pytest.mark.parametrize(("fused", "reads_in_step"), [(False, 1), (True, 0)])
def test_only_a_step_decided_on_the_host_reads_once(
    fused: bool, reads_in_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels are left out: on the CPU they are torch's own, which may read what they like."""
    import fxamp.kernels

    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu")
    iterate(scaler, [optimizer], [])
    for kernel in ("check_", "check_unscale_", "update_scale_"):
        monkeypatch.setattr(fxamp.kernels, kernel, lambda *args, **kwargs: None)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    monkeypatch.setattr(optimizer, "step", lambda: None)
    with HostReads() as reads:
        scaler.step(optimizer)
        assert reads.count == reads_in_step
        scaler.update()
        assert reads.count == reads_in_step
    with HostReads() as reads:
        scaler.unscale_(optimizer)
        scaler.update()
        assert reads.count == 0


def test_the_table_forgets_the_dead_and_keeps_few_indices() -> None:
    table = FlagTable(torch.device("cpu"))
    lasting = torch.ones(1)
    for _ in range(3 * MAX_INDICES):
        passing = torch.ones(1)
        table.add([passing, lasting, None], torch.tensor([True, True, True]))
        assert table.read([lasting, passing])[1] == 1
        del passing
    gc.collect()
    assert [(p is lasting, count) for p, count in table.nonzero()] == [(True, 3 * MAX_INDICES)]
    several = [torch.ones(1) for _ in range(3 * MAX_INDICES)]
    for parameter in several:
        table.add([parameter], torch.ones(1, dtype=torch.int32))
    assert len(table._indices) <= MAX_INDICES
    table.clear()
    assert list(table.nonzero()) == []
