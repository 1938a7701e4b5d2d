"""torch's detector of synchronizations, where warnings are errors: a stand-in for it warns when its mode is set."""

import warnings

import pytest
import torch
from support.machines.lacks import needs_gpu

from fxamp.tools.common.cuda_syncs import cuda_syncs, no_cuda_syncs


class Mode:
    """Takes effect first and warns then, as torch's function does."""

    now = "default"

    def set(self, mode: str) -> None:
        self.now = mode
        if mode != "default":
            warnings.warn("this mode does not detect all synchronizing operations", UserWarning, stacklevel=2)


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Mode:
    mode = Mode()
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.set)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return mode


def test_no_mode_outlives_its_block(mode: Mode) -> None:
    with no_cuda_syncs():
        assert mode.now == "error"
    assert mode.now == "default"
    with pytest.raises(RuntimeError, match="synchronizing"), no_cuda_syncs():
        raise RuntimeError("called a synchronizing CUDA operation")
    assert mode.now == "default"


def test_a_mode_that_cannot_be_set_is_reset(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: str) -> None:
        mode.set(value)
        if value != "default":
            raise RuntimeError("no such mode")

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", refuse)
    with pytest.raises(RuntimeError, match="no such mode"), no_cuda_syncs():
        pass
    assert mode.now == "default"


def test_only_synchronizations_are_counted(mode: Mode) -> None:
    with cuda_syncs() as count:
        assert mode.now == "warn"
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert count.value == 1 and mode.now == "default"


@pytest.mark.gpu
@needs_gpu
def test_a_device_that_is_waited_for_raises_and_leaves_no_mode() -> None:
    value = torch.ones((), device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing"), no_cuda_syncs():
        value.item()
    with cuda_syncs() as count:
        value.item()
    assert count.value == 1 and torch.cuda.get_sync_debug_mode() == 0
