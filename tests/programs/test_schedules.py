"""Each way to run a program compares what it says: a small program runs as under autocast, and a fault is found."""

import os
from collections.abc import Sequence
from dataclasses import replace
from threading import current_thread, main_thread
from typing import Any

import pytest
import torch
from programs.compare import Refused, differences
from programs.orders import random_order
from programs.program import ALL, SCHEDULES, Declaration, Line, Program, Setting, Text
from programs.search import Shrink, Tally
from programs.strategy import Focus
from programs.workers import Task, run_all
from support.checks.exhaustive import each_once, exhaustive
from torch import Tensor, nn

import fxamp
from fxamp.passes.backward.drop_unused_results import DropUnusedResults
from fxamp.passes.base import Context, Result

NORMED = Program(
    torch.bfloat16,
    (
        Declaration("x0", "input", (2, 4, 8), grad=True),
        Declaration("w0", "parameter", (4,), grad=True),
        Declaration("w1", "parameter", (8, 8), grad=True),
        Declaration("w2", "parameter", (8,), grad=True),
    ),
    (
        Line("group_norm", Text("h0 = F.group_norm(x0, 2, self.w0)")),
        Line("summed_product", Text("h1 = torch.einsum('bti,ij->bj', h0, self.w1)")),
        Line("with_parameter", Text("h2 = h0 * self.w2")),
    ),
    ("h0", "h1", "h2"),
)


@each_once("schedule, used", exhaustive(SCHEDULES, always=list(SCHEDULES)[::2]), [ALL, 0b010, 0])
def test_a_program_runs_as_under_autocast(schedule: str, used: int) -> None:
    scaled = schedule not in ("threads", "rewritten", "twice")
    lowering = "eager" if schedule == "twice" else "aot_eager"  # AOTAutograd's graphs have one backward
    assert differences(NORMED, Setting(lowering, schedule=schedule, used=used, scaled=scaled)) == []


@pytest.mark.exhaustive
def test_a_scaler_that_loads_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fxamp.GradScaler, "load_state_dict", lambda self, state: None)
    assert differences(NORMED, Setting(schedule="train", scaled=True)) == []
    assert "the scale becomes 512.0, with autocast 256.0" in differences(
        NORMED, Setting(schedule="restart", scaled=True)
    )


@pytest.mark.exhaustive
def test_a_gradient_that_is_no_zeros_where_autocast_has_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unused results get gradients of ones."""
    monkeypatch.setattr(DropUnusedResults, "run", _ones)
    messages = differences(NORMED, Setting(used=0b010))
    assert "the gradient of w2 is there, with autocast it is None" in messages


@pytest.mark.exhaustive
def test_gradients_of_zeros_are_no_fault() -> None:
    """A hook that adds to the gradient of an unused result: autograd calls it never, AOTAutograd with zeros."""
    hooked = replace(
        NORMED,
        statements=(
            *NORMED.statements,
            Line("hook", Text("h3 = h0 * 1\n        h3.register_hook(lambda g: g + 1)")),
        ),
        results=("h2", "h3"),
    )
    assert differences(hooked, Setting(used=0b01)) == []
    assert differences(hooked, Setting(used=0b01, zeros=True)) == []
    assert differences(hooked, Setting(schedule="apart")) == []


@pytest.mark.exhaustive
def test_a_hook_that_gets_no_gradient_is_no_fault() -> None:
    """torch's AOTAutograd calls it with None too, where it does not copy the input."""
    hooked = replace(
        NORMED,
        declarations=(*NORMED.declarations, Declaration("x1", "input", (4,), grad=True)),
        statements=(
            *NORMED.statements,
            Line(
                "hook", Text("x1.register_hook(lambda g: g.flip(0))\n        h3 = F.dropout(x1, 0.5, training=False)")
            ),
        ),
        results=("h2", "h3"),
    )
    with pytest.raises(Refused, match="raised AttributeError"):
        differences(hooked, Setting(used=0b01, traced=True))


def _ones(step: DropUnusedResults, gm: torch.fx.GraphModule, context: Context) -> Result:
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in step.inputs:
            value: Tensor = node.meta["val"]
            with gm.graph.inserting_before(node):
                ones = gm.graph.call_function(torch.ops.aten.full.default, (list(value.shape), 1))
            ones.meta["val"] = value
            node.replace_all_uses_with(ones)
            gm.graph.erase_node(node)
    return Result(1)


@pytest.mark.exhaustive
def test_threads_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of compiled calls in threads other than the main one are off by one."""
    compiled = torch.compile

    def compile_(module: nn.Module, **options: Any) -> Any:
        call = compiled(module, **options)
        if options["backend"] != "fxamp":
            return call

        def run(*args: Tensor) -> Sequence[Tensor]:
            results: list[Tensor] = call(*args)
            return results if current_thread() is main_thread() else [result + 1 for result in results]

        return run

    monkeypatch.setattr(torch, "compile", compile_)
    assert differences(NORMED, Setting()) == []
    assert any(one.startswith("result 0") for one in differences(NORMED, Setting(schedule="threads")))


#: A buffer that each call changes, and no version counter shows.
AVERAGED = replace(
    NORMED,
    declarations=(*NORMED.declarations, Declaration("b0", "buffer", (8,))),
    statements=(*NORMED.statements, Line("data_buffer", Text("self.b0.data.lerp_(x0.detach()[0, 0], 0.5)"))),
)


def test_threads_that_race_are_refused() -> None:
    assert differences(AVERAGED, Setting()) == []
    with pytest.raises(Refused, match="writes to what two threads share"):
        differences(AVERAGED, Setting(schedule="threads"))


def _die_at_three(task: Task) -> Tally:
    if task.number == 3:
        os._exit(7)
    if task.number == 4:
        os.abort()
    return Tally(programs=1)


def _die_at_four(task: Task) -> None:
    if task.number == 4:
        os.abort()


@pytest.mark.exhaustive
def test_a_process_that_dies_costs_its_program_alone() -> None:
    """It is no failure if torch.compile alone dies of the program too."""
    tasks = [Task(number, Focus(), Shrink.NO) for number in range(6)]
    total = Tally()
    for _, tally in run_all(_die_at_three, _die_at_four, tasks, 2, float("inf")):
        total.add(tally)
    assert total.programs == 5 and list(total.failures) == ["the process died with status 7: search([3])"]
    assert dict(total.refused) == {"torch.compile alone: the process dies": 1}


def test_orders_are_of_one_sum() -> None:
    """Three terms of which two are lost, or not, next to the third: some orders differ, and no other number appears."""

    def gradient(seed: int) -> float:
        x = torch.zeros((), requires_grad=True)
        y = x * 1
        total = y * 1e8 + y * 3 - y * 1e8
        with random_order(seed):
            total.backward()
        assert x.grad is not None
        return x.grad.item()

    assert {gradient(seed) for seed in range(16)} == {0.0, 3.0}
