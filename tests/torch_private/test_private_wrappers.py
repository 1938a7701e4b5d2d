"""DistributedDataParallel tells that it is running."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxamp import torch_private as private


def test_the_running_wrapper_is_known(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(private.running_wrapper())
            return super().forward(x)

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapper = nn.parallel.DistributedDataParallel(Model(2, 2))
        wrapper(torch.ones(1, 2))
    finally:
        torch.distributed.destroy_process_group()
    assert seen == [wrapper]
    assert private.running_wrapper() is None
