"""The passes realize-casts, realize-gradients and realize-sums on tiny backward graphs of an absent GPU."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from support.checks.bench_graph import assert_unchanged, golden_pass
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

import fxamp.kernels  # noqa: F401  registers fxamp::check_unscale
from fxamp.graph import GraphWriter
from fxamp.passes.backward.realize_casts import RealizeCasts
from fxamp.passes.backward.realize_gradients import RealizeGradients
from fxamp.passes.backward.realize_sums import RealizeSums
from fxamp.passes.base import Context, Pass
from fxamp.torch_private.parts.inductor import inductor_prims

aten, prims = torch.ops.aten, torch.ops.prims

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def cast(
    device: str = "meta",
    shape: tuple[int, ...] = (2, 3, 4),
    dtype: torch.dtype = FLOAT32,
    also_read: bool = False,
    source_read: bool = True,
) -> tuple[GraphModule, Context]:
    """A gradient of this shape, cast to 16 bits, and read through a view; by another op, if ``also_read``."""
    mode = FakeTensorMode()
    graph = Graph()
    gradient = graph.placeholder("gradient")
    with mode:
        gradient.meta["val"] = torch.empty(shape, dtype=dtype, device=device)
    writer = GraphWriter(graph, mode)
    doubled = writer.call(aten.mul.Tensor, gradient, 2)
    narrow = writer.call(prims.convert_element_type.default, doubled, torch.float16)
    view = writer.call(aten.view.default, narrow, [-1, shape[-1]])
    written = [doubled] if source_read else []
    results = [*written, view, *([writer.call(aten.neg.default, narrow)] if also_read else [])]
    graph.output(tuple(results))
    return GraphModule(torch.nn.Module(), graph), Context(mode)


def summed(
    addends: int = 4,
    device: str = "meta",
    dtype: torch.dtype = FLOAT32,
    readers: int = 2,
    shared: bool = False,
    rows: int = 3 * 2**20,
) -> tuple[GraphModule, Context]:
    """A sum of gradients that this many ops read; with ``shared``, another op reads what is summed before the last."""
    mode = FakeTensorMode()
    graph = Graph()
    gradients = [graph.placeholder(f"gradient_{at}") for at in range(addends)]
    for gradient in gradients:
        with mode:
            gradient.meta["val"] = torch.empty(2, rows, 1, dtype=dtype, device=device)
    writer = GraphWriter(graph, mode)
    total = before = gradients[0]
    for gradient in gradients[1:]:
        before, total = total, writer.call(aten.add.Tensor, total, gradient)
    results = [writer.call(aten.sum.dim_IntList, total, [dim]) for dim in range(readers)]
    graph.output((*results, *([writer.call(aten.neg.default, before)] if shared else [])))
    return GraphModule(torch.nn.Module(), graph), Context(mode)


def returned(
    shape: tuple[int, ...] = (2, 3, 2, 2), is_grad: bool = True, device: str = "cpu", expanded: bool = False
) -> tuple[GraphModule, Context]:
    """A gradient of this shape, and the sum of its elements."""
    mode = FakeTensorMode()
    graph = Graph()
    weight = graph.placeholder("weight")
    with mode:
        weight.meta["val"] = torch.empty(shape, device=device)
    writer = GraphWriter(graph, mode)
    doubled = writer.call(aten.mul.Tensor, weight, 2)
    if expanded:
        doubled = writer.call(aten.expand.default, writer.call(aten.slice.Tensor, doubled, 0, 0, 1), list(shape))
    output = graph.output((doubled, writer.call(aten.sum.default, doubled)))
    output.meta["desc"] = [SimpleNamespace(is_grad=lambda: is_grad), None]
    return GraphModule(torch.nn.Module(), graph), Context(mode)


#: By name, the pass, its graph, and which op its promise misses before it ran.
PASSES: dict[str, tuple[Pass, Callable[..., tuple[GraphModule, Context]], str]] = {
    "realize-casts": (RealizeCasts(), cast, "convert_element_type"),
    "realize-gradients": (RealizeGradients(), returned, "mul"),
    "realize-sums": (RealizeSums(), summed, "add"),
}
OTHERS: dict[str, list[dict[str, object]]] = {
    "realize-casts": [
        {"device": "cpu"},
        {"shape": (3, 4)},
        {"dtype": BFLOAT16},
        {"also_read": True},
        {"source_read": False},
    ],
    "realize-gradients": [{"shape": (2, 3, 4)}, {"is_grad": False}, {"expanded": True}],
    "realize-sums": [
        {"addends": 3},
        {"device": "cpu"},
        {"dtype": BFLOAT16},
        {"readers": 1},
        {"shared": True},
        {"rows": 2**20},
    ],
}


@pytest.mark.parametrize("name", PASSES)
def test_what_is_written_and_that_no_value_changes(name: str) -> None:
    step, make, realized = PASSES[name]
    gm, context = make()
    inputs = [torch.randn(node.meta["val"].shape) for node in gm.graph.find_nodes(op="placeholder")]
    expected = gm(*inputs)
    assert golden_pass(f"backward/{name}", gm, context, step, f"not realized: {realized}").modified == 1
    for got, want in zip(gm(*inputs), expected, strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


@pytest.mark.parametrize(("name", "graph"), [(name, graph) for name in OTHERS for graph in OTHERS[name]], ids=str)
def test_others_stay_as_they_are(name: str, graph: dict[str, object]) -> None:
    step, make, _ = PASSES[name]
    gm, context = make(**graph)
    assert_unchanged(gm, context, step)


@pytest.mark.parametrize("op", [torch.ops.fxamp.check_unscale.default, torch.ops.fxamp.check_unscale_norm.default])
def test_a_gradient_is_realized_before_a_kernel_unscales_it(op: OpOverload) -> None:
    """The kernel keeps its layout, which autograd would copy later."""
    mode = FakeTensorMode()
    graph = Graph()
    weight, inverse = graph.placeholder("weight"), graph.placeholder("inverse")
    with mode:
        weight.meta["val"] = torch.empty(2, 3, 2, 2, dtype=torch.float16)
        inverse.meta["val"] = torch.empty(())
    writer = GraphWriter(graph, mode)
    doubled = writer.call(aten.mul.Tensor, weight, 2)
    results = writer.call(op, [weight, doubled], inverse, FLOAT32)
    true = writer.item(results, 0)
    output = graph.output((writer.item(true, 1), writer.item(results, 1)))
    output.meta["desc"] = [SimpleNamespace(is_grad=lambda: True), None]
    gm, context = GraphModule(torch.nn.Module(), graph), Context(mode)
    assert RealizeGradients().run(gm, context).modified == 1
    (realized,) = gm.graph.find_nodes(op="call_function", target=inductor_prims.force_stride_order)
    assert realized.args == (doubled, [12, 4, 2, 1]) and set(realized.users) == {results}
    assert RealizeGradients().run(gm, context).modified == 0 and RealizeGradients().ensures(gm, context) is None
