"""Find the losses that a policy's rules cut into chunks: a cross entropy that alone reads a linear layer's results.

Between the two may stand what neither mixes classes nor computes: views and slices of rows, copies and conversions.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fxamp.graph import argument, is_wrapper, tensor_value
from fxamp.passes.base import CastContext
from fxamp.passes.shared.sites import site_of
from fxamp.policy import Category, Rule
from fxamp.policy.model.chunks import AUTO, LOSS
from fxamp.torch_private import hint

aten = torch.ops.aten

CONVERSIONS = frozenset({aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default})
"""Ops that only convert."""

SIZED = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
"""Row ops whose second argument is the new shape."""

_COPIES = frozenset({aten.contiguous.default, aten.clone.default, aten.alias.default})
_ROW_OPS = SIZED | {aten.slice.Tensor, aten.flatten.using_ints}


@dataclass(frozen=True)
class LinearLoss:
    """A ``loss`` of the results of ``linear``, and how it is cut.

    ``row_ops`` stand between them, in order. ``classes_second``: a transposition before the loss moved the classes to
    dimension 1.
    """

    loss: Node
    linear: Node
    row_ops: tuple[Node, ...]
    classes_second: bool
    rule: Rule
    chunks: int


def linear_loss(node: Node, context: CastContext) -> LinearLoss | str | None:
    """Return the loss that a rule cuts; why it stays whole, as text; None without a rule, or if one chunk is all."""
    if node.target is not aten.cross_entropy_loss.default or not context.policy.has_rules_for(LOSS):
        return None
    logits = tensor_value(node.args[0])
    elements = None if logits is None else hint(logits.numel())
    rule = context.policy.ruling(replace(site_of(node, LOSS), elements=elements)).rule
    if rule is None:
        return None
    if logits is None or is_wrapper(logits) or logits.dim() < 2:
        return "its logits are no plain matrix"
    path = _path(node, logits)
    if isinstance(path, str):
        return path
    linear, row_ops, classes_second = path
    ruling = context.policy.ruling(site_of(linear))
    if ruling.rule is not None and ruling.rule.cast is Category.FP8:
        return "its product runs in fp8"
    chunks = _chunks(rule, linear, logits)
    if isinstance(chunks, str):
        return chunks
    return LinearLoss(node, linear, row_ops, classes_second, rule, chunks) if chunks > 1 else None


def _path(loss: Node, logits: torch.Tensor) -> tuple[Node, tuple[Node, ...], bool] | str:
    """Walk from the loss to the linear layer."""
    node, row_ops, classes_second = _source(loss), list[Node](), False
    while isinstance(node, Node) and node.target is not aten.linear.default:
        if len(node.users) > 1:
            return f"{_others(node)} reads its logits too"
        if node.target in _ROW_OPS and _keeps_last(node):
            row_ops.append(node)
        elif _moves_classes(node) and logits.dim() == 3 and not classes_second and not row_ops:
            classes_second = True
        elif node.target not in CONVERSIONS | _COPIES:
            return f"between it and a linear layer stands {node.name}"
        node = _source(node)
    if not isinstance(node, Node):
        return "no linear layer makes its logits"
    if len(node.users) > 1:
        return f"{_others(node)} reads its logits too"
    if not classes_second and logits.dim() != 2:
        return "its logits are no plain matrix"
    return node, tuple(reversed(row_ops)), classes_second


def _source(node: Node) -> Any:
    return node.args[0] if node.args else None


def _others(node: Node) -> str:
    return " and ".join(user.name for user in list(node.users)[1:])


def _moves_classes(node: Node) -> bool:
    """Whether the op moves the last of three dimensions to the second place."""
    return node.target is aten.transpose.int and {*node.args[1:]} in ({1, 2}, {1, -1})


def _keeps_last(node: Node) -> bool:
    """Whether the op leaves the last dimension as it is, and in its place."""
    source, result = tensor_value(node.args[0]), tensor_value(node)
    if source is None or result is None or source.shape[-1] != result.shape[-1]:
        return False
    if node.target is aten.slice.Tensor:
        dim = argument(node, "dim")
        return isinstance(dim, int) and dim % source.dim() != source.dim() - 1
    return True


def _chunks(rule: Rule, linear: Node, logits: torch.Tensor) -> int | str:
    """Return the number of chunks; why there are none, as text."""
    weight = tensor_value(argument(linear, "weight"))
    if weight is None or weight.dim() != 2 or is_wrapper(weight):
        return "its weight is no plain matrix"
    counts = [hint(size) for size in (logits.numel(), *weight.shape)]
    elements, classes, hidden = counts
    if elements is None or not classes or hidden is None:
        return "the number of its rows is not known before it runs"
    rows = 2 << (hidden - 1).bit_length() if rule.chunks == AUTO else int(rule.chunks or 1)
    return -(-elements // classes // rows)
