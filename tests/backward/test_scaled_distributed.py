"""Two processes under DistributedDataParallel with compiled, scaled backwards: an overflow on one rank only."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from scaled_runs import compile_scaled, scaler
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fxamp.backend import registry

RANKS = 2
BAD_RANK, BAD_ITERATION, ITERATIONS = 1, 1, 4
CASES = {
    "the wrapped model": ("aot_eager", True, {}),
    "the model inside": ("aot_eager", False, {}),
    "buckets as gradients": ("aot_eager", True, {"gradient_as_bucket_view": True}),
    "eager": ("eager", True, {}),
    "several buckets": ("aot_eager", True, {"bucket_cap_mb": 5e-5}),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def train(rank: int, lowering: str, outside: bool, arguments: dict[str, Any]) -> dict[str, Any]:
    torch._dynamo.reset()
    net, given, before = Net(), scaler(2.0**10, growth_interval=2), registry.count()
    if outside:
        forward = compile_scaled(DistributedDataParallel(net, **arguments), given, lowering)
    else:
        forward = DistributedDataParallel(compile_scaled(net, given, lowering), **arguments)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    skips, scales, gradients = [], [], []
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        bad = (rank, iteration) == (BAD_RANK, BAD_ITERATION)
        # 1e36 is float32's, times the scale it is not: the overflow happens inside the backward of one rank.
        loss = forward(torch.full((4, 3), 1.0 + rank)).sum() * (1e36 if bad else 1.0)
        given.scale(loss).backward()
        gradients.append(net.first.weight.grad.clone())
        skips.append(given.step(optimizer, return_skipped=True).skipped)
        given.update()
        scales.append(given.loss_scale)
    weights, graphs = [p.detach() for p in net.parameters()], registry.count() - before
    return {"skips": skips, "scales": scales, "weights": weights, "first": gradients[0], "graphs": graphs}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    # Otherwise the first bucket holds the whole model, and torch.compile never splits the graph between buckets.
    dist._DEFAULT_FIRST_BUCKET_BYTES = 32
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.save({name: train(rank, *case) for name, case in CASES.items()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    run_ranks(work, (str(folder),), RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_skip_and_stay_equal(ranks: list[dict[str, Any]], case: str) -> None:
    first, second = (results[case] for results in ranks)
    assert first["skips"] == second["skips"] == [i == BAD_ITERATION for i in range(ITERATIONS)]
    assert first["scales"] == second["scales"] == [1024.0, 512.0, 512.0, 1024.0]
    assert case != "several buckets" or first["graphs"] > 1
    for one, other in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(one, other) and one.isfinite().all()


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_mean_of_true_ones(ranks: list[dict[str, Any]], case: str) -> None:
    wanted = []
    for rank in range(RANKS):
        net = Net()
        net(torch.full((4, 3), 1.0 + rank)).sum().backward()
        wanted.append(net.first.weight.grad)
    # Four products of float16's precision between the loss and this weight.
    bound = 4 * torch.finfo(torch.float16).eps
    torch.testing.assert_close(ranks[0][case]["first"], (wanted[0] + wanted[1]) / RANKS, rtol=bound, atol=bound)
