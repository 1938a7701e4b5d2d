"""What fxamp-show prints: tables, totals, reasons; golden texts of a listing written by hand."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.checks.golden_text import assert_golden
from support.programs.show_samples import cast, document, gpt, input_entry, op, plain

from fxamp.errors import OptionError
from fxamp.graph_text import Document, Entry, Listing
from fxamp.tools.common.table import cut
from fxamp.tools.common.terminal import Look
from fxamp.tools.show.select import select
from fxamp.tools.show.text import text_lines
from fxamp.tools.show.why import why_lines

FULL = Look()


def shown(doc: Document, look: Look = FULL, **options: str) -> str:
    return "\n".join(text_lines(select(doc, **options), "gpt.py", look))


def why(listing: Listing, asked: str) -> str:
    return "\n".join(why_lines(((0, listing),), asked))


def test_a_whole_graph() -> None:
    assert_golden("show/text", shown(document()))


def test_a_graph_without_records_explains_how_to_get_them() -> None:
    assert_golden("show/text-plain", shown(Document((plain(),))))


def test_one_module_with_its_own_totals() -> None:
    assert_golden("show/text-module", shown(document(), module="h.0.a*"))


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("casts", ["norm_f16", "w_f16", "add_f16", "view", "mm_f32"]),
        ("changed", ["linear", "view", "mm"]),
        ("matrix-products", ["linear", "mm"]),
    ],
)
def test_only_some_rows(only: str, names: list[str]) -> None:
    table = shown(document(), only=only).split("\n\n")[2].splitlines()
    assert [line.split()[0] for line in table[2:]] == names


def test_totals_stay_those_of_the_graph_when_rows_are_left_out() -> None:
    assert shown(document()).split("\n\n")[1] == shown(document(), only="casts").split("\n\n")[1]


def test_a_module_holds_what_is_below_it() -> None:
    assert "mm_f32" in shown(document(), module="h")
    assert "mm_f32" not in shown(document(), module="h.0.attn")


@pytest.mark.parametrize("width", [200, 120, 100, 80, 60, 40])
def test_a_table_fits_the_terminal(width: int) -> None:
    table = shown(document(), Look(width)).split("\n\n")[2].splitlines()
    assert max(map(len, table)) <= width
    assert all("norm" in line or "  " in line or "custom" in line for line in table)
    assert [line.split()[0] for line in table[2:]][:2] == ["norm", "norm_f16"]


def test_reasons_give_way_first() -> None:
    full = shown(document())
    wide = max(map(len, full.split("\n\n")[2].splitlines()))
    table = shown(document(), Look(wide - 14)).split("\n\n")[2]
    assert "policies/accelerators.toml:110" in table and "Mean and variance are sums over m" not in table


def test_a_short_path_keeps_its_end() -> None:
    assert cut("/models/gpt.py:10", 12, "middle") == "…s/gpt.py:10"
    assert cut("transformers/models/gpt2/modeling_gpt2.py:567", 28, "path") == "…/gpt2/modeling_gpt2.py:567"
    assert cut("transformers/models/gpt2/modeling_gpt2.py:567", 21, "path") == "…modeling_gpt2.py:567"
    assert cut("transformers/models/gpt2/modeling_gpt2.py:567", 9, "path") == "…2.py:567"
    assert cut("Sums over many", 6, "end") == "Sums…"
    assert cut("short", 5, "middle") == "short"


def test_text_that_is_not_fitted_is_never_shortened() -> None:
    assert "…" not in shown(document())
    assert "…" in shown(document(), Look(100))


def test_colours_are_by_dtype_and_change_no_width() -> None:
    painted = shown(document(), Look(120, colour=True))
    assert "\x1b[36mf16    \x1b[0m" in painted and "\x1b[33mf32" in painted and "\x1b[35mcast" in painted
    assert [line.rstrip() for line in re.sub(r"\x1b\[\d*m", "", painted).splitlines()] == shown(
        document(), Look(120)
    ).splitlines()


def test_no_control_character_of_a_dump_reaches_the_terminal() -> None:
    entry = replace(plain().entries[1], reason="a\x1b[2Jb\nc", module="\x1b]0;title\x07")
    for text in (shown(Document((Listing("G", (entry,)),))), why(Listing("G", (entry,)), entry.name)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)


def test_files_are_named_from_the_working_directory_or_their_package_on() -> None:
    from fxamp.tools.common.formatting import short_file

    assert short_file(str(Path.cwd() / "models/net.py")) == "models/net.py"
    assert short_file("/env/lib/python3.11/site-packages/torch/nn/linear.py") == "torch/nn/linear.py"
    assert short_file("/elsewhere/net.py") == "/elsewhere/net.py"


def test_why_a_rule_decides() -> None:
    assert_golden("show/why-rule", why(gpt(), "linear"))


def test_why_a_cast_is_there() -> None:
    assert_golden("show/why-cast", why(gpt(), "norm_f16"))


def test_why_a_name_in_several_places_shows_each() -> None:
    assert_golden("show/why-follows", why(gpt(), "view"))
    assert why(gpt(), "wrap_body_0/view").startswith("wrap_body_0/view\n")
    assert why(gpt(), "0:wrap_body_0/view") == why(gpt(), "wrap_body_0/view")


def test_why_names_the_graph() -> None:
    graphs = ((0, plain()), (1, replace(plain(), stage="cast")))
    assert "exp in graph 0" in "\n".join(why_lines(graphs, "exp"))
    assert "graph 0" not in "\n".join(why_lines(graphs, "1:exp"))


def test_why_an_unknown_node_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean 'softmax'"):
        why(gpt(), "sotfmax")
    with pytest.raises(OptionError, match="no node has this name"):
        why(gpt(), "7:softmax")


def test_why_goes_back_to_where_the_dtype_began_each_node_once() -> None:
    follows = {"reason": "no rule: follows its inputs"}
    entries = [input_entry("x", "f32[4]"), input_entry("y", "f32[4]"), cast("x_f16", "x", "f16[4]", "for a: rule r")]
    entries += [op("a", "aten::neg.default", ("x_f16",), "f16[4]", **follows)]
    entries += [op("b", "aten::add.Tensor", ("a", "a"), "f16[4]", **follows)]
    entries += [op("c", "aten::add.Tensor", ("a", "b", "y"), "f16[4]", **follows)]
    chain = why(Listing("G", tuple(entries)), "c").partition("  follows  ")[2].splitlines()
    assert [line.split()[0] for line in chain] == ["a", "x_f16", "b"]


def test_why_an_input_is_there() -> None:
    many = [input_entry("x", "f32[4]")] + [op(f"n{i}", "aten::neg.default", ("x",), "f32[4]") for i in range(30)]
    text = why(Listing("G", tuple(many)), "x")
    assert text.count("used by") == 20 and text.endswith("... and 10 more")
    assert "used by    output  no tensor  what the graph returns" in why(gpt(), "wrap_body_0/mm_f32")


def test_why_is_bounded() -> None:
    entries = [input_entry("n0", "f32[4]")] + [
        op(f"n{i}", "aten::neg.default", (f"n{i - 1}",), "f32[4]") for i in range(1, 500)
    ]
    text = why(Listing("G", tuple(entries)), "n499")
    assert text.count("\n") < 80 and "on from n438: --why n438" in text


def test_unknown_numbers_are_shown_as_unknown() -> None:
    symbolic = [input_entry("x", "f32[s0]"), cast("x_f16", "x", "f16[s0]", "for y: rule r")]
    listing = Listing("G", tuple(symbolic), policy="p", stage="cast")
    assert "1 inserted, bytes unknown" in shown(Document((listing,)))
    assert "unknown: sizes are symbolic" in shown(Document((listing,)))
    assert "kept for the backward" not in shown(Document((replace(listing, stage="backward"),)))
    assert "0 B before, unknown after" in shown(Document((replace(listing, kept_before=0),)))


def test_an_input_without_graphs() -> None:
    assert shown(Document(())) == "no graphs in gpt.py"
    with pytest.raises(OptionError, match="accepted: none"):
        select(Document(()), graph=0)


def test_a_graph_without_nodes() -> None:
    text = shown(Document((Listing("G", (), policy="float32", chosen="no 16-bit units"),)))
    assert "policy float32, no 16-bit units" in text and "no ops" in text


def test_overruled_and_verbatim_nodes_say_so() -> None:
    entry = Entry("f", "call_function", "mylib::f", reason="r", overruled="the op rejects: half", verbatim="unknown")
    text = shown(Document((Listing("G", (entry,)),)))
    assert "r; overruled: the op rejects: half" in text and "f: unknown" in text
