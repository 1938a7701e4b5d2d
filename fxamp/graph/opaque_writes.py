"""Which calls without a schema may write to their inputs: Python functions and methods, and higher-order ops."""

import inspect
import operator

from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node

from fxamp.graph.nodes import all_nodes, subgraphs

#: Higher-order ops that write to their operands only where a body does, and return nothing that shares their memory.
#: Of these, Dynamo lets the body of a while_loop write, and only without gradients.
_FUNCTIONAL = frozenset(
    {
        "associative_scan",
        "flex_attention",
        "flex_attention_backward",
        "invoke_subgraph",
        "map_impl",
        "scan",
        "triton_kernel_wrapper_functional",
        "while_loop",
    }
)

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

#: Functions that write to running statistics.
_NORMS = frozenset({"batch_norm", "instance_norm"})


def is_functional(node: Node) -> bool:
    """Whether ``node`` is a known higher-order op that writes to nothing and whose results are tensors of their own."""
    return (
        isinstance(node.target, HigherOrderOperator)
        and node.target._name in _FUNCTIONAL
        and not any(_writes(inner) for _, body in subgraphs(node) for inner in all_nodes(body))
    )


def may_write_opaquely(node: Node) -> bool:
    """Whether a node without a schema may write to its inputs: a Triton kernel's launch, an in-place call."""
    if isinstance(node.target, HigherOrderOperator):
        return not is_functional(node)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name.strip("_") in _OPERATORS:
        return True
    if node.kwargs.get("out") is not None or _inplace(node):
        return True
    in_place = name.endswith("_") and not name.endswith("__") and getattr(operator, name, None) is not node.target
    return in_place or name in _NORMS


def _writes(node: Node) -> bool:
    """Whether a node in the body of a higher-order op may write to an input."""
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, OpOverload):
        return node.target._schema.is_mutable
    return may_write_opaquely(node)


def _inplace(node: Node) -> bool:
    """Whether a Python function is called with ``inplace=True``, by position or by keyword."""
    if not inspect.isfunction(node.target):
        return bool(node.kwargs.get("inplace"))
    return bool(inspect.signature(node.target).bind_partial(*node.args, **node.kwargs).arguments.get("inplace"))
