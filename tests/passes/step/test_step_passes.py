"""guard-updates, fold-unscale and lift-scalars on the graph of a tiny step: golden texts, contract, values."""

from typing import Any

import pytest
import torch
from support.checks.bench_graph import assert_unchanged, golden_pass
from torch import nn

from fxamp.capture import Captured
from fxamp.errors import PassError
from fxamp.optim.reading.layout import read_layout
from fxamp.optim.tracing.trace import Traced, trace_step
from fxamp.passes.base import Context, Pass, Result
from fxamp.passes.step.fold_unscale import FOLDED, GRADIENT, FoldUnscale
from fxamp.passes.step.guard_updates import GuardUpdates, updates
from fxamp.passes.step.lift_scalars import LiftScalars, liftable, reads_on_host
from fxamp.pipeline import run_passes

aten = torch.ops.aten


def step_graph(**settings: Any) -> Traced:
    """The step of SGD on one parameter, with two of its floats as inputs."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.5, **settings)
    layout = read_layout(optimizer)
    return trace_step(optimizer, layout, range(len(layout.floats())), True, {})


def run(traced: Traced, *passes: Pass) -> list[Result]:
    context = Context(traced.mode)
    records = run_passes(Captured(traced.module, traced.mode), context, *passes)
    return [Result(record.modified, record.counts) for record in records]


PASSES: dict[str, Pass] = {
    "not guarded": GuardUpdates(),
    "read as they are": FoldUnscale(True, True),
    "floats are left": LiftScalars(),
}
"""By what their promises say of a graph that they have not seen."""


@pytest.mark.parametrize("broken", PASSES)
def test_what_is_written(broken: str) -> None:
    traced, step = step_graph(), PASSES[broken]
    assert golden_pass(f"passes/{step.name}", traced.module, Context(traced.mode), step, broken).modified > 0


@pytest.mark.parametrize("step", PASSES.values(), ids=lambda p: p.name)
def test_a_graph_without_a_step_stays_as_it_is(step: Pass) -> None:
    traced = step_graph()
    for node in reversed(list(traced.module.graph.nodes)):
        if node.op == "call_function" or (
            node.op == "placeholder" and not node.users and "Sym" in str(node.meta["val"])
        ):
            traced.module.graph.erase_node(node)
    for node in traced.module.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["val"], torch.SymFloat):
            traced.module.graph.erase_node(node)
            continue
        node.meta.pop(GRADIENT, None)
    assert_unchanged(traced.module, Context(traced.mode), step)


def test_a_graph_that_is_not_functional_is_refused() -> None:
    traced = step_graph()
    (copy,) = updates(traced.module)
    with traced.module.graph.inserting_before(copy):
        clone = traced.module.graph.call_function(aten.clone.default, (copy.args[0],))
        write = traced.module.graph.call_function(aten.add_.Tensor, (clone, clone))
    clone.meta["val"] = write.meta["val"] = copy.args[0].meta["val"]
    with pytest.raises(PassError, match="not functional"):
        run(traced, GuardUpdates())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_set_flag_keeps_everything_whatever_the_gradients_hold(bad: float) -> None:
    traced = step_graph()
    run(traced, FoldUnscale(True, False), GuardUpdates())
    values = torch.tensor([1.0, 2.0])
    traced.module(values, torch.tensor([bad, 1.0]), 0.5, *_unused(traced), torch.tensor(0.25), torch.tensor(1.0))
    assert values.tolist() == [1.0, 2.0]


def test_a_clear_flag_steps_by_the_true_clipped_gradient() -> None:
    traced = step_graph()
    run(traced, FoldUnscale(True, True), GuardUpdates())
    values = torch.tensor([1.0, 2.0])
    factors = torch.tensor(0.25), torch.tensor(0.5)
    traced.module(values, torch.tensor([8.0, 16.0]), 0.5, *_unused(traced), *factors, torch.tensor(0.0))
    assert values.tolist() == [0.5, 1.0]


def _unused(traced: Traced) -> list[float]:
    return [0.0] * (len(traced.symbols) - 1)


def test_16_bit_gradients_are_unscaled_in_float32_and_rounded() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    parameter.grad = torch.tensor([3.0, 1.0, 7.0], dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    layout = read_layout(optimizer)
    traced = trace_step(optimizer, layout, range(len(layout.floats())), True, {})
    run(traced, FoldUnscale(True, False), GuardUpdates())
    inverse = torch.tensor(1 / 3)
    expected = parameter.detach() - (parameter.grad.float() * inverse).bfloat16()
    values = parameter.detach().clone()
    traced.module(values, parameter.grad, 1.0, *_unused(traced), inverse, torch.tensor(0.0))
    assert torch.equal(values, expected)


def test_every_use_of_a_gradient_reads_the_product() -> None:
    traced = step_graph()
    run(traced, FoldUnscale(True, True))
    (gradient,) = [n for n in traced.module.graph.find_nodes(op="placeholder") if FOLDED in n.meta]
    assert [user.target for user in gradient.users] == [aten.mul.Tensor]


def test_a_step_that_reads_no_gradient_gets_the_factors_too() -> None:
    traced = step_graph()
    (copy,) = updates(traced.module)
    copy.replace_input_with(copy.args[1], copy.args[0])
    traced.module.graph.eliminate_dead_code()
    assert run(traced, FoldUnscale(True, True), FoldUnscale(True, True)) == [Result(0), Result(0)]
    names = [node.name for node in traced.module.graph.find_nodes(op="placeholder")]
    assert names[-2:] == ["inv_scale", "clip_coefficient"]


def test_lifted_numbers_give_the_same_values() -> None:
    plain, lifted = step_graph(weight_decay=0.1, momentum=0.0), step_graph(weight_decay=0.1, momentum=0.0)
    run(lifted, LiftScalars())
    a, b = torch.tensor([1.0, -2.0]), torch.tensor([1.0, -2.0])
    gradient = torch.tensor([0.3, 0.7])
    floats = [0.5] + [0.1] * (len(plain.symbols) - 1)
    plain.module(a, gradient, *floats)
    lifted.module(b, gradient, torch.tensor(floats, dtype=torch.float64))
    torch.testing.assert_close(a, b, rtol=2 * torch.finfo(torch.float32).eps, atol=0)


def test_a_value_that_the_graph_would_read_on_the_host_stays_a_tensor() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.Adagrad([parameter])
    layout = read_layout(optimizer)
    traced = trace_step(optimizer, layout, range(len(layout.floats())), True, {})
    assert reads_on_host(traced.module) and liftable(traced.module)
    run(traced, LiftScalars())
    assert not reads_on_host(traced.module)


def test_an_op_that_the_table_does_not_know_is_not_liftable() -> None:
    traced = step_graph()
    node = next(
        n for n in traced.module.graph.nodes if n.op == "placeholder" and isinstance(n.meta["val"], torch.SymFloat)
    )
    (copy,) = updates(traced.module)
    with traced.module.graph.inserting_before(copy):
        odd = traced.module.graph.call_function(aten.fmod.Scalar, (copy.args[1], node))
    odd.meta["val"] = copy.args[1].meta["val"]
    assert not liftable(traced.module)
    with pytest.raises(PassError, match=r"known for the float of aten\.fmod\.Scalar"):
        run(traced, LiftScalars())
