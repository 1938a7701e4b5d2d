"""Launch the kernels of a plan: one launch per group, for any number of gradients.

A kernel reads the addresses of its gradients from one table, and its share of the work from a table of blocks. Building
and uploading these tables costs the host some microseconds per gradient, so they are cached if the caller allows it:
the plan and the blocks by the gradients' sizes and dtypes, the addresses until a gradient moves. Nothing is cached
during CUDA graph capture or for ops inside compiled graphs, because memory from a graph's private pool must not outlive
the call (Inductor checks that). The upload uses new pinned memory, which torch holds until the copy has run or, under
capture, for the graph's lifetime.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxamp.kernels.gradient_request import Tables, UnscaleRequest
from fxamp.kernels.gradient_triton import kernel_name, parameters, source_text
from fxamp.kernels.launch_plan import ALIGNMENT, WARPS, Access, Gradient, Group, Kernel, Requested, is_dense, make_plan
from fxamp.kernels.store import load_function
from fxamp.torch_devices import moved, on_device

MOST_LAUNCHES = 32
# Fused multiply-adds would make the rounding of the squares depend on the compiler.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}

_launches: OrderedDict[Hashable, "_Launches"] = OrderedDict()
_lock = threading.Lock()
_address, _dtype = Tensor.data_ptr, attrgetter("dtype")


@dataclass(frozen=True, eq=False)
class _Launch:
    """A group, and its two tables on the device, each int64 and one-dimensional."""

    group: Group
    table: Tensor
    blocks: Tensor


@dataclass(frozen=True)
class _Addresses:
    """Data pointers of gradients and targets; zeros without targets. ``apart``: the targets are other tensors."""

    sources: list[int]
    targets: list[int]
    apart: bool = False

    @classmethod
    def of(cls, work: UnscaleRequest) -> "_Addresses":
        sources = list(map(_address, work.sources)) if work.addresses is None else work.addresses
        if work.targets is None:
            return cls(sources, [0] * len(sources))
        if work.targets is work.sources:
            return cls(sources, sources)
        return cls(sources, list(map(_address, work.targets)), apart=True)

    def accesses(self) -> list[Access]:
        """How each gradient is read and written."""
        others = Access.NARROW if self.apart else Access.PEELED
        places = zip(self.sources, self.targets, strict=True)
        return [others if (one | other) % ALIGNMENT else Access.WIDE for one, other in places]


@dataclass(frozen=True, eq=False)
class _Launches:
    """The launches of one call; ``left``: the positions of the gradients that no kernel handles."""

    launches: tuple[_Launch, ...]
    left: tuple[int, ...]
    addresses: _Addresses
    accesses: list[Access]

    def moved(self, addresses: _Addresses, device: torch.device) -> "_Launches | None":
        """Return the launches for other addresses; None if the plan depends on the difference."""
        if self.accesses != addresses.accesses():
            return None
        tables = _uploaded([_rows(launch.group, addresses) for launch in self.launches], device)
        launches = zip(self.launches, tables, strict=True)
        return replace(
            self,
            launches=tuple(replace(launch, table=table) for launch, table in launches),
            addresses=addresses,
        )


def perform(work: UnscaleRequest, keep: bool | Tables, interpret: bool = False) -> tuple[int, ...]:
    """Do the work on its device, asynchronously, and return the positions of the gradients that no kernel handles.

    Args:
        work: what to do; its tensors are on a CUDA device, or on the CPU if it is interpreted.
        keep: whether to cache the tables for the next call; or the caller's own cache.
        interpret: run in Triton's interpreter.
    """
    with on_device(work.device):
        return _perform(work, keep, interpret)


def _perform(work: UnscaleRequest, keep: bool | Tables, interpret: bool) -> tuple[int, ...]:
    prepared = _prepare(work, keep)
    programs = [launch.group.programs for launch in prepared.launches]
    partials = (
        torch.empty(sum(programs), dtype=torch.float32, device=work.device) if work.squared_norm is not None else None
    )
    shares = [partials] * len(programs)
    if partials is not None and len(programs) > 1:
        shares = [*torch.split(partials, programs)]
    for launch, share in zip(prepared.launches, shares, strict=True):
        _launch(launch, work, share, interpret)
    if work.squared_norm is not None and partials is not None:
        work.squared_norm.add_(partials.sum())
    return prepared.left


def _launch(launch: _Launch, work: UnscaleRequest, partials: Tensor | None, interpret: bool) -> None:
    kernel = launch.group.kernel
    available = {
        "table": launch.table,
        "blocks": launch.blocks,
        "inv_scale": work.inv_scale,
        "found_inf": work.found_inf,
        "flags": work.flags,
        "partials": partials,
    }
    arguments = [available[name] for name in parameters(kernel)]
    _function(kernel, interpret)[(launch.group.programs,)](*arguments, **OPTIONS)


@functools.cache
def _function(kernel: Kernel, interpret: bool) -> Any:
    return load_function(kernel_name(kernel), source_text(kernel), interpret)


def _prepare(work: UnscaleRequest, keep: bool | Tables) -> _Launches:
    """Return the launches for this work: those of an earlier call if no tensor has moved since."""
    on_gpu = work.device.type == "cuda"
    if keep is False or (on_gpu and torch.cuda.is_current_stream_capturing()):
        return _prepare_anew(work, _Addresses.of(work))
    stream = torch.cuda.current_stream().cuda_stream if on_gpu else 0
    if isinstance(keep, Tables):
        prepared = _renewed(work, keep.launches if keep.stream == stream else None)
        keep.launches, keep.stream = prepared, stream
        return prepared
    targets = work.targets is work.sources or (work.targets and _layout(work.targets))
    key = (work.device, stream, _requested(work), _layout(work.sources), targets)
    with _lock:
        prepared = _launches[key] = _renewed(work, _launches.get(key))
        _launches.move_to_end(key)
        if len(_launches) > MOST_LAUNCHES:
            _launches.popitem(last=False)
    return prepared


def _renewed(work: UnscaleRequest, known: _Launches | None) -> _Launches:
    """Return ``known``, which were made for gradients of the same layout, with other addresses if any has moved."""
    addresses = _Addresses.of(work)
    if known is not None and known.addresses == addresses:
        return known
    renewed = known.moved(addresses, work.device) if known is not None else None
    return renewed or _prepare_anew(work, addresses)


def _layout(tensors: Sequence[Tensor]) -> Hashable:
    """Return all properties of the tensors that the plan depends on, except their alignment."""
    return (
        tuple(map(Tensor.numel, tensors)),
        tuple(map(_dtype, tensors)),
        tuple([tensor.is_contiguous() or (tensor.shape, tensor.stride()) for tensor in tensors]),
    )


def _requested(work: UnscaleRequest) -> Requested:
    return Requested(work.found_inf is not None, work.flags is not None, work.squared_norm is not None)


def _prepare_anew(work: UnscaleRequest, addresses: _Addresses) -> _Launches:
    accesses = addresses.accesses()
    dtypes = [tensor.dtype for tensor in work.targets] if work.targets is not None else [None] * len(accesses)
    gradients = tuple(
        Gradient(tensor.numel(), tensor.dtype, dtype, access, is_dense(tensor))
        for tensor, dtype, access in zip(work.sources, dtypes, accesses, strict=True)
    )
    plan = make_plan(gradients, _requested(work), wave=64 if torch.version.hip else 32)
    parts = [part for group in plan.groups for part in (_rows(group, addresses), _block_map(group))]
    tables = _uploaded(parts, work.device)
    launches = tuple(map(_Launch, plan.groups, tables[::2], tables[1::2]))
    return _Launches(launches, plan.left, addresses, accesses)


def _rows(group: Group, addresses: _Addresses) -> Tensor:
    """Return the table of a group: for each gradient its address, its target's, its size and its position."""
    at = np.array(group.positions)
    columns = (np.array(addresses.sources)[at], np.array(addresses.targets)[at], group.numels, at)
    return torch.from_numpy(np.column_stack(columns).astype(np.int64, copy=False).ravel())


def _uploaded(parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Copy all tables to the device in one copy, without waiting for it."""
    if not parts:
        return ()
    lengths = [part.numel() for part in parts]
    host = torch.empty(sum(lengths), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return torch.split(moved(torch.cat(list(parts), out=host), device), lengths)


@functools.lru_cache(maxsize=64)
def _block_map(group: Group) -> Tensor:
    return group.block_map().flatten()
