"""Arguments of calls that are kept as they are: constants that fx can write as Python, and objects that it cannot."""

import functools
import math
from collections import namedtuple
from collections.abc import Callable
from enum import Enum, Flag, auto
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxamp
from fxamp.backend.entry_point import fxamp as backend
from fxamp.graph_text.parse import read_file

LOWERINGS = ("eager", "aot_eager")

Pair = namedtuple("Pair", "first second")


class Color(Enum):
    RED = 1


class Access(Flag):
    READ = auto()
    WRITE = auto()


#: What fx writes as a constant into a graph's code.
CONSTANTS = {
    "dtypes": [torch.float32, torch.float8_e4m3fn],
    "device": torch.device("cpu"),
    "layout": torch.strided,
    "memory format": torch.channels_last,
    "slices": [slice(1, None), slice(None, -1, 2)],
    "complex": 1 + 2j,
    "infinite": [math.inf, -math.inf],
    "enum": {"colors": [None, ...]},
    "member": Color.RED,
    "range": range(3),
    "size": torch.Size([2, 3]),
    "named tuple": Pair(1, torch.float16),
    "op": torch.ops.aten.mm.default,
    "text": "<not an object>",
}

#: What only a call computes, or a module holds: its repr is no Python, or means nothing in a graph's code.
OBJECTS = {
    "enum of C++": SDPBackend.MATH,
    "enums in a list": [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION],
    "flags": Access.READ | Access.WRITE,
    "flags in a dict": {"access": Access.READ | Access.WRITE, "kinds": (SDPBackend.MATH, 1)},
    "partial": functools.partial(torch.sum, dim=0),
    "function": lambda x: x,
    "generator": torch.Generator(),
    "set": {1, 2},
    "object": object(),
}

noted: list[Any] = []


def note(*values: Any, **named: Any) -> None:
    noted.append((values, named))


def recall(name: str) -> Any:
    return OBJECTS[name]


def program(add: Callable[[Graph], tuple[tuple[Any, ...], dict[str, Any]]], **attributes: Any) -> GraphModule:
    """``x @ x``, beside a call of :func:`note` with the arguments that ``add`` gives."""
    root, graph = torch.nn.Module(), Graph()
    for name, value in attributes.items():
        setattr(root, name, value)
    x = graph.placeholder("x")
    args, kwargs = add(graph)
    graph.call_function(note, args, kwargs)
    graph.output((graph.call_function(torch.matmul, (x, x)),))
    return GraphModule(root, graph)


def values_noted(run: Callable[[Tensor], Any]) -> Any:
    x = torch.full((2, 2), 1 + 2**-12)
    noted.clear()
    (result,) = run(x)
    assert torch.equal(result.float(), (x.bfloat16() @ x.bfloat16()).float())
    ((values, named),) = noted
    return values, named


def assert_noted(gm: GraphModule, expected: Any, folder: Path) -> None:
    """Rewritten and under lowering "eager", ``gm`` calls :func:`note` with ``expected``; its text can be read."""
    x = torch.ones(2, 2)
    assert values_noted(fxamp.rewrite(gm, (x,), policy="cpu-bfloat16")) == expected
    for lowering in LOWERINGS:
        dump = folder / lowering
        options = {"policy": "cpu-bfloat16", "lowering": lowering, "dump": dump}
        compiled = backend(gm, [x], options=options)
        if lowering == "eager":
            assert values_noted(compiled) == expected
        for file in dump.glob("*.py"):
            assert read_file(str(file)).graphs


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_stay(name: str, tmp_path: Path) -> None:
    value = CONSTANTS[name]
    gm = program(lambda _: (([value],), {"own": value}))
    assert_noted(gm, (([value],), {"own": value}), tmp_path)


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_a_call_computes_is_computed_by_the_call(name: str, tmp_path: Path) -> None:
    def add(graph: Graph) -> Any:
        value = graph.call_function(recall, (name,))
        return ([value, 1],), {"own": {"it": value}}

    assert_noted(program(add), (([OBJECTS[name], 1],), {"own": {"it": OBJECTS[name]}}), tmp_path)


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_the_module_holds_stays_in_the_module(name: str, tmp_path: Path) -> None:
    gm = program(lambda graph: ((graph.get_attr("held"),), {}), held=OBJECTS[name])
    assert_noted(gm, ((OBJECTS[name],), {}), tmp_path)


def test_an_object_that_only_traced_ops_read_leaves_no_call() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    summed = graph.call_function(lambda value, partial: partial(value), (x, graph.call_function(recall, ("partial",))))
    graph.output((summed,))
    rewritten = fxamp.rewrite(GraphModule(torch.nn.Module(), graph), (torch.ones(2, 2),), policy="cpu-bfloat16")
    calls = [node.target for node in rewritten.graph.nodes if node.op == "call_function"]
    assert calls == [torch.ops.aten.sum.dim_IntList]


def _attention(q: Tensor) -> Tensor:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)


def _checkpointed(q: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda x: _attention(x) * 2, q, use_reentrant=False)  # type: ignore


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("call", [_attention, _checkpointed])
def test_kernels_that_a_program_chooses_for_attention(call: Any, lowering: str, tmp_path: Path) -> None:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = call(q)
    gradient = torch.autograd.grad(expected.float().sum(), q)[0]
    options = {"policy": "cpu-bfloat16", "lowering": lowering, "dump": tmp_path}
    result = torch.compile(call, backend="fxamp", options=options)(q)
    assert torch.equal(result.float(), expected.float())
    assert torch.equal(torch.autograd.grad(result.float().sum(), q)[0], gradient)
    rewritten = fxamp.rewrite(call, (q,), policy="cpu-bfloat16")
    assert torch.equal(rewritten(q).float(), expected.float())
    assert all(read_file(str(file)).graphs for file in tmp_path.iterdir())


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_transform_leaves_no_state_where_graphs_are_dumped(lowering: str, tmp_path: Path) -> None:
    """torch.func.grad disables hooks for saved tensors; what is kept for the backward is counted by such hooks."""

    def call(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: (y * y).sum())(x)

    x = torch.randn(3, requires_grad=True)
    options = {"policy": "cpu-bfloat16", "lowering": lowering, "dump": tmp_path}
    assert torch.equal(torch.compile(call, backend="fxamp", options=options)(x), 2 * x)
    with torch.autograd.graph.saved_tensors_hooks(lambda y: y, lambda y: y):
        assert x.exp().requires_grad
