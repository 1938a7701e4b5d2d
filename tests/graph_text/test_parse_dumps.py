"""What fxamp dumps is read back as it was written: of real programs, and with any text in the fields."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from printed_graphs import PROGRAMS

import fxamp
from fxamp.errors import ListingError
from fxamp.graph_text import Entry, KeptValue, Listing, RuleRef, Source, TensorType
from fxamp.graph_text.parse import parse_text, read_file
from fxamp.graph_text.write import write_listing
from fxamp.reports.list_graph import list_graph


def read_back(listing: Listing) -> Listing:
    document = parse_text(write_listing(listing, 3), "dump.py")
    assert document.warnings == ()
    (graph,) = document.graphs
    return graph


@pytest.mark.parametrize("name", PROGRAMS)
def test_rewritten_programs(name: str) -> None:
    program, x = PROGRAMS[name]
    listing = list_graph(fxamp.rewrite(program, (x,), policy="cpu-bfloat16"), stage="cast", counts={"a b": 2})
    assert any(entry.is_cast for _, entry in listing.walk())
    assert read_back(listing) == written(listing)


def written(listing: Listing) -> Listing:
    """``listing`` without the only thing that a dump leaves out."""
    entries = (replace(e, source=None) if e.kind == "placeholder" else e for e in listing.entries)
    bodies = {name: written(body) for name, body in listing.bodies.items()}
    return replace(listing, entries=tuple(entries), bodies=bodies)


@pytest.mark.parametrize("name", ["mlp", "branches", "operators"])
def test_every_stage_of_a_scaled_compile(name: str, tmp_path: Any) -> None:
    """Dynamic sizes, checkpoint and cond, in a forward and a scaled backward."""
    program, x = PROGRAMS[name]
    scaler = fxamp.GradScaler("cpu", init_scale=4.0)
    options = {"policy": "cpu-float16", "lowering": "aot_eager", "dump": str(tmp_path), "scaler": scaler}
    x = x.clone().requires_grad_()
    torch._dynamo.maybe_mark_dynamic(x, 0)
    torch.compile(program, backend="fxamp", options=options)(x).backward()
    files = sorted(file for file in tmp_path.glob("graph_*.py") if "class " in file.read_text())
    assert {"captured", "cast", "forward", "backward"} <= {file.stem.split("_")[2] for file in files}
    for file in files:
        document = read_file(str(file))
        assert document.warnings == ()
        (listing,) = document.graphs
        assert listing.stage == file.stem.split("_")[2]
        assert write_listing(listing, int(file.stem.split("_")[1])) == file.read_text()


TEXT = st.text(
    st.characters(exclude_categories=("Cs",)) | st.sampled_from("|;\\\"'\n\r\t#= \x00\x1b\u2028\x85"), max_size=12
)
SOME = TEXT.filter(bool)
NAME = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
RULES = st.builds(RuleRef, SOME, TEXT, TEXT, TEXT)
SIZES = st.integers(0, 10**20) | st.sampled_from(["s77", "2*s0 + 1", "Max(1, s0)", "(s0//2)"])
TYPES = st.builds(
    TensorType,
    st.sampled_from(["f32", "bf16", "f8e4m3fn", "b8"]),
    st.lists(SIZES, max_size=3).map(tuple),
    st.sampled_from(["", "cpu", "cuda:0"]),
)
WORD = st.from_regex(r"[a-zA-Zé/_.|-]{1,8}", fullmatch=True)
# A line of Python holds no NUL; what begins a terminal's colour is taken for one.
CODE = TEXT.map(lambda text: " ".join(text.replace("\0", "").replace("\x1b", "").split()))
SOURCES = st.builds(Source, WORD, st.integers(0, 10**6), WORD, CODE)


@st.composite
def entries(draw: Callable[[Any], Any], kind: str) -> Entry:
    rule = draw(st.none() | RULES)
    return Entry(
        name="x" if kind == "placeholder" else "output" if kind == "output" else "y",
        kind=kind,
        target={"placeholder": "x", "output": "output"}.get(kind, "aten::sin.default"),
        call={"placeholder": "", "output": "(y,)"}.get(kind, "torch.ops.aten.sin.default(x)"),
        inputs={"placeholder": (), "output": ("y",)}.get(kind, ("x",)),
        values=() if kind == "output" else draw(st.lists(TYPES, max_size=3).map(tuple)),
        was=draw(st.lists(st.sampled_from(["f32", "i64"]), max_size=2).map(tuple)),
        needs_grad=draw(st.booleans()),
        module=draw(TEXT),
        module_class=draw(TEXT),
        source=None if kind == "placeholder" else draw(st.none() | SOURCES),
        rule=rule,
        lost=draw(st.lists(RULES, max_size=2).map(tuple)),
        reason=draw(TEXT) or (rule.why if rule else ""),  # a rule's is its why, unless another is given
        overruled=draw(TEXT),
        region=draw(TEXT),
        inserted=draw(TEXT),
        verbatim=draw(TEXT),
        not_fp8=draw(TEXT),
    )


SHAPES = st.lists(st.one_of(st.integers(0, 10**6), st.sampled_from(["s0", "s1*s2"])), max_size=3).map(tuple)
BYTES = st.none() | st.integers(0, 10**15)
KEPT = st.builds(KeptValue, TEXT, TEXT, TEXT, TEXT, SHAPES, TEXT, BYTES, BYTES, st.none() | RULES, TEXT)

LISTINGS = st.builds(
    Listing,
    NAME.map(lambda name: f"C{name}"),
    st.tuples(entries("placeholder"), entries("call_function"), entries("output")),
    stage=TEXT,
    policy=TEXT,
    device=TEXT,
    chosen=TEXT,
    counts=st.dictionaries(TEXT, st.integers(0, 10**9), max_size=3),
    unmatched=st.lists(RULES, max_size=2).map(tuple),
    ended=TEXT,
    kept_before=st.none() | st.integers(0, 10**15),
    kept_after=st.none() | st.integers(0, 10**15),
    kept=st.lists(KEPT, max_size=2).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(LISTINGS)
def test_any_text_in_any_field(listing: Listing) -> None:
    assert read_back(listing) == listing
    inner = replace(listing, **{key: getattr(Listing("", ()), key) for key in ABOUT})
    outer = replace(listing, bodies={listing.name: inner})
    assert read_back(outer) == outer


ABOUT = ("stage", "policy", "device", "chosen", "counts", "unmatched", "ended", "kept_before", "kept_after", "kept")
SMALL = Listing("G", (Entry("output", "output", "output", "(None,)", reason="a"),), stage="cast")


def test_constants_of_any_alphabet_in_a_call() -> None:
    call = "torch.ops.aten.einsum.default('äß€𝄞', [x],  mode = 'ö')"
    entry = Entry("y", "call_function", "aten::einsum.default", call, ("x",), reason="größer")
    listing = Listing("G", (Entry("x", "placeholder", "x"), entry, Entry("output", "output", "output", "y", ("y",))))
    assert read_back(listing) == listing
    (two,) = parse_text(write_listing(listing).replace(call, f"{call};  x = 'ü'[:0]"), "dump.py").graphs
    assert two.entries[1].call == call and two.entries[2].call == "'ü'[:0]"


def test_names_that_no_encoding_holds(tmp_path: Any) -> None:
    """A file name that is no UTF-8 reaches Python with lone surrogates."""
    listing = replace(SMALL, policy="pol\udce9icy.toml")
    file = tmp_path / "dump.py"
    file.write_text(write_listing(listing), encoding="utf-8")
    assert read_file(str(file)).graphs == (listing,)


def test_unknown_keys_are_warned_about() -> None:
    text = write_listing(SMALL).replace("stage=", "colour=red stage=").replace("reason=", "size=3 reason=")
    document = parse_text(text, "dump.py")
    assert document.graphs == (SMALL,)
    assert document.warnings == (
        "dump.py:2: unknown key 'colour' in fxamp's comment",
        "dump.py:5: unknown key 'size' in fxamp's comment",
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format=1", "format=2", r"dump\.py:1: format=2 was written by another version of fxamp; accepted: format=1"),
        ("stage=cast", "kept_before=x", r"dump\.py:1: kept_before is 'x', not a number"),
        ("stage=cast", "count=shared", r"dump\.py:1: count  is 'shared', not a number"),
        ("stage=cast", 'stage="cast', r"dump\.py:1: expected key=value at 'stage=\"cast'"),
        ("stage=cast", f"kept_after={'9' * 5000}", r"dump\.py:1: "),
    ],
)
def test_another_format_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(ListingError, match=message) as caught:
        parse_text(write_listing(SMALL).replace(old, new), "dump.py")
    assert "\n" not in str(caught.value)
