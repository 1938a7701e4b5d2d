"""Tensors that are made of others, as DTensors are, are not measured in a forward, and the log says so once."""

import logging

import pytest
import torch
from support.programs.small_models import Perceptron
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_a_wrapper_of_two_tensors_is_skipped_with_a_warning(lowering: str, caplog: pytest.LogCaptureFixture) -> None:
    net = Perceptron(8, 8, 4, torch.relu)
    net.first.weight = nn.Parameter(TwoTensor(torch.randn(8, 8), torch.randn(8, 8)), requires_grad=False)
    net.compile(backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": lowering, "nonfinite": "log"})
    with caplog.at_level(logging.WARNING, "fxamp"):
        for _ in range(2):
            net(torch.randn(3, 8))
    (message,) = [record.message for record in caplog.records if "'nonfinite'" in record.message]
    assert "measures no TwoTensor in a forward" in message


def test_plain_tensors_need_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    net = Perceptron(8, 8, 4, torch.relu)
    net.compile(backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": "aot_eager", "nonfinite": "log"})
    with caplog.at_level(logging.WARNING, "fxamp"):
        net(torch.randn(3, 8)).sum().backward()
    assert not caplog.records
