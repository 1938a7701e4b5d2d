"""fxamp.report: graphs, breaks and why, what stayed outside."""

import gc
from dataclasses import replace

import pytest
import torch

import fxamp
from fxamp.graph_text import Entry, Listing, TensorType
from fxamp.graph_text.totals import totals
from fxamp.reports import GraphRecord, registry

OPTIONS = {"policy": "cpu-bfloat16", "lowering": "eager"}


class Recurrent(torch.nn.Module):
    """Dynamo leaves the LSTM, and the rest of its function, outside."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.lstm = torch.nn.LSTM(4, 4)

    def forward(self, x):
        hidden = self.first(x).relu()
        print("", end="")
        return self.outside(hidden)

    @torch.compiler.disable
    def outside(self, hidden):
        return self.lstm(hidden)[0].sum()


@pytest.fixture
def recurrent() -> Recurrent:
    model = Recurrent()
    model.compile(backend="fxamp", options=OPTIONS)
    model(torch.ones(3, 2, 4)).backward()
    return model


def test_a_graph_without_a_policy_counts_its_ops_in_float32() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda y: (y @ y).relu(), x @ x, use_reentrant=False)

    compiled = torch.compile(program, backend="fxamp", options={"lowering": "eager"})
    with torch.autocast("cpu", torch.bfloat16):
        compiled(torch.ones(4, 4))
    compiled(torch.ones(4, 4))
    cast, plain = fxamp.report(compiled).graphs
    assert (cast.policy, plain.policy) == ("cpu-bfloat16", "float32")
    assert cast.ops == plain.ops == 3 and plain.ops_by_dtype == {"f32": 3} and plain.casts == 0


def test_a_break_and_what_stayed_outside_are_named(recurrent):
    report = fxamp.report(recurrent)

    assert len(report.graphs) == 1 and len(report.breaks) == 1
    assert "test_report.py:" in report.breaks[0] and "print" in report.breaks[0]
    assert report.outside == tuple(f"lstm.{name}_l0" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    shown = str(report)
    assert "after graph 0:" in shown and "\n  lstm: 4\n" in shown and "none of these graphs runs unchanged" in shown


def test_a_break_before_the_first_op_is_named_beside_graphs():
    """torch 2.15 ends a graph at a recurrent layer, and compiles what comes after it."""

    class Ended(torch.nn.Module):
        def forward(self, x):
            print("", end="")
            return x @ x

    model = Ended()
    model.compile(backend="fxamp", options=OPTIONS)
    model(torch.ones(2, 2))
    report = fxamp.report(model)
    (reason,) = report.ended
    assert len(report.graphs) == 1 and report.breaks == () and f"\n  before the first op: {reason}\n" in str(report)


def test_what_is_kept_for_one_reason_is_one_line():
    compiled = torch.compile(torch.vmap(lambda x: x.sin().cos().tan() * 2), backend="fxamp", options=OPTIONS)
    compiled(torch.ones(3, 4))
    report = fxamp.report(compiled)
    reasons = report.graphs[0].verbatim.values()
    lines = [line for line in str(report).splitlines() if "inside a torch.func transform" in line]
    assert len(lines) == 1 and f"and {sum('transform' in why for why in reasons) - 4} more: inside" in lines[0]


def test_the_document_holds_every_node_with_its_decision(recurrent):
    (listing,) = fxamp.report(recurrent).document.graphs

    by_name = {entry.name: entry for _, entry in listing.walk()}

    assert by_name["linear"].rule.id == "matrix-products" and by_name["linear"].was == ("f32",)
    assert by_name["linear"].module == "first" and by_name["linear"].dtype == "bf16"
    assert sum(entry.is_cast for entry in by_name.values()) == fxamp.report(recurrent).casts == 4
    assert listing.ended == fxamp.report(recurrent).breaks[0]


def test_a_whole_model_in_one_graph_has_nothing_to_add():
    model = torch.compile(lambda a: a @ a, backend="fxamp", options=OPTIONS)
    model(torch.ones(2, 2))

    report = fxamp.report(model)

    assert report.breaks == () and report.outside == ()
    assert len(str(report).splitlines()) == 3


def test_a_rule_that_matched_in_no_graph_is_named():
    base = fxamp.Policy.load("cpu-bfloat16").resolve("cpu")
    rules = [fxamp.Rule(op, "fp32", (op,)) for op in ("relu", "sum", "tanh")]  # the sum is outside of the graph
    model = Recurrent()
    model.compile(backend="fxamp", options={**OPTIONS, "policy": replace(base, rules=(*base.rules, *rules))})
    model(torch.ones(3, 2, 4))

    report = fxamp.report(model)

    assert [rule.id for rule in report.unmatched] == ["sum", "tanh"]
    assert "Rules that matched no op:\n  sum (made in Python)\n  tanh (made in Python)" in str(report)


def test_a_notebook_shows_the_same_escaped(recurrent):
    shown = fxamp.report(recurrent)._repr_html_()

    assert shown.startswith("<table>") and "lstm: 4" in shown
    assert "[&#x27;str&#x27;]" in shown and "['str']" not in shown
    assert fxamp.report(torch.nn.Linear(2, 2))._repr_html_().startswith("<p>0 graphs:")


def test_records_go_with_their_model():
    since = registry.count()
    model = Recurrent()
    model.compile(backend="fxamp", options=OPTIONS)
    model(torch.ones(3, 2, 4))
    assert len(registry.recent(since)) == 1

    del model
    torch._dynamo.reset()
    gc.collect()
    torch.compile(lambda a: a @ a, backend="fxamp", options=OPTIONS)(torch.ones(2, 2))

    assert [record.ops for record in registry.recent(since)] == [1]


def test_ops_are_counted_alike_by_a_report_and_by_fxamp_show():
    size = Entry("n", "call_function", target="aten::sym_size.int", symbol="s0")
    op = Entry("sin", "call_function", target="aten::sin.default", values=(TensorType("f32", ("s0",)),))
    listing = Listing("GraphModule", (size, op))

    assert GraphRecord(listing).ops == totals(listing).ops == 1
