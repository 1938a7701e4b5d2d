"""Dynamo's capture of one whole graph is as fxamp takes it to be."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import functional_export

import fxamp
from fxamp import torch_private as private


def _transposed(x: Tensor) -> Tensor:
    return x.T


def test_a_graph_may_return_nothing() -> None:
    x, codegen = torch.ones(2, 3), functional_export._DynamoBytecodeCodeGen
    with private.returning_nothing():
        gm = functional_export.dynamo_graph_capture_for_export(_transposed)(x)
    assert torch.equal(gm(x), x.T)
    assert functional_export._DynamoBytecodeCodeGen is codegen


def test_torch_still_needs_it() -> None:
    with pytest.raises(SyntaxError):
        functional_export.dynamo_graph_capture_for_export(_transposed)(torch.ones(2, 3))


class _Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x


def test_a_graph_may_have_no_inputs() -> None:
    """The rewritten graph reads the module's tensors itself, and its caller's arguments are what it returns."""
    module, x = _Counter(), torch.ones(2, 3)
    rewritten = fxamp.rewrite(module, [x], "cpu-bfloat16")
    assert torch.equal(rewritten(x), x)
    assert module.calls.tolist() == [1, 1]
