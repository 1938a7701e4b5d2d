"""The same training under torch.amp.GradScaler with an eager optimizer, which is the oracle, and skip="device"."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.optim import guarded
from fxamp.tools.bench.optimizers.scenario import SCENARIOS, Scenario
from fxamp.tools.bench.optimizers.training import INF, Training, by_torch, on_device

__all__ = ["INF", "SCENARIOS", "HostReads", "Scenario", "Training", "by_torch", "on_device"]


class HostReads(TorchDispatchMode):
    """Counts values that the host reads from tensors, each of which waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


def compilations(training: Training, lowering: str = "aot_eager") -> int:
    return compilations_of(training.optimizer, lowering)


def compilations_of(optimizer: torch.optim.Optimizer, lowering: str = "aot_eager") -> int:
    return guarded(optimizer, lowering).compilations


def assert_agree(ours: Training, theirs: Training, exact: Training | None) -> None:
    """Parameters, saved states and scales agree: no further from float64's than a few roundings of torch's own are.

    Two computations of one formula differ by the roundings on their way. torch's distance from float64, in ``exact``,
    shows how large these are here; one last rounding comes on top, which is all without ``exact``.
    """
    assert ours.scales == theirs.scales
    our, their, true = (saved(training) for training in (ours, theirs, exact or theirs))
    assert our.keys() == their.keys()
    for name, value in our.items():
        wanted, wide = their[name], true[name].double()
        assert value.shape == wanted.shape and (value.dtype == wanted.dtype or not name.startswith("parameter")), name
        if not value.numel() or torch.equal(value.double(), wanted.double()):
            continue
        distance = (wanted.double() - wide).abs().max().item()
        bound = 4 * distance + torch.finfo(torch.float32).eps * (1 + wide.abs().max().item())
        torch.testing.assert_close(
            value.double(), wide, rtol=0, atol=bound, msg=lambda text, name=name: f"{name}: {text}"
        )


def saved(training: Training) -> dict[str, Tensor]:
    """Parameters, and every number of the optimizer's saved state, by name."""
    leaves = pytree.tree_leaves_with_path(training.optimizer.state_dict()["state"])
    state = {
        pytree.keystr(path): torch.as_tensor(leaf) for path, leaf in leaves if isinstance(leaf, (Tensor, int, float))
    }
    return {f"parameter {at}": each.detach() for at, each in enumerate(training.parameters)} | state
