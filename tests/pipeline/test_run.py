"""The one loop that runs the passes: order, verification, and what its errors name."""

from dataclasses import dataclass

import pytest
import torch
from torch.fx import GraphModule, Node

from fxamp.capture import Captured, capture
from fxamp.capture.dynamo_trace import trace
from fxamp.errors import BannedOpError, PassError
from fxamp.passes.base import CastContext, Pass, Result
from fxamp.passes.sequences import FORWARD
from fxamp.pipeline import run_passes
from fxamp.policy import Category, Policy, Rule


def captured() -> Captured:
    traced = trace(lambda a: a.exp() + 1, (torch.ones(2),))
    return capture(traced.module, traced.inputs)


def run(*passes: Pass, rules: tuple[Rule, ...] = ()) -> list[str]:
    program = captured()
    records = run_passes(program, CastContext(program.mode, Policy("test", "cpu", "bfloat16", rules=rules)), *passes)
    return [record.name for record in records]


@dataclass(frozen=True)
class Visit(Pass):
    """Looks at every node and does nothing."""

    name = "visit"

    def run(self, gm: GraphModule, context: CastContext) -> Result:
        for node in gm.graph.nodes:
            self.look(node)
        return Result(0)

    def look(self, node: Node) -> None:
        pass


@dataclass(frozen=True)
class Stumble(Visit):
    """Fails at the second op."""

    name = "stumble"

    def look(self, node: Node) -> None:
        if node.target is torch.ops.aten.add.Tensor:
            raise ZeroDivisionError("over the addition")


@dataclass(frozen=True)
class Break(Visit):
    """Leaves a graph that uses a value before it is made."""

    name = "break"

    def run(self, gm: GraphModule, context: CastContext) -> Result:
        first, second = (node for node in gm.graph.nodes if node.op == "call_function")
        first.prepend(second)
        return Result(1)


@dataclass(frozen=True)
class Promise(Visit):
    name = "promise"

    def ensures(self, gm: GraphModule, context: CastContext) -> str | None:
        return "the exponential is still there"


@dataclass(frozen=True)
class Demand(Visit):
    name = "demand"

    def requires(self, gm: GraphModule, context: CastContext) -> str | None:
        return "there is no multiplication"


def test_passes_run_in_order_and_are_recorded() -> None:
    assert run(Visit(), *FORWARD) == ["visit", *(step.name for step in FORWARD)]


def test_a_failing_pass_is_named_with_the_node_and_the_users_line() -> None:
    with pytest.raises(PassError) as caught:
        run(Visit(), Stumble())
    message = str(caught.value)
    assert "pass Stumble() (stumble) ZeroDivisionError: over the addition" in message
    assert "node add = aten.add.Tensor" in message
    assert "test_run.py" in message and "a.exp() + 1" in message
    assert "passes that ran before: visit" in message


def test_a_malformed_graph_is_noticed_after_the_pass_that_made_it() -> None:
    with pytest.raises(PassError, match=r"pass Break\(\) \(break\)"):
        run(Break(), Visit())


def test_a_broken_promise_and_a_missing_condition() -> None:
    with pytest.raises(PassError, match="broke its promise: the exponential is still there"):
        run(Promise())
    with pytest.raises(PassError, match="cannot run: there is no multiplication"):
        run(Demand())


def test_an_error_for_the_user_passes_through() -> None:
    with pytest.raises(BannedOpError, match="use log instead"):
        run(*FORWARD, rules=(Rule("no", Category.BANNED, ("exp",), advice="use log instead"),))
