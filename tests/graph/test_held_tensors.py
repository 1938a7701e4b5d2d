"""A module that holds a graph's tensors under their paths."""

from operator import attrgetter

import torch
from torch import nn

from fxamp.graph.nodes import hold


def test_a_tensor_is_found_at_its_path_whatever_else_has_that_path() -> None:
    root, weight, buffer = nn.Module(), nn.Parameter(torch.ones(1)), torch.zeros(1)
    given = [("a.w", weight), ("a.w", buffer), ("a.w", weight), ("a.w.b", buffer), ("a.w.b", buffer)]
    held = {hold(root, path, tensor): tensor for path, tensor in given}
    assert held == {"a.w": weight, "held.a.w": buffer, "held.held.a.w.b": buffer}
    assert all(attrgetter(path)(root) is tensor for path, tensor in held.items())
    assert dict(root.named_parameters()) == {"a.w": weight}
