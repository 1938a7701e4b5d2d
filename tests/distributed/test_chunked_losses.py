"""Losses in chunks and dropped logits under DDP: the mean of single processes; heads whose classes are spread."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks.messages import said_by_fxamp
from support.machines.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fxamp.policy import Policy, Rule

WORDS, WIDTH, RANKS = 16, 8, 2
BASE = Policy.load("cpu-bfloat16")
RULES = (
    Rule("cut", ops=("cross_entropy_loss",), chunks=4),
    Rule("no-logits", drop=True, args={"result": {"rank": 2}}),
)
OPTIONS = {"policy": Policy("mine", "cpu", "bfloat16", rules=(*BASE.rules, *RULES)), "lowering": "aot_eager"}

Gradients = dict[str, Tensor]


class Tied(nn.Module):
    """Embedding and head share their weight; ``frozen`` has no gradient, as an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body, self.frozen = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(self.embedding(words)).tanh())
        return F.cross_entropy(logits, words.roll(-1)), logits


def words(rank: int) -> Tensor:
    return torch.randint(WORDS, (10,), generator=torch.Generator().manual_seed(rank))


def gradients(net: nn.Module, rank: int) -> Gradients:
    """Of two batches, accumulated."""
    for step in range(2):
        loss, _ = net(words(rank + 10 * step))
        loss.backward()
    gradients = {name.removeprefix("module."): p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {name: gradient.detach().clone() for name, gradient in gradients.items()}


def compiled() -> Tied:
    torch._dynamo.reset()
    net = Tied()
    net.compile(backend="fxamp", options=OPTIONS)
    return net


def parallel(mesh: DeviceMesh) -> list[str]:
    """What the log says of a head whose classes are spread over the ranks."""
    torch._dynamo.reset()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            logits = self.head(x)
            targets = DTensor.from_local(target, logits.device_mesh, [Replicate()])
            return F.cross_entropy(logits, targets).to_local()

    net = parallelize_module(Net(), mesh, {"head": ColwiseParallel(output_layouts=Replicate(), use_local_output=False)})
    net.compile(backend="fxamp", options=OPTIONS)
    with said_by_fxamp() as messages:
        net(torch.ones(10, WIDTH), words(0)).backward()
    return messages


def work(mesh: DeviceMesh) -> dict[str, Any]:
    rank = mesh.get_local_rank()
    plain = gradients(DistributedDataParallel(compiled()), rank)
    static = gradients(DistributedDataParallel(compiled(), gradient_as_bucket_view=True), rank)
    return {"plain": plain, "views": static, "parallel": parallel(mesh)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(work, RANKS, Path(tmp_path_factory.mktemp("ranks")))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["plain", "views"])
def test_gradients_are_the_mean_of_those_of_single_processes(ranks: list[dict[str, Any]], kind: str) -> None:
    alone = [gradients(compiled(), rank) for rank in range(RANKS)]
    for rank in ranks:
        assert rank[kind].keys() == alone[0].keys()
        for name, gradient in rank[kind].items():
            torch.testing.assert_close(gradient, torch.stack([of_rank[name] for of_rank in alone]).mean(0))


@pytest.mark.exhaustive
def test_the_log_names_a_head_that_is_spread_over_ranks(ranks: list[dict[str, Any]]) -> None:
    assert all("is not cut into chunks: its logits are a DTensor" in " ".join(rank["parallel"]) for rank in ranks)
