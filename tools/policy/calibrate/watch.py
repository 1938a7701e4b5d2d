"""Run a captured graph on real tensors, and pass every value, and its gradient, to a callback."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.hooks import RemovableHandle

from fxamp.graph import ENTER_AUTOCAST, EXIT_AUTOCAST
from fxamp.graph.higher_order_ops import bodies

#: Takes a node's name, a tensor, and whether the tensor is the gradient of the node's value.
Show = Callable[[str, Tensor, bool], None]


class Watch(Interpreter):
    """An interpreter of one graph and its bodies; ``shows`` maps each graph to its callback.

    Marks of autocast regions are ignored, so that everything runs in the dtypes of the program's tensors. ``handles``
    collects the hooks on gradients, to remove them after the backward.
    """

    def __init__(
        self, module: GraphModule, shows: Mapping[GraphModule, Show], gradients: bool, handles: list[RemovableHandle]
    ) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._graph = module
        self._shows = shows
        self._gradients = gradients
        self._handles = handles

    def run_node(self, n: Node) -> Any:
        """Run one node and pass its result to the callback."""
        if n.target in (ENTER_AUTOCAST, EXIT_AUTOCAST):
            return None
        value = self._inside(n) if bodies(n) else super().run_node(n)
        if isinstance(value, Tensor) and value.is_floating_point():
            self._show(n.name, value)
        return value

    def _inside(self, node: Node) -> Any:
        """Run the body of a higher-order op here; for a cond, the chosen branch."""
        parts = bodies(node)
        chosen = parts[0]
        if len(parts) == 2:
            predicate = self.map_nodes_to_values(node.args[0], node)
            chosen = parts[0] if bool(predicate) else parts[1]
        operands = self.map_nodes_to_values(chosen.operands, node)
        inner = Watch(chosen.module, self._shows, self._gradients, self._handles)
        return inner.run(*operands)  # type: ignore[misc]

    def _show(self, name: str, value: Tensor) -> None:
        show = self._shows[self._graph]
        show(name, value, False)
        if self._gradients and value.requires_grad:
            self._handles.append(value.register_hook(lambda gradient: show(name, gradient, True)))  # type: ignore[no-untyped-call]
