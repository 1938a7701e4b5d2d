"""pack-kept on small forwards: what is packed, where in the graph, and what stays."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from support.checks.bench_graph import assert_unchanged
from support.checks.golden_text import assert_golden
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fxamp.graph import format_graph
from fxamp.passes.base import CastContext
from fxamp.passes.partition.pack_kept import PackKept
from fxamp.policy import Policy, Rule

aten = torch.ops.aten
RULE = Rule("all", keep="int8", region="kept", elements=">=1", block=16)  # type: ignore[arg-type]


def forward(function: Callable[..., Any], *inputs: Tensor, rule: Rule = RULE) -> tuple[GraphModule, CastContext]:
    """``function`` as a forward of AOTAutograd, and the context to pack it in."""
    policy, mode = Policy.load("cpu-bfloat16"), FakeTensorMode()
    gm = make_fx(function)(*map(mode.from_tensor, inputs))
    return gm, CastContext(mode, replace(policy, rules=(*policy.rules, rule)))


def ops(gm: GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_what_comes_after_the_results_is_packed_once() -> None:
    def function(x: Tensor) -> Any:
        y = aten.mm.default(x, x)
        return y.sum(), x, y, y.t(), aten.ne.Scalar(y, 0.0)

    gm, context = forward(function, torch.ones(32, 32))
    before = format_graph(gm.graph)
    assert PackKept(1).run(gm, context).modified == 1
    assert_golden("passes/pack-kept", f"before\n{before}\n\nafter\n{format_graph(gm.graph)}")
    assert PackKept(1).ensures(gm, context) is None
    assert PackKept(1).run(gm, context).modified == 0, "it is packed already"


def test_where_no_rule_matches_nothing_changes() -> None:
    odd = replace(RULE, ops=("aten::addmm",))
    gm, context = forward(lambda x: (x.sum(), aten.mm.default(x, x)), torch.ones(32, 32), rule=odd)
    assert_unchanged(gm, context, PackKept(1))


def test_a_convolution_reads_a_pooling_before_it_is_packed() -> None:
    """Inductor gives a value that it writes to memory the layout that its first reader asks for."""

    def function(x: Tensor, weight: Tensor) -> Any:
        pooled = aten.max_pool2d_with_indices.default(x, [2, 2])[0]
        y = aten.convolution.default(pooled, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        return y, pooled

    def pointwise(x: Tensor, weight: Tensor) -> Any:
        y = aten.convolution.default(x := aten.relu.default(x), weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        return y, x

    for body, after in ((function, "aten.convolution.default"), (pointwise, "aten.relu.default")):
        gm, context = forward(body, torch.ones(1, 32, 8, 8), torch.ones(4, 32, 1, 1))
        assert PackKept(1).run(gm, context).modified == 1
        names = ops(gm)
        assert names[names.index(after) + 1] == "aten.permute.default", "blocks lie along the channels"
