"""Two processes under DistributedDataParallel: an overflow on one rank skips the step on both."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import results_of_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fxamp.scaler import GradScaler

RANKS = 2
BAD_RANK, BAD_ITERATION, ITERATIONS = 1, 1, 4


def train(rank: int, mode: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    fused = mode == "fused"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2, ranks=None if mode == "alone" else "world")
    if mode == "graph":
        scaler.attach()
    skips, scales = [], []
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        # Fixed, equal data: what is under test is who skips, and DDP averages what the ranks feed it.
        scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
        bad = (rank, iteration) == (BAD_RANK, BAD_ITERATION)
        if mode == "graph":
            own = list(model.parameters())
            scaler.graphs.record(own, torch.full((len(own),), bad), [p.grad for p in own])
        elif bad:
            # After DDP has reduced: only this rank sees it, as in a hook, or with sharded gradients.
            gradient = model.module.weight.grad
            assert gradient is not None
            gradient[0, 0] = float("inf")
        if mode == "unscale":
            scaler.unscale_(optimizer)
        skips.append(scaler.step(optimizer, return_skipped=True).skipped)
        scaler.update()
        scales.append(scaler.loss_scale)
    return {"skips": skips, "scales": scales, "weight": model.module.weight.detach().clone()}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    results = {mode: train(rank, mode) for mode in ("step", "unscale", "fused", "graph", "alone")}
    # One rank without gradients takes part, and then refuses as it would alone.
    idle = torch.ones(2, requires_grad=True)
    scaler = GradScaler("cpu")
    loss = scaler.scale(idle.sum())
    if rank == 0:
        loss.backward()
    try:
        scaler.step(torch.optim.SGD([idle], lr=0.1))
        results["idle"] = "stepped"
    except AssertionError as error:
        results["idle"] = str(error)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of_ranks(work, tmp_path_factory.mktemp("ranks"), RANKS)


@pytest.mark.parametrize("mode", ["step", "unscale", "fused", "graph"])
def test_both_ranks_skip_and_stay_equal(ranks: list[dict[str, Any]], mode: str) -> None:
    first, second = (results[mode] for results in ranks)
    assert first["skips"] == second["skips"] == [i == BAD_ITERATION for i in range(ITERATIONS)]
    assert first["scales"] == second["scales"] == [1024.0, 512.0, 512.0, 1024.0]
    assert torch.equal(first["weight"], second["weight"])
    assert first["weight"].isfinite().all()


def test_ranks_that_decide_alone_part(ranks: list[dict[str, Any]]) -> None:
    first, second = (results["alone"] for results in ranks)
    assert first["skips"] == [False] * ITERATIONS
    assert any(second["skips"])
    assert not torch.equal(first["weight"], second["weight"])


def test_a_rank_without_gradients_takes_part(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["idle"] == "stepped"
    assert ranks[1]["idle"] == "No inf checks were recorded for this optimizer."
