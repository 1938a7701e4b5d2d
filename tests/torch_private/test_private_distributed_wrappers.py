"""DistributedDataParallel tells that it is running, and FSDP2 in which dtype it sums gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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


@pytest.mark.usefixtures("one_rank")
def test_the_dtype_of_sums_is_known() -> None:
    nets = [nn.Linear(2, 2) for _ in range(2)]
    for net, dtype in zip(nets, (torch.float16, None), strict=True):
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    found = {id(parameter) for parameter in private.summed_in(torch.float16)}
    narrow, wide = ({id(parameter) for parameter in net.parameters()} for net in nets)
    assert narrow <= found and not wide & found
