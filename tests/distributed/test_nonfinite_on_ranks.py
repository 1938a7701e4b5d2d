"""Option "nonfinite" on two ranks: each says what is its own, under DDP and FSDP2."""

from functools import partial
from pathlib import Path

import pytest
import torch
from support.machines.ranks import on_ranks
from support.programs.small_models import unchanging
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxamp

RANKS = 2
Said = list[tuple[str, str, str, str]]


def overflowing(h: Tensor) -> Tensor:
    """Its forward overflows in float16 for large numbers; its backward is not finite for negative ones."""
    return torch.exp(h).mean() + torch.where(h > 0, torch.sqrt(h * (h > 0)), 0.0).sum()


def said(kind: str, sizes: tuple[float, float], lowering: str, mesh: DeviceMesh) -> Said:
    """What this rank reports of a step; ``sizes``: the numbers of each rank's batch."""
    torch._dynamo.reset()
    net = unchanging(overflowing)
    net.compile(backend="fxamp", options={"policy": "cpu-float16", "lowering": lowering, "nonfinite": "log"})
    model = DistributedDataParallel(net) if kind == "ddp" else fully_shard(net, mesh=mesh)
    model(torch.full((2, 4), sizes[mesh.get_rank()])).backward()
    found = fxamp.report(net).nonfinite
    return [(f.kind, f.region, (f.forward or f.entry).target, f.source.code if f.source else "") for f in found]


BATCHES = {"forward": (1.0, 20.0), "backward": (1.0, -1.0), "neither": (1.0, 2.0)}


def work(kind: str, lowering: str, mesh: DeviceMesh) -> dict[str, Said]:
    return {name: said(kind, sizes, lowering, mesh) for name, sizes in BATCHES.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_rank_reports_its_own(kind: str, lowering: str, tmp_path: Path) -> None:
    first, second = on_ranks(partial(work, kind, lowering), RANKS, tmp_path)
    assert not any(first.values())
    ((what, region, op, code),) = second["forward"]
    assert (what, region, op) == ("op", "forward", "aten::exp.default") and "torch.exp(h)" in code
    ((what, region, op, code),) = second["backward"]
    assert (what, region, op) == ("op", "backward", "aten::sqrt.default") and "torch.sqrt" in code
    assert second["neither"] == []
