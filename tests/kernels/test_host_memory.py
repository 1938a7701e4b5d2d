"""Copies to host memory and back: what they return, on which stream, after and before what."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fxamp.kernels import host_memory

OPS = torch.ops.fxamp
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def values() -> Iterator[Tensor]:
    x = torch.randn(4, 6, 8, 2, generator=torch.Generator().manual_seed(0))
    yield from (x, x.bfloat16(), x > 0, x.double(), (x * 9).long(), torch.ones(()), torch.ones(0, 3))
    yield from (x.to(memory_format=torch.channels_last), x.permute(2, 0, 3, 1), x.exp().log().transpose(0, 1))
    yield torch.tensor([float("nan"), float("inf"), -0.0])


def bits(value: Tensor) -> Tensor:
    return value.contiguous().flatten().view(torch.uint8)


def test_a_copy_has_the_bits_and_the_strides_and_memory_of_its_own() -> None:
    for value in values():
        host = OPS.send_to_host(value, [])
        back = OPS.take_from_host(host[None], CPU, [])
        OPS.await_copies([back], CPU, [host])
        for copy in (host, back):
            assert copy.stride() == value.stride() and copy.dtype == value.dtype
            assert copy.numel() == 0 or copy.data_ptr() != value.data_ptr()
            assert torch.equal(bits(copy), bits(value))


def test_the_ops_are_what_they_say_they_are() -> None:
    value = torch.randn(4, 6).t()
    torch.library.opcheck(OPS.send_to_host.default, (value, [torch.ones(2)]))
    torch.library.opcheck(OPS.take_from_host.default, (value, CPU, [torch.ones(2)]))
    torch.library.opcheck(OPS.await_copies.default, ([value], CPU, [torch.ones(2)]))


class Streams:
    """Stands in for CUDA's streams. ``asked``: the calls, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.capturing, self.made = False, 0
        own = self

        class Stream:
            def __init__(self, device: torch.device, name: str = "copies") -> None:
                self.name = f"{name} of {device.index}"
                own.made += name == "copies"

            def wait_stream(self, other: "Stream") -> None:
                own.asked.append(f"{self.name} waits for {other.name}")

            def synchronize(self) -> None:
                own.asked.append(f"the host waits for {self.name}")

        @contextmanager
        def current(stream: Stream) -> Iterator[None]:
            own.asked.append(f"on {stream.name}")
            yield
            own.asked.append("left")

        for name, value in {
            "Stream": Stream,
            "stream": current,
            "current_stream": lambda device: Stream(device, "program"),
            "is_current_stream_capturing": lambda: own.capturing,
            "current_device": lambda: 0,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(host_memory, "_streams", {})


class Noted(Tensor):
    """A tensor that says how it is copied into."""

    streams: Streams

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Any:  # type: ignore[override]
        self.streams.asked.append(f"copy, {'no wait' if non_blocking else 'the host waits'}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_a_copy_runs_beside_the_program_after_the_work_so_far(streams: Streams) -> None:
    target = torch.ones(2).as_subclass(Noted)
    target.streams = streams
    host_memory._begin(target, torch.ones(2), GPU)
    host_memory.await_copies_of(GPU)
    assert streams.asked == [
        "copies of 1 waits for program of 1",
        "on copies of 1",
        "copy, no wait",
        "left",
        "program of 1 waits for copies of 1",
    ]


@pytest.mark.parametrize("place,waits", [("meta", 0), ("cpu", 1)])
def test_the_host_waits_for_copies_to_its_memory_alone(place: str, waits: int, streams: Streams) -> None:
    """Of one copy among several; "meta" stands for the GPU."""
    targets = [torch.empty(2, device="meta"), torch.empty(2, device=place)]
    host_memory.await_copies_of(GPU, targets)
    expected = ["program of 1 waits for copies of 1", "the host waits for copies of 1"]
    assert streams.asked == expected[: 1 + waits]


def test_all_copies_of_a_gpu_are_on_one_stream(streams: Streams) -> None:
    found: list[Any] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        found.append(host_memory._stream(torch.device("cuda", len(found) % 2)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(stream) for stream in found}) <= 2 and streams.made <= 2
    assert host_memory._stream(torch.device("cuda")) is host_memory._stream(torch.device("cuda", 0))


def test_a_cuda_graph_that_captures_a_copy_is_refused(streams: Streams) -> None:
    streams.capturing = True
    with pytest.raises(RuntimeError, match=r"keep = 'host'.*CUDA graph"):
        host_memory._begin(torch.ones(2), torch.ones(2), GPU)
    assert not streams.asked


def test_a_cpu_needs_no_stream(streams: Streams) -> None:
    host_memory._begin(torch.ones(2), torch.zeros(2), CPU)
    host_memory.await_copies_of(CPU)
    assert not streams.asked and not streams.made
