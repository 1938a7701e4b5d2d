"""Every op of a backward in the other dtype: real kernels run, and give the dtypes that the graph says they give."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backward_graphs import backward_graph, mode_of
from support.checks.exhaustive import exhaustive
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fxamp.capture import Captured
from fxamp.passes.backward.cast_backward import CastBackward
from fxamp.passes.base import CastContext
from fxamp.passes.shared.decision import decision
from fxamp.pipeline import run_passes
from fxamp.policy import Category, Policy, Rule

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "linear": (lambda x, w, b: F.gelu(F.linear(x, w, b)), ((3, 4), (5, 4), (5,))),
    "softmax": (lambda x: x.softmax(-1) * x.log_softmax(0), ((3, 4),)),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.arange(3)), ((3, 4),)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), ((3, 4), (4,), (4,))),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), ((3, 4, 5), (4,), (4,))),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ((3, 4, 5), (4,), (4,))),
    "rms norm": (lambda x, w: F.rms_norm(x, (4,), w), ((3, 4), (4,))),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), ((1, 2, 4, 8),) * 3),
    "convolution": (lambda x, w: F.conv2d(x, w).relu(), ((2, 3, 6, 6), (4, 3, 3, 3))),
    "pooling in 3d": (lambda x: F.avg_pool3d(x, 2), ((1, 2, 4, 4, 4),)),
    "embedding": (lambda w: F.embedding(torch.tensor([0, 2, 2]), w), ((4, 5),)),
    "reductions": (lambda x: x.std(0) + x.logsumexp(0) + x.prod(0) + x.norm(dim=0), ((3, 4),)),
    "joins": (lambda x, y: torch.cat((x, y))[1:].cumsum(0).where(torch.tensor(True), torch.tensor(0.0)), ((3, 4),) * 2),
}


class DtypeCheck(Interpreter):
    """Runs a graph, and notes results whose dtype is not the one that the graph says."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.wrong: list[str] = []

    def run_node(self, n: Node) -> Any:
        result, messages = super().run_node(n), n.meta.get("val")
        if isinstance(messages, Tensor) and messages.dtype != result.dtype:
            self.wrong.append(f"{n.format_node()}: says {messages.dtype}, gives {result.dtype}")
        return result


#: avg_pool3d has no bfloat16 kernel on the CPU to begin with.
WIDENED = [name for name in PROGRAMS if name != "pooling in 3d"]


@pytest.mark.parametrize("program", exhaustive(PROGRAMS, always=list(PROGRAMS)[::2]))
def test_lowered_kernels_compute_the_graphs_results(program: str) -> None:
    assert wrong_dtypes(program, torch.float32, Category.LOWER_PRECISION_FP) == []


@pytest.mark.parametrize("program", exhaustive(WIDENED, always=WIDENED[::2]))
def test_widened_kernels_compute_the_graphs_results(program: str) -> None:
    assert wrong_dtypes(program, torch.bfloat16, Category.FP32) == []


def wrong_dtypes(program: str, captured: torch.dtype, cast: Category) -> list[str]:
    """Where a kernel gives a different dtype than the graph says, in the backward with every op cast."""
    run, shapes = PROGRAMS[program]
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.rand(shape, generator=generator).to(captured).requires_grad_() for shape in shapes]
    gm = backward_graph(run, *leaves)
    mode = mode_of(gm)
    everything = Rule("all", cast, ("*", "*::*"), region="backward")
    policy = replace(Policy.load("cpu-bfloat16").resolve(), rules=(everything,))
    run_passes(Captured(gm, mode), CastContext(mode, policy), CastBackward())
    assert any(decision(node) for node in gm.graph.nodes)
    check = DtypeCheck(gm)
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    real = [
        torch.full(v.shape, 0.5).to(v.dtype) if v.is_floating_point() else torch.zeros(v.shape, dtype=v.dtype)
        for v in inputs
    ]
    check.run(*real)
    return check.wrong
