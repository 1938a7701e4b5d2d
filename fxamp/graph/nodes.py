"""Queries on a single fx node. Values are read from ``node.meta["val"]`` (FakeTensors, or trees of them)."""

import operator
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

#: The calls that mark an autocast region in a captured graph.
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast


def op_name(node: Node) -> str:
    """Return the name of a node's operation in policies and records.

    ``"aten::mm.default"`` for an ATen overload, ``"higher_order::cond"`` for a higher-order operator, otherwise the
    qualified name of the Python function (``"operator.getitem"``) or the method's name with a leading dot.
    """
    target = node.target
    if isinstance(target, OpOverload):
        return f"{target.namespace}::{target._opname}.{target._overloadname}"
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target._name}"
    if isinstance(target, str):
        return f".{target}" if node.op == "call_method" else target
    module = getattr(target, "__module__", None)
    name = getattr(target, "__name__", str(target))
    return f"{module.lstrip('_')}.{name}" if module else name


def is_custom(target: object) -> TypeGuard[OpOverload]:
    """Whether ``target`` is an op of a library other than torch: no table says what such an op does with dtypes."""
    return isinstance(target, OpOverload) and target.namespace not in ("aten", "prims")


def base_name(node: Node) -> str:
    """Return the name without overload; for an in-place variant the name of its functional op."""
    name = op_name(node).rpartition(".")[0]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def nodes_with_gradients(graph: Graph, on: bool = True) -> set[Node]:
    """Return the nodes of ``graph`` at which gradients are on; ``on``: whether they are on at its start."""
    nodes = set()
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            on = bool(node.args[0])
        if on:
            nodes.add(node)
    return nodes


def inherit_provenance(node: Node, source: Node) -> None:
    """Copy the user's stack, module path and annotations from ``source`` to ``node``."""
    node.meta.update({key: source.meta[key] for key in _PROVENANCE if key in source.meta})


_PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


def register(root: torch.nn.Module, prefix: str, value: object) -> str:
    """Set ``value`` as an attribute of ``root`` under the first free ``prefix_N``; return that name."""
    index = 0
    while hasattr(root, f"{prefix}_{index}"):
        index += 1
    setattr(root, f"{prefix}_{index}", value)
    return f"{prefix}_{index}"


def hold(root: torch.nn.Module, path: str, tensor: torch.Tensor) -> str:
    """Store ``tensor`` in ``root`` under the dotted ``path``, as a parameter if it is one, else as a buffer.

    Returns the path; another path if ``path`` holds another value.
    """
    *parents, name = path.split(".")
    owner = root
    for parent in parents:
        child = getattr(owner, parent, None)
        if child is None:
            owner.add_module(parent, child := torch.nn.Module())
        if not isinstance(child, torch.nn.Module):
            return hold(root, f"held.{path}", tensor)
        owner = child
    present = getattr(owner, name, None)
    if present is None and isinstance(tensor, torch.nn.Parameter):
        owner.register_parameter(name, tensor)
    elif present is None:
        owner.register_buffer(name, tensor)
    elif present is not tensor:
        return hold(root, f"held.{path}", tensor)
    return path


def tensor_stores(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the dicts in which a module keeps tensors: parameters, buffers, plain attributes."""
    return [module._parameters, module._buffers, vars(module)]


def tensor_value(node: object) -> torch.Tensor | None:
    """Return the node's FakeTensor, or None if its value is not a tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def dtype_of(node: object) -> torch.dtype | None:
    """Return the dtype of the node's FakeTensor, or None if its value is not a tensor."""
    value = tensor_value(node)
    return None if value is None else value.dtype


def is_float_tensor(node: object) -> bool:
    """Whether the value of ``node`` is one tensor of a real floating-point dtype."""
    value = tensor_value(node)
    return value is not None and value.is_floating_point()


def floating_inputs(node: Node) -> list[Node]:
    """Return the distinct inputs of ``node`` that are real floating-point tensors, in order of their first use."""
    return [source for source in node.all_input_nodes if is_float_tensor(source)]


def fake_tensors(value: object) -> list[torch.Tensor]:
    """Return all tensors in a value, which may be a tree."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def need_gradients(values: Iterable[object]) -> bool:
    """Whether one of ``values`` is a tensor that needs a gradient."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def nesting_change(target: object) -> int:
    """Return 1 for a call that opens a torch.func transform (vmap, grad, jvp), -1 for one that closes it, else 0.

    A level of forward-mode AD is one too.
    """
    name = getattr(target, "__name__", "")
    opens, closes = ("_increment_nesting", "_enter_dual_level"), ("_decrement_nesting", "_exit_dual_level")
    return name.endswith(opens) - name.endswith(closes)


def is_composite(target: object, device: str = "") -> bool:
    """Whether ``target`` is an op that computes tensors and that eager mode decomposes into other ops on ``device``.

    The dispatcher calls such ops CompositeImplicitAutograd; on ``device``, if one is given, those with a kernel of
    their own for it do not count, such as the fused RMS norm on "cuda". Nor do Python decompositions that compilers
    register for more ops, and queries of a tensor (``sym_size``): tracing answers them by calling the same op.
    """
    if not isinstance(target, OpOverload) or not any("Tensor" in str(r.type) for r in target._schema.returns):
        return False
    name: str = target.name()  # type: ignore[no-untyped-call]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    own = bool(device) and has_kernel(name, device.upper())
    return not own and has_kernel(name, torch._C.DispatchKey.CompositeImplicitAutograd)


def is_random(node: Node) -> bool:
    """Whether ``node`` calls an op that draws random numbers."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def is_pure(node: Node) -> bool:
    """Whether ``node`` calls an op, or one of Python's operators, that only computes results from its operands.

    Such a call writes to nothing, draws no random numbers and asserts nothing.
    """
    if isinstance(node.target, OpOverload):
        schema = node.target._schema
        return bool(schema.returns) and not schema.is_mutable and not is_random(node)
    return node.op == "call_function" and getattr(operator, getattr(node.target, "__name__", ""), None) is node.target


def is_answered(node: Node) -> bool:
    """Whether ``node``, of a graph that was just traced, computes a number that the traced code has read."""
    if not isinstance(node.target, OpOverload) or "val" in node.meta:
        return False
    return bool(node.target._schema.returns) and not is_mutable(node)


def is_mutable(node: Node) -> bool:
    """Whether ``node`` calls an op that writes to an argument, by its schema."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def first_computation(graph: Graph) -> Node:
    """Return the first node that is not an input; what is inserted before it may read all inputs."""
    first: Node = next(node for node in graph.nodes if node.op != "placeholder")
    return first


def graph_output(graph: Graph) -> Node:
    """Return the output node."""
    output: Node = next(iter(reversed(graph.nodes)))
    return output


def returned(graph: Graph) -> Any:
    """Return the nodes and constants that the graph returns: a tuple or a list, in some graphs another tree."""
    return graph_output(graph).args[0]


def subgraphs(node: Node) -> Iterator[tuple[Node, GraphModule]]:
    """Yield the ``get_attr`` inputs of a node that hold graph modules (the bodies of a higher-order op), in order."""
    owner = node.graph.owning_module
    for source in node.all_input_nodes:
        if source.op != "get_attr" or owner is None:
            continue
        body = attribute(owner, str(source.target))
        if isinstance(body, GraphModule):
            yield source, body


def attribute(owner: torch.nn.Module, path: str) -> object:
    """Return the object that ``owner`` holds under the dotted ``path``."""
    value: object = owner
    for part in path.split("."):
        value = getattr(value, part)
    return value


def all_graphs(gm: GraphModule) -> Iterator[GraphModule]:
    """Yield ``gm`` and, depth first, the bodies of its higher-order ops."""
    yield gm
    for node in list(gm.graph.nodes):
        for _, body in subgraphs(node):
            yield from all_graphs(body)


def all_nodes(gm: GraphModule) -> Iterator[Node]:
    """Yield the nodes of :func:`all_graphs`; these may change meanwhile."""
    for graph in all_graphs(gm):
        yield from list(graph.graph.nodes)


def strip_values(gm: GraphModule) -> None:
    """Remove all values: they belong to fxamp's fake mode, and AOTAutograd rejects a graph with two fake modes.

    Bodies of a while_loop keep theirs, because torch 2.11 reads there which results share memory.
    """
    for node in gm.graph.nodes:
        for key in ("val", "tensor_meta", "example_value"):
            node.meta.pop(key, None)
        for _, body in subgraphs(node) if node.target is not torch.ops.higher_order.while_loop else ():
            strip_values(body)
