"""Listings: every node of a rewritten graph with what was decided for it, and the text that they make."""

import re
from dataclasses import replace
from pathlib import Path

import torch
from support.checks.golden_text import assert_golden
from torch.fx import GraphModule

import fxamp
from fxamp.capture import capture
from fxamp.capture.dynamo_trace import trace
from fxamp.graph import dtype_name, op_name, subgraphs
from fxamp.graph_text import Listing
from fxamp.graph_text.write import write_listing
from fxamp.passes.base import CastContext
from fxamp.pipeline import cast_graph
from fxamp.policy import Category, Policy, Rule
from fxamp.reports.list_graph import list_graph


class Model(torch.nn.Module):
    """A checkpointed layer, an autocast region, a result in two pieces, an infinite constant."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        hidden = torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)
        with torch.autocast("cpu", enabled=False):
            mean = x.mean()
        left, _ = hidden.split(2, -1)
        return (left @ left.t()).masked_fill(x[:, :1] > 0, float("-inf")).sum() + mean


def rewritten(policy: "str | Policy" = "cpu-bfloat16") -> GraphModule:
    """The model captured in float32 and rewritten, as torch.compile has it outside of autocast."""
    traced = trace(Model(), (torch.ones(3, 4),))
    captured = capture(traced.module, traced.inputs)
    resolved = policy if isinstance(policy, Policy) else Policy.load(policy).resolve("cpu")
    cast_graph(captured, CastContext(captured.mode, replace(resolved, outputs="keep")))
    return captured.module


def compare(gm: GraphModule, listing: Listing) -> int:
    """Hold every entry against its node; returns how many there were."""
    count = 0
    for node, entry in zip(gm.graph.nodes, listing.entries, strict=True):
        count += 1
        assert (entry.name, entry.kind) == (node.name, node.op)
        assert entry.inputs == tuple(source.name for source in node.all_input_nodes)
        if node.op == "call_function":
            assert entry.target == op_name(node)
            tensors = torch.utils._pytree.tree_leaves(node.meta["val"])
            expected = [(dtype_name(t.dtype), tuple(t.shape)) for t in tensors if isinstance(t, torch.Tensor)]
            assert [(value.dtype, value.shape) for value in entry.values] == expected
        for attribute, body in subgraphs(node) if node.op == "call_function" else ():
            assert str(attribute.target) in entry.bodies
            count += compare(body, listing.bodies[str(attribute.target)])
    return count


def test_every_node_is_listed_as_it_is():
    gm = rewritten()

    assert compare(gm, list_graph(gm)) == sum(1 for _ in list_graph(gm).walk()) > 20


def test_a_listing_shows_the_decisions():
    by_name = {entry.name: entry for _, entry in list_graph(rewritten()).walk()}

    linear, mean, cast = by_name["linear"], by_name["mean"], by_name["l_x__bf16"]
    assert linear.rule.id == "matrix-products" and linear.rule.origin.startswith("policies/cpu.toml:")
    assert (linear.was, linear.dtype, linear.region) == (("f32",), "bf16", "bf16")
    assert (linear.module, linear.module_class) == ("linear", "Linear")
    assert linear.source.code.startswith("hidden = torch.utils.checkpoint") and linear.source.file == __file__
    assert (mean.was, mean.dtype, mean.region) == ((), "f32", "off")
    assert cast.is_cast and cast.inserted == "for linear: rule matrix-products" and cast.was == ()
    assert by_name["split"].was == ("f32", "f32") and len(by_name["split"].values) == 2
    checkpoint = by_name["tag_activation_checkpoint"]
    assert checkpoint.bodies == ("body_0",) and checkpoint.verbatim == ""
    assert by_name["l_self_modules_linear_parameters_weight_"].needs_grad and not by_name["l_x_"].needs_grad


def test_rules_that_lost_are_listed():
    base = Policy.load("cpu-bfloat16")
    mine = Rule("mine", Category.FP32, ("linear",), why="A reason.")

    listing = list_graph(rewritten(Policy("p", "cpu", "bfloat16", rules=(*base.resolve("cpu").rules, mine))))

    (linear,) = [entry for _, entry in listing.walk() if entry.name == "linear"]
    assert (linear.rule.id, linear.rule.origin, linear.reason) == ("mine", "", "A reason.")
    assert [rule.id for rule in linear.lost] == ["matrix-products"]


def test_the_text_of_a_listing_is_torchs_form_with_comments():
    listing = list_graph(rewritten(), stage="cast", policy="cpu-bfloat16", device="cpu", counts={"shared": 1})

    text = write_listing(listing, 0).replace(__file__, "model.py")

    # Line numbers change with the files they count in.
    assert_golden("graph_text/checkpoint", re.sub(r"(model\.py|\.toml):\d+", r"\1:N", text))


def test_a_text_depends_on_nothing_but_the_graph():
    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda t: t.sin() @ t, x, use_reentrant=False)

    first, second = (write_listing(list_graph(fxamp.rewrite(call, (torch.ones(2, 2),)))) for _ in range(2))

    assert first == second and " at 0x" not in first
    assert Path(__file__).name in first
