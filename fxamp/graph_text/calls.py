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

#: The functions of module ``operator`` that expressions stand for, by the class of their operator in ``ast``.
OPERATORS = {
    "Add": "add",
    "Sub": "sub",
    "Mult": "mul",
    "Div": "truediv",
    "FloorDiv": "floordiv",
    "Mod": "mod",
    "Pow": "pow",
    "MatMult": "matmul",
    "LShift": "lshift",
    "RShift": "rshift",
    "BitAnd": "and_",
    "BitOr": "or_",
    "BitXor": "xor",
    "USub": "neg",
    "UAdd": "pos",
    "Invert": "invert",
    "Not": "not_",
    "Eq": "eq",
    "NotEq": "ne",
    "Lt": "lt",
    "LtE": "le",
    "Gt": "gt",
    "GtE": "ge",
    "Is": "is_",
    "IsNot": "is_not",
}
_BUILTINS = frozenset(dir(builtins))

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
    if isinstance(value, ast.Subscript):
        return "operator.getitem"
    compared = value.ops if isinstance(value, ast.Compare) else ()
    operation = compared[0] if len(compared) == 1 else getattr(value, "op", None)
    name = OPERATORS.get(type(operation).__name__)
    if name and isinstance(value, ast.AugAssign):
        name = f"i{name.rstrip('_')}"
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
