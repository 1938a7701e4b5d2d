"""``--check``: each finding on a graph that has it, and none on graphs that are as they should be."""

from dataclasses import replace

import pytest
import torch
from support.checks.exhaustive import exhaustive
from support.checks.golden_text import assert_golden
from support.programs.show_samples import MINE, cast, gpt, input_entry, op, plain, tensor
from torch import nn
from torch.nn import functional

import fxamp
from fxamp.capture import capture
from fxamp.capture.dynamo_trace import trace
from fxamp.graph_text import Entry, Listing, RuleRef, Source
from fxamp.passes.base import CastContext
from fxamp.pipeline import cast_graph
from fxamp.policy import built_in_names
from fxamp.reports.record import record_graph
from fxamp.tools.show.findings import Finding, finding_lines, findings

HERE = {"module": "h.0", "source": Source("/models/gpt.py", 5, "forward", "y = f(x)")}


PICK = Entry("pick", "call_function", "_operator.getitem", "v[0]", ("v",), (tensor("f32[4, 4]"),))


def check(*listings: Listing) -> list[Finding]:
    return findings(tuple(enumerate(listings)))


def there_and_back(*between: Entry, back: str = "f16") -> Listing:
    source = between[-1].name if between else "wide"
    entries = (
        input_entry("x", "f16[4, 4]"),
        cast("wide", "x", "f32[4, 4]", "for norm: rule norms"),
        op("norm", "aten::layer_norm.default", ("wide",), "f32[4, 4]"),
        *between,
        cast("back", source, f"{back}[4, 4]", "for mm: rule products", **HERE),
        op("mm", "aten::mm.default", ("back", "back"), f"{back}[4, 4]"),
    )
    return Listing("G", entries, stage="cast", policy="p")


def ill() -> Listing:
    listing = there_and_back(op("view", "aten::view.default", ("wide",), "f32[4, 4]"))
    exp = op("exp", "aten::exp.default", ("mm",), "f16[4, 4]", **HERE)
    return replace(listing, entries=(*listing.entries, exp), device="cuda", unmatched=(RuleRef("typo", "mine.toml:3"),))


def test_all_findings_as_text() -> None:
    assert_golden("show/check", "\n".join(finding_lines(check(ill()))))


def test_an_empty_result_is_reported() -> None:
    assert list(finding_lines([])) == ["no findings"]


def test_the_sample_has_its_unmatched_rule_only() -> None:
    assert [finding.kind for finding in check(gpt())] == ["unmatched-rule"]


@pytest.mark.parametrize(
    ("listing", "wrong"),
    [
        (there_and_back(), True),
        (there_and_back(op("t", "aten::t.default", ("wide",), "f32[4, 4]")), True),
        (there_and_back(op("v", "aten::chunk.default", ("wide",), "f32[4, 4]"), PICK), True),
        (there_and_back(op("neg", "aten::neg.default", ("wide",), "f32[4, 4]")), False),
        (there_and_back(back="bf16"), False),
        (there_and_back(op("users", "aten::to.dtype", ("x",), "f32[4, 4]")), False),
    ],
    ids=["at once", "through a view", "through a pick", "through an op", "to another dtype", "the user's own cast"],
)  # fmt: skip
def test_casts_back_and_forth(listing: Listing, wrong: bool) -> None:
    assert [(finding.kind, finding.node) for finding in check(listing)] == [("casts-back-and-forth", "back")] * wrong


def in_float16(target: str, **about: object) -> Listing:
    entries = (input_entry("x", "f16[4]"), op("y", target, ("x",), "f16[4]"))
    return Listing("G", entries, **{"stage": "cast", "policy": "p", "device": "cuda", **about})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("listing", "wrong"),
    [
        (in_float16("aten::exp.default"), True),
        (in_float16("aten::softmax.int"), True),
        (in_float16("aten::exp.default", stage="", policy="", device=""), True),
        (in_float16("aten::neg.default"), False),
        (in_float16("aten::exp_.default"), False),
        (in_float16("mylib::exp.default"), False),
        (in_float16("aten::exp.default", stage="backward"), False),
        (in_float16("aten::exp.default", stage="captured"), False),
        (in_float16("aten::softmax.int", device="cpu"), False),
        (in_float16("aten::cosine_similarity.default", device="cpu"), False),
        (in_float16("aten::mse_loss.default", device="cpu"), True),
        (in_float16("aten::exp.default", device="vulkan"), True),
    ],
)
def test_ops_that_autocast_keeps_in_float32(listing: Listing, wrong: bool) -> None:
    assert [finding.kind for finding in check(listing)] == ["float16-range"] * wrong


def test_an_op_in_float16_from_float32_inputs_is_the_programs_own_wish() -> None:
    listing = in_float16("aten::sum.default")
    assert check(replace(listing, entries=(input_entry("x", "f32[4]"), listing.entries[1]))) == []


@pytest.mark.parametrize(("rule", "wrong"), [(MINE, False), (RuleRef("r", "p.toml:3", "fp32"), True)])
def test_a_rule_that_asks_for_16_bits_explains_it(rule: RuleRef, wrong: bool) -> None:
    listing = in_float16("aten::exp.default")
    entries = (listing.entries[0], replace(listing.entries[1], rule=rule))
    assert bool(check(replace(listing, entries=entries))) is wrong


def test_sums_of_a_backward_are_not_autocasts_business() -> None:
    listing = in_float16("aten::sum.default", stage="")
    assert check(listing) != []
    assert check(replace(listing, entries=(input_entry("tangents_1", "f16[4]"), *listing.entries))) == []


def test_a_rule_that_another_graph_uses_is_no_finding_and_each_is_reported_once() -> None:
    lacking = replace(plain(), entries=(), unmatched=(RuleRef("mine"),), policy="p")
    using = Listing("G", (Entry("y", "call_function", "aten::neg.default", rule=RuleRef("mine")),), policy="p")
    assert len(check(lacking, lacking)) == 1
    assert check(lacking, using) == []


def test_findings_of_a_selection() -> None:
    graphs = ((0, ill()),)
    assert [f.node for f in findings(graphs, lambda entry: entry.name == "exp", rules=False)] == ["exp"]


class Block(nn.Module):
    """A transformer's block with what is delicate in 16 bits: norms, softmax, an activation with powers, a loss."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(8), nn.Sequential(nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8))
        self.q, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, target):
        q = self.q(self.norm(x))
        x = x + (q @ q.transpose(1, 2)).softmax(-1) @ q
        x = functional.gelu(self.conv(x.transpose(1, 2)).transpose(1, 2), approximate="tanh") + x.pow(3)
        return functional.cross_entropy(self.out(x).flatten(0, 1), target)


SHIPPED = [*built_in_names(), "cuda-float16-fast-norms"]


@pytest.mark.parametrize("policy", exhaustive(SHIPPED, always=["cpu-float16", "cuda-float16-fast-norms"]))
def test_the_shipped_policies_give_no_findings(policy: str) -> None:
    inputs = (torch.ones(2, 3, 8), torch.zeros(6, dtype=torch.int64))
    traced = trace(Block(), inputs)
    captured = capture(traced.module, traced.inputs)
    context = CastContext(captured.mode, fxamp.Policy.load(policy).resolve(), every_device=True)
    listing = record_graph(cast_graph(captured, context), "").listing
    assert any(entry.is_cast for entry in listing.entries)
    assert list(finding_lines(check(listing))) == ["no findings"]
