"""Graph networks of PyTorch Geometric: gather, scatter, segment softmax, several aggregations."""

from collections.abc import Callable
from typing import Any

import torch
from corpus_loss import WithLoss
from zoo import Batch, Spec

_NODES, _EDGES, _WIDTH = 12, 40, 16


def _spec(build: Callable[[Any], torch.nn.Module], *edges: str) -> Spec:
    """``edges``: which inputs by edge the model takes, of ``edge_weight``, ``edge_attr`` and ``edge_type``."""

    def wrapped() -> torch.nn.Module:
        import torch_geometric.nn

        return WithLoss(build(torch_geometric.nn))

    def batch() -> Batch:
        values = {
            "edge_weight": torch.rand(_EDGES),
            "edge_attr": torch.randn(_EDGES, 8),
            "edge_type": torch.randint(3, (_EDGES,)),
        }
        graph = {"x": torch.randn(_NODES, _WIDTH), "edge_index": torch.randint(_NODES, (2, _EDGES))}
        return graph | {name: values[name] for name in edges}

    return Spec(wrapped, batch)


def _layers(inputs: int, outputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(inputs, outputs), torch.nn.ReLU(), torch.nn.Linear(outputs, outputs))


MODELS: dict[str, Spec] = {
    "pyg-gcn": _spec(lambda g: g.GCN(_WIDTH, 16, 2, 4), "edge_weight"),
    "pyg-sage": _spec(lambda g: g.GraphSAGE(_WIDTH, 16, 2, 4)),
    "pyg-gin": _spec(lambda g: g.GIN(_WIDTH, 16, 2, 4, norm="batch")),
    "pyg-gat": _spec(lambda g: g.GAT(_WIDTH, 16, 2, 4, heads=2)),
    "pyg-gat-v2": _spec(lambda g: g.GAT(_WIDTH, 16, 2, 4, v2=True, heads=2)),
    "pyg-edge-cnn": _spec(lambda g: g.EdgeCNN(_WIDTH, 16, 2, 4)),
    "pyg-pna": _spec(
        lambda g: g.PNA(
            _WIDTH, 16, 1, 4, aggregators=["mean", "max", "std"], scalers=["identity"], deg=torch.tensor([1, 2, 3])
        )
    ),
    "pyg-transformer": _spec(lambda g: g.TransformerConv(_WIDTH, 8, heads=2, edge_dim=8), "edge_attr"),
    "pyg-rgcn": _spec(lambda g: g.RGCNConv(_WIDTH, 8, 3, num_bases=2), "edge_type"),
    "pyg-nn": _spec(lambda g: g.NNConv(_WIDTH, 4, _layers(8, _WIDTH * 4)), "edge_attr"),
    "pyg-gen": _spec(lambda g: g.GENConv(_WIDTH, 8, aggr="softmax", learn_t=True)),
}
