"""Products in fp8 and kept rules on several ranks: what one process computes of the same batches, bit for bit."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch._functorch.partitioners as partitioners
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once, exhaustive
from support.checks.messages import said_by_fxamp
from support.machines.ranks import asked_by, on_ranks, whole
from support.oracles.saved_tensors_oracle import as_autograd_keeps, in_eight_bits, memory
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fxamp.optim.shards import joined, local
from fxamp.policy import Category, Policy, Rule

pytestmark = pytest.mark.exhaustive

RANKS = (2, 4)
WIDTH, HIDDEN, BLOCK = 32, 64, 32
BASE = Policy.load("cpu-bfloat16")
LEAST = 64
POLICIES = {
    "tensorwise": Rule("fp8", Category.FP8, ("linear",), recipe="tensorwise"),
    "rowwise": Rule("fp8", Category.FP8, ("linear",), recipe="rowwise"),
    "mxfp8": Rule("mxfp8", Category.MXFP8, ("linear",), recipe="rceil"),
    "nvfp4": Rule("nvfp4", Category.NVFP4, ("linear",), recipe="nearest"),
    "kept": Rule("all", keep="int8", region="kept", elements=f">={LEAST}", block=BLOCK),
}
SPREAD = ("replicated", "by block", "in one piece")

Gradients = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))).float()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def model() -> Stack:
    torch.manual_seed(0)
    return Stack()


def batch(rank: int) -> Tensor:
    """Ranks have batches of different ranges, so that one scale for all of them would show."""
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(rank)) * (1 + 3 * rank)


def options(name: str) -> dict[str, Any]:
    policy = Policy(name, "cpu", BASE.lower_precision_fp, rules=(*BASE.rules, POLICIES[name]))
    return {"policy": policy, "lowering": "aot_eager"}


def gradients(net: nn.Module, x: Tensor) -> Gradients:
    net.zero_grad()
    net(x).square().mean().backward()
    return {name.removeprefix("module."): gradient for name, gradient in gradients_of(net).items()}


def spread(mesh: DeviceMesh, kind: str, name: str) -> Gradients:
    """The mean over ranks of the gradients of their batches."""
    torch._dynamo.reset()
    net, settings = model(), options(name)
    if kind == "replicated":
        net.compile(backend="fxamp", options=settings)
        return gradients(DistributedDataParallel(net), batch(mesh.get_local_rank()))
    for block in net.blocks:
        if kind == "by block":
            block.compile(backend="fxamp", options=settings)
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    if kind == "in one piece":
        net.compile(backend="fxamp", options=settings)
    return gradients(net, batch(mesh.get_local_rank()))


def alone(kind: str, name: str, ranks: int) -> Gradients:
    """The same in one process, a batch after the other. A model that FSDP2 shards is one graph for each block."""
    torch._dynamo.reset()
    net = model()
    for results in [net] if kind == "replicated" else net.blocks:
        results.compile(backend="fxamp", options=options(name))
    rows = [gradients(net, batch(rank)) for rank in range(ranks)]
    return {key: torch.stack([row[key] for row in rows]).double().mean(0).float() for key in rows[0]}


def parallel(mesh: DeviceMesh) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model().blocks[0], mesh, plan)


def gradients_of(net: nn.Module) -> Gradients:
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    return {name: whole(gradient) for name, gradient in gradients.items() if gradient is not None}


def kept_in_parallel(mesh: DeviceMesh) -> tuple[Gradients, Gradients]:
    """By fxamp, and by eager autocast whose saved tensors are packed by hooks: the parts that this rank has."""
    torch._dynamo.reset()
    ours, theirs, x = parallel(mesh), parallel(mesh), batch(0)
    ours.compile(backend="fxamp", fullgraph=True, options=options("kept"))
    before, partitioners.min_cut_rematerialization_partition = (
        partitioners.min_cut_rematerialization_partition,
        as_autograd_keeps,
    )
    try:
        ours(x).square().mean().backward()
    finally:
        partitioners.min_cut_rematerialization_partition = before
    there = {value.untyped_storage().data_ptr() for value in map(local, (x, *theirs.parameters()))}

    def packed(value: Tensor) -> Tensor:
        part = local(value)
        if not value.is_floating_point() or part.untyped_storage().data_ptr() in there or part.numel() < LEAST:
            return value
        squeezed = in_eight_bits(memory(part), torch.int8, BLOCK).as_strided(part.shape, part.stride())
        return joined(squeezed, value) if isinstance(value, DTensor) else squeezed

    with saved_tensors_hooks(packed, lambda value: value), torch.autocast("cpu", torch.bfloat16):
        result = theirs(x)
    result.square().mean().backward()
    return gradients_of(ours), gradients_of(theirs)


def work(mesh: DeviceMesh, asked: Sequence[tuple[str, str]]) -> dict[str, Any]:
    results: dict[str, Any] = {f"{kind} {name}": spread(mesh, kind, name) for kind, name in asked}
    return results | {"refused": refused(mesh), "parallel": kept_in_parallel(mesh)}


def refused(mesh: DeviceMesh) -> list[str]:
    """What the log says of fp8 on DTensors."""
    torch._dynamo.reset()
    net = parallel(mesh)
    net.compile(backend="fxamp", fullgraph=True, options=options("tensorwise"))
    with said_by_fxamp() as messages:
        net(batch(0)).square().mean().backward()
    return messages


@pytest.fixture(scope="module", params=exhaustive(RANKS, always=[2]), ids=lambda ranks: f"{ranks} ranks")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """On each rank, what the selected tests ask for."""
    asked = sorted({(results["kind"], results["name"]) for results in asked_by(request) if "kind" in results})
    return on_ranks(partial(work, asked=asked), request.param, tmp_path_factory.mktemp("ranks"))


@each_once("kind, name", SPREAD, POLICIES)
def test_ranks_compute_what_one_process_does(ranks: list[dict[str, Any]], kind: str, name: str) -> None:
    expected = alone(kind, name, len(ranks))
    for results in ranks:
        got = results[f"{kind} {name}"]
        assert got.keys() == expected.keys() and len(got) == 12
        for key, value in expected.items():
            # The sum over two ranks has one order only; of four, three roundings.
            loose = 0.0 if len(ranks) == 2 else 3 * torch.finfo(torch.float32).eps * float(value.abs().max())
            torch.testing.assert_close(got[key], value, rtol=0, atol=loose)


def test_what_is_kept_of_dtensors_is_each_ranks_part(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert_equal(*results["parallel"])


def test_products_of_dtensors_stay_in_16_bits_and_are_logged(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        (message,) = results["refused"]
        assert "linear stays in 16 bits: its operands are not plain tensors" in message
