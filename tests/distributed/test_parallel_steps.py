"""Training with scaled backwards on DTensors: the ranks of a mesh skip the same steps, and flags have names."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parallel_programs import HIDDEN, WIDTH
from support.checks.equality import assert_equal
from support.machines.ranks import on_ranks
from support.programs.small_models import Perceptron
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxamp
from fxamp.scaler.graphs.graph_flags import GraphFlags

RANKS = 2
BAD_RANK, BAD_ITERATION, ITERATIONS = 1, 1, 4
LOWERINGS = ("eager", "aot_eager")


class Watched(GraphFlags):
    """Remembers whose gradients the compiled backwards report."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: list[Any] = []

    def record(self, owners: Callable[[], Sequence[Any]], *reported: Any) -> None:
        self.owners += owners()
        super().record(owners, *reported)


def on_mesh(mesh: DeviceMesh) -> nn.Module:
    """A model whose input needs no gradient: nothing of the backward is communicated, an overflow stays on its rank."""
    model = Perceptron(WIDTH, HIDDEN, WIDTH, F.gelu)
    return parallelize_module(model, mesh, {"first": ColwiseParallel(), "last": RowwiseParallel()})


def loss_of(result: Tensor, iteration: int, bad: bool) -> Tensor:
    # 1e36 is float32's, times the scale it is not: the overflow happens inside the backward of one rank.
    return result.float().square().sum() * (iteration + 1) * (1e36 if bad else 1.0)


def train(mesh: DeviceMesh, lowering: str) -> dict[str, Any]:
    torch._dynamo.reset()
    net, scaler = on_mesh(mesh), fxamp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scaler.graphs = flags = Watched()
    scaler.name_parameters(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net.compile(
        backend="fxamp", fullgraph=True, options={"policy": "cpu-float16", "lowering": lowering, "scaler": scaler}
    )
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    skips, finite, norms = [], [], []
    for iteration in range(ITERATIONS):
        bad = (mesh.get_local_rank(), iteration) == (BAD_RANK, BAD_ITERATION)
        scaler.scale(loss_of(net(inputs(iteration)), iteration, bad)).backward()
        finite.append(all(p.grad.to_local().isfinite().all() for p in net.parameters()))
        norms.append(float(scaler.clip_grad_norm_(optimizer, 1.0).full_tensor()))
        skips.append(scaler.step(optimizer, return_skipped=True).skipped)
        scaler.update()
        optimizer.zero_grad()
    return {
        "skips": skips,
        "scale": scaler.loss_scale,
        "finite": finite,
        "norms": norms,
        "weights": {name: p.detach().to_local() for name, p in net.named_parameters()},
        "overflowed": scaler.overflowed(),
        "owners": [None if owner is None else names[id(owner())] for owner in flags.owners],
    }


def by_torch(mesh: DeviceMesh) -> dict[str, Any]:
    """Eager autocast with a constant scale, which leaves out the bad iteration."""
    net, norms, scale = on_mesh(mesh), [], 2.0**9
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for iteration in range(ITERATIONS):
        with torch.autocast("cpu", torch.float16):
            result = net(inputs(iteration))
        if iteration == BAD_ITERATION:
            continue
        (loss_of(result, iteration, bad=False) * scale).backward()
        for parameter in net.parameters():
            parameter.grad /= scale
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "weights": {name: p.detach().to_local() for name, p in net.named_parameters()}}


def inputs(iteration: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(iteration))


def work(mesh: DeviceMesh) -> dict[str, Any]:
    return {"torch": by_torch(mesh), **{lowering: train(mesh, lowering) for lowering in LOWERINGS}}


pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(work, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks: list[dict[str, Any]], lowering: str) -> None:
    rows = [results[lowering] for results in ranks]
    expected = [[True] * ITERATIONS, [i != BAD_ITERATION for i in range(ITERATIONS)]]
    assert [row["finite"] for row in rows] == expected, "the overflow must be on one rank for the test to show anything"
    for row in rows:
        assert row["skips"] == [i == BAD_ITERATION for i in range(ITERATIONS)]
        assert row["scale"] == 2.0**10


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_other_steps_are_those_of_eager_autocast(ranks: list[dict[str, Any]], lowering: str) -> None:
    for results in ranks:
        got, expected = results[lowering], results["torch"]
        assert [norm for i, norm in enumerate(got["norms"]) if i != BAD_ITERATION] == expected["norms"]
        assert_equal(got["weights"], expected["weights"])


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_flags_belong_to_the_parameters_of_the_mesh(ranks: list[dict[str, Any]], lowering: str) -> None:
    parameters = ["first.bias", "first.weight", "last.bias", "last.weight"]
    for rank, results in enumerate(ranks):
        assert sorted(results[lowering]["owners"]) == sorted(parameters * ITERATIONS)
        assert results[lowering]["overflowed"] == (dict.fromkeys(parameters, 1) if rank == BAD_RANK else {})
