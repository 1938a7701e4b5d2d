"""Find the losses that chunk rules cover: a cross entropy that is the only reader of a linear layer's results.

1. Between the two there may be ops that neither mix classes nor compute: views and slices of rows, copies, and
   conversions that lose nothing and stay on the device. ``logsumexp`` over the classes of the same rows may read the
   results too.
2. The layer runs later than in the program, together with its loss. So nothing may write to its operands, and neither
   the layer nor a ``logsumexp`` may be in code with gradients off, unless the loss is.
3. A loss whose operands torch would reject is not chunked, so that torch raises its own error.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fxamp.graph import AliasSets, argument, is_wrapper, nodes_with_gradients, tensor_value
from fxamp.passes.base import CastContext
from fxamp.passes.shared.cast_writer import CONVERSIONS, COPIES, before_cast
from fxamp.passes.shared.log_sums import keeps_values, log_sums_of, moved_before
from fxamp.passes.shared.sites import site_of
from fxamp.policy import ChunkRule
from fxamp.policy.model.chunk_rule import AUTO
from fxamp.policy.model.site import LOSS
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
    """A ``loss`` of the results of ``linear``, and the number of its ``chunks``.

    ``row_ops`` are between the two, in order. ``classes_second``: a transposition before the loss moved the classes to
    dimension 1. ``log_sums`` are the calls of ``logsumexp`` that read the results too. All of it is computed at
    ``place``, one of these nodes; the nodes in ``moved``, which the loss depends on, move there first.
    """

    loss: Node
    linear: Node
    row_ops: tuple[Node, ...]
    classes_second: bool
    log_sums: tuple[Node, ...]
    rule: ChunkRule
    chunks: int
    place: Node
    moved: tuple[Node, ...]


class _Path:
    """The ops from a loss up to a linear layer, its last node; see :class:`LinearLoss`."""

    def __init__(self, loss: Node, logits: torch.Tensor) -> None:
        self.nodes = [loss]
        self.row_ops: list[Node] = []
        self.log_sums: list[Node] = []
        self.classes_second = False
        self._dims = logits.dim()

    @property
    def linear(self) -> Node:
        """The linear layer, once the path has reached it."""
        return self.nodes[-1]

    def add(self, node: Node) -> str:
        """Add the source of the last node; return why a chunk of the loss cannot compute it, or ""."""
        beside = _other_log_sums(node, self.nodes[-1], 1 if self._dims == 3 and not self.classes_second else -1)
        if isinstance(beside, str):
            return beside
        if beside and any(op.target is aten.slice.Tensor for op in self.row_ops):
            return f"{beside[0].name} reads other rows of its logits"
        self.log_sums += beside
        self.nodes.append(node)
        return "" if node.target is aten.linear.default else self._add_op(node)

    def _add_op(self, node: Node) -> str:
        if node.target in _ROW_OPS and _keeps_last(node):
            self.row_ops.insert(0, node)
        elif _moves_classes(node) and self._dims == 3 and not self.classes_second and not self.row_ops:
            self.classes_second = True
        elif node.target in CONVERSIONS:
            return "" if keeps_values(node) else f"{node.name} rounds or moves its logits, or makes them float64"
        elif node.target not in COPIES:
            return f"{node.name} is between it and a linear layer"
        return ""


def linear_loss(node: Node, context: CastContext) -> LinearLoss | str | None:
    """Return the loss to chunk; or, as text, why not; or None without a rule, or if one chunk holds all rows."""
    if node.target is not aten.cross_entropy_loss.default or not context.policy.has_rules_for(LOSS):
        return None
    logits = tensor_value(node.args[0])
    elements = None if logits is None else hint(logits.numel())
    rule = context.policy.ruling(replace(site_of(node, LOSS), elements=elements)).rule
    if not isinstance(rule, ChunkRule):
        return None
    if is_wrapper(logits):
        return f"its logits are a {type(logits).__name__}"
    if logits is None or logits.dim() < 2:
        return "its logits are not a plain matrix"
    path = _path(node, logits)
    if isinstance(path, str):
        return path
    why = _wrong_operands(node, logits) or _why_in_place(node, path)
    if why:
        return why
    chunks = _chunks(rule, path.linear, logits)
    return _cut(node, path, rule, chunks) if isinstance(chunks, int) else chunks


def _cut(loss: Node, path: _Path, rule: ChunkRule, chunks: int) -> LinearLoss | str | None:
    if chunks < 2:
        return None
    place = min((loss, *path.log_sums))
    operands = [source for op in (loss, *path.row_ops) for source in op.all_input_nodes[1:]]
    moved = moved_before(place, loss, operands)
    if isinstance(moved, str):
        return moved
    row_ops, log_sums = tuple(path.row_ops), tuple(path.log_sums)
    return LinearLoss(
        loss, path.linear, row_ops, path.classes_second, log_sums, rule, chunks=chunks, place=place, moved=moved
    )


def _path(loss: Node, logits: torch.Tensor) -> _Path | str:
    """Walk from the loss to the linear layer."""
    path, node = _Path(loss, logits), _source(loss)
    while isinstance(node, Node):
        if why := path.add(node):
            return why
        if node.target is aten.linear.default:
            break
        node = _source(node)
    if not isinstance(node, Node):
        return "no linear layer makes its logits"
    if not path.classes_second and logits.dim() != 2:
        return "its logits are not a plain matrix"
    if logits.dtype not in _COMPUTED:
        return f"its logits are {logits.dtype}".replace("torch.", "")
    return path


def _source(node: Node) -> Any:
    return node.args[0] if node.args else None


def _other_log_sums(node: Node, reader: Node, classes: int) -> list[Node] | str:
    """Return the log-sums over dimension ``classes`` that read ``node`` besides ``reader``, or why not."""
    value = tensor_value(node)
    others = [user for user in node.users if user is not reader]
    branches = {} if value is None else {user: log_sums_of(user, classes % value.dim()) for user in others}
    strangers = [user for user in others if branches.get(user) is None]
    if strangers and all(user.op == "output" for user in strangers):
        return "the output (a rule with drop = true drops results) reads its logits too"
    if strangers:
        return f"{' and '.join(user.name for user in strangers)} reads its logits too"
    return [node for branch in branches.values() for node in branch or ()]


def _wrong_operands(loss: Node, logits: torch.Tensor) -> str:
    """Rule 3: return why torch would reject target, weights or settings, or ""."""
    target, weight = (tensor_value(argument(loss, name)) for name in ("target", "weight"))
    if target is None or is_wrapper(target) or is_wrapper(weight):
        return "its target and weights are not plain tensors"
    rows = (logits.shape[0], *logits.shape[2:])
    shape = logits.shape if target.is_floating_point() else rows
    if target.dtype not in (torch.int64, *_COMPUTED) or tuple(target.shape) != tuple(shape):
        return f"its target is {target.dtype} of {tuple(target.shape)}".replace("torch.", "")
    if weight is not None and (weight.dtype not in _COMPUTED or tuple(weight.shape) != (logits.shape[1],)):
        return f"its class weights are {weight.dtype} of {tuple(weight.shape)}".replace("torch.", "")
    if len({value.device for value in (logits, target, weight) if value is not None}) > 1:
        return "its operands are on several devices"
    return "" if 0 <= argument(loss, "label_smoothing") <= 1 else "its label smoothing is not between 0 and 1"


def _why_in_place(loss: Node, path: _Path) -> str:
    """Rule 2: return why the layer cannot run together with its loss, or ""."""
    linear = path.linear
    aliases = AliasSets(loss.graph)
    operands = [source for operand in linear.all_input_nodes for source in (operand, before_cast(operand))]
    written = [operand.name for operand in operands if aliases.mutated(operand)]
    if written:
        return f"the program writes to {written[0]}, which the linear layer reads"
    learning = nodes_with_gradients(loss.graph)
    on = loss in learning
    if on and linear not in learning:
        return "gradients are off where its logits are made"
    other = next((node.name for node in path.log_sums if (node in learning) is not on), "")
    return f"{other} reads its logits where gradients are {'off' if on else 'on'}" if other else ""


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


def _chunks(rule: ChunkRule, linear: Node, logits: torch.Tensor) -> int | str:
    """Return the number of chunks; why there are none, as text."""
    weight = tensor_value(argument(linear, "weight"))
    if weight is None or weight.dim() != 2 or is_wrapper(weight):
        return "its weight is not a plain matrix"
    counts = [hint(size) for size in (logits.numel(), *weight.shape)]
    elements, classes, hidden = counts
    if elements is None or not classes or hidden is None:
        return "the number of its rows is not known before it runs"
    rows = 2 << (hidden - 1).bit_length() if rule.chunks == AUTO else int(rule.chunks)
    return -(-elements // classes // rows)
