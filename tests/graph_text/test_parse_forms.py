"""Every form in which torch's versions print a statement, a type or a comment, each on a graph of a few lines."""

import pytest
import torch

from fxamp.errors import ListingError
from fxamp.graph import op_name
from fxamp.graph_text import Entry, Listing
from fxamp.graph_text.parse import parse_text


def read(*body: str, inputs: str = 'x: "f32[2, 3]"', before: str = "", after: str = "") -> Listing:
    """The one graph of a forward with the lines ``body``, read without a warning."""
    lines = "".join(f"        {line}\n" for line in body)
    text = f"{before}class GraphModule(torch.nn.Module):\n    def forward(self, {inputs}):\n{lines}{after}"
    document = parse_text(text, "graph.txt")
    assert document.warnings == ()
    (listing,) = document.graphs
    return listing


def entry(statement: str, inputs: str = 'x: "f32[2, 3]", y: "f32[3]"') -> Entry:
    """What one statement, which names ``z``, is read as."""
    result = read(statement, "return (z,)", inputs=inputs).entry("z")
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("right", "kind", "target", "inputs"),
    [
        ("torch.ops.aten.mm.default(x, y)", "call_function", "aten::mm.default", ["x", "y"]),
        ("torch.ops.aten.sum.dim_IntList(y, [0], True)", "call_function", "aten::sum.dim_IntList", ["y"]),
        ("torch.ops.aten.relu(x)", "call_function", "aten::relu", ["x"]),
        ("torch.ops.mylib.op.default(x)", "call_function", "mylib::op.default", ["x"]),
        ("torch.ops.higher_order.cond(x, y, x, (y,))", "call_function", "higher_order::cond", ["x", "y"]),
        ("torch._C._nn.linear(x, y, None)", "call_function", "torch._C._nn.linear", ["x", "y"]),
        ("torch.nn.functional.relu(x, inplace = False)", "call_function", "torch.nn.functional.relu", ["x"]),
        ("_operator.add(y, x)", "call_function", "operator.add", ["y", "x"]),
        ("math.trunc(2)", "call_function", "math.trunc", []),
        ("len(x)", "call_function", "builtins.len", ["x"]),
        ("x.shape", "call_function", "builtins.getattr", ["x"]),
        ("getattr(x, 'not a name')", "call_function", "builtins.getattr", ["x"]),
        ("x > 0", "call_function", "operator.gt", ["x"]),
        ("2 @ x", "call_function", "operator.matmul", ["x"]),
        ("-x", "call_function", "operator.neg", ["x"]),
        ("x[(slice(None, y, None), 0)]", "call_function", "operator.getitem", ["x", "y"]),
        ("x.view(2, y)", "call_method", ".view", ["x", "y"]),
        ("self.w", "get_attr", "w", []),
        ("self.layers.w", "get_attr", "layers.w", []),
        ('getattr(self, "0")', "get_attr", "0", []),
        ('getattr(getattr(self.layers, "0"), "1").w', "get_attr", "layers.0.1.w", []),
        ("self.layers_0(x)", "call_module", "layers_0", ["x"]),
        ('getattr(self.layers, "0")(x, y)', "call_module", "layers.0", ["x", "y"]),
        ('getattr(self.layers, "0").norm(x)', "call_module", "layers.0.norm", ["x"]),
    ],
)
def test_right_hand_sides(right: str, kind: str, target: str, inputs: list[str]) -> None:
    result = entry(f"z = {right};  x = None")
    assert (result.kind, result.target, list(result.inputs)) == (kind, target, inputs)
    assert result.call == right


@pytest.mark.parametrize("operator", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or"])
def test_operators_that_write(operator: str) -> None:
    sign = dict(zip(["add", "sub", "mul", "truediv", "floordiv"], ["+", "-", "*", "/", "//"], strict=True))
    sign |= {"mod": "%", "pow": "**", "matmul": "@", "and": "&", "or": "|"}
    result = entry(f'x {sign[operator]}= y;  z: "f32[2, 3]" = x;  x = y = None')
    assert (result.target, result.inputs, result.dtype) == (f"operator.i{operator}", ("x", "y"), "f32")


def test_an_item_that_is_written() -> None:
    result = entry("x[(0, slice(None, None, None))] = y;  z = x;  y = z = None")
    assert (result.kind, result.target, result.inputs) == ("call_function", "operator.setitem", ("x", "y"))


@pytest.mark.parametrize(
    ("annotation", "dtype", "shape", "device"),
    [
        ('"f32[8, 16]"', "f32", (8, 16), ""),
        ('"f32[]"', "f32", (), ""),
        ('"f32[][]cpu"', "f32", (), "cpu"),
        ('"bf16[s77, 4][4, 1]cuda:0"', "bf16", ("s77", 4), "cuda:0"),
        ('"f8e4m3fn[s0*(s1 + 1), Max(1, s0)]cuda:1"', "f8e4m3fn", ("s0*(s1 + 1)", "Max(1, s0)"), "cuda:1"),
        ('"DTensor(f32[8, 16][16, 1]cuda:0, S(0)R)"', "f32", (8, 16), "cuda:0"),
        ('"Parameter(f16[3])"', "f16", (3,), ""),
        ("f32[8, 16]", "f32", (8, 16), ""),
        ("f32[]", "f32", (), ""),
        ("f32[8, s0][s0, 1]cuda:0", "f32", (8, "s0"), "cuda:0"),
    ],
)
def test_types(annotation: str, dtype: str, shape: tuple[int | str, ...], device: str) -> None:
    (of_input,) = read("return (x,)", inputs=f"x: {annotation}").entries[0].values
    (of_result,) = entry(f"z: {annotation} = x.sin()", inputs=f"y: {annotation}, x: {annotation} = None").values
    assert (of_result.dtype, of_result.shape, of_result.device) == (dtype, shape, device)
    assert of_result == of_input


@pytest.mark.parametrize("annotation", ["torch.Tensor", '"PlainAOTInput"', '""', '"()"', "list[int]", '"A(B(C()))"'])
def test_types_of_no_tensor(annotation: str) -> None:
    assert entry(f"z : {annotation} = x.sin()").values == ()


def test_symbols_are_no_tensors() -> None:
    result = entry('z: "Sym(s0 + 2*s1)" = x.size(0)')
    assert (result.symbol, result.values) == ("s0 + 2*s1", ())


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("# File: a.py:3 in forward, code: y = x", "a.py:3 in forward: y = x"),
        (
            "# File: C:\\a b\\c.py:12 in <lambda>, code: f(x)  # in b.py:9",
            "C:\\a b\\c.py:12 in <lambda>: f(x)  # in b.py:9",
        ),
        ("# File: a.py:3 in forward, code:", "a.py:3 in forward: "),
        ("# Annotation: {'stage': 'x: 1'} File: a.py:3 in f, code: y", "a.py:3 in f: y"),
        ("# Annotation: {} recompute: MUST_SAVE File: a.py:3 in f, code: y", "a.py:3 in f: y"),
        ("#  ac_graph_id: 2 - PREFER_RECOMPUTE File: a.py:3 in f, code: y", "a.py:3 in f: y"),
        ("# Backward of forward node: File: a.py:3 in f, code: y", "a.py:3 in f: y"),
        ("# seq_nr: 4 # File: a.py:3 in f, code: y", "a.py:3 in f: y"),
        ("# No stacktrace found for following nodes", ""),
        ("# Annotation: {'a': 1} No stacktrace found for following nodes", ""),
    ],
)
def test_sources(comment: str, expected: str) -> None:
    first = "# File: first.py:1 in first, code: first"
    listing = read(first, "a = x.sin()", "", comment, "b = a.cos()", "c = b.tan()", "return (c,)")
    sources = [listing.entry(name).source for name in ("a", "b", "c")]  # type: ignore[union-attr]
    texts = [f"{s.file}:{s.line} in {s.function}: {s.code}" if s else "" for s in sources]
    assert texts == ["first.py:1 in first: first", expected, expected]
    assert [e.source for e in listing.entries if e.kind in ("placeholder", "output")] == [None, None]


def test_inputs_that_are_unpacked_from_trees() -> None:
    body = [
        'primals_1: "f32[2]"; tangents_1: "bf16[3]cpu";',
        "",
        "primals_1, tangents_1, = fx_pytree.tree_flatten_spec([primals, tangents], self._in_spec)",
        'mul: "f32[2]" = torch.ops.aten.mul.Tensor(tangents_1, primals_1);  tangents_1 = primals_1 = None',
        "return pytree.tree_unflatten([mul, None], self._out_spec)",
    ]
    listing = read(*body, inputs="primals, tangents")
    assert [(e.name, e.kind, e.dtype) for e in listing.entries] == [
        ("primals_1", "placeholder", "f32"),
        ("tangents_1", "placeholder", "bf16"),
        ("mul", "call_function", "f32"),
        ("output", "output", ""),
    ]
    assert listing.entries[2].inputs == ("tangents_1", "primals_1") and listing.entries[3].inputs == ("mul",)
    assert listing.stage == "joint"


def test_names_of_inputs() -> None:
    listing = read("l_x_ = L_x_", "add = l_x_ + L_x_", "return (add,)", inputs="L_x_, /, *args, k = 3, **more")
    assert [(e.name, e.target) for e in listing.entries[:4]] == [
        ("l_x_", "L_x_"),
        ("args", "*args"),
        ("k", "k"),
        ("more", "**more"),
    ]
    assert listing.entries[4].inputs == ("l_x_",)


def test_varied_inputs_are_read_as_torch_makes_them() -> None:
    def program(x: torch.Tensor, *args: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    traced = torch.fx.symbolic_trace(program)
    (listing,) = parse_text(traced.print_readable(print_output=False), "graph.txt").graphs
    assert [(e.name, e.target) for e in listing.entries] == [(n.name, op_name(n)) for n in traced.graph.nodes]


def test_objects_that_python_cannot_read_back() -> None:
    shown = "<function f.<locals>.g at 0x7f>"
    result = entry(f'z: "f32[2]" = torch.ops.higher_order.flex(x, {shown}, [<Kind.A: 1>]);  x = None')
    assert (result.target, result.inputs) == ("higher_order::flex", ("x",))
    assert shown in result.call and result.values[0].shape == (2,)


def test_comparisons_are_no_objects() -> None:
    result = entry("z = torch.f(x <y, <object at 0x1>)")
    assert result.inputs == ("x", "y")


def test_results_over_several_lines() -> None:
    listing = read("y = x.sin()", "return (", "    y,  # PlainAOTOutput(idx=0)", "    None,", ")")
    assert (listing.entries[-1].call, listing.entries[-1].inputs) == ("(y, None)", ("y",))


def test_a_forward_alone() -> None:
    text = 'def forward(\n    self,\n    x: "f32[2]",  # PlainAOTInput(idx=0)\n):\n    y = x.sin()\n    return (y,)\n'
    (listing,) = parse_text(f"import torch\n\n{text}\n", "graph.txt").graphs
    assert [e.name for e in listing.entries] == ["x", "y", "output"] and listing.entries[0].dtype == "f32"


def test_what_is_cut_between_two_lines_is_warned_about() -> None:
    text = "class G(torch.nn.Module):\n    def forward(self, x):\n        y = x.sin()\n"
    document = parse_text("\n" + text, "graph.txt")
    assert document.warnings == ("graph.txt:2: G has no return; is it truncated?",)


def test_a_comment_of_fxamp_that_is_broken_is_warned_about() -> None:
    text = "class G(torch.nn.Module):\n    def forward(self):\n        # fxamp: was\n        return ()\n"
    document = parse_text("# fxamp: format=1\n" + text, "graph.txt")
    assert document.warnings == ("graph.txt:4: expected key=value at 'was'",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("y, z = x.chunk(2)", r"^graph\.txt:3: a graph gives a value one name, not several$"),
        ("if x: pass", r"^graph\.txt:3: a graph holds no if statement$"),
        ("y = torch.add(x,", r"^graph\.txt:3: not the text of a graph: .*never closed"),
    ],
)
def test_what_is_no_graph(line: str, message: str) -> None:
    with pytest.raises(ListingError, match=message):
        read(line, "return (y,)")


def test_the_end_of_a_truncated_file_is_reported() -> None:
    with pytest.raises(ListingError, match=r"^graph\.txt:3: .*; the file ends here: is it truncated\?$"):
        parse_text("class G(torch.nn.Module):\n    def forward(self, x):\n        y = torch.add(x", "graph.txt")
