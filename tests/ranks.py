"""The ranks of a distributed run, forked from a process that has imported torch and fxamp already."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forked import preload
from torch.multiprocessing import start_processes


def run_ranks(work: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Call ``work(rank, *arguments)`` in a process for each rank, and wait; an error in one of them is raised here."""
    preload()
    start_processes(work, arguments, nprocs=ranks, start_method="forkserver")  # type: ignore[no-untyped-call]


def results_of_ranks(work: Callable[..., None], folder: Path, ranks: int) -> list[Any]:
    """Call ``work(rank, folder)`` in a process for each rank; return what each saved as ``RANK.pt`` in ``folder``."""
    run_ranks(work, (str(folder),), ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]
