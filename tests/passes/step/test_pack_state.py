"""pack-state and spread-fills: what is written, that a second run changes nothing, and graphs that they leave alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.bench_graph import assert_unchanged, traced_step
from torch import Tensor
from torch.fx import GraphModule

from fxamp.capture import Captured
from fxamp.kernels.blockwise_8bit import block_scales, decode, encode
from fxamp.passes.base import Context
from fxamp.passes.step.pack_state import COMPENSATION, COUNT, ROLE, STREAM, PackState
from fxamp.passes.step.spread_fills import SpreadFills
from fxamp.pipeline import run_passes

aten = torch.ops.aten
ROLES = ("parameter", "gradient", "mean", COMPENSATION, COUNT)


def update(parameter: Tensor, gradient: Tensor, mean: Tensor, compensation: Tensor, steps: Tensor) -> tuple[()]:
    """Momentum, functional but for its final copies."""
    new = mean * 0.5 + gradient
    aten.copy_.default(parameter, parameter - 0.25 * new)
    aten.copy_.default(mean, new)
    aten.copy_.default(compensation, compensation)
    aten.copy_.default(steps, steps)
    return ()


def traced(function: Callable[..., Any], count: int = 300) -> tuple[GraphModule, Captured, Context]:
    gm, context = traced_step(function, *(torch.empty(count) for _ in ROLES[:-1]), torch.empty((), dtype=torch.int32))
    for node, role in zip(gm.graph.find_nodes(op="placeholder"), ROLES, strict=True):
        node.meta[ROLE] = role
    return gm, Captured(gm, context.mode), context


def test_codes_are_decoded_as_they_are_read_and_encoded_as_they_are_written() -> None:
    gm, captured, context = traced(update)
    packer = PackState({"mean": "s3m4"})
    (record,) = run_passes(captured, context, packer)
    assert record.modified == 1 and packer.ensures(gm, context) is None
    own, gradient, mean = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).unbind()
    scales = block_scales(mean)
    codes = encode(mean, scales, torch.zeros((), dtype=torch.int32), "s3m4", -1)
    reference = decode(codes, scales, "s3m4") * 0.5 + gradient
    expected = own - 0.25 * reference
    gm(own, gradient, codes, scales, torch.zeros(300), torch.zeros((), dtype=torch.int32))
    assert torch.equal(own, expected) and torch.equal(scales, block_scales(reference))
    assert torch.equal(codes, encode(reference, scales, torch.zeros((), dtype=torch.int32), "s3m4", -1))


def test_a_compensated_parameter_is_the_sum_of_both() -> None:
    gm, captured, context = traced(update)
    run_passes(captured, context, PackState({"parameter": "bfloat16"}, compensated=True))
    own, lost = torch.ones(300, dtype=torch.bfloat16), torch.full((300,), 2.0**-10, dtype=torch.bfloat16)
    gm(own, torch.full((300,), 2.0**-9), torch.zeros(300), lost, torch.zeros((), dtype=torch.int32))
    assert torch.equal(own.double() + lost.double(), torch.full((300,), 1 + 2.0**-10 - 2.0**-11, dtype=torch.float64))
    assert own.eq(1).all()


def test_chance_has_an_input_of_its_own_and_a_slot_for_each_use() -> None:
    gm, captured, context = traced(update)
    run_passes(captured, context, PackState({"parameter": "bfloat16", "mean": "s3m4"}, stochastic=True))
    names = [node.target for node in gm.graph.find_nodes(op="placeholder")]
    assert names[-1] == STREAM
    calls = [
        n
        for n in gm.graph.nodes
        if n.target in (torch.ops.fxamp.encode.default, torch.ops.fxamp.stochastic_round.default)
    ]
    assert sorted(int(str(node.args[-1])) for node in calls) == [0, 1]


def test_a_step_that_draws_counts_itself_and_draws_other_bits_the_next_time() -> None:
    gm, captured, context = traced(update)
    run_passes(captured, context, PackState({"parameter": "bfloat16"}, stochastic=True))
    steps, stream, results = torch.zeros((), dtype=torch.int32), torch.tensor(7, dtype=torch.int32), []
    for _ in range(2):
        results.append(torch.ones(300, dtype=torch.bfloat16))
        gm(results[-1], torch.full((300,), 2.0**-8), torch.zeros(300), torch.zeros(300), steps, stream)
    assert steps.item() == 2 and not torch.equal(*results) and all(0 < result.lt(1).sum() < 300 for result in results)


@pytest.mark.parametrize("stored", [{}, {"other": "s3m4"}])
def test_nothing_to_store_nothing_changed(stored: dict[str, str]) -> None:
    gm, _, context = traced(update)
    assert_unchanged(gm, context, PackState(stored))


def test_a_second_run_changes_nothing() -> None:
    gm, captured, context = traced(update)
    packer = PackState({"mean": "u5m3", "gradient": "bfloat16"}, stochastic=True)
    assert packer.ensures(gm, context) == "not stored in their form: gradient_1, mean_1"
    run_passes(captured, context, packer)
    assert_unchanged(gm, context, packer)


def filled(parameter: Tensor, gradient: Tensor, mean: Tensor, compensation: Tensor, steps: Tensor) -> tuple[()]:
    zero, two = torch.zeros_like(gradient), torch.full((300,), 2.0)
    aten.copy_.default(parameter, torch.where(gradient > 0, zero, two) + torch.ones(300))
    return ()


def test_fills_lose_their_sizes_and_values_stay() -> None:
    gm, captured, context = traced(filled)
    spread = SpreadFills()
    assert "filled tensors are left" in str(spread.ensures(gm, context))
    (record,) = run_passes(captured, context, spread)
    assert record.modified == 3 and "300" not in gm.code
    own, gradient = torch.zeros(7), torch.tensor([1.0, -1.0, 0.0, 2.0, -2.0, 0.0, 1.0])
    gm(own, gradient, own, own, own)
    assert own.tolist() == [1, 3, 3, 1, 3, 3, 1]
    (record,) = run_passes(captured, context, spread)
    assert record.modified == 0
