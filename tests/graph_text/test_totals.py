"""Numbers about listings, on listings whose numbers are known."""

import pytest

from fxamp.graph_text import Entry, Listing, RuleRef, TensorType
from fxamp.graph_text.totals import Index, changed, is_op, totals, was_dtype


def input_entry(name: str, dtype: str, *shape: int | str) -> Entry:
    return Entry(name, "placeholder", name, values=(TensorType(dtype, shape),))


def op(name: str, target: str, *inputs: str, dtype: str = "f32", **more: object) -> Entry:
    values = (TensorType(dtype, (3, 4)),)
    return Entry(name, "call_function", target, inputs=inputs, **{"values": values, **more})  # type: ignore[arg-type]


def test_a_cast_reads_and_writes_every_element() -> None:
    cast = op("c", "aten::to.dtype", "x", dtype="bf16", inserted="for y")
    assert Index().bytes_cast(Listing("G", (input_entry("x", "f32", 3, 4), cast)), cast) == 12 * (4 + 2)


@pytest.mark.parametrize("entries", [(), (input_entry("x", "f32", "s0", 4),), (input_entry("x", "f9", 3, 4),)])
def test_bytes_of_unknown_sizes_and_dtypes_are_unknown(entries: tuple[Entry, ...]) -> None:
    cast = op("c", "aten::to.dtype", "x", dtype="bf16", inserted="for y")
    listing = Listing("G", (*entries, cast), policy="p")
    assert Index().bytes_cast(listing, cast) is None
    sums = totals(listing)
    assert (sums.casts, sums.cast_bytes, sums.casts_of_unknown_size) == (1, 0, 1)


def test_names_are_those_of_the_graph_or_body_they_stand_in() -> None:
    cast = op("c", "aten::to.dtype", "x", dtype="bf16", inserted="for y")
    inner = Listing("body", (input_entry("x", "f32", 3, 4), cast))
    outer = Entry("hop", "call_function", "higher_order::wrap", bodies=("body",))
    sums = totals(Listing("G", (input_entry("x", "f32", "s0"), outer), bodies={"body": inner}, policy="p"))
    assert (sums.casts, sums.cast_bytes, sums.ops) == (1, 72, 0)


def test_ops_are_counted_by_dtype_most_first_and_without_what_is_no_op() -> None:
    entries = (
        input_entry("x", "f32", 3, 4),
        op("a", "aten::mm.default", "x", dtype="bf16", rule=RuleRef("r")),
        op("b", "aten::neg.default", "a", dtype="bf16"),
        op("c", "aten::neg.default", "b", dtype="bf16"),
        op("d", "aten::add.Tensor", "x"),
        op("e", "mylib::log", "x", values=()),
        op("pick", "_operator.getitem", "d"),
        op("size", "aten::sym_size.int", "x", symbol="s0", values=()),
        op("grad", "torch._C._set_grad_enabled", values=()),
        op("cast", "aten::to.dtype", "x", inserted="for y"),
        op("copy", "aten::copy_.default", "x", inserted="for y"),
        op("kept", "torch.func.vmap", "x", verbatim="not looked into"),
    )
    sums = totals(Listing("G", entries, policy="p", counts={"shared": 3}))
    assert list(sums.ops_by_dtype.items()) == [("bf16", 3), ("f32", 2), ("other", 1)]
    assert (sums.ops, sums.casts, sums.shared, sums.folded) == (6, 1, 3, None)
    assert next(iter(sums.without_rule.items())) == ("aten::neg.default", 2)
    assert "aten::mm.default" not in sums.without_rule
    assert sums.verbatim == {"kept": "not looked into"}
    assert totals(Listing("G", entries)).without_rule == {}
    assert totals(Listing("G", entries), lambda entry: entry.name == "a").ops == 1
    assert [entry.name for entry in entries if is_op(entry)] == ["a", "b", "c", "d", "e", "kept"]


def test_the_dtype_before_is_that_of_the_result_which_names_the_dtype_now() -> None:
    values = (TensorType("i64", ()), TensorType("bf16", ()), TensorType("bf16", ()))
    entry = op("a", "aten::f", values=values, was=("i64", "f32", "bf16"))
    assert was_dtype(entry) == "f32" and changed(entry)
    same = op("a", "aten::f", values=values)
    assert was_dtype(same) == "" and not changed(same)
    assert was_dtype(op("a", "aten::f", values=values, was=("f64",))) == "f64"
