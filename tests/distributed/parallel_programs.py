"""Programs whose parameters are DTensors: the building blocks of tensor-parallel models, small."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN, HEADS, VOCABULARY = 8, 16, 4, 12


class Mlp(nn.Module):
    """A row-wise layer after a column-wise one: the plain norm before them lies outside of the mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Checkpointed(Mlp):
    """The same, computed again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


class Attention(nn.Module):
    """Each rank has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Words(nn.Module):
    """Embedding and head split over the vocabulary; the logits are whole again for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Layouts(nn.Module):
    """What a program may do with DTensors by hand: ops, a region without autocast, a write, new placements, views."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mesh = self.up.weight.device_mesh
        spread = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        h = self.up(spread)
        with torch.autocast("cpu", enabled=False):
            h = h + F.linear(spread, self.up.weight)
        h = torch.softmax(h.redistribute(placements=[Replicate()]), dim=-1)
        h = h + 0.5
        h.mul_(0.5)
        wide = h.float().redistribute(placements=[Shard(2)])
        out = self.down(wide)
        whole = out.full_tensor()
        scores = torch.einsum("bsh,bth->bst", wide, wide).redistribute(placements=[Shard(1)])
        return whole, whole[:1], scores.to_local()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 * x


class Functions(nn.Module):
    """A custom autograd.Function of a DTensor, then a frozen layer whose result is a DTensor too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.frozen = nn.Linear(HIDDEN, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = Square.apply(self.up(x))
        return self.frozen(h)


@dataclass(frozen=True)
class Program:
    """A net, how it is laid out over a mesh of one dimension, and its input on one rank of ``ranks``."""

    build: Callable[[], nn.Module]
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module]
    inputs: Callable[[int, int], tuple[Any, ...]]

    def make(self, mesh: DeviceMesh | None) -> nn.Module:
        """The net with its fixed first weights, in parallel if there is a mesh."""
        torch.manual_seed(0)
        net = self.build()
        return net if mesh is None else self.parallelize(net, mesh)


def planned(plan: Callable[[], Any]) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    return lambda net, mesh: parallelize_module(net, mesh, plan())


def whole(rank: int, ranks: int) -> tuple[Any, ...]:
    """The same input on every rank."""
    return (torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_(),)


def split(rank: int, ranks: int) -> tuple[Any, ...]:
    """This rank's part of the sequence."""
    (x,) = whole(rank, ranks)
    return (x.detach().chunk(ranks, dim=1)[rank].clone().requires_grad_(),)


def tokens(rank: int, ranks: int) -> tuple[Any, ...]:
    return (torch.randint(VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(1)),)


def mlp_plan(**outputs: Any) -> dict[str, Any]:
    return {"up": ColwiseParallel(**outputs), "down": RowwiseParallel(**outputs)}


def sequence_plan() -> dict[str, Any]:
    return {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }


def words_plan() -> dict[str, Any]:
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def attention_plan() -> dict[str, Any]:
    return {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "out": RowwiseParallel()}


def functions_plan() -> dict[str, Any]:
    return {"up": ColwiseParallel(use_local_output=False), "frozen": RowwiseParallel(use_local_output=False)}


PROGRAMS = {
    "mlp": Program(Mlp, planned(mlp_plan), whole),
    "sequence": Program(Mlp, planned(sequence_plan), split),
    "checkpoint": Program(Checkpointed, planned(mlp_plan), whole),
    "attention": Program(Attention, planned(attention_plan), whole),
    "words": Program(Words, planned(words_plan), tokens),
    "layouts": Program(Layouts, planned(lambda: mlp_plan(use_local_output=False)), whole),
    "functions": Program(Functions, planned(functions_plan), whole),
}
