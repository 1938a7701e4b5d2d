"""Layers of a model that are of one kind, and what is left of them."""

import pytest
import torch
from torch import nn

from fxamp.tools.policy.fit.depth import cut, depth_of


def net(*layers: int) -> nn.Module:
    """A model with this many layers in each of its lists."""
    inside = [nn.Sequential(*(nn.Linear(3 + at, 3 + at) for _ in range(n))) for at, n in enumerate(layers)]
    return nn.Sequential(nn.Linear(2, 3), *inside, nn.Linear(3, 1))


@pytest.mark.parametrize(("layers", "depth"), [((6,), 6), ((6, 6), 6), ((6, 5), 0), ((4,), 0), ((1,), 0), ((), 0)])
def test_a_depth_is_one_number_above_what_is_counted(layers: tuple[int, ...], depth: int) -> None:
    assert depth_of(net(*layers)) == depth


def test_first_and_last_stay_where_layers_are_cut() -> None:
    model = net(6)
    ends = model[1][0], model[1][5]
    assert cut(model, 2) is model and [*model[1]] == [*ends] and list(model[1]._modules) == ["0", "1"]
    assert model(torch.ones(2)).shape == (1,)
    assert len(cut(net(6), 4)[1]) == 4 and len(cut(net(6), 0)[1]) == 6


def test_a_layer_of_another_kind_in_the_list_stays() -> None:
    layers = nn.ModuleList([nn.Linear(3, 5), *(nn.Linear(5, 5) for _ in range(6)), nn.ReLU()])
    model = nn.ModuleDict({"layers": layers})
    assert depth_of(model) == 6
    assert [tuple(layer.weight.shape) for layer in cut(model, 2)["layers"][:3]] == [(5, 3), (5, 5), (5, 5)]


def test_a_function_has_no_depth() -> None:
    assert depth_of(torch.relu) == 0 and cut(torch.relu, 0) is torch.relu
