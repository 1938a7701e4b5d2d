"""Classify a right-hand side of a printed graph: the kind of node, the operation, the inputs.

A function keeps its printed name, ``torch.nn.functional.linear``. Ops get the names that policies use:
``torch.ops.aten.mm.default`` is ``aten::mm.default``; without an overload it is ``aten::mm``.
"""

import ast
import builtins
from collections.abc import Mapping
from typing import Any

#: Modules whose functions graphs call, by the first part of the dotted name.
MODULES = frozenset(
    {"torch", "operator", "_operator", "math", "builtins", "fx_pytree", "pytree", "triton", "einops", "fxamp"}
)

_BINARY = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
    ast.BitXor: "xor",
}
_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Is: "is_"}
_BUILTINS = frozenset(dir(builtins))
_UNARY = {ast.USub: "neg", ast.UAdd: "pos", ast.Invert: "invert", ast.Not: "not_"}


#: Syntax without names to read.
_LEAVES = (ast.Constant, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)


def classify(value: ast.expr, nodes: Mapping[str, str]) -> tuple[str, str]:
    """Return kind and target of the node with right-hand side ``value``; ``nodes`` maps the names of earlier nodes."""
    path = dotted(value)
    if path is not None and path.startswith("self."):
        return "get_attr", path.removeprefix("self.")
    if isinstance(value, ast.Call):
        return _call(value.func, nodes)
    if isinstance(value, ast.Attribute):
        return "call_function", "builtins.getattr"
    return "call_function", operator_name(value)


def operator_name(value: ast.AST) -> str:
    """Return ``"operator.add"`` for ``x + y`` and ``x += y``, and so on; else the kind of expression."""
    name: str | None = None
    if isinstance(value, ast.Subscript):
        name = "getitem"
    elif isinstance(value, ast.BinOp):
        name = _BINARY.get(type(value.op))
    elif isinstance(value, ast.AugAssign):
        name = "i" + _BINARY[type(value.op)].rstrip("_")
    elif isinstance(value, ast.Compare) and len(value.ops) == 1:
        name = _COMPARE.get(type(value.ops[0]))
    elif isinstance(value, ast.UnaryOp):
        name = _UNARY.get(type(value.op))
    return f"operator.{name}" if name else f"python.{type(value).__name__}"


def names_in(value: ast.AST | None) -> list[str]:
    """Return every name that an expression reads, in the order of the text."""
    names: list[str] = []
    waiting: list[Any] = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name):
            names.append(node.id)
        elif isinstance(node, list):
            waiting += node[::-1]
        elif isinstance(node, ast.AST) and not isinstance(node, _LEAVES):
            waiting += [getattr(node, part) for part in node._fields[::-1]]
    return names


def dotted(value: ast.expr) -> str | None:
    """Return ``"torch.ops.aten"`` for a chain of attributes of a name, None for anything else.

    An attribute that is not an identifier is printed as ``getattr(self.layers, "0")``; this gives ``"self.layers.0"``.
    """
    parts: list[str] = []
    while not isinstance(value, ast.Name):
        if isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
            continue
        named = _getattr(value)
        if named is None:
            return None
        value, name = named
        parts.append(name)
    return ".".join([value.id, *reversed(parts)])


def _call(function: ast.expr, nodes: Mapping[str, str]) -> tuple[str, str]:
    path = dotted(function)
    if path is None:
        method = isinstance(function, ast.Attribute)
        return ("call_method", f".{function.attr}") if method else ("call_function", "python.Call")  # type: ignore[attr-defined]
    first, _, rest = path.partition(".")
    if first == "self" and rest:
        return "call_module", rest
    if rest and (first in nodes or first not in MODULES):
        return "call_method", f".{path.rpartition('.')[2]}"
    return "call_function", _function(path)


def _getattr(value: ast.expr) -> tuple[ast.expr, str] | None:
    """Return the owner and the name in ``getattr(owner, "name")``."""
    if not isinstance(value, ast.Call) or len(value.args) != 2 or value.keywords:
        return None
    function, (owner, name) = value.func, value.args
    if not isinstance(function, ast.Name) or function.id != "getattr" or not isinstance(name, ast.Constant):
        return None
    return (owner, name.value) if isinstance(name.value, str) else None


def _function(path: str) -> str:
    if not path.startswith("torch.ops."):
        return f"builtins.{path}" if path in _BUILTINS else path.replace("_operator.", "operator.", 1)
    namespace, _, op = path.removeprefix("torch.ops.").partition(".")
    return f"{namespace}::{op}" if op else path
