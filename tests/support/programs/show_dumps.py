"""Graphs as the installed torch prints them, each beside the listing that fxamp makes of the same graph."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from fxamp.capture import capture
from fxamp.graph_text import Listing
from fxamp.passes.base import CastContext
from fxamp.pipeline import cast_graph
from fxamp.policy import Policy
from fxamp.reports.record import record_graph

POLICY = "cpu-bfloat16"


def dumped(
    model: Callable[..., Any], folder: Path, *args: Any, dynamic: bool = False, devices: bool = False, **kwargs: Any
) -> list[tuple[Path, Listing]]:
    """For every graph of one call: the file that holds its text, and the listing under :data:`POLICY`."""
    listings: list[tuple[Path, Listing]] = []
    policy = Policy.load(POLICY).resolve("cpu")

    def take(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        file = folder / f"graph_{len(listings)}.txt"
        text = gm.print_readable(print_output=False, include_device=devices, include_stride=devices)
        file.write_text(text, encoding="utf-8")
        captured = capture(gm, inputs)
        cast = cast_graph(captured, CastContext(captured.mode, policy))
        listings.append((file, record_graph(cast, "named by --policy").listing))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=take, dynamic=dynamic)(*args, **kwargs)
    return listings


def rows(listing: Listing) -> list[tuple[Any, ...]]:
    """What must agree, node for node: operation, dtypes, casts, the rule and the reason."""
    return [
        (
            entry.kind,
            entry.target if entry.is_call else "",
            tuple(value.dtype for value in entry.values),
            tuple(entry.was),
            entry.inserted,
            entry.rule.id if entry.rule else "",
            entry.reason,
        )
        for _, entry in listing.walk()
    ]


class Mlp(torch.nn.Module):
    """Two linear layers, a norm, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.second = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(torch.nn.functional.gelu(self.first(x)))).softmax(-1).sum()


class Conv(torch.nn.Module):
    """A residual convolution with batch norm, as ResNet has it, with its in-place additions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.conv = torch.nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.relu = torch.nn.ReLU(inplace=True)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.norm(self.conv(x))
        y += x
        pooled = torch.nn.functional.max_pool2d(self.relu(y), 2).mean((2, 3))
        return self.head(pooled.flatten(1))


class Attention(torch.nn.Module):
    """One block of a GPT."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class Gpt(torch.nn.Module):
    """Embeddings, two blocks (``checkpointed`` or not) and a loss."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens = torch.nn.Embedding(32, 16)
        self.places = torch.nn.Embedding(16, 16)
        self.blocks = torch.nn.ModuleList([Attention(), Attention()])
        self.head = torch.nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(x)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Branches(torch.nn.Module):
    """A cond whose branches run in different dtypes, a region without autocast, in-place writes, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda t: (t @ t).exp(), lambda t: t.sin(), (x,))
        with torch.autocast("cpu", enabled=False):
            y = y @ self.weight
        y[:, 0] = 3
        y = y.masked_fill(x > 0, float("-inf")).T.to(torch.float32, memory_format=torch.contiguous_format)
        with torch.no_grad():
            z = y.new_zeros(4) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return torch.einsum("ij,kj->ik", y, self.weight) * z


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Custom(torch.nn.Module):
    """A custom autograd.Function, and a vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _Square.apply(x, self.weight)
        return y + torch.vmap(lambda row: (row * 2).sum())(y).unsqueeze(-1)
