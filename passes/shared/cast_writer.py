"""Insert casts into a graph, and decide which of them can be shared."""

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node, map_arg

from fxamp.graph import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    INSERTED,
    AliasSets,
    GraphWriter,
    dtype_name,
    dtype_of,
    fake_mode_of,
    is_data,
    nesting_change,
    tensor_value,
)
from fxamp.graph.aliases import alias_of, unchanged_input, writes

aten = torch.ops.aten

CONVERSIONS = frozenset({aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default})
"""Ops that only convert."""

COPIES = frozenset({aten.contiguous.default, aten.clone.default, aten.alias.default})
"""Ops that return the values of their input, in memory of its own or not."""

_DETACHING = frozenset({aten.detach.default, aten.detach_.default})


@dataclass(frozen=True)
class AutogradInfo:
    """Whether a value needs a gradient, and whether autocast caches its casts: a float32 leaf that is not a view."""

    needs_grad: bool
    leaf: bool


def before_cast(operand: Any) -> Any:
    """Return the input of fxamp's cast from float32, so that its reader rounds only once; else ``operand``."""
    if not isinstance(operand, Node) or INSERTED not in operand.meta or operand.target is not aten.to.dtype:
        return operand
    return operand.args[0] if dtype_of(operand.args[0]) is torch.float32 else operand


def _origin(value: torch.Tensor | None) -> AutogradInfo:
    if value is None or not value.requires_grad:
        return AutogradInfo(False, False)
    return AutogradInfo(True, value.is_leaf and not value._is_view() and value.dtype is torch.float32)


def _same_tensor(node: Node) -> Node | None:
    """Return the input that ``node`` returns unchanged; None if there is none."""
    return alias_of(node) if node.target is operator.getitem else unchanged_input(node)


def _returned_inputs(node: Node) -> list[Node]:
    """Return the inputs of which ``node`` may return one as it is, in every gradient mode."""
    same = _same_tensor(node)
    return [*(writes(node) if isinstance(node.target, OpOverload) else []), *([] if same is None else [same])]


class CastWriter:
    """Casts for one graph. Call ``visit`` for every node in order, to track grad mode and what needs a gradient.

    A write may make every value that shares memory with its target need a gradient from then on.

    ``outer`` gives the origin of each placeholder of a body; without it the placeholders' values are used.
    ``per_region``: no cast is shared between two outermost autocast regions; eager autocast empties its cache there.
    """

    def __init__(
        self, graph: Graph, grad: bool, outer: Sequence[AutogradInfo] | None = None, per_region: bool = False
    ) -> None:
        self.grad_enabled = grad
        self.inserted = 0
        self.shared = 0
        self._graph = graph
        self._aliases = AliasSets(graph)
        self._needs_grad: set[Node] = set()
        self._leaves: set[Node] = set()
        self._casts: dict[tuple[Node, torch.dtype, bool], Node] = {}
        self._written: list[Node] = []
        self._transforms: list[Node] = []
        self._outer = iter(outer or ())
        self._per_region = per_region
        self._regions = 0

    def visit(self, node: Node) -> None:
        """Update the state for a node before casting its inputs. What the previous node wrote to is cast again."""
        for written in self._written:
            self._casts = {key: cast for key, cast in self._casts.items() if not self._aliases.shared(key[0], written)}
        self._written = writes(node)
        change = nesting_change(node.target)
        if change > 0:
            self._transforms.append(node)
        elif change < 0:
            self._transforms.pop()
        self._regions += (node.target is ENTER_AUTOCAST) - (node.target is EXIT_AUTOCAST)
        if node.target is EXIT_AUTOCAST and not self.in_region:
            self._casts.clear()
        if node.target is torch._C._set_grad_enabled:
            self.grad_enabled = bool(node.args[0])
            return
        if node.op == "placeholder":
            origin = next(self._outer, None) or _origin(tensor_value(node))
            if origin.needs_grad:
                self._needs_grad.add(node)
            if origin.leaf:
                self._leaves.add(node)
            return
        if node.target in _DETACHING or is_data(node):
            return
        sources = node.all_input_nodes if self.grad_enabled else _returned_inputs(node)
        if any(source in self._needs_grad for source in sources):
            self._needs_grad.add(node)
            if self.grad_enabled:
                self._needs_grad.update(self._aliases.of(self._written))

    @property
    def in_region(self) -> bool:
        """Whether eager autocast would keep its cache here; always, unless it is ``per_region``."""
        return not self._per_region or self._regions > 0

    def origin(self, argument: Any) -> AutogradInfo:
        """Return the gradient information for the placeholder of a body that is bound to ``argument``."""
        return AutogradInfo(argument in self._needs_grad, argument in self._leaves)

    def original(self, node: Node) -> Node:
        """Return the value that conversions and bodies returned unchanged as ``node``, such as a leaf."""
        while (same := _same_tensor(node)) is not None:
            node = same
        return node

    def cast(self, source: Node, dtype: torch.dtype, user: Node, why: str, cached: bool = True) -> Node:
        """Return ``source`` in ``dtype``, for ``user``: an existing cast if it can be shared, else a new one.

        ``cached``: whether autocast would have the cast of a leaf in its cache.
        The :meth:`original` of ``source`` is cast.
        """
        source = self.original(source)
        key = (source, dtype, self.grad_enabled)
        shareable = self._shareable(source, cached)
        if shareable and key in self._casts:
            self.shared += 1
            return self._casts[key]
        value = tensor_value(source)
        mode = fake_mode_of(value) if value is not None else None
        assert mode is not None
        # A cast inside a torch.func transform would be a value of that transform: insert it before the outermost one.
        with self._graph.inserting_before(self._transforms[0] if self._transforms else user):
            cast = GraphWriter(self._graph, mode).call(
                aten.to.dtype,
                source,
                dtype,
                near=user,
                why=f"for {user.name}: {why}",
                name=f"{source.name}_{dtype_name(dtype)}",
            )
        cast.meta.pop("source_fn_stack", None)
        self.inserted += 1
        if source in self._needs_grad and self.grad_enabled:
            self._needs_grad.add(cast)
        if shareable:
            self._casts[key] = cast
        return cast

    def cast_uses(
        self, node: Node, dtypes: Mapping[Node, torch.dtype], why: str, cached: bool = True
    ) -> dict[Node, Node]:
        """Cast inputs of ``node``, for each position in which it reads them; return one cast of each input.

        Other arguments and results are those of :meth:`cast`. A node that may write to its inputs reads the same cast
        in all positions. The casts of one value are assigned from its last position to its first: autocast, as torch is
        built on Linux, creates them in this order, and the order determines how gradients are summed.
        """
        places: list[Node] = []
        map_arg((node.args, node.kwargs), places.append)
        opaque = not isinstance(node.target, OpOverload)
        values = {source: (self.original(source), dtype) for source, dtype in dtypes.items()}
        casts: dict[tuple[Node, torch.dtype], list[Node]] = {}
        for (value, dtype), count in Counter(values[place] for place in places if place in values).items():
            copies = [self.cast(value, dtype, node, why, cached) for _ in range(1 if opaque else count)]
            casts[value, dtype] = copies * count if opaque else copies
        returned = {source: casts[value][0] for source, value in values.items()}
        node.args, node.kwargs = map_arg(
            (node.args, node.kwargs), lambda n: casts[values[n]].pop() if n in values else n
        )
        return returned

    def erase_unused(self) -> None:
        """Remove unused casts."""
        for node in reversed(self._graph.nodes):
            if node.target is aten.to.dtype and INSERTED in node.meta and not node.users:
                self._graph.erase_node(node)
                self.inserted -= 1

    def _shareable(self, source: Node, cached: bool) -> bool:
        return not self.grad_enabled or (cached and source in self._leaves) or source not in self._needs_grad
