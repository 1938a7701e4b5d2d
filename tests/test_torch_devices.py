"""Moves between devices, and what a device can do."""

import pytest
import torch
from support.machines.lacks import needs_gpu

from fxamp.torch_devices import converts_float8, moved


@pytest.mark.parametrize(
    "capability, hip, converts", [((8, 6), None, False), ((8, 9), None, True), ((9, 0), "7.0", True)]
)
def test_float8_needs_a_new_gpu_of_nvidias(
    capability: tuple[int, int], hip: str | None, converts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = torch.device("cuda", 1)
    assert converts_float8(torch.device("cpu"))
    if not torch.cuda.is_available():
        assert converts_float8(second), "of an absent GPU nothing is known"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability if device == second else (0, 0))
    monkeypatch.setattr(torch.version, "hip", hip)
    assert converts_float8(second) is converts


def test_a_copy_is_made_only_if_it_is_asked_for() -> None:
    value, cpu = torch.ones(2), torch.device("cpu")
    assert moved(value, cpu) is value
    copied = moved(value, cpu, copy=True)
    assert torch.equal(copied, value) and copied.data_ptr() != value.data_ptr()


@pytest.mark.gpu
@needs_gpu
def test_what_comes_to_the_cpu_has_arrived() -> None:
    value, cpu = torch.zeros(1 << 20, device="cuda"), torch.device("cpu")
    torch.cuda._sleep(50_000_000)
    value.fill_(1.0)
    assert moved(value, cpu).numpy().min() == 1.0
