"""Which values of a graph may share memory, and which of them are written to."""

from torch._ops import OpOverload
from torch.fx import Graph, Node

from fxamp.graph.nodes import fake_tensors, writes


class AliasSets:
    """A union-find over the nodes of one graph: values that may share storage are in one set.

    Views are recognised by the alias annotations of their op's schema, and by a table of ops whose schemas hide that
    they may return an input; an op without a schema (a higher-order or Python operation) is taken to alias everything
    that it reads. ``mutated(node)`` holds if anything in the graph may write to the memory of ``node``: a copy of such
    a value, an inserted cast for example, is stale after the write.
    """

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[Node, Node] = {}
        self._written: set[Node] = set()
        for node in graph.nodes:
            for source in aliased_inputs(node):
                self._union(node, source)
        written = [source for node in graph.nodes for source in writes(node)]
        self._written = {self._find(node) for node in written}

    def mutated(self, node: Node) -> bool:
        """Whether any op of the graph may write to the memory of ``node``."""
        return self._find(node) in self._written

    def shared(self, a: Node, b: Node) -> bool:
        """Whether ``a`` and ``b`` may share memory."""
        return self._find(a) is self._find(b)

    def _find(self, node: Node) -> Node:
        root = node
        while (up := self._parent.get(root, root)) is not root:
            root = up
        while (up := self._parent.get(node, node)) is not root:
            self._parent[node] = root
            node = up
        return root

    def _union(self, a: Node, b: Node) -> None:
        self._parent[self._find(a)] = self._find(b)


def is_view(node: Node) -> bool:
    """Whether the schema of the node's op says that its result shares memory with an input."""
    return isinstance(node.target, OpOverload) and any(result.alias_info for result in node.target._schema.returns)


#: Ops that may return an input, or views of one, although their schemas do not say so; found by running ATen's ops.
_UNANNOTATED = frozenset(
    f"aten::{name}"
    for name in (
        "_to_cpu",
        "alpha_dropout",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "broadcast_tensors",
        "cartesian_prod",
        "dropout",
        "einsum",
        "feature_alpha_dropout",
        "feature_dropout",
        "meshgrid",
        "sum_to_size",
        "type_as",
        "unsafe_chunk",
        "unsafe_split",
        "unsafe_split_with_sizes",
    )
)


def aliased_inputs(node: Node) -> list[Node]:
    """The inputs whose memory the result of ``node`` may share."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    inputs = [source for source in node.all_input_nodes if fake_tensors(source.meta.get("val"))]
    if not isinstance(node.target, OpOverload) or node.target._schema.name in _UNANNOTATED:
        return inputs
    if not is_view(node):
        return []
    sources: list[Node] = []
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None:
            continue
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        candidates = given if isinstance(given, (list, tuple)) else [given]
        sources += [item for item in candidates if isinstance(item, Node)]
    return sources
