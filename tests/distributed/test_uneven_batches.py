"""Ranks whose batches have other sizes, or that have fewer of them, against one process on the same global batches."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_programs import WIDTH, Mlp
from parallel_runs import SCALE
from support.checks.exhaustive import exhaustive
from support.machines.ranks import asked_by, on_ranks, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxamp
from fxamp.errors import UnscaledError

RANKS = (2, 4)
BATCHES = ((4, 4, 4, 4), (2, 3, 5, 4), (3, 1, 2, 1))
"""The sizes on each rank, step by step: the last ones are what is left of the data."""
KINDS = ("replicated", "sharded")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Mlp(), Mlp())


def batch(step: int, rank: int, size: int) -> Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(result: Tensor, size: int, ranks: int) -> Tensor:
    """This rank's part of the mean over the global batch; the mean over ranks is taken of it."""
    return result.float().square().sum() * (ranks / size)


def lower(scaled: bool) -> str:
    return "float16" if scaled else "bfloat16"


def train(mesh: DeviceMesh, kind: str, scaled: bool) -> dict[str, Tensor]:
    torch._dynamo.reset()
    net, ranks, rank = model(), mesh.size(), mesh.get_local_rank()
    scaler = fxamp.GradScaler("cpu", init_scale=SCALE, enabled=scaled)
    options = {"policy": f"cpu-{lower(scaled)}", "lowering": "aot_eager", "scaler": scaler}
    for block in net:
        block.compile(backend="fxamp", options=options)
        if kind == "sharded":
            fully_shard(block, mesh=mesh)
    wrapped = fully_shard(net, mesh=mesh) if kind == "sharded" else DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    for step, sizes in enumerate(BATCHES):
        own = sizes[:ranks]
        scaler.scale(loss_of(wrapped(batch(step, rank, own[rank])), sum(own), ranks)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {name: whole(value) for name, value in net.named_parameters()}


def alone(ranks: int, scaled: bool) -> dict[str, Tensor]:
    """One process under eager autocast, which goes through the parts of a global batch one by one."""
    net, factor = model(), SCALE if scaled else 1.0
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    for step, sizes in enumerate(BATCHES):
        own = sizes[:ranks]
        for rank, size in enumerate(own):
            x = batch(step, rank, size)
            for block in net:  # whose results leave a compiled graph in float32
                with torch.autocast("cpu", getattr(torch, lower(scaled))):
                    x = block(x)
                x = x.float()
            (loss_of(x, sum(own), ranks) / ranks * factor).backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad /= factor
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in net.named_parameters()}


def joined(scaler: Any, options: dict[str, Any] | None) -> dict[str, Tensor]:
    """Training in which each rank has one step more than the one before it; ``options``: None for eager autocast."""
    torch._dynamo.reset()
    net = model()
    if options is not None:
        net.compile(backend="fxamp", options={"lowering": "aot_eager", **options})
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    dtype = torch.float16 if scaler.is_enabled() else torch.bfloat16
    with wrapped.join():
        for step in range(1 + dist.get_rank()):
            with torch.autocast("cpu", dtype):
                result = wrapped(batch(step, dist.get_rank(), 2))
            scaler.scale(result.float().square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in net.named_parameters()}


def refusal() -> str:
    try:
        scaler = fxamp.GradScaler("cpu", init_scale=SCALE)
        joined(scaler, {"policy": "cpu-float16", "scaler": scaler})
    except UnscaledError as error:
        return str(error)
    return ""


def work(mesh: DeviceMesh, asked: Sequence[tuple[str, bool]], named: Sequence[str]) -> dict[str, Any]:
    results: dict[str, Any] = {f"{kind} {scaled}": train(mesh, kind, scaled) for kind, scaled in asked}
    if "joined" in named:
        off = torch.amp.GradScaler("cpu", enabled=False)
        results["joined"] = joined(off, {"policy": "cpu-bfloat16"}), joined(off, None)
    alone, torchs = (kind("cpu", SCALE, **more) for kind, more in JOINED)
    results["joined, scaled"] = joined(alone, {"policy": "cpu-float16"}), joined(torchs, None)
    return results | {"refused": refusal()}


JOINED: tuple[tuple[Any, dict[str, Any]], ...] = (
    (partial(fxamp.GradScaler), {"ranks": None}),
    (partial(torch.amp.GradScaler), {}),
)


@pytest.fixture(scope="module", params=exhaustive(RANKS, always=[]), ids=lambda ranks: f"{ranks} ranks")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """On each rank, what the selected tests ask for."""
    cases = asked_by(request)
    asked = sorted({(case["kind"], case["scaled"]) for case in cases if "kind" in case})
    named = [case["name"] for case in cases if "name" in case]
    return on_ranks(partial(work, asked=asked, named=named), request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scaled", [False, True])
def test_other_sizes_on_each_rank_train_as_one_process_does(
    ranks: list[dict[str, Any]], kind: str, scaled: bool
) -> None:
    expected = alone(len(ranks), scaled)
    for results in ranks:
        got = results[f"{kind} {scaled}"]
        for name, value in expected.items():
            # The sum over two ranks has one order only.
            loose = 0.0 if len(ranks) == 2 else 1e-3
            torch.testing.assert_close(got[name], value, rtol=loose, atol=loose)


@pytest.mark.parametrize("name", exhaustive(["joined", "joined, scaled"], always=["joined, scaled"]))
def test_a_rank_that_ends_before_the_others(ranks: list[dict[str, Any]], name: str) -> None:
    for results in ranks:
        ours, theirs = results[name]
        for key, value in theirs.items():
            assert torch.equal(ours[key], value) and torch.equal(value, ranks[0][name][1][key]), key


def test_a_scaler_that_asks_all_ranks_is_refused_where_one_may_have_ended(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert "join()" in results["refused"] and "accepted" in results["refused"]
