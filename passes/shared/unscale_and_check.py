"""The nodes that scale-backward writes: gradients times the scale or its inverse, and the flags."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch.fx import Node

import fxamp.kernels  # noqa: F401  registers fxamp::check_unscale
from fxamp.graph import GraphWriter, first_computation
from fxamp.passes.shared.widening import before_widening
from fxamp.torch_dtypes import HALVES, widest_float
from fxamp.torch_private import is_dynamic

aten = torch.ops.aten

#: The minimum number of elements for which saving one read of a gradient is worth two launches.
_LARGE = 2**20

#: The maximum number of elements of the gradients that one launch unscales: their 16-bit values wait for each other.
_MOST = 2**26

#: The maximum number of elements of gradients that share a flag: 64 x 64. Writing a flag costs the host about 0.6 us.
_SMALL = 2**12


@dataclass(frozen=True)
class Unscaled:
    """Unscaled gradients, in the given order; flags, ``[len(covered)]``; and the positions of each flag's gradients.

    float16 gradients stay scaled. ``square``: 0-dim float32, the sum of the squares of all others but sparse ones; None
    if not requested.
    """

    gradients: list[Node]
    flags: Node
    covered: list[list[int]]
    square: Node | None = None


@dataclass(frozen=True)
class _Piece:
    """Unscaled gradients by their scaled nodes, and their flags: bool, on the scale's device.

    There is a flag for each gradient, in the same order, or one for all of them. ``squares``: sums of their squares on
    that device, 0-dim float32, if the piece computes them.
    """

    unscaled: dict[Node, Node]
    flags: Node
    squares: Sequence[Node] = ()


class UnscaleWriter:
    """Inserts nodes into one backward graph through ``writer``; ``scale`` is its input that holds the scale.

    ``check``: as of :class:`fxamp.passes.backward.scale_backward.ScaleBackward`. ``norm``: whether the sum of the
    gradients' squares is requested.
    """

    def __init__(self, writer: GraphWriter, scale: Node, check: str, norm: bool = False) -> None:
        self._graph = writer.graph
        self._call, self._as, self._on = writer.call, writer.in_dtype, writer.on_device
        self._item, self._times = writer.item, writer.times
        self._scale = scale
        self._check, self._norm = check, norm
        with self._graph.inserting_before(scale.next):
            self._inverse = self._reciprocal()

    def scale(self, tangent: Node) -> None:
        """Replace ``tangent`` for all its users by itself times the scale, in its dtype."""
        users = list(tangent.users)
        with self._graph.inserting_before(first_computation(self._graph)):
            scaled = self._times(tangent, self._scale)
        for user in users:
            user.replace_input_with(tangent, scaled)

    def unscale(self, gradients: Sequence[Node]) -> Unscaled:
        """Insert the unscaled gradients and their flags, once for a node that is the gradient of several inputs."""
        places: dict[Node, list[int]] = {}
        for at, node in enumerate(gradients):
            places.setdefault(node, []).append(at)
        fit = [node for node in places if self._check == "kernel" and _fits_kernel(node)]
        others = [node for node in places if node not in fit]
        shared = self._check == "shared"
        pieces = self._by_kernel(fit) + [self._by_ops(together) for together in _together(others, shared)]
        unscaled = {node: result for piece in pieces for node, result in piece.unscaled.items()}
        flags = self._call(aten.cat.default, [piece.flags for piece in pieces])
        if shared:
            covered = [[at for node in piece.unscaled for at in places[node]] for piece in pieces]
        else:
            flags, covered = self._for_each(flags, [places[node] for node in unscaled])
        squares = [square for piece in pieces for square in piece.squares]
        if self._norm:
            again = [node for node, every in places.items() for _ in every[1:]]
            dense = [node for node in again if not (in_float16(node) or _sparse(node))]
            squares += [self._beside_scale(self._square(unscaled[gradient])) for gradient in dense]
            squares = squares or [self._call(aten.zeros_like.default, self._scale)]
        return Unscaled([unscaled[node] for node in gradients], flags, covered, self._total(squares))

    def _for_each(self, flags: Node, places: Sequence[Sequence[int]]) -> tuple[Node, list[list[int]]]:
        """Copy the flags of gradients with several ``places``, so that every flag has one place."""
        again = [(slot, at) for slot, every in enumerate(places) for at in every[1:]]
        if again:
            copies = [self._call(aten.slice.Tensor, flags, 0, slot, slot + 1) for slot, _ in again]
            flags = self._call(aten.cat.default, [flags, *copies])
        return flags, [[every[0]] for every in places] + [[at] for _, at in again]

    def _by_ops(self, gradients: Sequence[Node]) -> _Piece:
        """Return the gradients with a flag that they share, if they are several."""
        unscaled = {node: node if in_float16(node) else self._times(node, self._inverse) for node in gradients}
        summed = [unscaled[node] for node in gradients if self._norm and not (in_float16(node) or _sparse(node))]
        squares = [self._beside_scale(self._square(node)) for node in summed]
        return _Piece(unscaled, self._beside_scale(self._not_finite(*unscaled.values())), squares)

    def _square(self, unscaled: Node) -> Node:
        """Return the sum of the squares of the elements' absolute values: 0-dim float32."""
        value = unscaled.meta["val"]
        if value.is_complex():
            unscaled = self._call(aten.abs.default, unscaled)
        wide = self._as(unscaled, torch.promote_types(unscaled.meta["val"].dtype, torch.float32))
        squares = self._call(aten.mul.Tensor, wide, wide)
        if self._check == "kernel" and _is_fused(unscaled):
            squares = self._call(aten.sum.dim_IntList, squares, [-1])
        return self._as(self._call(aten.sum.default, squares), torch.float32)

    def _total(self, squares: Sequence[Node]) -> Node | None:
        if not squares:
            return None
        views = [self._call(aten.view.default, square, [1]) for square in squares]
        return self._call(aten.sum.default, self._call(aten.cat.default, views))

    def _by_kernel(self, gradients: Sequence[Node]) -> list[_Piece]:
        groups: dict[tuple[torch.device, torch.dtype], list[Node]] = {}
        for node in gradients:
            groups.setdefault((node.meta["val"].device, node.meta["val"].dtype), []).append(node)
        return [
            self._launch(part, device, dtype) for (device, dtype), members in groups.items() for part in _parts(members)
        ]

    def _launch(self, gradients: list[Node], device: torch.device, dtype: torch.dtype) -> _Piece:
        sources = [before_widening(node, self._call) for node in gradients]
        inverse = self._on(self._inverse, device)
        op = torch.ops.fxamp.check_unscale_norm if self._norm else torch.ops.fxamp.check_unscale
        results = self._call(op.default, sources, inverse, dtype)
        unscaled, flags = self._item(results, 0), self._item(results, 1)
        squares = [self._beside_scale(self._item(results, 2))] if self._norm else []
        # The kernel checks gradients before it unscales them; a non-finite inverse would make all of them non-finite.
        flags = self._call(aten.logical_or.default, flags, self._not_finite(inverse))
        results_of = {node: self._item(unscaled, at) for at, node in enumerate(gradients)}
        return _Piece(results_of, self._beside_scale(flags), squares)

    def _not_finite(self, *nodes: Node) -> Node:
        """Whether one of ``nodes``, of one shape, holds an inf or NaN: bool ``[1]``.

        inf - inf and NaN - NaN are NaN, which is not 0, and stays NaN in a sum.
        """
        difference = reduce(partial(self._call, aten.add.Tensor), map(self._difference, nodes))
        bad = self._call(aten.ne.Scalar, difference, 0)
        if self._check == "kernel" and _is_fused(nodes[0]):
            bad = self._call(aten.any.dim, bad, -1)
        if bad.meta["val"].is_contiguous():
            # Inductor writes the result of a reduction straight to its place among all flags, but copies a view of it.
            # Kernels may return different strides than AOTAutograd has foreseen: a view would raise under "aot_eager".
            return self._call(aten.any.dim, self._call(aten.reshape.default, bad, [-1]), 0, True)
        return self._call(aten.view.default, self._call(aten.any.default, bad), [1])

    def _difference(self, node: Node) -> Node:
        """Return ``node`` minus itself."""
        if _sparse(node):  # Inductor calls few ops on sparse tensors; a sum is inf or NaN if a value is
            node = self._call(aten.sum.default, node)
        return self._call(aten.sub.Tensor, node, node)

    def _beside_scale(self, flags: Node) -> Node:
        return self._on(flags, self._scale.meta["val"].device)

    def _reciprocal(self) -> Node:
        """Rule 3."""
        wide = widest_float(self._scale.meta["val"].device)
        exact = self._call(aten.reciprocal.default, self._as(self._scale, wide))
        return self._as(exact, torch.float32)


def _parts(gradients: Sequence[Node]) -> Iterator[list[Node]]:
    """Cut ``gradients`` into parts of at most :data:`_MOST` elements, or of one gradient that has more."""
    part, elements = list[Node](), 0
    for node in gradients:
        elements += node.meta["val"].numel()
        if part and elements > _MOST:
            yield part
            part, elements = [], node.meta["val"].numel()
        part.append(node)
    yield part


def _fits_kernel(node: Node) -> bool:
    """Whether the kernel takes this gradient: none that is complex, sparse, fused, or handed out scaled."""
    return not (node.meta["val"].is_complex() or _sparse(node) or in_float16(node) or _is_fused(node))


def _together(gradients: Sequence[Node], shared: bool) -> list[list[Node]]:
    """Return the gradients whose flags are computed together; if ``shared``, small ones of one layout and dtype are."""
    groups: dict[object, list[Node]] = {}
    for node in gradients:
        value = node.meta["val"]
        small = shared and not (_sparse(node) or is_dynamic(value)) and value.numel() <= _SMALL
        layout = (value.dtype, value.device, tuple(value.shape), value.stride()) if small else node
        groups.setdefault(layout, []).append(node)
    return list(groups.values())


def _is_fused(node: Node) -> bool:
    """Whether Inductor fuses more ops into the one that makes this large float32 gradient: it is elementwise.

    An example is the sum of both gradients of a weight that is used twice. Reductions by rows fuse with that kernel
    too; Inductor would split a reduction of all elements at once in a way that does not fuse.
    """
    value = node.meta["val"]
    elementwise = node.target in (aten.add.Tensor, aten.mul.Tensor)
    return elementwise and value.dtype == torch.float32 and value.dim() > 1 and value.numel() >= _LARGE


def _sparse(node: Node) -> bool:
    return node.meta["val"].layout is not torch.strided


def in_float16(node: object) -> bool:
    """Whether ``node`` is float16: its range is so small that its gradients stay scaled outside graphs."""
    return isinstance(node, Node) and node.meta["val"].dtype in HALVES
