"""Copies between a GPU's memory and the host's, for tensors that a policy saves for the backward in host memory.

All copies of one GPU, in both directions, run on one dedicated stream in the order of the calls. So a copy back begins
when the copy out has ended, whichever thread, stream or backward calls. No table of copies is needed, and any number of
backwards can read a host tensor.

    send_to_host      the copies' stream waits for the work so far, then copies a value to new pinned memory
    take_from_host    the same in the other direction, to new memory of the GPU
    await_copies      all later work waits for the copies so far; so does the host, if one of them is in its memory

Until the wait, nothing may overwrite the source of a copy or read its target. So graphs pass both to the op that waits,
which keeps their memory alive and fixes the order. Hooks on saved tensors may read a host tensor as soon as the graph
returns it, and Inductor copies a returned tensor to other strides right after the op that made it. So graphs return a
view with one more dimension, which they create after the wait. On a CPU a copy is complete when its op returns.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_streams: dict[torch.device, torch.cuda.Stream] = {}
_creating = threading.Lock()

#: Inductor passes values in the memory layouts that it chose.
_TAGS = (torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe)


@torch.library.custom_op("fxamp::send_to_host", mutates_args=(), tags=_TAGS)
def send_to_host(value: Tensor, awaited: Sequence[Tensor]) -> Tensor:
    """Begin to copy ``value`` to the host, and return the copy: on the CPU, with the strides of ``value``.

    Args:
        value: any shape and dtype; its elements fill its memory.
        awaited: the sources and targets of earlier copies; if there are any, all later work first waits for these
            copies.

    Raises RuntimeError while a CUDA graph is captured.
    """
    host = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
    if awaited:
        await_copies_of(value.device)
    _begin(host, value, value.device)
    return host


@torch.library.custom_op("fxamp::take_from_host", mutates_args=(), tags=_TAGS)
def take_from_host(host: Tensor, device: torch.device, after: Sequence[Tensor]) -> Tensor:
    """Begin to copy ``host[0]`` to ``device``, and return the copy, with its strides.

    ``host``: ``[1, ...]``. ``after``: tensors that must be computed first; they are not read. Raises RuntimeError while
    a CUDA graph is captured.
    """
    value = torch.empty_like(host[0], device=device)
    _begin(value, host[0], device)
    return value


@torch.library.custom_op("fxamp::await_copies", mutates_args=("targets",), tags=_TAGS)
def await_copies(targets: Sequence[Tensor], device: torch.device, others: Sequence[Tensor]) -> None:
    """Let all later work on ``device`` wait for its copies so far, after which ``targets`` can be read.

    If one of them is in the host's memory, the host waits too. ``others``: tensors that must stay alive until then,
    such as the sources of the copies.
    """
    await_copies_of(device, targets)


@send_to_host.register_fake
def _(value: Tensor, awaited: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(value, device="cpu")


@take_from_host.register_fake
def _(host: Tensor, device: torch.device, after: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(host[0], device=device)


def await_copies_of(device: torch.device, targets: Sequence[Tensor] = ()) -> None:
    """Let all later work on the current stream of ``device`` wait for the device's copies so far.

    The host waits too if one of ``targets`` is in its memory.
    """
    if device.type != "cuda":
        return
    torch.cuda.current_stream(device).wait_stream(_stream(device))
    if any(target.is_cpu for target in targets):
        _stream(device).synchronize()


def _begin(target: Tensor, source: Tensor, device: torch.device) -> None:
    """Copy on the copies' stream of ``device``, after all work so far on its current stream."""
    if device.type != "cuda":
        target.copy_(source)
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a policy keeps values in host memory (keep = 'host'), which a CUDA graph cannot capture; accepted: "
            "the compiled model outside of CUDA graphs, or a policy without such rules"
        )
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)


def _stream(device: torch.device) -> torch.cuda.Stream:
    place = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    with _creating:  # two streams would not be in order
        if place not in _streams:
            _streams[place] = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
        return _streams[place]
