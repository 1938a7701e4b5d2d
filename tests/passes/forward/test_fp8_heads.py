"""chunk-losses under a rule for fp8: each chunk is what torchao's layer computes for its rows."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.checks.bench_graph import Workbench, policy, workbench
from support.checks.exhaustive import exhaustive
from support.machines.lacks import needs_rowwise_products
from support.oracles.torchao_beside import RECIPES, autocast, converted, multiplied
from torch import Tensor, nn
from torch.nn import functional as F

import fxamp
from fxamp.graph import all_nodes
from fxamp.kernels.linear_cross_entropy import CHUNKED
from fxamp.passes.forward.annotate_rules import AnnotateRules
from fxamp.passes.forward.chunk_losses import ChunkLosses
from fxamp.passes.forward.expand_composites import ExpandComposites
from fxamp.passes.forward.insert_casts import InsertCasts
from fxamp.passes.forward.scale_products import ScaleProducts
from fxamp.passes.shared.decision import decision
from fxamp.policy import Category, Policy, Rule

WIDTH, CLASSES, CHUNKS = 32, 64, 4
SOFTMAX = Rule("softmax", Category.FP32, ("log_softmax", "nll_loss_nd"))


def under(recipe: str) -> Policy:
    cut = Rule("cut", ops=("cross_entropy_loss",), chunks=16)
    return policy(Rule("fp8", Category.FP8, ("linear",), recipe=recipe), SOFTMAX, cut)


class Net(nn.Module):
    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), target, reduction="sum")


def inputs(rows: int = 64) -> tuple[Tensor, Tensor]:
    """Rows of very different sizes, so that a scale for a few of them is not that of all."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, WIDTH, generator=generator) * torch.logspace(-2, 1, rows).unsqueeze(1)
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def bench_of(recipe: str, classes: int = CLASSES) -> Workbench:
    x, target = inputs()
    bench = workbench(Net(classes), x, target % classes, under=under(recipe))
    bench.run(ExpandComposites(), AnnotateRules(), InsertCasts(), ChunkLosses(), ScaleProducts())
    return bench


def ours(module: nn.Module, x: Tensor, target: Tensor, rules: Policy, lowering: str = "aot_eager") -> list[Tensor]:
    torch._dynamo.reset()
    options: dict[str, Any] = {"policy": rules, "lowering": lowering}
    return outcome(torch.compile(module, backend="fxamp", options=options), module, x, target)


def outcome(run: Any, module: nn.Module, x: Tensor, target: Tensor) -> list[Tensor]:
    module.zero_grad()
    rows = x.clone().requires_grad_()
    loss = run(rows, target)
    loss.backward()
    gradients = [tensor.grad for tensor in (rows, *module.parameters()) if tensor.grad is not None]
    assert len(gradients) == 3
    return [loss.detach().double(), *(gradient.double() for gradient in gradients)]


def cut(tensor: Tensor) -> Iterator[Tensor]:
    ends = [tensor.shape[0] * i // CHUNKS for i in range(CHUNKS + 1)]
    return (tensor[start:end] for start, end in pairwise(ends))


@pytest.mark.parametrize("recipe", exhaustive(multiplied(*RECIPES), always=["rowwise"]))
def test_each_chunk_is_torchaos_layer_on_its_rows(recipe: str) -> None:
    x, target = inputs()
    chunked = ours(module := Net(), x, target, under(recipe))
    layer = converted(module, recipe)
    layer.zero_grad()
    rows, losses = x.clone().requires_grad_(), []
    for part, classes in zip(cut(rows), cut(target), strict=True):
        with autocast(torch.bfloat16):
            losses.append(layer(part, classes))
        losses[-1].backward()
    assert rows.grad is not None
    theirs = [sum(losses), rows.grad, *(p.grad for p in layer.parameters())]
    for index, (one, other) in enumerate(zip(chunked, theirs, strict=True)):
        assert isinstance(other, Tensor)
        # The softmax is made of other ops, so its gradients may be rounded to the next 8 bits, a 16th apart.
        tolerance = 1e-5 if index == 0 else 2**-5
        assert (one - other.double()).norm() <= tolerance * other.double().norm()


@needs_rowwise_products
def test_the_head_of_a_chunked_loss_runs_in_fp8() -> None:
    bench = bench_of("rowwise")
    (call,) = (node for node in all_nodes(bench.captured.module) if node.target is CHUNKED)
    choice = decision(call)
    assert call.args[-1] == "rowwise" and choice is not None and choice.rule is not None
    assert choice.rule.id == "fp8" and choice.reason.startswith("4 chunks") and not choice.not_fp8


@pytest.mark.exhaustive
def test_a_head_that_kernels_do_not_support_is_cut_in_16_bits() -> None:
    bench = bench_of("rowwise", classes=50)
    (call,) = (node for node in all_nodes(bench.captured.module) if node.target is CHUNKED)
    choice = decision(call)
    assert call.args[-1] == "forward" and choice is not None and choice.rule is not None
    assert choice.rule.id == "cut" and choice.not_fp8 == "size 0 of the weight is 50, not a multiple of 16"


def test_the_report_counts_it() -> None:
    module = Net()
    module.compile(backend="fxamp", options={"policy": under("tensorwise"), "lowering": "aot_eager"})
    module(*inputs()).backward()
    assert "tensorwise: 1" in str(fxamp.report(module))


@pytest.mark.inductor
@pytest.mark.exhaustive
def test_the_error_is_at_most_that_of_all_rows_at_once_under_inductor() -> None:
    x, target = inputs()
    eager, compiled = (ours(Net(), x, target, under("rowwise"), lowering) for lowering in ("aot_eager", "inductor"))
    for one, other in zip(compiled, eager, strict=True):
        assert (one - other).norm() <= 2**-5 * other.norm()
