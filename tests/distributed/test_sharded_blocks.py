"""FSDP2 around compiled blocks, or around a model compiled whole: inside of the graphs parameters are gathered."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from parallel_programs import PROGRAMS, WIDTH, Mlp
from parallel_runs import SCALE
from support.machines.ranks import asked_by, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import fxamp
from fxamp.optim.shards import local
from fxamp.reports import registry

RANKS = (2, 4)
LOWERINGS = ("eager", "aot_eager")
MESHES = ("sharded", "sharded and parallel")
WHOLE = ("in one piece", "by block")
"""How a model that is compiled whole is sharded; its own parameter is in the graphs too."""

Gradients = dict[str, Tensor]


class Block(Mlp):
    """Its result is float32, as that of a compiled graph is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.gain = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain(self.blocks(x)).float()


def step(mesh: DeviceMesh, kind: str, scaled: bool, lowering: str | None) -> Gradients:
    """The gradients on this rank, by fxamp or (``lowering`` is None) by eager autocast."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    if kind in WHOLE:
        return trained(whole_model(mesh, kind, scaled, lowering), scaled, lowering)
    blocks = [Block(), Block()]
    if kind == "sharded and parallel":
        shape = (mesh.size() // 2, 2)
        both = init_device_mesh("cpu", shape, mesh_dim_names=("sharded", "parallel"))
        mesh = both["sharded"]
        for block in blocks:
            PROGRAMS["sequence"].parallelize(block, both["parallel"])
    for block in blocks:
        if lowering is not None:
            block.compile(backend="fxamp", options=options(scaled, lowering))
        fully_shard(block, mesh=mesh)
    return trained(fully_shard(nn.Sequential(*blocks), mesh=mesh), scaled, lowering)


def whole_model(mesh: DeviceMesh, kind: str, scaled: bool, lowering: str | None) -> nn.Module:
    net = Whole()
    for block in net.blocks if kind == "by block" else ():
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    if lowering is not None:
        net.compile(backend="fxamp", options=options(scaled, lowering))
    return net


def options(scaled: bool, lowering: str) -> dict[str, Any]:
    chosen = {"policy": "cpu-float16" if scaled else "cpu-bfloat16", "lowering": lowering}
    return chosen | ({"scaler": fxamp.GradScaler("cpu", init_scale=SCALE)} if scaled else {})


def trained(net: nn.Module, scaled: bool, lowering: str | None) -> Gradients:
    before = registry.count()
    x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(torch.distributed.get_rank())).requires_grad_()
    with torch.autocast("cpu", torch.float16 if scaled else torch.bfloat16, enabled=lowering is None):
        result = net(x)
    by_hand = SCALE if scaled and lowering is None else 1.0
    (result.square().sum() * by_hand).backward()
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()} | {"input": x.grad}
    ratios = {name: local(gradient) / by_hand for name, gradient in gradients.items()}
    own = [record for record in registry.recent(before) if isinstance(net, Whole) and "gain" in str(record.listing)]
    return ratios | {"graphs": torch.tensor(len(own))}


def work(mesh: DeviceMesh, asked: Sequence[tuple[str, bool, str | None]]) -> dict[str, Gradients]:
    return {f"{kind} {lowering} {scaled}": step(mesh, kind, scaled, lowering) for kind, scaled, lowering in asked}


@pytest.fixture(scope="module", params=RANKS, ids=lambda ranks: f"{ranks} ranks")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """On each rank, what the selected tests ask for."""
    cases = asked_by(request)
    asked = [
        (parameters["kind"], parameters["scaled"], lowering)
        for parameters in cases
        for lowering in (None, parameters["lowering"])
    ]
    return on_ranks(partial(work, asked=[*dict.fromkeys(asked)]), request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", (*MESHES, *WHOLE))
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_those_of_eager_autocast(
    ranks: list[dict[str, Gradients]], kind: str, lowering: str, scaled: bool
) -> None:
    for runs in ranks:
        got, expected = dict(runs[f"{kind} {lowering} {scaled}"]), dict(runs[f"{kind} None {scaled}"])
        assert got.keys() == expected.keys() and len(expected) == 14 + (kind in WHOLE)
        assert got.pop("graphs") == (kind in WHOLE) and expected.pop("graphs") == 0
        for name, gradient in expected.items():
            assert gradient.isfinite().all() and torch.equal(got[name], gradient), name
