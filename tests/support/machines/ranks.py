"""The ranks of a distributed run, forked from a process that has imported torch and fxamp already."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes

from support.machines.forked import preload


def on_ranks(work: Callable[[DeviceMesh], Any], ranks: int, folder: Path) -> list[Any]:
    """What ``work`` returns on each of this many ranks, processes that meet in ``folder``; one rank is this process.

    An error in one of them is raised here.
    """
    if ranks == 1:
        _rank(0, 1, folder, work)
    else:
        preload()
        start_processes(_rank, (ranks, folder, work), nprocs=ranks, start_method="forkserver")  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def asked_by(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The parameters of each selected test of the module: its ranks run no more than these tests look at."""
    items = (item for item in request.session.items if getattr(item, "module", None) is request.module)
    return [item.callspec.params for item in items if hasattr(item, "callspec")]


def whole(value: Tensor) -> Tensor:
    """A copy of a tensor: of a DTensor, with the parts of all ranks."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _rank(rank: int, ranks: int, folder: Path, work: Callable[[DeviceMesh], Any]) -> None:
    if ranks > 1:
        torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        torch.save(work(init_device_mesh("cpu", (ranks,))), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
