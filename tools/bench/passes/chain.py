"""A program of any number of ops for timing the passes: transformer-like blocks in a row, built without tracing."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

#: Tokens and width of the chain; small, because the time of a pass does not depend on sizes.
TOKENS, WIDTH = 16, 8


@dataclass(frozen=True)
class Chain:
    """A graph of ``ops`` calls of torch functions and the FakeTensors for its placeholders, in order."""

    module: GraphModule
    inputs: list[Any]
    ops: int


def build_chain(ops: int) -> Chain:
    """Return a program of exactly ``ops`` calls on float32 tensors of shape (16, 8) that need gradients.

    The mix is a transformer's: matrix products, norms, softmax, residual additions, views, and an in-place write.
    Each op reads the result of the one before, so the graph is as deep as it is long.
    """
    graph = Graph()
    x, weight, bias, scale = (graph.placeholder(name) for name in ("x", "weight", "bias", "scale"))
    residual = x
    for index in range(ops):
        kind = index % len(_BLOCK)
        residual = x if kind == 0 else residual
        x = _BLOCK[kind](graph, x, _Operands(weight, bias, scale, residual))
    graph.output((x,))
    with FakeTensorMode():
        shapes = ((TOKENS, WIDTH), (WIDTH, WIDTH), (WIDTH,), (WIDTH,))
        inputs = [torch.empty(shape, requires_grad=True) for shape in shapes]
    return Chain(GraphModule(torch.nn.Module(), graph), inputs, ops)


@dataclass(frozen=True)
class _Operands:
    weight: Node
    bias: Node
    scale: Node
    residual: Node


_Step = Callable[[Graph, Node, _Operands], Node]


def _layer_norm(graph: Graph, x: Node, o: _Operands) -> Node:
    return graph.call_function(F.layer_norm, (x, (WIDTH,), o.scale, o.bias))


def _linear(graph: Graph, x: Node, o: _Operands) -> Node:
    return graph.call_function(F.linear, (x, o.weight, o.bias))


def _residual(graph: Graph, x: Node, o: _Operands) -> Node:
    return graph.call_function(operator.add, (x, o.residual))


def _matmul(graph: Graph, x: Node, o: _Operands) -> Node:
    return graph.call_function(torch.matmul, (x, o.weight))


def _multiply_in_place(graph: Graph, x: Node, o: _Operands) -> Node:
    return graph.call_function(torch.Tensor.mul_, (x, 0.5))


def _unary(function: Callable[..., Any], *arguments: Any) -> _Step:
    return lambda graph, x, operands: graph.call_function(function, (x, *arguments))


#: One block; the chain repeats it.
_BLOCK: tuple[_Step, ...] = (
    _layer_norm,
    _linear,
    _unary(torch.reshape, (2, TOKENS // 2, WIDTH)),
    _matmul,
    _multiply_in_place,
    _unary(torch.softmax, -1),
    _unary(torch.transpose, 0, 1),
    _matmul,
    _unary(torch.transpose, 0, 1),
    _unary(torch.reshape, (TOKENS, WIDTH)),
    _linear,
    _residual,
    _unary(F.relu),
    _linear,
    _unary(F.gelu),
    _residual,
)
