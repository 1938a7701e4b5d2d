"""Every node of what torch prints of GPT-2 and ResNet, in every stage, is read as it is."""

import pytest
import torch
from models.zoo import MODELS, build
from printed_graphs import graphs_of
from support.checks.exhaustive import exhaustive
from test_parse_printed import compare

from fxamp.graph_text.parse import parse_text


@pytest.mark.parametrize("name", exhaustive(["gpt2", "resnet"], always=["resnet"]))
def test_every_node_of_a_model_is_read(name: str) -> None:
    model, batch = build(MODELS[name])

    def loss(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(**batch).loss * x.sum()
        return result

    graphs = graphs_of(loss, torch.ones(2))
    assert {stage for stage, _ in graphs} == {"dynamo", "joint", "forward", "backward"}

    count = 0
    for _, gm in graphs:
        document = parse_text(gm.print_readable(print_output=False), "graph.txt")
        assert document.warnings == ()
        count += compare(gm, document.graphs[0])
    assert count > 200
