"""Launch the kernels of a plan: one launch per group, for any number of gradients.

A kernel reads the addresses of its gradients from a table. Building and uploading the table costs the host some
microseconds per gradient. So the table is cached if the caller allows it, and uploaded again only after a gradient has
moved. It is not cached during CUDA graph capture, nor for ops inside compiled graphs: memory from a graph's private
pool must not outlive the call (Inductor checks that). The upload uses fresh pinned memory, which torch holds until the
copy has run or, under capture, for the graph's lifetime.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxamp.kernels.plan import ALIGNMENT, WARPS, Asked, Gradient, Group, Kernel, LaunchPlan, is_dense, make_plan
from fxamp.kernels.request import UnscaleRequest
from fxamp.kernels.source import kernel_name, parameters, source_text
from fxamp.kernels.store import load_function

KEPT = 32
# Fused multiply-adds would make the rounding of the squares depend on the compiler.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}

_kept: OrderedDict[Hashable, "_Launches"] = OrderedDict()
_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class _Launch:
    """A group, and its two tables on the device, each int64 and one-dimensional."""

    group: Group
    table: Tensor
    blocks: Tensor


@dataclass(frozen=True, eq=False)
class _Launches:
    launches: tuple[_Launch, ...]
    left: tuple[int, ...]


def perform(work: UnscaleRequest, keep: bool, interpret: bool = False) -> tuple[int, ...]:
    """Do the work on its device, asynchronously, and return the positions of the gradients that no kernel handles.

    Args:
        work: what to do; its tensors are on a CUDA device, or on the CPU if it is interpreted.
        keep: whether to cache tables of addresses for the next call.
        interpret: run in Triton's interpreter.
    """
    prepared = _prepare(work, keep)
    programs = [launch.group.programs for launch in prepared.launches]
    partials = (
        torch.empty(sum(programs), dtype=torch.float32, device=work.device) if work.squared_norm is not None else None
    )
    shares = [None] * len(programs) if partials is None else torch.split(partials, programs)
    with torch.cuda.device(work.device) if work.device.type == "cuda" else nullcontext():
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
    function = load_function(kernel_name(kernel), source_text(kernel))
    if not interpret:
        return function
    from fxamp.kernels.interpreter import Interpreted

    return Interpreted(function)


def _prepare(work: UnscaleRequest, keep: bool) -> _Launches:
    """Return the launches for this work: those of an earlier call if no tensor has moved since."""
    on_gpu = work.device.type == "cuda"
    if not keep or (on_gpu and torch.cuda.is_current_stream_capturing()):
        return _prepare_anew(work)
    stream = torch.cuda.current_stream(work.device).cuda_stream if on_gpu else 0
    targets = work.targets is work.sources or (work.targets and _layout(work.targets))
    key = (work.device, stream, _asked(work), _layout(work.sources), targets)
    with _lock:
        prepared = _kept.get(key)
        if prepared is None:
            prepared = _kept[key] = _prepare_anew(work)
        _kept.move_to_end(key)
        if len(_kept) > KEPT:
            _kept.popitem(last=False)
    return prepared


def _layout(tensors: Sequence[Tensor]) -> Hashable:
    """Return all properties of the tensors that the tables and the plan depend on."""
    return (
        tuple([tensor.data_ptr() for tensor in tensors]),
        tuple([tensor.numel() for tensor in tensors]),
        tuple([tensor.dtype for tensor in tensors]),
        tuple([tensor.is_contiguous() or (tensor.shape, tensor.stride()) for tensor in tensors]),
    )


def _asked(work: UnscaleRequest) -> Asked:
    return Asked(work.found_inf is not None, work.flags is not None, work.squared_norm is not None)


def _prepare_anew(work: UnscaleRequest) -> _Launches:
    sources = [tensor.data_ptr() for tensor in work.sources]
    targets = [tensor.data_ptr() for tensor in work.targets] if work.targets is not None else [0] * len(sources)
    dtypes = [tensor.dtype for tensor in work.targets] if work.targets is not None else [None] * len(sources)
    gradients = tuple(
        Gradient(tensor.numel(), tensor.dtype, dtype, (source | target) % ALIGNMENT == 0, is_dense(tensor))
        for tensor, dtype, source, target in zip(work.sources, dtypes, sources, targets, strict=True)
    )
    plan = make_plan(gradients, _asked(work), wave=64 if torch.version.hip else 32)
    return _Launches(_upload(plan, sources, targets, work.device), plan.left)


def _upload(plan: LaunchPlan, sources: list[int], targets: list[int], device: torch.device) -> tuple[_Launch, ...]:
    """Copy all tables of the plan to the device in one copy, without waiting for it."""
    if not plan.groups:
        return ()
    parts = []
    for group in plan.groups:
        members = zip(group.positions, group.numels, strict=True)
        rows = [cell for at, numel in members for cell in (sources[at], targets[at], numel, at)]
        parts += [torch.tensor(rows, dtype=torch.int64, device="cpu"), _block_map(group)]
    length = sum(part.numel() for part in parts)
    host = torch.empty(length, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    tables = torch.split(torch.cat(parts, out=host).to(device, non_blocking=True), [part.numel() for part in parts])
    return tuple(map(_Launch, plan.groups, tables[::2], tables[1::2]))


@functools.lru_cache(maxsize=64)
def _block_map(group: Group) -> Tensor:
    return group.block_map().flatten()
