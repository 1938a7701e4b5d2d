"""What happened to one graph: numbers for reports, in plain values."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fxamp.graph import dtype_name, fake_tensors
from fxamp.passes.base import all_graphs
from fxamp.passes.decision import inserted_for, users_of_rule


@dataclass(frozen=True)
class PassRecord:
    """One pass over one graph: its name, how long it took (seconds), and what it counted."""

    name: str
    seconds: float
    modified: int
    counts: dict[str, int]


@dataclass(frozen=True)
class GraphRecord:
    """One rewritten graph.

    ``ops`` counts calls of ATen ops without the inserted casts; ``ops_by_dtype`` the same by the dtype of their first
    floating result; ``casts`` the inserted casts; ``rules`` how many ops each rule decides.
    """

    policy: str
    chosen: str
    ops: int
    casts: int
    ops_by_dtype: dict[str, int]
    rules: dict[str, int]
    passes: tuple[PassRecord, ...]
    verbatim: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Time in all passes together."""
        return sum(record.seconds for record in self.passes)

    @property
    def shared(self) -> int:
        """How often an inserted cast served another use."""
        return sum(record.counts.get("shared", 0) for record in self.passes)

    @property
    def folded(self) -> int:
        """How many inserted casts cancelled."""
        return sum(record.counts.get("folded", 0) for record in self.passes)


def record_graph(gm: GraphModule, policy: str, chosen: str, passes: list[PassRecord]) -> GraphRecord:
    """Count what is in the rewritten ``gm`` and the bodies of its higher-order ops."""
    nodes = [node for graph in all_graphs(gm) for node in graph.graph.nodes]
    ops = [node for node in nodes if isinstance(node.target, OpOverload) and inserted_for(node) is None]
    casts = sum(inserted_for(node) is not None and node.target is torch.ops.aten.to.dtype for node in nodes)
    verbatim = {node.name: node.meta["fxamp_verbatim"] for node in nodes if "fxamp_verbatim" in node.meta}
    return GraphRecord(
        policy=policy,
        chosen=chosen,
        ops=len(ops),
        casts=casts,
        ops_by_dtype=dict(Counter(_dtype(node) for node in ops)),
        rules=users_of_rule(nodes),
        passes=tuple(passes),
        verbatim=verbatim,
    )


def _dtype(node: Node) -> str:
    for tensor in fake_tensors(node.meta.get("val")):
        if tensor.is_floating_point():
            return dtype_name(tensor.dtype)
    return "other"
