"""Rebuild one call of a graph's text as an fx node: names are looked up in tables, and nothing is evaluated."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from fxamp.devices import DEVICES
from fxamp.graph_text.calls import dotted
from fxamp.tools.inputs import trusted

_CONSTANTS: Mapping[str, Any] = {
    "inf": float("inf"),
    "nan": float("nan"),
    "Ellipsis": Ellipsis,
    "NotImplemented": NotImplemented,
    "math.inf": float("inf"),
    "math.nan": float("nan"),
    "math.pi": torch.pi,
    "math.e": torch.e,
    "torch.inf": float("inf"),
    "torch.nan": float("nan"),
    "float": float,
    "int": int,
    "bool": bool,
}


class Unreadable(ValueError):
    """A call that cannot be rebuilt; the message says which part, and why."""


class Opaque:
    """Represents a function that this process does not have. Calling it raises Unreadable."""

    def __init__(self, path: str, why: str = "") -> None:
        self.__name__ = self.__qualname__ = path.replace(".", "_")
        self.__module__ = "fxamp.opaque"
        self.path = path
        self.why = why or f"{path} is not known here"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Unreadable(self.why)


class Reader:
    """Makes nodes of ``graph`` from calls as text.

    ``names`` maps names in the text to the nodes so far. ``attribute`` creates the node that reads an attribute
    of the graph's module. Every device becomes the CPU. ``unknown`` collects the functions that were not found.
    """

    def __init__(self, graph: Graph, attribute: Callable[[str], Node]) -> None:
        self._graph = graph
        self._attribute = attribute
        self.names: dict[str, Node] = {}
        self.unknown: list[str] = []

    def node(self, call: str, name: str) -> Node:
        """Return the node for ``call``, named ``name``. Raises Unreadable."""
        tree = _statement(call)
        node = self._written(tree, name) if isinstance(tree, ast.stmt) else self._call(tree, name)
        if node is None:
            raise Unreadable(f"{call[:80]!r} is not a call")
        return node

    def value(self, text: str) -> Any:
        """Return the fx argument for ``text``: nodes, numbers, tuples, dtypes. Raises Unreadable."""
        tree = _statement(text)
        if isinstance(tree, ast.stmt):
            raise Unreadable(f"{text[:80]!r} is not an expression")
        return self._argument(tree)

    def _call(self, tree: ast.expr, name: str) -> Node | None:
        if isinstance(tree, ast.Call):
            return self._called(tree, name)
        if isinstance(tree, ast.Subscript):
            return self._apply(operator.getitem, (tree.value, tree.slice), name)
        if isinstance(tree, ast.BinOp):
            return self._apply(_expression(tree.op), (tree.left, tree.right), name)
        if isinstance(tree, ast.UnaryOp):
            return self._apply(_expression(tree.op), (tree.operand,), name)
        if isinstance(tree, ast.Compare) and len(tree.ops) == 1:
            return self._apply(_expression(tree.ops[0]), (tree.left, tree.comparators[0]), name)
        if isinstance(tree, ast.Attribute):
            return self._read_attribute(tree, name)
        return None

    def _written(self, tree: ast.stmt, name: str) -> Node | None:
        """``x += y`` and ``x[i] = y``, as torch prints ``operator.iadd`` and ``operator.setitem``."""
        if isinstance(tree, ast.AugAssign):
            function = trusted.function(f"operator.i{_expression(tree.op).__name__.strip('_')}")
            return None if function is None else self._apply(function, (tree.target, tree.value), name)
        if isinstance(tree, ast.Assign) and len(tree.targets) == 1 and isinstance(tree.targets[0], ast.Subscript):
            place = tree.targets[0]
            return self._apply(operator.setitem, (place.value, place.slice, tree.value), name)
        return None

    def _apply(self, function: Callable[..., Any], operands: tuple[ast.expr, ...], name: str) -> Node:
        args = tuple(self._argument(operand) for operand in operands)
        if not any(isinstance(leaf, Node) for leaf in args):
            raise Unreadable("an operation on constants alone")
        return self._graph.create_node("call_function", function, args, {}, name)

    def _read_attribute(self, tree: ast.Attribute, name: str) -> Node:
        path = dotted(tree)
        if path is not None and path.startswith("self."):
            return self._attribute(path.removeprefix("self."))
        if tree.attr not in trusted.ATTRIBUTES:
            raise Unreadable(f"attribute .{tree.attr} is not one that graphs read")
        return self._graph.create_node("call_function", getattr, (self._argument(tree.value), tree.attr), {}, name)

    def _called(self, tree: ast.Call, name: str) -> Node:
        path = dotted(tree.func)
        if path is not None and path.startswith("self."):
            raise Unreadable(f"{path} calls a module, whose content the text does not hold")
        method = isinstance(tree.func, ast.Attribute) and (path is None or path.partition(".")[0] in self.names)
        if method:
            return self._method(tree, name)
        if path is None:
            raise Unreadable("a call of something that is not a name")
        if path == "getattr" and len(tree.args) == 2 and isinstance(tree.args[1], ast.Constant):
            return self._read_attribute(ast.Attribute(tree.args[0], str(tree.args[1].value)), name)
        target = trusted.function(path) or self._opaque(path)
        args, kwargs = self._arguments(tree)
        return self._graph.create_node("call_function", target, args, kwargs, name)

    def _opaque(self, path: str) -> Opaque:
        self.unknown.append(path)
        return Opaque(path)

    def _method(self, tree: ast.Call, name: str) -> Node:
        assert isinstance(tree.func, ast.Attribute)
        method = tree.func.attr
        if not trusted.is_method(method):
            raise Unreadable(f"method .{method} is not one that graphs call")
        args, kwargs = self._arguments(tree)
        receiver = self._argument(tree.func.value)
        if method in ("to", "type") or "device" in kwargs:
            args = tuple(self._on_device(argument) for argument in args)
        if method in _DEVICES and method != "cpu":
            method, args, kwargs = "cpu", (), {}
        return self._graph.create_node("call_method", method, (receiver, *args), kwargs, name)

    def _arguments(self, tree: ast.Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = tuple(self._argument(argument) for argument in tree.args)
        kwargs = {}
        for keyword in tree.keywords:
            if keyword.arg is None:
                raise Unreadable("** in a call")
            value = self._argument(keyword.value)
            kwargs[keyword.arg] = self._on_device(value) if keyword.arg == "device" else value
        return args, kwargs

    def _on_device(self, value: Any) -> Any:
        """Return the device that the graph is rebuilt on if ``value`` is the name of a device, else ``value``."""
        return _CPU if isinstance(value, str) and value.partition(":")[0] in _DEVICES else value

    def _argument(self, tree: ast.expr) -> Any:
        if isinstance(tree, ast.Constant):
            return tree.value
        if isinstance(tree, ast.Name) and tree.id in self.names:
            return self.names[tree.id]
        if isinstance(tree, ast.Tuple):
            return tuple(self._argument(item) for item in tree.elts)
        if isinstance(tree, ast.List):
            return [self._argument(item) for item in tree.elts]
        if isinstance(tree, ast.Dict):
            keys = [None if key is None else self._argument(key) for key in tree.keys]
            return dict(zip(keys, (self._argument(value) for value in tree.values), strict=True))
        if isinstance(tree, ast.Slice):
            parts = (tree.lower, tree.upper, tree.step)
            return slice(*(None if part is None else self._argument(part) for part in parts))
        return self._constant(tree)

    def _constant(self, tree: ast.expr) -> Any:
        path = dotted(tree)
        if path is not None:
            return self._named(path)
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            operand = self._argument(tree.operand)
            if isinstance(operand, (int, float, complex)):
                return -operand
        if isinstance(tree, ast.BinOp) and isinstance(tree.op, (ast.Add, ast.Sub)):
            return self._complex(tree)
        if isinstance(tree, ast.Call):
            return self._made(tree)
        raise Unreadable(f"{ast.unparse(tree)[:60]!r} is not a value that a graph can hold")

    def _named(self, path: str) -> Any:
        if path.startswith("self."):
            return self._attribute(path.removeprefix("self."))
        value = _CONSTANTS.get(path, trusted.constant(path))
        if value is None:
            raise Unreadable(f"the name {path!r} is not known")
        return value

    def _complex(self, tree: ast.BinOp) -> complex:
        left, right = self._argument(tree.left), self._argument(tree.right)
        if not isinstance(left, (int, float)) or not isinstance(right, complex):
            raise Unreadable(f"{ast.unparse(tree)[:60]!r} is not a value that a graph can hold")
        return left + right if isinstance(tree.op, ast.Add) else left - right

    def _made(self, tree: ast.Call) -> Any:
        """``device(type='cuda')``, ``slice(None, 1, None)``, ``torch.Size([2])``, ``float('inf')``."""
        path = dotted(tree.func)
        args, kwargs = self._arguments(tree)
        if path in ("device", "torch.device"):
            return _CPU
        if path == "slice" and 1 <= len(args) <= 3:
            return slice(*args)
        if path in ("torch.Size", "list", "tuple") and len(args) == 1 and isinstance(args[0], (list, tuple)):
            return tuple(args[0])
        if path == "float" and args in (("inf",), ("-inf",), ("nan",)):
            return float(args[0])
        if path in ("set", "frozenset", "dict", "immutable_list") and not args and not kwargs:
            return ()
        raise Unreadable(f"{ast.unparse(tree)[:60]!r} is not a value that a graph can hold")


_CPU = torch.device("cpu")

#: The devices that policies can name, and others that occur in graphs.
_DEVICES = frozenset({*DEVICES, "hpu", "ipu", "meta"})


def _expression(operation: ast.AST) -> Callable[..., Any]:
    name = type(operation).__name__
    if name not in trusted.EXPRESSIONS:
        raise Unreadable(f"operator {name} does not occur in graphs")
    return trusted.EXPRESSIONS[name]


def _statement(text: str) -> ast.stmt | ast.expr:
    try:
        (statement,) = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"{text[:80]!r} is not Python") from error
    return statement.value if isinstance(statement, ast.Expr) else statement
