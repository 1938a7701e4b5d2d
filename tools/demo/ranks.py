"""The processes of a distributed run, as torchrun starts them: which one this is, and how it shares the work."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fxamp.errors import OptionError
from fxamp.tools.demo.model import GPT

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class Ranks:
    """This process, ``rank`` of ``count``. ``kind``: "ddp", "fsdp", or "" for a single process without either."""

    kind: str = ""
    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this process prints and draws."""
        return self.rank == 0

    def spread(self, model: GPT, device: str) -> nn.Module:
        """Return the model with its gradients averaged (DDP), or its parameters sharded (FSDP2), over the processes."""
        if self.kind == "ddp":
            return DistributedDataParallel(model)
        if self.kind == "fsdp":
            mesh = init_device_mesh(device, (self.count,))
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh)
        return model

    def share(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return this process's passages, of inputs and of targets."""
        return batch[0][self.rank :: self.count], batch[1][self.rank :: self.count]

    def mean(self, loss: Tensor) -> float:
        """Return the mean of all processes' losses."""
        total = loss.detach().clone()
        if self.count > 1:
            dist.all_reduce(total)
        return total.item() / self.count


@contextmanager
def joined(kind: str, device: str, batch: int) -> Iterator[Ranks]:
    """Join the other processes while the context is active; ``kind`` as in :class:`Ranks`.

    Raises:
        OptionError: torchrun did not start this process, or the processes cannot share a batch of that size evenly.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    _require(kind, count, batch)
    if not kind:
        yield Ranks()
        return
    if device == "cuda":
        torch.cuda.set_device(_own_gpu(kind))
    dist.init_process_group(_BACKENDS[device])
    try:
        yield Ranks(kind, dist.get_rank(), count)
    finally:
        dist.destroy_process_group()


def _own_gpu(kind: str) -> int:
    """Return the index of this process's GPU: each process of a machine has one of its own."""
    own, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if own >= gpus:
        raise OptionError(f"--{kind}: GPUs of this machine: {gpus}; accepted: torchrun --nproc-per-node {gpus} at most")
    return own


def _require(kind: str, count: int, batch: int) -> None:
    if not kind and count > 1:
        raise OptionError(f"torchrun started {count} processes; say how they train one model: --ddp or --fsdp")
    if kind and "WORLD_SIZE" not in os.environ:
        raise OptionError(f"--{kind}: start it as torchrun --nproc-per-node 2 $(which fxamp-demo) --{kind}")
    if batch % count:
        raise OptionError(f"--{kind}: {count} processes cannot share {batch} passages a step evenly")
