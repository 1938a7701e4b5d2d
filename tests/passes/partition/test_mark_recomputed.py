"""mark-recomputed on small joint graphs: which values it marks for recomputation."""

from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from fxamp.passes.base import CastContext
from fxamp.passes.partition.mark_recomputed import RECOMPUTED, MarkRecomputed
from fxamp.policy import Policy, Rule

aten = torch.ops.aten


def joint(*ops: str) -> tuple[GraphModule, CastContext]:
    """A forward of one result, a backward of one gradient, and a rule that has ``ops`` computed again."""

    def function(x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        inner = aten.sin.default(aten.mm.default(x, x))
        drawn = aten.bernoulli.default(inner)
        return aten.sin.default(inner) * drawn, aten.cos.default(gradient)

    rule = Rule("again", keep="recompute", region="kept", ops=ops)  # type: ignore[arg-type]
    policy, mode = Policy.load("cpu-bfloat16"), FakeTensorMode()
    gm = make_fx(function)(*map(mode.from_tensor, (torch.ones(4, 4), torch.ones(4, 4))))
    (last,) = gm.graph.find_nodes(op="call_function", target=aten.cos.default)
    last.meta["partitioner_tag"] = "is_backward"
    return gm, CastContext(mode, replace(policy, rules=(*policy.rules, rule)))


def marked(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if RECOMPUTED in node.meta]


def test_the_forwards_values_of_a_rule_are_marked_once() -> None:
    gm, context = joint("sin", "cos", "mm")
    assert [MarkRecomputed(1).run(gm, context).modified for _ in range(2)] == [3, 0]
    assert marked(gm) == ["mm", "sin", "sin_1"], "and no op of the backward"
    marks = {node.name: node.meta["recompute"] for node in gm.graph.nodes if "recompute" in node.meta}
    assert marks == dict.fromkeys(("mm", "sin", "sin_1"), CheckpointPolicy.MUST_RECOMPUTE)


def test_results_random_numbers_and_marks_of_the_program_stay() -> None:
    gm, context = joint("sin", "mul", "bern*")
    (first, _) = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
    first.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    assert MarkRecomputed(1).run(gm, context).modified == 1
    assert marked(gm) == ["sin_1"] and first.meta["recompute"] is CheckpointPolicy.MUST_SAVE


def test_where_no_rule_matches_nothing_is_marked() -> None:
    gm, context = joint("addmm")
    assert MarkRecomputed(1).run(gm, context).modified == 0 and marked(gm) == []
