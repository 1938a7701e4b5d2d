"""Which values of a graph may share memory, and which of them are written to."""

from torch._ops import OpOverload
from torch.fx import Graph, Node

from fxamp.graph.nodes import fake_tensors, writes


class AliasSets:
    """A union-find over the nodes of one graph: values that may share storage are in one set.

    Views are recognised by the alias annotations of their op's schema; an op without a schema (a higher-order or
    Python operation) is taken to alias everything that it reads. ``mutated(node)`` holds if anything in the graph may
    write to the memory of ``node``: a copy of such a value, an inserted cast for example, is stale after the write.
    """

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[Node, Node] = {}
        self._written: set[Node] = set()
        for node in graph.nodes:
            for source in _aliased_inputs(node):
                self._union(node, source)
        written = [source for node in graph.nodes for source in writes(node)]
        self._written = {self._find(node) for node in written}

    def mutated(self, node: Node) -> bool:
        """Whether any op of the graph may write to the memory of ``node``."""
        return self._find(node) in self._written

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


def may_alias_inputs(node: Node) -> bool:
    """Whether the result of ``node`` may share memory with one of its inputs."""
    return bool(_aliased_inputs(node))


def _aliased_inputs(node: Node) -> list[Node]:
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    inputs = [source for source in node.all_input_nodes if fake_tensors(source.meta.get("val"))]
    if not isinstance(node.target, OpOverload):
        return inputs
    schema = node.target._schema
    aliases = {name for result in schema.returns if result.alias_info for name in _names(result.alias_info)}
    if not aliases:
        return []
    sources: list[Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        candidates = given if isinstance(given, (list, tuple)) else [given]
        sources += [item for item in candidates if isinstance(item, Node)]
    return sources


def _names(info: object) -> set[str]:
    return set(info.before_set) | set(info.after_set)  # type: ignore[attr-defined]
