"""Copies to the host's memory and back that end as late as they may: when they are awaited."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.multiprocessing.reductions import StorageWeakRef

from fxamp.kernels import host_memory
from fxamp.passes.shared import kept_packing


@contextmanager
def late_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator["LateCopies"]:
    """Inside, copies are late; torch's caches are off, whose keys do not know of this."""
    with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(fx_graph_cache=False):
        yield LateCopies(monkeypatch)


class LateCopies:
    """Stands in for a GPU's stream of copies: on the CPU, whose memory is that of the GPU and of the host here.

    Until a copy is awaited its target holds 0xFF in each byte, NaN as a float. A copy reads its source when it is
    awaited: what has overwritten it is copied. The host finds a copy in its memory when it has waited itself, or when a
    later copy back has ended. ``count``: the copies that have ended. ``freed``: what a copy would have read or written
    after its memory was freed. ``most``: most copies that were under way at once.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.most = 0, 0
        self.freed: list[str] = []
        self._waiting: list[tuple[str, StorageWeakRef, Tensor, tuple[Any, ...]]] = []
        self._landing: list[tuple[Tensor, Tensor]] = []
        monkeypatch.setattr(kept_packing, "_SENDERS", frozenset({"cuda", "cpu"}))
        monkeypatch.setattr(host_memory, "_begin", self._begin)
        monkeypatch.setattr(host_memory, "await_copies_of", self._await)

    def _begin(self, target: Tensor, source: Tensor, device: torch.device) -> None:
        op = sys._getframe(1).f_code.co_name
        target.untyped_storage().fill_(255)
        # The GPU's memory is free when the program frees it; the host's allocator waits for copies.
        on_device, on_host = (source, target) if op == "send_to_host" else (target, source)
        layout = on_device.dtype, on_device.shape, on_device.stride(), on_device.storage_offset()
        self._waiting.append((op, StorageWeakRef(on_device.untyped_storage()), on_host, layout))
        self.most = max(self.most, len(self._waiting))

    def _end(self) -> None:
        for op, reference, on_host, (dtype, shape, stride, offset) in self._waiting:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                self.freed.append(f"{op} of {dtype} {tuple(shape)}")
                continue
            on_device = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
            if op == "send_to_host":
                self._landing.append((on_host, on_device.clone()))
            else:
                self._land()
                on_device.copy_(on_host)
            self.count += 1
        self._waiting.clear()

    def _await(self, device: torch.device, targets: Sequence[Tensor] = ()) -> None:
        self._end()
        if any(target.is_cpu for target in targets):
            self._land()

    def _land(self) -> None:
        for on_host, value in self._landing:
            on_host.copy_(value)
        self._landing.clear()

    @property
    def waiting(self) -> int:
        """The copies under way."""
        return len(self._waiting)
