"""The same training under torch.amp.GradScaler with an eager optimizer, which is the oracle, and skip="device"."""

import torch

from fxamp.optim import guarded
from fxamp.tools.bench.optimizers.agreement import DIFFERS, agreement
from fxamp.tools.bench.optimizers.host_syncs import HostReads
from fxamp.tools.bench.optimizers.scenario import SCENARIOS, Scenario
from fxamp.tools.bench.optimizers.training import INF, Training, by_torch, on_device

__all__ = ["INF", "SCENARIOS", "HostReads", "Scenario", "Training", "by_torch", "on_device"]


def compilations(training: Training, lowering: str = "aot_eager") -> int:
    return compilations_of(training.optimizer, lowering)


def compilations_of(optimizer: torch.optim.Optimizer, lowering: str = "aot_eager") -> int:
    return guarded(optimizer, lowering).compilations


def assert_agree(ours: Training, theirs: Training, exact: Training | None) -> None:
    """Parameters, saved states and scales agree: no further from float64's than a few roundings of torch's own are."""
    found = agreement(ours, theirs, exact)
    assert found.word != DIFFERS, found.where
