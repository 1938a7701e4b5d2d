"""Write measurements into a graph, at places and as reductions that a compiler can fuse into the loops of other ops."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter, base_name, fake_tensors, floating_inputs, graph_output, returned, tensor_value
from fxamp.passes.shared.magnitudes import MEASURED, converted_limits, is_conversion, passes_on
from fxamp.policy.model.op_names import aten_ops
from fxamp.torch_private import hint

aten = torch.ops.aten


class MagnitudeWriter:
    """Writes the measurements of one graph. ``traced``: a graph of AOTAutograd's, after its decompositions."""

    def __init__(self, writer: GraphWriter, traced: bool) -> None:
        self._writer, self._traced = writer, traced
        self.call = writer.call

    def magnitude(self, node: Node) -> Node:
        """Return the largest magnitude in ``node``, 0-dim float32 (float64 for float64), outside of autograd."""
        call, value = self.call, node.meta["val"]
        wide = torch.promote_types(value.dtype, torch.float32)
        source = node if self._traced else call(aten.detach.default, node)
        rows = [-1] if _by_rows(node) else None
        if any(hint(size) is None for size in value.shape):  # it may be 0, and then there is no largest
            rows = None
            zero = call(aten.full.default, [1], 0.0, dtype=value.dtype, device=value.device)
            source = call(aten.cat.default, [call(aten.reshape.default, source, [-1]), zero])
        if not self._traced:
            largest = call(aten.linalg_vector_norm.default, source, torch.inf, rows, False, dtype=wide)
        else:
            largest = call(aten.amax.default, call(aten.abs.default, source), *([rows] if rows else []))
        largest = call(aten.amax.default, largest) if rows else largest
        return self._writer.in_dtype(largest, wide)

    def add_output(self, gm: GraphModule, names: Sequence[str], parts: list[Node]) -> None:
        """Return ``parts`` as one more output, joined; ``meta[MEASURED]`` of the output node is ``names``."""
        output = graph_output(gm.graph)
        output.meta[MEASURED] = tuple(names)
        if not parts:
            return
        with gm.graph.inserting_before(output):
            output.args = ((*returned(gm.graph), self.joined(parts)),)
        if "desc" in output.meta:  # AOTAutograd's description of each output
            output.meta["desc"] = [*output.meta["desc"], None]

    def joined(self, parts: list[Node]) -> Node:
        """Return 0-dim and 1-dim ``parts`` as one 1-dim tensor of their widest dtype, on the first one's device."""
        call, device = self.call, parts[0].meta["val"].device
        widest = torch.float32
        for part in parts:
            widest = torch.promote_types(widest, part.meta["val"].dtype)
        rows = []
        for part in parts:
            row = self._writer.on_device(self._writer.in_dtype(part, widest), device)
            rows.append(call(aten.unsqueeze.default, row, 0) if row.meta["val"].dim() == 0 else row)
        return call(aten.cat.default, rows)


def _by_rows(node: Node) -> bool:
    """Whether to reduce the rows of the value of ``node`` first.

    On a GPU it does so if a reader works by rows, such as a norm or a softmax. On a CPU all elements are read in one
    loop, unless the op that computes them, or their first reader, has one number for each row.
    """
    value = node.meta["val"]
    width = hint(value.shape[-1]) if value.dim() > 1 else None
    if width is None or width < _ROW:
        return False
    return value.device.type != "cpu" or any(map(_works_by_rows, (node, first_reader(node))))


def _works_by_rows(node: Node, reach: int = 4) -> bool:
    """Whether ``node`` computes one number for each row, or reads some.

    An elementwise op that reads the result of such an op, up to ``reach`` ops before it, counts too, because Inductor
    computes them in one loop.
    """
    if isinstance(node.target, OpOverload) and base_name(node) in _ROW_OPS:
        return True
    read = [tensor_value(source) for source in floating_inputs(node)]
    if any(map(_is_of_rows, fake_tensors([node.meta.get("val"), read]))):
        return True
    on_elements = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    if reach == 0 or not (on_elements or passes_on(node)):
        return False
    return any(_works_by_rows(source, reach - 1) for source in floating_inputs(node))


def _is_of_rows(tensor: Tensor) -> bool:
    """Whether ``tensor`` has one number for each row of others."""
    *rows, width = map(hint, tensor.shape) if tensor.dim() > 1 else (1, 0)
    return width == 1 and any(size != 1 for size in rows)


_ROW_OPS = aten_ops("""
    softmax _softmax log_softmax _log_softmax layer_norm native_layer_norm rms_norm cross_entropy_loss logsumexp
    _softmax_backward_data _log_softmax_backward_data native_layer_norm_backward _fused_rms_norm
    _fused_rms_norm_backward
""")


#: The minimum number of elements of a row that is reduced by itself.
_ROW = 32


def in_shape_read(node: Node) -> Node:
    """Return the view, possibly in a wider dtype, through which all readers read ``node``; else ``node``.

    Inductor does not fuse kernels whose loops have different shapes, unless none of their inputs is broadcast.
    """
    read = node
    while len(node.users) == 1:
        (node,) = node.users
        if isinstance(node.target, OpOverload) and base_name(node) in _SHAPES:
            read = node
        elif not _is_widening(node):
            break
    return read


def place_of(node: Node) -> Node:
    """Return the node before which ``node`` is measured: the one after its :func:`first_reader`.

    Inductor's CPU backend fuses a reduction into the loop of an earlier op, not of a later one, and computes
    elementwise ops where they are read.
    """
    reader = first_reader(node)
    return reader.next if reader.op.startswith("call") else graph_output(node.graph)


def first_reader(node: Node) -> Node:
    """Return the first node that reads ``node``, past views and conversions; conversions come first."""
    reader = node
    while reader.users and (reader is node or passes_on(reader)):
        reader = next(filter(is_conversion, sorted(reader.users)), min(reader.users))
    return reader


def _is_widening(node: Node) -> bool:
    """Whether ``node`` converts to a dtype that holds all floating values of its input."""
    limits = converted_limits(node)
    return limits is not None and limits[1].max >= limits[0].max and limits[1].eps <= limits[0].eps


_SHAPES = aten_ops("view _unsafe_view reshape flatten unflatten")
