"""chunk-losses: which losses are cut, why the others stay whole, and that results are those of the whole loss."""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.checks.bench_graph import Workbench, policy, workbench
from support.checks.exhaustive import each_once, exhaustive
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.graph import all_nodes, op_name
from fxamp.passes.forward.annotate_rules import AnnotateRules
from fxamp.passes.forward.chunk_losses import ChunkLosses
from fxamp.passes.forward.expand_composites import ExpandComposites
from fxamp.passes.forward.insert_casts import InsertCasts
from fxamp.policy import Category, ChunkRule, Policy, Rule

CLASSES = 12
PRODUCTS = Rule("products", Category.LOWER_PRECISION_FP, ("linear",))
SOFTMAX = Rule("softmax", Category.FP32, ("log_softmax", "nll_loss_nd"))


def chunks_of(rows: int | str = 4, **conditions: Any) -> Policy:
    return policy(PRODUCTS, SOFTMAX, Rule("cut", ops=("cross_entropy_loss",), chunks=rows, **conditions))


class Head(nn.Module):
    """A linear layer and its loss; ``between`` is what a program does to the logits."""

    def __init__(self, between: Callable[[Tensor], Tensor] | None = None, **loss: Any) -> None:
        super().__init__()
        self.linear, self.between, self.loss = nn.Linear(8, CLASSES), between, loss

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = self.linear(x)
        return F.cross_entropy(logits if self.between is None else self.between(logits), target, **self.loss)


class Shifted(Head):
    """As language models shift: all rows but the last predict all targets but the first."""

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = self.linear(x)[:, :-1].contiguous().float()
        return F.cross_entropy(logits.view(-1, CLASSES), target[:, 1:].reshape(-1), **self.loss)


class Returning(Head):
    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = self.linear(x)
        return F.cross_entropy(logits, target), logits


class Written(Head):
    def forward(self, x: Tensor, target: Tensor) -> Any:
        rows = x * 1
        logits = self.linear(rows)
        rows.add_(1)
        return F.cross_entropy(logits, target)


class Unwatched(Head):
    def forward(self, x: Tensor, target: Tensor) -> Any:
        with torch.no_grad():
            logits = self.linear(x)
        return F.cross_entropy(logits, target)


class Mapped(Head):
    def forward(self, x: Tensor, target: Tensor) -> Any:
        return torch.func.vmap(lambda x: F.cross_entropy(self.linear(x), target))(x[None])


class Distilled(Head):
    """The teacher learns too."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return F.cross_entropy(self.linear(x), self.teacher(x).softmax(-1))


class Checkpointed(Head):
    def forward(self, x: Tensor, target: Tensor) -> Any:
        return checkpoint(super().forward, x, target, use_reentrant=False)


ROWS = torch.arange(80.0).view(10, 8) / 40
TARGET = torch.arange(10) % CLASSES


def bench_of(program: Callable[..., Any], *inputs: Any, under: Policy | None = None) -> Workbench:
    bench = workbench(program, *inputs, under=under or chunks_of())
    bench.run(ExpandComposites(), AnnotateRules(), InsertCasts())
    return bench


def cut(bench: Workbench) -> int:
    return [op_name(node) for node in all_nodes(bench.captured.module)].count("fxamp::linear_cross_entropy.default")


def test_a_loss_of_shifted_logits() -> None:
    bench = bench_of(Shifted(), ROWS.view(2, 5, 8), TARGET.view(2, 5))
    assert bench.golden("chunk-losses", ChunkLosses()).modified == 1
    assert bench.run(ChunkLosses()).modified == 0


WHOLE = {
    "reads its logits too": Returning(),
    "tanh is between": Head(torch.tanh),
    "t_1 is between": Head(lambda logits: logits.t().contiguous().t()),
    "rounds or moves": Head(lambda logits: logits.to(torch.float16).float()),
    "makes them float64": Head(lambda logits: logits.double()),
    "logits are float64": Head().double(),
    "the program writes to": Written(),
    "gradients are off": Unwatched(),
    "target is int32": Head(),
}


@pytest.mark.parametrize("why", WHOLE)
def test_a_loss_that_stays_whole_has_a_reason(why: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxamp"):
        module = WHOLE[why]
        bench = bench_of(module, ROWS.to(module.linear.weight.dtype), TARGET.int() if "int32" in why else TARGET)
    assert bench.run(ChunkLosses()).modified == 0 and cut(bench) == 0
    assert "is not cut into chunks" in caplog.text and why in caplog.text


def test_logits_that_change_their_device_stay_whole(caplog: pytest.LogCaptureFixture) -> None:
    def program(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).to("cpu"), target)

    with FakeTensorMode():
        x, weight = (torch.empty(rows, 8, device="cuda") for rows in (10, CLASSES))
        target = torch.empty(10, dtype=torch.int64)
    under = replace(chunks_of(), device="cuda")
    with caplog.at_level(logging.WARNING, "fxamp"):
        assert not cut(bench_of(program, x, weight, target, under=under))
    assert "rounds or moves" in caplog.text


def test_inside_a_transform_nothing_changes() -> None:
    """What torch.func transforms stays as it was captured."""
    bench = bench_of(Mapped(), ROWS, TARGET)
    assert bench.run(ChunkLosses()).modified == 0 and cut(bench) == 0


@pytest.mark.parametrize(
    "under", [policy(PRODUCTS, SOFTMAX), chunks_of(10), chunks_of(elements=">1000"), chunks_of(modules=["other"])]
)
def test_without_a_rule_or_with_one_chunk_nothing_changes(under: Policy, caplog: pytest.LogCaptureFixture) -> None:
    bench = bench_of(Head(), ROWS, TARGET, under=under)
    before = bench.text
    assert bench.run(ChunkLosses()).modified == 0
    assert bench.text == before and "log_softmax" in before and not caplog.text


def outcome(
    module: nn.Module, x: Tensor, target: Tensor, under: Policy | None, lowering: str, autocast: bool = True
) -> list[Tensor]:
    torch._dynamo.reset()
    rows = x.clone().requires_grad_()
    run = (
        module
        if under is None
        else torch.compile(module, backend="fxamp", options={"policy": under, "lowering": lowering})
    )
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=under is None and autocast):
        loss = run(rows, target)
    (loss.float() * torch.arange(1.0, 1 + loss.numel()).view_as(loss)).sum().backward()
    return [loss.detach().float(), *(p.grad.clone() for p in (rows, *module.parameters()) if p.grad is not None)]


PROGRAMS = {
    "plain": (Head(), ROWS, TARGET),
    "shifted": (Shifted(ignore_index=3, label_smoothing=0.1), ROWS.view(2, 5, 8), TARGET.view(2, 5)),
    "sum": (Head(reduction="sum"), ROWS, TARGET),
    "none": (Head(reduction="none"), ROWS, TARGET),
    "classes second": (Head(lambda logits: logits.transpose(1, 2)), ROWS.view(2, 5, 8), TARGET.view(2, 5)),
    "classes second, none": (
        Head(lambda logits: logits.transpose(1, 2), reduction="none"), ROWS.view(2, 5, 8), TARGET.view(2, 5)
    ),
    "probabilities": (Head(), ROWS, torch.arange(120.0).view(10, CLASSES).softmax(-1)),
    "classes second, probabilities": (
        Head(lambda logits: logits.transpose(1, 2), weight=torch.arange(1.0, 13)),
        ROWS.view(2, 5, 8), torch.arange(120.0).sin().view(2, CLASSES, 5).softmax(1),
    ),
    "classes second, weights": (
        Head(lambda logits: logits.transpose(1, 2), weight=torch.arange(1.0, 13), label_smoothing=0.1),
        ROWS.view(2, 5, 8), TARGET.view(2, 5),
    ),
    "distilled": (Distilled(), ROWS, TARGET),
    "checkpoint": (Checkpointed(), ROWS, TARGET),
}  # fmt: skip


@pytest.mark.parametrize("name", exhaustive(PROGRAMS, always=[*PROGRAMS][:1]))
@pytest.mark.parametrize("gradients", exhaustive(["forward", "backward"], always=["backward"]))
@pytest.mark.parametrize("lowering", exhaustive(["eager", "aot_eager"], always=["aot_eager"]))
def test_results_are_those_of_the_whole_loss(name: str, gradients: str, lowering: str) -> None:
    """Up to the rounding of 16 bits, compared with eager autocast."""
    module, x, target = PROGRAMS[name]
    assert cut_by_compiling(module, x, target)
    ours = outcome(module, x, target, chunks_of(gradients=gradients), lowering)
    for one, autocast in zip(ours, outcome(module, x, target, None, ""), strict=True):
        torch.testing.assert_close(one, autocast, rtol=2**-6, atol=2**-6 * float(autocast.abs().max()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["shifted", pytest.param("distilled", marks=pytest.mark.inductor)])
def test_results_are_those_of_the_whole_loss_under_inductor(name: str) -> None:
    test_results_are_those_of_the_whole_loss(name, "forward", "inductor")


def cut_by_compiling(module: nn.Module, x: Tensor, target: Tensor) -> int:
    bench = bench_of(module, x, target)
    bench.run(ChunkLosses())
    return cut(bench)


CONVERTED = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@each_once("first, second, exact_head", CONVERTED, CONVERTED[::-1], [False, True])
def test_conversions_keep_the_error_of_autocast(first: torch.dtype, second: torch.dtype, exact_head: bool) -> None:
    """Whatever logits are converted to before the loss, and whether the layer computes in 16 bits."""
    module = Head(lambda logits: logits.to(first).to(second), weight=torch.arange(1.0, 13).to(second))
    heads = [Rule("exact", Category.FP32, ("linear",))] if exact_head else []
    under = replace(chunks_of(), rules=(*chunks_of().rules, *heads))
    double = copy.deepcopy(module).double()
    double.between, double.loss["weight"] = None, torch.arange(1.0, 13).double()
    exact = outcome(double, ROWS.double(), TARGET, None, "", autocast=False)
    ours, whole = (outcome(module, ROWS, TARGET, rules, "eager") for rules in (under, _unchunked(under)))
    for one, other, truth in zip(ours, whole, exact, strict=True):
        error, accepted = ((value.double() - truth.double()).norm() for value in (one, other))
        assert error <= 2**0.5 * accepted + 1e-6


def _unchunked(under: Policy) -> Policy:
    return replace(under, rules=tuple(rule for rule in under.rules if not isinstance(rule, ChunkRule)))


def test_a_loss_of_16_bit_logits_is_float32() -> None:
    """Where the policy widens no cross entropy, but its parts, as CUDA's autocast does."""
    exact = Rule("softmax", Category.FP32_SET_OPT_DTYPE, ("log_softmax.int",))
    bench = bench_of(
        Head(), ROWS, TARGET, under=policy(PRODUCTS, exact, Rule("cut", ops=("cross_entropy_loss",), chunks=4))
    )
    bench.run(ChunkLosses())
    assert cut(bench) == 1 and "bf16[]" not in bench.text


def test_a_scaler_and_tied_frozen_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.middle = nn.Embedding(CLASSES, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, CLASSES, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, target: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.middle(self.embedding(target))), target)

    def gradients(rows: int) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, scaler = Tied(), fxamp.GradScaler("cpu", init_scale=1024.0)
        model.middle.bias.requires_grad_(False)
        options = {"policy": chunks_of(rows), "lowering": "aot_eager", "scaler": scaler}
        loss = torch.compile(model, backend="fxamp", options=options)(TARGET)
        scaler.scale(loss).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    chunked, whole = gradients(4), gradients(10)
    assert len(chunked) == len(whole) == 2
    torch.testing.assert_close(chunked, whole, rtol=2**-5, atol=2**-7)


@pytest.mark.exhaustive
def test_dynamic_rows() -> None:
    module, losses = Head(), []
    options = {"policy": chunks_of(), "lowering": "aot_eager"}
    compiled = torch.compile(module, backend="fxamp", options=options, dynamic=True)
    for size in (10, 7, 9):
        for run in (compiled, module):
            module.zero_grad()
            loss = run(ROWS[:size], TARGET[:size])
            loss.backward()
            losses.append([loss.detach(), *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(losses[::2], losses[1::2], rtol=2**-6, atol=2**-6)
