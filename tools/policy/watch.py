"""Runs a captured graph on real tensors and shows every value, and the gradient at every value, as they are made."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.hooks import RemovableHandle

from fxamp.graph import ENTER_AUTOCAST, EXIT_AUTOCAST
from fxamp.graph.higher_order import bodies

#: Takes the name of a graph's node, a tensor, and whether it is the gradient at the node's value.
Show = Callable[[str, Tensor, bool], None]


class Watch(Interpreter):
    """An interpreter of one graph, by ``shows``, those of its bodies too.

    ``autocast`` regions are passed over, so that everything runs in the dtypes of the program's tensors. ``handles``
    collects the hooks on gradients, to be removed after the backward.
    """

    def __init__(
        self, module: GraphModule, shows: Mapping[GraphModule, Show], wanted: bool, handles: list[RemovableHandle]
    ) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._graph = module
        self._shows = shows
        self._wanted = wanted
        self._handles = handles

    def run_node(self, n: Node) -> Any:
        """Run one node and show what it gives."""
        if n.target in (ENTER_AUTOCAST, EXIT_AUTOCAST):
            return None
        value = self._inside(n) if bodies(n) else super().run_node(n)
        if isinstance(value, Tensor) and value.is_floating_point():
            self._seen(n.name, value)
        return value

    def _inside(self, node: Node) -> Any:
        """Run the body of a higher-order op here, the chosen one of a cond."""
        found = bodies(node)
        chosen = found[0]
        if len(found) == 2:
            predicate = self.map_nodes_to_values(node.args[0], node)
            chosen = found[0] if bool(predicate) else found[1]
        operands = self.map_nodes_to_values(chosen.operands, node)
        inner = Watch(chosen.module, self._shows, self._wanted, self._handles)
        return inner.run(*operands)  # type: ignore[misc]

    def _seen(self, name: str, value: Tensor) -> None:
        show = self._shows[self._graph]
        show(name, value, False)
        if self._wanted and value.requires_grad:
            self._handles.append(value.register_hook(lambda gradient: show(name, gradient, True)))  # type: ignore[no-untyped-call]
