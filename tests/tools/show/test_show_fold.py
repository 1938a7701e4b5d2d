"""Sibling blocks are folded if they show the same, and only then; compared with rows that are compared one by one."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from support.programs.show_samples import FOLLOWS, NORMS, PRODUCTS, cast, input_entry, line, op, tensor

from fxamp.graph_text import Document, Entry, KeptValue, Listing
from fxamp.graph_text.write import write_listing
from fxamp.tools.common.numbered_rows import glob
from fxamp.tools.common.terminal import Look
from fxamp.tools.show.command import main
from fxamp.tools.show.fold import Alike, folded, repeated
from fxamp.tools.show.json_format import to_json
from fxamp.tools.show.select import select
from fxamp.tools.show.text import View, text_lines


def block(at: int, widths: tuple[int, ...], gap: bool) -> list[Entry]:
    """One layer: a norm, products with casts, a residual; ``gap``: its last op is in the code of the module around."""
    path, before = f"net.h.{at}", f"add_{at - 1}" if at else "x"
    here = line(10, "x = layer(x)")
    ops = [op(f"norm_{at}", "aten::layer_norm.default", (before,), "f32[4, 8]", module=f"{path}.ln", rule=NORMS,
                reason=NORMS.why, source=here)]  # fmt: skip
    for number, width in enumerate(widths):
        product, weight, source = f"linear_{at}_{number}", f"w_{at}_{number}", ops[-1].name
        asked = {"module": f"{path}.mlp.{number}", "source": here}
        ops.append(cast(f"{source}_f16", source, "f16[4, 8]", f"for {product}: rule matrix-products", **asked))
        ops.append(cast(f"{weight}_f16", weight, f"f16[{width}, 8]", f"for {product}: rule matrix-products", **asked))
        reads = (ops[-2].name, ops[-1].name)
        ops.append(op(product, "aten::linear.default", reads, f"f16[4, {width}]", was=("f32",), rule=PRODUCTS, **asked))
    tail = "net" if gap else path
    ops.append(op(f"add_{at}", "aten::add.Tensor", (before, ops[-1].name), "f32[4, 8]", reason=FOLLOWS, module=tail))
    return ops


def network(count: int, widths: tuple[int, ...], gap: bool) -> list[list[Entry]]:
    return [block(at, widths, gap) for at in range(count)]


def listing_of(blocks: list[list[Entry]], widths: tuple[int, ...]) -> Listing:
    weights = [
        input_entry(f"w_{at}_{n}", f"f32[{width}, 8]") for at in range(len(blocks)) for n, width in enumerate(widths)
    ]
    ends = op("sum", "aten::sum.default", (blocks[-1][-1].name,), "f32[]", module="net")
    return Listing(
        "G", (input_entry("x", "f32[4, 8]"), *weights, *chain.from_iterable(blocks), ends), policy="p", stage="cast"
    )


def calls(listing: Listing) -> list[Entry]:
    return [entry for entry in listing.entries if entry.is_call]


WIDTHS = st.lists(st.integers(1, 3).map(lambda n: 8 * n), min_size=1, max_size=3).map(tuple)

#: Changes of what is recorded of a node, each of which must keep its block from being folded with others.
CHANGES: dict[str, Callable[[Entry], Entry]] = {
    "dtype": lambda e: replace(e, values=(replace(e.values[0], dtype="bf16"),)),
    "shape": lambda e: replace(e, values=(replace(e.values[0], shape=(5, 7)),)),
    "captured dtype": lambda e: replace(e, was=("f64",)),
    "rule": lambda e: replace(e, rule=replace(NORMS, id="other")),
    "place of the rule": lambda e: replace(e, rule=replace(NORMS, origin="mine.toml:3")),
    "lost rule": lambda e: replace(e, lost=(PRODUCTS,)),
    "reason": lambda e: replace(e, reason="because", inserted=""),
    "overruled": lambda e: replace(e, overruled="the op rejects: half"),
    "not in fp8": lambda e: replace(e, not_fp8="size 4 is not %16"),
    "kept as captured": lambda e: replace(e, verbatim="unknown"),
    "op": lambda e: replace(e, target="aten::neg.default"),
    "an argument": lambda e: replace(e, call=e.call.replace(")", ", 1e-05)")),
    "source": lambda e: replace(e, source=line(99, "y")),
    "module": lambda e: replace(e, module=f"{e.module}.deeper"),
    "region": lambda e: replace(e, region="off"),
    "gradient": lambda e: replace(e, needs_grad=True),
    "what it reads": lambda e: replace(e, inputs=(*e.inputs, "sum")),
}


@drawn(count=st.integers(2, 5), widths=WIDTHS, gap=st.booleans())
def test_layers_that_show_the_same_are_one_block(count: int, widths: tuple[int, ...], gap: bool) -> None:
    listing = listing_of(network(count, widths, gap), widths)
    parts = folded(listing, calls(listing))
    assert [type(part) for part in parts] == [Alike, Entry]
    assert isinstance(parts[0], Alike) and (parts[0].first, parts[0].last) == ("net.h.0", f"net.h.{count - 1}")
    assert sum(times for _, times in repeated(parts)) == len(calls(listing))


@drawn(
    data=st.data(), count=st.integers(2, 5), widths=WIDTHS, gap=st.booleans(), change=st.sampled_from(sorted(CHANGES))
)
def test_what_differs_is_never_folded(
    data: st.DataObject, count: int, widths: tuple[int, ...], gap: bool, change: str
) -> None:
    blocks = network(count, widths, gap)
    number = data.draw(st.integers(0, count - 1))
    at = data.draw(st.integers(0, len(blocks[number]) - 1))
    was = blocks[number][at]
    blocks[number][at] = CHANGES[change](was)
    listing = listing_of(blocks, widths)
    parts = folded(listing, calls(listing))
    folds = [part for part in parts if isinstance(part, Alike) and part.first.startswith("net.h.")]
    layers = [range(int(fold.first.split(".")[2]), int(fold.last.split(".")[2]) + 1) for fold in folds]
    assert not any(number in span and len(span) > 1 for span in layers), (change, was)
    assert sum(times for _, times in repeated(parts)) == len(calls(listing))


def test_what_reads_another_place_of_its_block_is_not_folded() -> None:
    blocks = network(3, (8, 8), gap=False)
    last = blocks[1][-1]
    blocks[1][-1] = replace(last, inputs=(last.inputs[0], "linear_1_0"), call=last.call)
    listing = listing_of(blocks, (8, 8))
    assert not any(
        isinstance(part, Alike) and part.count > 1 and part.first == "net.h.0"
        for part in folded(listing, calls(listing))
    )


def test_bodies_are_compared_too() -> None:
    def layer(at: int, dtype: str) -> tuple[Entry, Listing]:
        body = f"wrap_body_{at}"
        inside = op(f"neg_{at}", "aten::neg.default", ("x",), f"{dtype}[4]", module=f"h.{at}", reason=FOLLOWS)
        outside = Entry(
            f"wrap_{at}",
            "call_function",
            "higher_order::wrap",
            f"wrap({body}, x)",
            ("x",),
            bodies=(body,),
            module=f"h.{at}",
        )
        return outside, Listing(body, (input_entry("x", "f32[4]"), inside))

    for dtypes, count in ((["f16", "f16", "f16"], 3), (["f16", "f16", "f32"], 2)):
        layers = [layer(at, dtype) for at, dtype in enumerate(dtypes)]
        listing = Listing(
            "G",
            (
                input_entry("x", "f32[4]"),
                *sum(((Entry(body.name, "get_attr", body.name), entry) for entry, body in layers), ()),
            ),
            {body.name: body for _, body in layers},
        )
        first = folded(listing, calls(listing))[0]
        assert isinstance(first, Alike) and first.count == count


def test_a_block_inside_a_block_is_folded_too() -> None:
    entries = [
        op(f"neg_{at}_{expert}", "aten::neg.default", ("x",), "f32[4]", module=f"h.{at}.experts.{expert}")
        for at in range(2)
        for expert in range(4)
    ]
    (whole,) = folded(Listing("G", (input_entry("x", "f32[4]"), *entries)), entries)
    assert isinstance(whole, Alike) and whole.count == 2
    (inner,) = whole.parts
    assert isinstance(inner, Alike) and inner.count == 4
    assert (inner.first, inner.last) == ("h.0.experts.0", "h.0.experts.3")
    assert [times for _, times in repeated([whole])] == [8]


@pytest.fixture
def twelve(tmp_path: Path) -> str:
    path = tmp_path / "net.txt"
    values = tuple(
        KeptValue(f"norm_{at}", "aten::layer_norm.default", f"net.h.{at}.ln", "f16", (4, 8), "int8/128", 64, 33)
        for at in range(12)
    )
    listing = replace(
        listing_of(network(12, (8,), True), (8,)), kept=(*values, replace(values[0], name="odd", after=64))
    )
    path.write_text(write_listing(listing), encoding="utf-8")
    return str(path)


def test_twelve_layers_print_one_and_the_sum_of_all(twelve: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([twelve]) == 0
    text = capsys.readouterr().out
    assert "net.h.0 .. net.h.11 (12 alike): 36 ops, 24 casts, 6.8 KiB; the first:\n  norm_0 " in text
    assert "norm_1 " not in text and "\nsum " in text
    assert "  4.5 KiB: w_0_0_f16 in net.h.*.mlp.0, f32 to f16, 12 times\n" in text
    assert main([twelve, "--all"]) == 0
    every = capsys.readouterr().out
    assert "alike" not in every and all(f"norm_{at}_f16 " in every for at in range(12))


def test_rows_by_the_bytes_of_all_alike(twelve: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([twelve, "--sort", "bytes"]) == 0
    table = capsys.readouterr().out.split("\n\n")[2].splitlines()[2:]
    assert [row.split()[0] for row in table[:3]] == ["w_0_0_f16", "norm_0_f16", "norm_0"]
    assert " 12  4.5 KiB" in table[0] and " 12  2.2 KiB" in table[1]
    assert main([twelve, "--sort", "bytes", "--all"]) == 0
    table = capsys.readouterr().out.split("\n\n")[2].splitlines()[2:]
    assert [row.split()[0] for row in table[:12]] == [f"w_{at}_0_f16" for at in range(12)]


def test_kept_values_of_siblings_are_one_row(twelve: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([twelve, "--sort", "kept"]) == 0
    rows = capsys.readouterr().out.split("\n\n")[3].splitlines()[2:]
    assert [row.split() for row in rows] == [
        ["norm_0", "layer_norm", "net.h.*.ln", "4x8", "f16", "int8/128", "12", "768", "B", "396", "B"],
        ["odd", "layer_norm", "net.h.0.ln", "4x8", "f16", "int8/128", "64", "B", "64", "B"],
    ]
    assert main([twelve, "--kept", "--all"]) == 0
    assert "net.h.7.ln" in capsys.readouterr().out


def test_sums_of_a_fold_are_those_of_its_rows() -> None:
    listing = listing_of(network(4, (8, 16), True), (8, 16))
    selection = select(Document((listing,)))
    title = next(row for row in text_lines(selection, "g", Look()) if "alike" in row)
    rows = json.loads(to_json(Document((listing,))))["graphs"][0]["nodes"]
    moved = sum(row["bytes"] for row in rows if row.get("inserted"))
    assert f"{moved / 1024:.1f} KiB" in title
    every = list(text_lines(selection, "g", Look(), View(fold=False)))
    assert sum(" cast " in row for row in every) == int(title.split(" ops, ")[1].split()[0])


def test_a_glob_names_what_differs() -> None:
    assert glob(["h.0.mlp.1", "h.1.mlp.1"]) == "h.*.mlp.1" and glob(["h.0"]) == "h.0" and glob(["", ""]) == ""
    assert tensor("f32[2]").bytes == 8
