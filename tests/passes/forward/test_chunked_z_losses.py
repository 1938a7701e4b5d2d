"""chunk-losses: a ``logsumexp`` beside the loss, as a z-loss reads it, comes from the chunked loss."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.bench_graph import Workbench, policy, workbench
from support.checks.exhaustive import exhaustive
from support.programs.small_models import Layer
from torch import Tensor, nn
from torch.nn import functional as F

from fxamp.graph import all_nodes, op_name
from fxamp.passes.forward.annotate_rules import AnnotateRules
from fxamp.passes.forward.chunk_losses import ChunkLosses
from fxamp.passes.forward.expand_composites import ExpandComposites
from fxamp.passes.forward.insert_casts import InsertCasts
from fxamp.policy import Category, Policy, Rule

CLASSES = 12
RULES = (
    Rule("products", Category.LOWER_PRECISION_FP, ("linear",)),
    Rule("wide", Category.FP32, ("log_softmax", "nll_loss_nd", "logsumexp", "pow")),
)
CHUNKS = policy(*RULES, Rule("cut", ops=("cross_entropy_loss",), chunks=4))
ROWS, TARGET = torch.arange(80.0).view(2, 5, 8).sin(), torch.arange(10).view(2, 5) % CLASSES

Loss = Callable[[Tensor, Tensor], Any]


def net(loss: Loss) -> nn.Module:
    """A linear layer; ``loss`` is what a program makes of logits ``[2, 5, C]`` and classes ``[2, 5]``."""
    torch.manual_seed(0)
    return Layer(8, loss, CLASSES)


def of_rows(logits: Tensor, target: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1), **settings)


def palm(logits: Tensor, target: Tensor) -> Tensor:
    return of_rows(logits, target) + 1e-1 * (torch.logsumexp(logits, dim=-1) ** 2).mean()


def olmo(logits: Tensor, target: Tensor) -> Tensor:
    """The mask is not the loss's."""
    rows, labels = logits.float().view(-1, CLASSES), target.view(-1)
    z_squared = rows.logsumexp(-1).pow(2)
    return F.cross_entropy(rows, labels, ignore_index=3) + 0.1 * (z_squared * (labels != 3)).mean()


def megatron(logits: Tensor, target: Tensor) -> Tensor:
    """The z-loss comes first, and is another result."""
    z_loss = torch.mean(torch.square(torch.logsumexp(logits, dim=-1))) * 0.1
    return z_loss + of_rows(logits, target)


def classes_second(logits: Tensor, target: Tensor) -> Tensor:
    columns = logits.transpose(1, 2)
    return F.cross_entropy(columns, target, reduction="sum") + columns.logsumexp(1, keepdim=True).square().sum()


def of_each_row(logits: Tensor, target: Tensor) -> Tensor:
    rows = logits.view(-1, CLASSES)
    return (F.cross_entropy(rows, target.view(-1), reduction="none") + rows.logsumexp(-1).square()).mean()


def twice(logits: Tensor, target: Tensor) -> Tensor:
    return of_rows(logits, target) + logits.logsumexp(2).mean() - 0.1 * logits.float().logsumexp([-1]).exp().mean()


LOSSES = [palm, olmo, megatron, classes_second, of_each_row, twice]


def bench_of(loss: Loss, under: Policy = CHUNKS) -> Workbench:
    bench = workbench(net(loss), ROWS, TARGET, under=under)
    bench.run(ExpandComposites(), AnnotateRules(), InsertCasts())
    return bench


def cut(bench: Workbench) -> int:
    names = [op_name(node) for node in all_nodes(bench.captured.module)]
    return names.count("fxamp::linear_cross_entropy_and_log_sums.default")


def test_a_z_loss_before_its_loss() -> None:
    bench = bench_of(megatron)
    assert bench.golden("chunk-z-losses", ChunkLosses()).modified == 1
    assert cut(bench) == 1


def outcome(module: nn.Module, x: Tensor, under: Policy | None, lowering: str = "eager") -> list[Tensor]:
    torch._dynamo.reset()
    rows = x.clone().requires_grad_()
    options: dict[str, Any] = {"policy": under, "lowering": lowering}
    run = module if under is None else torch.compile(module, backend="fxamp", options=options)
    module.zero_grad()
    loss = run(rows, TARGET)
    loss.backward()
    gradients = [tensor.grad for tensor in (rows, *module.parameters())]
    assert all(gradient is not None for gradient in gradients)
    return [loss.detach().double(), *(gradient.double() for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("loss", exhaustive(LOSSES, always=[*LOSSES][::3]))
@pytest.mark.parametrize("lowering", exhaustive(["eager", "aot_eager"], always=["aot_eager"]))
def test_the_error_is_at_most_that_of_the_whole_loss(loss: Loss, lowering: str) -> None:
    bench = bench_of(loss)
    assert bench.run(ChunkLosses()).modified == cut(bench) == 1 and "%logsumexp" not in bench.text
    module = net(loss)
    exact = outcome(copy.deepcopy(module).double(), ROWS.double(), None)
    ours, whole = (outcome(module, ROWS, under, lowering) for under in (CHUNKS, policy(*RULES)))
    for one, other, truth in zip(ours, whole, exact, strict=True):
        assert (one - truth).norm() <= 2**0.5 * (other - truth).norm() + 1e-6


@pytest.mark.exhaustive
@pytest.mark.inductor
def test_the_error_is_at_most_that_of_the_whole_loss_under_inductor() -> None:
    test_the_error_is_at_most_that_of_the_whole_loss(megatron, "inductor")


def of_other_rows(logits: Tensor, target: Tensor) -> Tensor:
    return of_rows(logits[:, 1:].contiguous(), target[:, 1:].contiguous()) + logits.logsumexp(-1).mean()


def of_the_rows(logits: Tensor, target: Tensor) -> Tensor:
    return of_rows(logits, target) + logits.logsumexp(1).mean()


def unwatched(logits: Tensor, target: Tensor) -> Tensor:
    loss = of_rows(logits, target)
    with torch.no_grad():
        log_sums = logits.logsumexp(-1)
    return loss + log_sums.mean()


def maxima(logits: Tensor, target: Tensor) -> Tensor:
    return of_rows(logits, target) + (logits - logits.amax(-1, keepdim=True)).logsumexp(-1).mean()


def weighted_by_it(logits: Tensor, target: Tensor) -> Tensor:
    rows = logits.view(-1, CLASSES)
    weight = rows.logsumexp(-1).mean() * torch.ones(CLASSES)
    return F.cross_entropy(rows, target.view(-1), weight.detach())


WHOLE = {
    "reads other rows": of_other_rows,
    "reads its logits too": of_the_rows,
    "where gradients are off": unwatched,
    "amax": maxima,
    "is before": weighted_by_it,
}


@pytest.mark.parametrize("why", WHOLE)
def test_a_loss_that_stays_whole_has_a_reason(why: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxamp"):
        bench = bench_of(WHOLE[why])
    assert bench.run(ChunkLosses()).modified == 0 and cut(bench) == 0
    assert "is not cut into chunks" in caplog.text and why in caplog.text
