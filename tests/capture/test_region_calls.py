"""Regions that are calls in a graph (``nested_compile_region``, blocks of ``torch.export``) are cast as other code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracles.like_autocast import assert_like_autocast, assert_rewritten_like_autocast, leaf
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.capture.region_calls import inline_regions

REGIONS = torch.ops.higher_order.invoke_subgraph


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    @torch.compiler.nested_compile_region  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu()) * torch.tensor(2.0)


class Blocks(nn.Module):
    def __init__(self, through: Callable[..., Any] = lambda block, x: block(x)) -> None:
        super().__init__()
        self.blocks, self.through = nn.ModuleList(Block() for _ in range(3)), through

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.through(block, x)
        return x


@torch.compiler.nested_compile_region  # type: ignore[untyped-decorator]
def layer(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, weight).tanh(), x.sum(-1)


@torch.compiler.nested_compile_region  # type: ignore[untyped-decorator]
def layers(x: Tensor, weight: Tensor) -> Tensor:
    (y, total), (z, _) = layer(x, weight), layer(x * 0.5, weight)
    return y @ z.mT + total


def nested(x: Tensor, weight: Tensor) -> Tensor:
    return layers(layers(x, weight), weight)


def twice(x: Tensor, weight: Tensor) -> Tensor:
    return layer(layer(x, weight)[0], weight)[0].float()


def in_a_branch(x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = torch.cond(x.sum() > 0, lambda x: twice(x, weight), lambda x: x * 1, (x,))
    return y


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_regions_are_cast_as_under_autocast(lowering: str, around: bool) -> None:
    assert_like_autocast(Blocks(), leaf(4, 8), lowering=lowering, around=around)
    assert_like_autocast(nested, leaf(8, 8), leaf(8, 8), lowering=lowering, around=around)


def test_regions_in_other_bodies_are_cast() -> None:
    recomputed = Blocks(lambda block, x: checkpoint(block, x, use_reentrant=False))
    assert_like_autocast(recomputed, leaf(4, 8), lowering="aot_eager")
    positive = leaf(8, 8).detach().square().requires_grad_()
    assert_like_autocast(in_a_branch, positive, leaf(8, 8), lowering="aot_eager", oracle=twice)


def test_each_call_has_its_own_module_path(tmp_path: Path) -> None:
    policy = tmp_path / "p.toml"
    policy.write_text(
        'extends = ["cpu-bfloat16"]\n[[rule]]\nid = "last"\ncast = "fp32"\nops = ["aten::linear"]\n'
        'modules = ["blocks.2.first"]\nwhy = "a test"\n'
    )
    compiled = torch.compile(Blocks(), backend="fxamp", options={"policy": policy, "lowering": "aot_eager"})
    compiled(leaf(4, 8)).sum().backward()
    (graph,) = fxamp.report(compiled).graphs
    entries = [entry for entry in graph.listing.entries if entry.target == "aten::linear.default"]
    paths = [f"blocks.{at}.{name}" for at in range(3) for name in ("first", "second")]
    assert [entry.module for entry in entries] == paths
    dtypes = {entry.module: entry.values[0].dtype for entry in entries}
    assert dtypes == dict.fromkeys(paths, "bf16") | {"blocks.2.first": "f32"}


class WithBlocks(nn.Module):
    """Blocks without gradients and with another autocast, one in another.

    torch.export forgets whether autocast caches casts, and takes a value and its ``float()`` for one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            total = self.first(x * 1).sum(-1, keepdim=True)
        y = self.second(x) * total
        doubled = y * 2
        with torch.autocast("cpu", enabled=False):
            z = self.first(y.float())
            with torch.autocast("cpu", torch.bfloat16):
                z = z * self.third(z)
        return doubled, z, x + z


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_cast_as_its_model_is(strict: bool) -> None:
    model, x = WithBlocks(), leaf(4, 8)
    program = torch.export.export(model, (x,), strict=strict)
    for call in ("wrap_with_set_grad_enabled", "wrap_with_autocast", "_assert_tensor_metadata"):
        assert call in str(program)
    rewritten = assert_rewritten_like_autocast(program, x, oracle=model)
    assert "_assert_tensor_metadata" not in rewritten.code


def test_a_graph_without_regions_is_returned_as_it_is() -> None:
    captured: list[GraphModule] = []

    def backend(gm: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        captured.append(gm)
        return gm

    torch.compile(Blocks(), backend=backend)(torch.ones(4, 8))
    (gm,) = captured
    assert len(gm.graph.find_nodes(op="call_function", target=REGIONS)) >= 2
    inlined = inline_regions(gm)
    assert inlined is not gm and not inlined.graph.find_nodes(op="call_function", target=REGIONS)
    assert inline_regions(inlined) is inlined
