"""What makes the host wait for the device is counted, on a CPU by the values that the host reads."""

import torch

from fxamp.tools.bench.host_syncs import HostReads, host_syncs


def test_host_reads_are_counted() -> None:
    with HostReads() as reads:
        assert torch.ones(()).item() == 1
        torch.ones(3).sum()
        torch.ones(3).nonzero()
    assert reads.count == 2


def test_counters_that_torch_keeps_on_the_host_do_not_count() -> None:
    parameter = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    state = optimizer.state[parameter]
    with host_syncs("cpu", optimizer) as syncs:
        state["step"].item()
        state["exp_avg"].sum().item()
    assert syncs.value == 1
