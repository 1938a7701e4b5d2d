"""Loops of real trainers: torchtitan's blocks compiled one by one, sharded and saved; ZeRO's optimizer under DDP."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel_programs import WIDTH, Mlp
from support.checks.equality import assert_equal
from support.machines.ranks import on_ranks, whole
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fxamp

pytestmark = pytest.mark.exhaustive

RANKS, BAD_RANK = 2, 1
STEPS, LOUD = 4, 2
SCALE = 2.0**8
NAMES = [f"blocks.{at}.{name}" for at in range(2) for name in Mlp().state_dict()]


class Model(nn.Module):
    """The loss is outside of the compiled blocks, as is the root's own parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (x * self.gain).square().mean()


def sharded(mesh: DeviceMesh, options: dict[str, Any] | None) -> Model:
    """As torchtitan prepares a model: checkpoint, compile, shard, block by block."""
    model = Model()
    for at, block in enumerate(model.blocks):
        model.blocks[at] = checkpoint_wrapper(block)
        if options is not None:
            model.blocks[at].compile(backend="fxamp", fullgraph=True, options=options)
        fully_shard(model.blocks[at], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(step: int, loud: bool) -> Tensor:
    """This rank's; ``loud``: in one step one rank's holds values that float16 does not."""
    seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(2, WIDTH, generator=seed)
    return x * 1e30 if loud and (step, dist.get_rank()) == (LOUD, BAD_RANK) else x


def train(mesh: DeviceMesh, lower: str, lowering: str | None, folder: Path | None = None) -> dict[str, Any]:
    """torchtitan's loop, by fxamp or (``lowering`` is None) by eager autocast, which leaves out the overflow."""
    torch._dynamo.reset()
    scaler = fxamp.GradScaler("cpu", init_scale=SCALE, enabled=lower == "float16")
    options = None if lowering is None else {"policy": f"cpu-{lower}", "lowering": lowering, "scaler": scaler}
    model = sharded(mesh, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if lowering is None and lower == "float16" and step == LOUD:
            continue
        with torch.autocast("cpu", getattr(torch, lower), enabled=lowering is None):
            loss = model(batch(step, loud=lower == "float16"))
        factor = SCALE if lowering is None and lower == "float16" else 1.0
        scaler.scale(loss).backward() if lowering else (loss * factor).backward()
        for parameter in model.parameters():
            parameter.grad /= factor
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)).item())
        scaler.step(optimizer) if lowering else optimizer.step()
        scaler.update() if lowering else None
    if folder is not None:
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    weights = {name: whole(value) for name, value in get_state_dict(model, optimizer)[0].items()}
    skipped = scaler.skipped_steps if lowering and lower == "float16" else 0
    graphs = [len(fxamp.report(block).graphs) for block in model.blocks]
    return {"norms": [norm for norm in norms if norm == norm], "weights": weights, "skipped": skipped, "graphs": graphs}


def load(mesh: DeviceMesh, folder: Path) -> dict[str, Tensor]:
    """The weights that a run on another number of ranks saved."""
    model = sharded(mesh, {"policy": "cpu-bfloat16", "lowering": "eager"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return {name: whole(value) for name, value in get_state_dict(model, optimizer)[0].items()}


def replicated(zero: bool) -> dict[str, Any]:
    """DDP with ZeRO's optimizer, or each rank with all of AdamW's state; one rank overflows."""
    torch._dynamo.reset()
    scaler, model = fxamp.GradScaler("cpu", init_scale=SCALE), Model()
    model.compile(backend="fxamp", options={"policy": "cpu-float16", "lowering": "aot_eager", "scaler": scaler})
    wrapped = DistributedDataParallel(model)
    kind = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW) if zero else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(wrapped(batch(step, loud=True))).backward()
        scaler.step(optimizer)
        scaler.update()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    return {"weights": weights, "skipped": scaler.skipped_steps, "scale": scaler.loss_scale}


def work(mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {
        lower: (train(mesh, lower, None), train(mesh, lower, "aot_eager", folder if lower == "float16" else None))
        for lower in ("bfloat16", "float16")
    }
    return results | {"zero": replicated(True), "ddp": replicated(False)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def ranks(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(partial(work, folder=saved), RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("lower", ["bfloat16", "float16"])
def test_sharded_blocks_train_as_under_eager_autocast(ranks: list[dict[str, Any]], lower: str) -> None:
    for rank in ranks:
        theirs, ours = rank[lower]
        assert ours["norms"] == theirs["norms"]
        assert len(ours["norms"]) == STEPS - (lower == "float16") and ours["graphs"] == [1, 1]
        assert ours["skipped"] == (lower == "float16")
        assert_equal(ours["weights"], theirs["weights"])


def test_another_number_of_ranks_loads_what_was_saved(ranks: list[dict[str, Any]], saved: Path, tmp_path: Path) -> None:
    (loaded,) = on_ranks(partial(load, folder=saved), 1, tmp_path)

    assert sorted(loaded) == sorted([*NAMES, "gain"])
    assert_equal(loaded, ranks[0]["float16"][1]["weights"])


def test_zeros_optimizer_skips_with_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["zero"]["skipped"] == rank["ddp"]["skipped"] == 1
        assert rank["zero"]["scale"] == rank["ddp"]["scale"] == SCALE / 2
        assert_equal(rank["zero"]["weights"], rank["ddp"]["weights"])
        assert_equal(rank["zero"]["weights"], ranks[0]["zero"]["weights"])
