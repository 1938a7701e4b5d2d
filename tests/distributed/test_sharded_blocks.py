"""FSDP2 around compiled blocks: outside of the graphs parameters are DTensors, inside of them the gathered ones."""

from typing import Any

import pytest
import torch
from parallel_programs import PROGRAMS, WIDTH, Mlp
from parallel_runs import SCALE, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fxamp

RANKS = 2
LOWERINGS = ("eager", "aot_eager")
MESHES = ("sharded", "sharded and parallel")

Gradients = dict[str, Tensor]


class Block(Mlp):
    """Its result is float32, as that of a compiled graph is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


def step(mesh: DeviceMesh, kind: str, scaled: bool, lowering: str | None) -> Gradients:
    """The gradients on this rank, by fxamp or (``lowering`` is None) by eager autocast."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = [Block(), Block()]
    if kind == "sharded and parallel":
        both = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("sharded", "parallel"))
        mesh = both["sharded"]
        for block in blocks:
            PROGRAMS["sequence"].parallelize(block, both["parallel"])
    lower = "float16" if scaled else "bfloat16"
    for block in blocks:
        if lowering is not None:
            chosen = {"policy": f"cpu-{lower}", "lowering": lowering}
            given = {"scaler": fxamp.GradScaler("cpu", init_scale=SCALE)} if scaled else {}
            block.compile(backend="fxamp", options=chosen | given)
        fully_shard(block, mesh=mesh)
    net = fully_shard(nn.Sequential(*blocks), mesh=mesh)
    x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(torch.distributed.get_rank())).requires_grad_()
    with torch.autocast("cpu", getattr(torch, lower), enabled=lowering is None):
        result = net(x)
    by_hand = SCALE if scaled and lowering is None else 1.0
    (result.square().sum() * by_hand).backward()
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()} | {"input": x.grad}
    return {name: _local(gradient) / by_hand for name, gradient in gradients.items()}


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def work(mesh: DeviceMesh) -> dict[str, Gradients]:
    return {
        f"{kind} {lowering} {scaled}": step(mesh, kind, scaled, lowering)
        for kind in MESHES
        for scaled in (False, True)
        for lowering in (None, *LOWERINGS)
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(work, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scaled", [False, True], ids=["bfloat16", "scaled float16"])
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("kind", MESHES)
def test_gradients_are_those_of_eager_autocast(
    ranks: list[dict[str, Gradients]], kind: str, lowering: str, scaled: bool
) -> None:
    for runs in ranks:
        got, wanted = runs[f"{kind} {lowering} {scaled}"], runs[f"{kind} None {scaled}"]
        assert got.keys() == wanted.keys() and len(wanted) == 13
        for name, gradient in wanted.items():
            assert gradient.isfinite().all() and torch.equal(got[name], gradient), name
