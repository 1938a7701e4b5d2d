"""Which calls without a schema may write to their inputs: Python functions and methods, and higher-order ops."""

import inspect
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from fxamp.graph.nodes import is_mutable, subgraphs
from fxamp.graph.tensor_wrappers import is_wrapper

#: Higher-order ops that write to their operands only where a body does, and return nothing that shares their memory
#: unless it does. Of these, Dynamo lets the bodies of a cond and a while_loop write, and only without gradients.
_FUNCTIONAL = frozenset(
    {
        "associative_scan",
        "cond",
        "flex_attention",
        "flex_attention_backward",
        "invoke_subgraph",
        "map_impl",
        "scan",
        "triton_kernel_wrapper_functional",
        "while_loop",
    }
)

#: The positions of the lists of operands that all bodies take.
_OPERANDS = {"cond": (3,), "while_loop": (2, 3)}

#: Python's operators that write, as functions and, between underscores, as methods.
_OPERATORS = frozenset(
    {
        "delitem",
        "iadd",
        "iand",
        "ifloordiv",
        "ilshift",
        "imatmul",
        "imod",
        "imul",
        "ior",
        "ipow",
        "irshift",
        "isub",
        "itruediv",
        "ixor",
        "setitem",
    }
)

#: Functions that write to running statistics, and the positions and names of these.
_NORMS = frozenset({"batch_norm", "instance_norm"})
_STATISTICS = (1, 2, "running_mean", "running_var")


def is_functional(node: Node) -> bool:
    """Whether ``node`` is a known higher-order op that writes to nothing and whose results are tensors of their own."""
    return (
        isinstance(node.target, HigherOrderOperator) and node.target._name in _FUNCTIONAL and not written_inputs(node)
    )


def written_inputs(node: Node) -> list[Node]:
    """Return the inputs that a node without a schema may write to, such as a Triton kernel's launch.

    All of them if it may write at all, except for those that no body of a cond or a while_loop writes to.
    """
    tensors = [source for source in node.all_input_nodes if isinstance(_value(source), Tensor)]
    if not isinstance(node.target, HigherOrderOperator):
        return tensors if _writes_by_name(node) else []
    if node.target._name not in _FUNCTIONAL:
        return tensors
    written = set().union(*(_written_places(body) for _, body in subgraphs(node)))
    if node.target._name not in _OPERANDS or not written:
        return tensors if written else []
    operands: Any = [operand for at in _OPERANDS[node.target._name] for operand in node.args[at]]  # type: ignore[union-attr]
    return [operands[at] for at in sorted(written) if isinstance(operands[at], Node)]


def _written_places(body: GraphModule) -> set[int]:
    """Return the positions of the placeholders of ``body`` that its nodes may write to, themselves or through views."""
    targets = [_value(target) for node in body.graph.nodes for target in _targets(node)]
    placeholders = enumerate(map(_value, body.graph.find_nodes(op="placeholder")))
    return {at for at, value in placeholders if any(_may_share(value, target) for target in targets)}


def _targets(node: Node) -> Iterable[Node]:
    """Return the nodes that ``node``, in the body of a higher-order op, may write to."""
    if node.op not in ("call_function", "call_method"):
        return []
    if isinstance(node.target, OpOverload):
        return node.all_input_nodes if is_mutable(node) else []
    if isinstance(node.target, HigherOrderOperator):
        return written_inputs(node)
    if not _writes_by_name(node):
        return []
    places: tuple[int | str, ...] = _STATISTICS if _name(node) in _NORMS else ("out", 0, "input")
    arguments = dict(enumerate(node.args)) | node.kwargs
    named = [argument for place in places if isinstance(argument := arguments.get(place), Node)]
    return named if _name(node) in _NORMS else named[:1] or node.all_input_nodes


def _value(node: Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _may_share(one: Any, other: Any) -> bool:
    """Whether two values may share memory: their FakeTensors have one storage, or it is unknown."""
    if not isinstance(one, Tensor):
        return False
    if not isinstance(other, Tensor) or is_wrapper(one) or is_wrapper(other):
        return True
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return True
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _writes_by_name(node: Node) -> bool:
    """Whether the name or an argument of a function or method says that it writes, such as ``relu(inplace=True)``."""
    name = _name(node)
    if name.strip("_") in _OPERATORS or name in _NORMS or node.kwargs.get("out") is not None or _inplace(node):
        return True
    return name.endswith("_") and not name.endswith("__") and getattr(operator, name, None) is not node.target


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _inplace(node: Node) -> bool:
    """Whether a Python function is called with ``inplace=True``, by position or by keyword."""
    if not inspect.isfunction(node.target):
        return bool(node.kwargs.get("inplace"))
    return bool(inspect.signature(node.target).bind_partial(*node.args, **node.kwargs).arguments.get("inplace"))
