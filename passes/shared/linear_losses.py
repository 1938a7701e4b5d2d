"""Find the losses that a policy's rules cut into chunks: a cross entropy that alone reads a linear layer's results.

1. Between the two may stand what neither mixes classes nor computes: views and slices of rows, copies, and conversions
   that lose nothing and stay on the device.
2. The layer computes later than in the program, beside its loss. So nothing may write to its operands, and it must not
   stand where gradients are off unless the loss does.
3. A loss whose operands torch would reject stays whole, so that torch raises its own error.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fxamp.graph import INSERTED, AliasSets, argument, is_wrapper, tensor_value
from fxamp.passes.base import CastContext
from fxamp.passes.shared.cast_writer import CONVERSIONS, COPIES, before_cast
from fxamp.passes.shared.sites import site_of
from fxamp.policy import Category, Rule
from fxamp.policy.model.chunks import AUTO, LOSS
from fxamp.torch_dtypes import NARROW
from fxamp.torch_private import hint

aten = torch.ops.aten

SIZED = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
"""Row ops whose second argument is the new shape."""

_ROW_OPS = SIZED | {aten.slice.Tensor, aten.flatten.using_ints}


_COMPUTED = (torch.float32, *NARROW)
"""The dtypes that autocast computes a loss of in float32."""


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
    if is_wrapper(logits):
        return f"its logits are a {type(logits).__name__}"
    if logits is None or logits.dim() < 2:
        return "its logits are no plain matrix"
    path = _path(node, logits)
    if isinstance(path, str):
        return path
    linear, row_ops, classes_second = path
    why = _wrong_operands(node, logits, classes_second) or _why_in_place(node, linear)
    if why:
        return why
    ruling = context.policy.ruling(site_of(linear))
    if ruling.rule is not None and ruling.rule.cast is Category.FP8:
        return "its product runs in fp8"
    chunks = _chunks(rule, linear, logits)
    if isinstance(chunks, str):
        return chunks
    return LinearLoss(node, linear, row_ops, classes_second, rule, chunks) if chunks > 1 else None


def _path(loss: Node, logits: torch.Tensor) -> tuple[Node, tuple[Node, ...], bool] | str:
    """Walk from the loss to the linear layer."""
    reader, node, row_ops, classes_second = loss, _source(loss), list[Node](), False
    while isinstance(node, Node) and node.target is not aten.linear.default:
        if len(node.users) > 1:
            return f"{_others(node, reader)} reads its logits too"
        if node.target in _ROW_OPS and _keeps_last(node):
            row_ops.append(node)
        elif _moves_classes(node) and logits.dim() == 3 and not classes_second and not row_ops:
            classes_second = True
        elif node.target in CONVERSIONS:
            if INSERTED not in node.meta and not _keeps_values(node):
                return f"{node.name} rounds or moves its logits, or makes them float64"
        elif node.target not in COPIES:
            return f"between it and a linear layer stands {node.name}"
        reader, node = node, _source(node)
    if not isinstance(node, Node):
        return "no linear layer makes its logits"
    if len(node.users) > 1:
        return f"{_others(node, reader)} reads its logits too"
    if not classes_second and logits.dim() != 2:
        return "its logits are no plain matrix"
    if logits.dtype not in _COMPUTED:
        return f"its logits are {logits.dtype}".replace("torch.", "")
    return node, tuple(reversed(row_ops)), classes_second


def _source(node: Node) -> Any:
    return node.args[0] if node.args else None


def _others(node: Node, reader: Node) -> str:
    others = [user for user in node.users if user is not reader]
    if all(user.op == "output" for user in others):
        return "the output (a rule with drop = true drops results)"
    return " and ".join(user.name for user in others)


def _keeps_values(node: Node) -> bool:
    """Whether a conversion loses nothing, stays on its device, and makes no dtype wider than float32."""
    source, result = tensor_value(node.args[0]), tensor_value(node)
    if source is None or result is None or source.device != result.device or source.layout != result.layout:
        return False
    return result.dtype is torch.float32 or (result.dtype is source.dtype and result.dtype in NARROW)


def _wrong_operands(loss: Node, logits: torch.Tensor, classes_second: bool) -> str:
    """Rule 3: return why torch would reject target, weights or settings, or ""."""
    target, weight = (tensor_value(argument(loss, name)) for name in ("target", "weight"))
    if target is None or is_wrapper(target) or is_wrapper(weight):
        return "its target and weights are no plain tensors"
    rows = (logits.shape[0], *logits.shape[2:])
    shape = logits.shape if target.is_floating_point() else rows
    if target.dtype not in (torch.int64, *_COMPUTED) or tuple(target.shape) != tuple(shape):
        return f"its target is {target.dtype} of {tuple(target.shape)}".replace("torch.", "")
    if weight is not None and (weight.dtype not in _COMPUTED or tuple(weight.shape) != (logits.shape[1],)):
        return f"its weights of classes are {weight.dtype} of {tuple(weight.shape)}".replace("torch.", "")
    if len({value.device for value in (logits, target, weight) if value is not None}) > 1:
        return "its operands are on several devices"
    return "" if 0 <= argument(loss, "label_smoothing") <= 1 else "its label smoothing is not from 0 to 1"


def _why_in_place(loss: Node, linear: Node) -> str:
    """Rule 2: return why the layer cannot compute beside its loss, or ""."""
    aliases = AliasSets(loss.graph)
    operands = [source for operand in linear.all_input_nodes for source in (operand, before_cast(operand))]
    written = [operand.name for operand in operands if aliases.mutated(operand)]
    if written:
        return f"the program writes to {written[0]}, which the linear layer reads"
    return "" if _gradients_on(linear) or not _gradients_on(loss) else "gradients are off where its logits are made"


def _gradients_on(node: Node) -> bool:
    """Whether no ``torch.no_grad()`` of the graph is around ``node``."""
    on = True
    for earlier in node.graph.nodes:
        if earlier is node:
            break
        if earlier.target is torch._C._set_grad_enabled:
            on = bool(earlier.args[0])
    return on


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
