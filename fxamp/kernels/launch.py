"""Launch the kernels of a plan: one launch per group, for any number of gradients.

A kernel reads the addresses of its gradients from one table, and its share of the work from a table of blocks. Building
and uploading these tables costs the host some microseconds per gradient, so they are cached if the caller allows it:
the plan and the blocks by the gradients' sizes and dtypes, the addresses until a gradient moves. On the device nothing
is cached during CUDA graph capture or for ops inside compiled graphs, because memory from a graph's private pool must
not outlive the call (Inductor checks that). The upload uses new pinned memory, which torch holds until the copy has run
or, under capture, for the graph's lifetime.
"""

import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fxamp.kernels.gradient_request import Tables, UnscaleRequest
from fxamp.kernels.gradient_triton import kernel_name, parameters, source_text
from fxamp.kernels.launch_plan import (
    ALIGNMENT,
    WARPS,
    Access,
    Gradient,
    Group,
    Kernel,
    LaunchPlan,
    Requested,
    fills_memory,
    make_plan,
)
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


@dataclass(frozen=True, eq=False)
class _Addresses:
    """Data pointers of gradients and targets, int64; zeros without targets. ``apart``: targets are other tensors."""

    sources: "np.ndarray[Any, Any]"
    targets: "np.ndarray[Any, Any]"
    apart: bool = False

    @classmethod
    def of(cls, work: UnscaleRequest) -> "_Addresses":
        known = map(_address, work.sources) if work.addresses is None else work.addresses
        sources = np.fromiter(known, np.int64, len(work.sources))
        if work.targets is None:
            return cls(sources, np.zeros_like(sources))
        if work.targets is work.sources:
            return cls(sources, sources)
        return cls(sources, np.fromiter(map(_address, work.targets), np.int64, len(sources)), apart=True)

    def same(self, others: "_Addresses") -> bool:
        """Whether these are the same addresses."""
        return np.array_equal(self.sources, others.sources) and np.array_equal(self.targets, others.targets)

    @functools.cached_property
    def alignment(self) -> "_Alignment":
        """What the plan depends on."""
        return _Alignment(((self.sources | self.targets) % ALIGNMENT != 0).tobytes(), self.apart)


class _Alignment(NamedTuple):
    """For each gradient a byte, 0 if it and its target start at multiples of 16 bytes; ``apart`` as in _Addresses."""

    unaligned: bytes
    apart: bool

    def accesses(self) -> list[Access]:
        """How each gradient is read and written."""
        others = Access.NARROW if self.apart else Access.PEELED
        return [others if unaligned else Access.WIDE for unaligned in self.unaligned]


@dataclass(frozen=True, eq=False)
class _Launches:
    """The launches of one call; ``left``: the positions of the gradients that no kernel handles."""

    launches: tuple[_Launch, ...]
    left: tuple[int, ...]
    addresses: _Addresses

    def moved(self, addresses: _Addresses, device: torch.device) -> "_Launches | None":
        """Return the launches for other addresses; None if the plan depends on the difference."""
        if self.addresses.alignment != addresses.alignment:
            return None
        tables = _uploaded([_rows(launch.group, addresses) for launch in self.launches], device)
        launches = zip(self.launches, tables, strict=True)
        return replace(
            self, launches=tuple(replace(launch, table=table) for launch, table in launches), addresses=addresses
        )


def perform(work: UnscaleRequest, keep: bool | Tables, interpret: bool = False) -> tuple[int, ...]:
    """Do the work on its device, asynchronously, and return the positions of the gradients that no kernel handles.

    Args:
        work: what to do; its tensors are on a CUDA device, or on the CPU if it is interpreted.
        keep: whether to cache the tables for the next call; or the caller's own cache.
        interpret: run in Triton's interpreter.
    """
    with on_device(work.device):
        prepared, partials = _prepare(work, keep), None
        programs = [launch.group.programs for launch in prepared.launches]
        if work.squared_norm is not None:
            partials = torch.empty(sum(programs), dtype=torch.float32, device=work.device)
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
    targets = work.targets is work.sources or (work.targets and _Layout.of(work.targets))
    key = (work.device, stream, _requested(work), _Layout.of(work.sources), targets)
    with _lock:
        prepared = _launches[key] = _renewed(work, _launches.get(key))
        _launches.move_to_end(key)
        if len(_launches) > MOST_LAUNCHES:
            _launches.popitem(last=False)
    return prepared


def _renewed(work: UnscaleRequest, known: _Launches | None) -> _Launches:
    """Return ``known``, which were made for gradients of the same layout, with other addresses if any has moved."""
    addresses = _Addresses.of(work)
    if known is not None and known.addresses.same(addresses):
        return known
    renewed = known.moved(addresses, work.device) if known is not None else None
    return renewed or _prepare_anew(work, addresses)


class _Layout(NamedTuple):
    """All properties of tensors that the plan depends on, except their alignment.

    ``strides``: for each tensor True if it is contiguous, else its shape and strides.
    """

    numels: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    strides: tuple[bool | tuple[torch.Size, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "_Layout":
        strides = [tensor.is_contiguous() or (tensor.shape, tensor.stride()) for tensor in tensors]
        return cls(tuple(map(Tensor.numel, tensors)), tuple(map(_dtype, tensors)), tuple(strides))


def _requested(work: UnscaleRequest) -> Requested:
    return Requested(work.found_inf is not None, work.flags is not None, work.squared_norm is not None)


def _prepare_anew(work: UnscaleRequest, addresses: _Addresses) -> _Launches:
    dtypes = None if work.targets is None else tuple(map(_dtype, work.targets))
    plan = _plan(_Layout.of(work.sources), dtypes, addresses.alignment, _requested(work))
    parts = [part for group in plan.groups for part in (_rows(group, addresses), group.blocks)]
    tables = _uploaded(parts, work.device)
    launches = tuple(map(_Launch, plan.groups, tables[::2], tables[1::2]))
    return _Launches(launches, plan.left, addresses)


@functools.lru_cache(maxsize=64)
def _plan(
    layout: _Layout, targets: tuple[torch.dtype, ...] | None, alignment: _Alignment, requested: Requested
) -> LaunchPlan:
    """Return the plan of gradients of a layout, with targets of these dtypes."""
    dense = [isinstance(strides, bool) or fills_memory(*strides) for strides in layout.strides]
    columns = layout.numels, layout.dtypes, targets or [None] * len(dense), alignment.accesses(), dense
    gradients = tuple(itertools.starmap(Gradient, zip(*columns, strict=True)))
    return make_plan(gradients, requested, wave=64 if torch.version.hip else 32)


def _rows(group: Group, addresses: _Addresses) -> Tensor:
    """Return the table of a group: for each gradient its address, its target's, its size and its position."""
    rows = group.rows.copy()
    rows[:, 0] = addresses.sources[rows[:, 3]]
    rows[:, 1] = addresses.targets[rows[:, 3]]
    return torch.from_numpy(rows.ravel())


def _uploaded(parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Copy all tables to the device in one copy, without waiting for it."""
    if not parts:
        return ()
    lengths = [part.numel() for part in parts]
    host = torch.empty(sum(lengths), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return torch.split(moved(torch.cat(list(parts), out=host), device), lengths)
