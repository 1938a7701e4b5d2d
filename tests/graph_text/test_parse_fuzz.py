"""Whatever a file holds, it is read or refused in one line that begins with its name; nothing of it is executed."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.checks.exhaustive import each_once

from fxamp.errors import ListingError
from fxamp.graph_text import Document
from fxamp.graph_text.parse import parse_text, read_file

TORCHS = """class <lambda>(torch.nn.Module):
    def forward(self, L_x_: "f32[s77, 4]", s77: "Sym(s77)", getattr_1 = None):
        l_x_ = L_x_
        # File: model.py:3 in forward, code: y = x.sin().cos()
        sin: "f32[s77, 4][4, 1]cpu" = torch.ops.aten.sin.default(l_x_);  l_x_ = None
        setitem = sin[(0, slice(None, 2, None))] = -1.0; setitem = sin
        sin *= 2; imul = sin
        body_0 = self.body_0
        cond = torch.ops.higher_order.cond(sin, body_0, body_0, (sin,));  body_0 = None
        getitem: "f32[s77, 4]" = cond[0];  cond = None
        return (getitem,)
    class body_0(torch.nn.Module):
        def forward(self, x: "f32[s77, 4]"):
            return (getattr(self.layers, "0")(x),)
"""
FXAMPS = """# fxamp: format=1 graph=0 stage=cast policy=cpu-bfloat16 count="shared 1" kept_before=4
# fxamp: unmatched="a|b.toml:3|fp32|never"
class GraphModule(torch.nn.Module):
    # fxamp: input=x needs_grad=1
    def forward(self, x: "f32[2, 2]cpu"):

        # File: model.py:3 in forward, code: return x @ x
        # fxamp: was=f32 rule=mm at=p.toml:3 cast=lower_precision_fp why="it is \\"fast\\"" region=bf16
        mm: "bf16[2, 2]cpu" = torch.ops.aten.mm.default(x, x)
        # fxamp: values="f32[2]cpu; i64[2]cpu" reason="no rule"
        max_1 = torch.ops.aten.max.dim(mm, 0)
        return (max_1,)
"""
RUNNABLE = """
def load_args(reader):
    buf0 = reader.storage(None, 16, device=device(type='cuda', index=0))
    reader.tensor(buf0, (2, 2), dtype=torch.float16, is_leaf=True)  # x
load_args._version = 0
"""
SEEDS = (TORCHS, FXAMPS, FXAMPS.partition("class")[1] + FXAMPS.partition("class")[2] + RUNNABLE)
#: What is put into a text: characters, and beginnings of what the reader looks for.
PIECES = (
    *"\n\r\x0c\x00\u2028()[]\"'#:\\;=\t*é\N{ZERO WIDTH SPACE}\ufeff",
    *("\r\n", "\x1b[31m", "**", "'''", "f'{x}'", "9" * 5000, "lambda: ", "yield ", "await x", "x := "),
    *(
        "class A(torch.nn.Module):",
        "def forward(self):",
        "def load_args(",
        "self.",
        "# fxamp: ",
        "    # fxamp: format=1\n",
    ),
)


def read(text: str) -> Document | None:
    """What is read, at least one graph; None for text that is refused in one line. Any other error fails the test."""
    try:
        document = parse_text(text, "dump.py")
    except ListingError as error:
        assert str(error).startswith("dump.py") and len(str(error).splitlines()) == 1
        return None
    assert document.graphs
    return document


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(1, 4))):
        how = draw(st.sampled_from(("delete", "repeat", "insert", "cut", "delete line", "repeat line", "move line")))
        if how.endswith("line"):
            lines = text.splitlines(keepends=True) or [""]
            at = draw(st.integers(0, len(lines) - 1))
            line = lines[at]
            if how != "repeat line":
                del lines[at]
            if how != "delete line":
                lines.insert(draw(st.integers(0, len(lines))), line)
            text = "".join(lines)
            continue
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.integers(1, 40)))
        new = draw(st.sampled_from(PIECES) | st.text(max_size=3)) if how == "insert" else ""
        text = {
            "delete": text[:at] + text[end:],
            "repeat": text[:end] + text[at:],
            "cut": text[:at],
            "insert": text[:at] + new + text[at:],
        }[how]
    return text


@settings(max_examples=400, deadline=None)
@given(mutated())
@example(TORCHS.replace("sin *=", "\r  sin *="))
@example(FXAMPS.replace("model.py:3", f"model.py:{'3' * 5000}"))
@example(FXAMPS.replace("f32[2, 2]", f"f32[{'3' * 5000}]"))
@example(FXAMPS + "# def load_args(")
@example(FXAMPS.replace("(x, x)", r'("\d")'))
@example(FXAMPS.replace("\n", "\r\n"))
def test_mutations_are_read_or_refused(text: str) -> None:
    read(text)


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_line_ends_of_other_systems(end: str) -> None:
    for seed in SEEDS:
        assert read(seed.replace("\n", end)) == read(seed) is not None


def test_what_python_warns_about_is_read_in_silence() -> None:
    document = read(nested(r'f("\d" is x)'))
    assert document is not None and document.graphs[0].entries[1].call == r'f("\d" is x)'


@pytest.mark.parametrize("seed", SEEDS, ids=["torch", "fxamp", "runnable"])
def test_truncated_anywhere(seed: str, tmp_path: Path) -> None:
    assert read(seed) is not None
    for end in range(len(seed)):
        read(seed[:end])
    file = tmp_path / "dump.py"
    whole = seed.replace("model.py", "größe.py").encode()
    for end in range(len(whole)):
        if not 0x80 <= whole[end] < 0xC0:
            continue
        file.write_bytes(whole[:end])
        with pytest.raises(ListingError, match="not text") as caught:
            read_file(str(file))
        assert str(caught.value).startswith(str(file))


def nested(expression: str) -> str:
    return f"class G(torch.nn.Module):\n    def forward(self, x):\n        y = {expression}\n        return (y,)\n"


DEEP = 100_000
EXPRESSIONS = {
    "parentheses": "(" * DEEP + "x" + ")" * DEEP,
    "unclosed": "(" * DEEP,
    "minus": "-" * DEEP + "x",
    "minus-few": "-" * 2000 + "x",
    "not": "not " * DEEP + "x",
    "plus": "x" + "+x" * DEEP,
    "attributes": "x" + ".a" * DEEP,
    "items": "x" + "[0]" * 5000,
    "calls": "f(" * 150 + "x" + ")" * 150,
    "lists": "[" * 150 + "x" + "]" * 150,
    "conditions": "x if x else " * 5000 + "x",
    "lambdas": "lambda: " * 5000 + "x",
    "f-string": "f'{" * 100 + "x" + "}'" * 100,
}


@each_once("name, where", EXPRESSIONS, ["value", "index", "annotation", "default"])
def test_deep_nesting(name: str, where: str) -> None:
    expression = EXPRESSIONS[name]
    text = {
        "value": nested(expression),
        "index": nested(f"x\n        x[{expression}] = 'é'"),
        "annotation": nested("x").replace("(self, x)", f"(self, x: {expression})"),
        "default": nested("x").replace("(self, x)", f"(self, x = {expression})"),
    }[where]
    read(text)
    read(text + RUNNABLE.replace("(2, 2)", f"({expression}, 2)"))


def test_brackets_in_an_annotation_and_classes_in_classes() -> None:
    read(nested("x").replace("(self, x)", f'(self, x: "f32[{"(" * DEEP}")'))
    depth = 90
    classes = "".join(
        f"{' ' * at}class C{at}(torch.nn.Module):\n{' ' * at} def forward(self): pass\n" for at in range(depth)
    )
    document = read(classes)
    assert document is None or len(document.graphs) == 1


CALL = '__import__("os").system("touch {mark}")'
ATTACKS = {
    "call": nested(CALL),
    "argument": nested(f"torch.add(x, {CALL})"),
    "annotation": nested("x").replace("(self, x)", f"(self, x: {CALL})"),
    "quoted annotation": nested("x").replace("(self, x)", f"(self, x: 'f32[{CALL}]')"),
    "default": nested("x").replace("(self, x)", f"(self, x = {CALL})"),
    "keyword default": nested("x").replace("(self, x)", f"(self, *, x = {CALL})"),
    "return annotation": nested("x").replace("(self, x):", f"(self, x) -> {CALL}:"),
    "decorator": nested("x").replace("    def", f"    @{CALL}\n    def"),
    "class body": nested("x").replace("    def", f"    {CALL}\n    def"),
    "class base": nested("x").replace("class G(", f"class H({CALL}, torch.nn.Module): pass\nclass G("),
    "f-string": nested(f"f'{{{CALL}}}'"),
    "comprehension": nested(f"[{CALL} for _ in (1,)]"),
    "lambda": nested(f"(lambda: {CALL})()"),
    "source comment": nested("x").replace("        y", f"        # File: a.py:3 in f, code: {CALL}\n        y"),
    "fxamp comment": f"# fxamp: format=1 stage={CALL.replace(' ', '')!r}\n" + nested("x"),
    "outside": f"{CALL}\n{nested('x')}{CALL}\n",
    "load_args": nested("x") + RUNNABLE.replace("(2, 2)", f"({CALL}, 2)"),
    "dtype": nested("x") + RUNNABLE.replace("torch.float16", CALL),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_nothing_is_executed(attack: str, tmp_path: Path) -> None:
    assert "__import__" in attack
    mark = tmp_path / "executed"
    read(attack.replace("{mark}", str(mark)))
    assert not mark.exists()


def test_the_mark_would_be_made_if_it_ran(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    eval(CALL.format(mark=mark))
    assert mark.exists()
