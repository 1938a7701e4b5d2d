"""Print a graph as canonical text, one line per node: for golden tests, error messages and logs."""

import torch
from torch.fx import Graph, GraphModule, Node

from fxamp.graph.nodes import op_name, subgraphs
from fxamp.graph_text.model import short_op
from fxamp.torch_private.parts.fx import dtype_abbrs


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name in torch's printed graphs: ``f32``, ``bf16``, ``f8e4m3fn``, ...; else the full name."""
    return dtype_abbrs.get(dtype, str(dtype).removeprefix("torch."))


def _value(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_value(item) for item in value)})"
    return type(value).__name__ if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else ""


def _argument(value: object, names: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return names.get(value, f"%{value.name}")
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, (tuple, list)):
        inner = ", ".join(_argument(item, names) for item in value)
        return f"[{inner}]"
    return repr(value)


def _line(node: Node, names: dict[Node, str]) -> str:
    args = [_argument(value, names) for value in node.args]
    args += [f"{key}={_argument(value, names)}" for key, value in node.kwargs.items()]
    if node.op == "output":
        return f"return {', '.join(args)}"
    annotation = _value(node.meta.get("val"))
    left = f"{names[node]}: {annotation}" if annotation else names[node]
    if node.op == "placeholder":
        return f"{left} = input"
    if node.op == "get_attr":
        return f"{left} = self.{node.target}"
    name = short_op(op_name(node))
    return f"{left} = {name}({', '.join(args)})"


def format_graph(source: GraphModule | Graph, indent: str = "") -> str:
    """Return one line per node, named ``%0``, ``%1``, ... in order, with dtypes and shapes; subgraphs indented."""
    graph = source.graph if isinstance(source, GraphModule) else source
    names: dict[Node, str] = {}
    lines: list[str] = []
    for node in graph.nodes:
        names[node] = f"%{len(names)}"
        lines.append(indent + _line(node, names))
        if node.op == "call_function":
            for attribute, body in subgraphs(node):
                lines.append(f"{indent}  {attribute.target}:")
                lines.append(format_graph(body, indent + "    "))
    return "\n".join(lines)
