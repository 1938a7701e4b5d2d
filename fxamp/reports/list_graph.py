"""Create the listing of a graph: every node with its recorded decision."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from fxamp.capture import VERBATIM
from fxamp.graph import dtype_name, fake_tensors, graph_output, inner_tensors, op_name, subgraphs
from fxamp.graph.higher_order_ops import inner_graphs
from fxamp.graph.source import module_class, module_path, source_line
from fxamp.graph_text import Entry, KeptValue, Listing, RuleRef, Source, TensorType
from fxamp.graph_text.totals import totals_of
from fxamp.passes.partition.pack_kept import KEPT_VALUES, kept_as_they_are
from fxamp.passes.shared.decision import WAS, Decision, decision, inserted_for
from fxamp.policy import Rule
from fxamp.torch_private import current_metadata
from fxamp.torch_private.parts.fx import _get_qualified_name

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def list_graph(gm: GraphModule, name: str = "GraphModule", **about: Any) -> Listing:
    """Return the listing of ``gm`` and the bodies of its higher-order ops.

    Values are read from ``meta["val"]``, or from Dynamo's ``meta["example_value"]``. ``about`` are fields of Listing
    for the whole graph: ``stage``, ``policy``, ``chosen`` and so on.
    """
    listings: dict[str, Listing] = {}
    entries = []
    for node in gm.graph.nodes:
        inner = {str(attribute.target): body for attribute, body in subgraphs(node) if node.op == "call_function"}
        listings |= {attribute: list_graph(body, attribute) for attribute, body in inner.items()}
        entries.append(_entry(node, tuple(inner)))
    return Listing(name, tuple(entries), listings, **about)


def list_partition(gm: GraphModule, stage: str, values: tuple[KeptValue, ...] = ()) -> Listing:
    """Return the listing of one of AOTAutograd's partitioned graphs, with the tensors saved for the backward.

    ``stage`` is "forward" or "backward"; ``values`` describes what rules did to the saved values.
    """
    if stage != "forward":
        return list_graph(gm, stage=stage)
    metadata, ruled = current_metadata(), bool(values)
    if KEPT_VALUES not in graph_output(gm.graph).meta and metadata is not None:
        values = kept_as_they_are(gm, metadata.num_forward_returns)
    before, after = totals_of(values) if values or metadata is not None else (None, None)
    return list_graph(gm, stage=stage, kept=values, kept_before=before if ruled else None, kept_after=after)


def why_verbatim(node: Node) -> str:
    """Return why fxamp left ``node`` verbatim, without looking inside; ``""`` if it did not."""
    return "" if inner_graphs(node) else " ".join(node.meta.get(VERBATIM, "").split())


def rule_ref(rule: Rule) -> RuleRef:
    """Return ``rule`` in the form that listings hold."""
    return RuleRef(rule.id, str(rule.origin or ""), rule.asks, rule.why)


def _entry(node: Node, inner: tuple[str, ...]) -> Entry:
    value = node.meta.get("val", node.meta.get("example_value"))
    decided = decision(node)
    where = source_line(node)
    return Entry(
        name=node.name,
        kind=node.op,
        target=op_name(node) if node.op.startswith("call") else str(node.target),
        call=_call(node),
        inputs=tuple(source.name for source in node.all_input_nodes),
        values=tuple(_type(tensor) for tensor in fake_tensors(value)),
        was=_was(node, value),
        symbol=str(value) if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else "",
        needs_grad=node.op == "placeholder" and isinstance(value, torch.Tensor) and value.requires_grad,
        module=module_path(node),
        module_class=module_class(node),
        source=Source(where.file, where.line, where.function, where.text) if where else None,
        inserted=inserted_for(node) or "",
        verbatim=why_verbatim(node),
        bodies=inner,
        **({} if decided is None else _decided(decided)),
    )


def _decided(decided: Decision) -> dict[str, Any]:
    return {
        "rule": None if decided.rule is None else rule_ref(decided.rule),
        "lost": tuple(rule_ref(rule) for rule in decided.lost),
        "reason": decided.reason,
        "overruled": " ".join(decided.overruled.split()),
        "not_fp8": decided.not_fp8,
        "region": "off" if decided.lower is None else dtype_name(decided.lower),
    }


def _type(tensor: torch.Tensor) -> TensorType:
    parts = inner_tensors(tensor)
    shape = parts[0].shape if len(parts) == 1 else tensor.shape  # for a DTensor the part on this rank
    return TensorType(dtype_name(tensor.dtype), tuple(map(_size, shape)), str(tensor.device))


def _size(size: int | torch.SymInt) -> int | str:
    text = str(size)  # the number, for a symbol that became a constant
    return int(text) if text.isdecimal() else text


def _was(node: Node, value: object) -> tuple[str, ...]:
    now = tuple(dtype_name(tensor.dtype) for tensor in fake_tensors(value))
    before = tuple(dtype_name(dtype) for dtype in node.meta.get(WAS, ()))
    return () if before == now else before


def _call(node: Node) -> str:
    if node.op == "placeholder":
        return ""
    if node.op == "get_attr":
        return _attribute(str(node.target))
    if node.op == "output":
        return _argument(node.args[0])
    if node.op == "call_method":
        receiver, *rest = node.args
        return f"{_argument(receiver)}.{node.target}({_arguments(rest, node.kwargs)})"
    if node.op == "call_module":
        return f"{_attribute(str(node.target))}({_arguments(node.args, node.kwargs)})"
    return f"{_function(node.target)}({_arguments(node.args, node.kwargs)})"


def _function(target: Any) -> str:
    if isinstance(target, OpOverload):
        return f"torch.ops.{target.namespace}.{target._opname}.{target._overloadname}"
    if isinstance(target, HigherOrderOperator):
        return f"torch.ops.higher_order.{target._name}"
    return _get_qualified_name(target).replace("_operator.", "operator.").replace(" ", "_")


def _attribute(path: str) -> str:
    """Return the expression for a dotted path, as torch prints it: ``getattr(self.layers, "0").weight``."""
    text = "self"
    for part in path.split("."):
        text = f"{text}.{part}" if part.isidentifier() else f'getattr({text}, "{part}")'
    return text


def _arguments(args: Iterable[Any], kwargs: dict[str, Any]) -> str:
    positional = [_argument(value) for value in args]
    return ", ".join([*positional, *(f"{key} = {_argument(value)}" for key, value in kwargs.items())])


def _argument(value: Any) -> str:
    """Return a value as Python text, as in torch's printed graphs; without memory addresses."""
    if isinstance(value, Node):
        return value.name
    if isinstance(value, tuple):
        return f"({', '.join(map(_argument, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_argument(item)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({', '.join(map(_argument, (value.start, value.stop, value.step)))})"
    if isinstance(value, (OpOverload, HigherOrderOperator)):
        return _function(value)
    if callable(value) and not isinstance(value, (torch.dtype, torch.nn.Module)):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return _ADDRESS.sub("", repr(value))
