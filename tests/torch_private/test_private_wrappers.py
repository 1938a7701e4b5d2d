"""DistributedDataParallel tells that it is running."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxamp import torch_private as private


@pytest.mark.usefixtures("one_rank")
def test_the_running_wrapper_is_known() -> None:
    values: list[Any] = []

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            values.append(private.running_wrapper())
            return super().forward(x)

    wrapper = nn.parallel.DistributedDataParallel(Model(2, 2))
    wrapper(torch.ones(1, 2))
    assert values == [wrapper]
    assert private.running_wrapper() is None
