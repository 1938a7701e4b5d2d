"""The plan: which gradients share a launch, and what its kernel depends on.

Gradients share a launch if they have the same dtype, the same target dtype, and the same access to memory; a launch
handles any number of them. Each gradient is split into chunks of 16,384 elements, one per program, so that every
program has about the same amount of work.
"""

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

CHUNK = 16_384
WARPS = 8
ALIGNMENT = 16  # bytes: the widest single memory access of a GPU lane
LANE = 32  # bytes of arithmetic per lane at a time: 8 float32 values, which take 16 bytes as float16
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Access(enum.Enum):
    """How a kernel reads and writes gradients.

    ``WIDE``: 16 bytes at a time; source and target start at multiples of 16 bytes. ``PEELED``: 16 bytes at a time after
    a head of fewer elements than that; the target is the source, or there is none, so that both are aligned after the
    same element. ``NARROW``: one element at a time.
    """

    WIDE = "yes"
    PEELED = "after the head"
    NARROW = "no"


class Gradient(NamedTuple):
    """The properties of one gradient that the plan depends on.

    Attributes:
        numel: its number of elements.
        source: its dtype.
        target: the dtype of the unscaled gradient, or None if it is only checked.
        access: how kernels may access it, given where source and target start.
        dense: whether its elements fill their memory without gaps or overlaps, so that storage order can be used.
    """

    numel: int
    source: torch.dtype
    target: torch.dtype | None
    access: Access
    dense: bool


@dataclass(frozen=True)
class Requested:
    """The requested results: one flag for all gradients, one flag for each, the sum of all squares."""

    found_inf: bool = False
    flags: bool = False
    squared_norm: bool = False


@dataclass(frozen=True)
class Kernel:
    """Everything that the source text of one kernel depends on.

    Attributes:
        source: the dtype that is read.
        target: the dtype that is written, or None if nothing is.
        access: how it reads and writes them.
        requested: the requested results.
        block: the number of elements that a program handles at a time; it divides ``CHUNK``.
    """

    source: torch.dtype
    target: torch.dtype | None
    access: Access
    requested: Requested
    block: int


@dataclass(frozen=True)
class Group:
    """The gradients of one launch.

    Attributes:
        kernel: the kernel that is launched.
        positions: the index of each gradient in the caller's list.
        numels: the number of elements of each, never 0.
    """

    kernel: Kernel
    positions: tuple[int, ...]
    numels: tuple[int, ...]

    @functools.cached_property
    def programs(self) -> int:
        """Return the number of programs of the launch."""
        return sum(-(-numel // CHUNK) for numel in self.numels)

    @functools.cached_property
    def rows(self) -> "np.ndarray[Any, Any]":
        """Return int64 ``[gradients, 4]``: the group's table of gradients, with zeros in the columns of addresses."""
        zeros = np.zeros(len(self.positions), np.int64)
        return np.column_stack((zeros, zeros, self.numels, self.positions))

    @functools.cached_property
    def blocks(self) -> Tensor:
        """Return int64 ``[2 * programs]`` on the CPU: each program's row in the table of gradients, and its chunk."""
        return block_map(self.numels).flatten()


def block_map(numels: Sequence[int]) -> Tensor:
    """Return int64 ``[programs, 2]`` on the CPU: each program's row in the table, and its chunk of that row."""
    chunks = torch.tensor([-(-numel // CHUNK) for numel in numels], device="cpu")
    rows = torch.repeat_interleave(torch.arange(len(chunks), device="cpu"), chunks)
    first_programs = (chunks.cumsum(0) - chunks)[rows]
    return torch.stack([rows, torch.arange(len(rows), device="cpu") - first_programs], dim=1)


@dataclass(frozen=True)
class LaunchPlan:
    """How the work on the gradients of one device is divided.

    Attributes:
        groups: one launch each.
        left: the positions of gradients that no kernel supports: they have gaps, overlaps, or another dtype.
    """

    groups: tuple[Group, ...]
    left: tuple[int, ...]


def make_plan(gradients: tuple[Gradient, ...], requested: Requested, wave: int) -> LaunchPlan:
    """Group the gradients of one device; ``wave`` is the number of lanes of a warp on the device, 32 or 64."""
    members: dict[Kernel, list[int]] = {}
    left = []
    for position, (numel, source, target, access, dense) in enumerate(gradients):
        if not dense or source not in DTYPES or (target or source) not in DTYPES:
            left.append(position)
        elif numel:
            kernel = Kernel(source, target, access, requested, block_size(source, wave))
            members.setdefault(kernel, []).append(position)
    groups = (
        Group(kernel, tuple(positions), tuple(gradients[position].numel for position in positions))
        for kernel, positions in members.items()
    )
    return LaunchPlan(tuple(groups), tuple(left))


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill the tensor's memory without gaps or overlaps, in any order of dimensions."""
    return tensor.is_contiguous() or fills_memory(tensor.shape, tensor.stride())


def fills_memory(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements of a tensor with these strides fill its memory, as :func:`is_dense` does."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def block_size(source: torch.dtype, wave: int) -> int:
    """Return how many elements a program handles at a time: few enough for the registers of each lane."""
    return WARPS * wave * LANE // max(source.itemsize, torch.float32.itemsize)
