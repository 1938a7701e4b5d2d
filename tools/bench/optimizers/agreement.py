"""Compares two trainings: equal bit for bit, equal within rounding, or different."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxamp.tools.bench.optimizers.training import Training

EQUAL, ROUNDING, DIFFERS = "equal", "rounding", "differs"


@dataclass(frozen=True)
class Agreement:
    """``word``: EQUAL, ROUNDING or DIFFERS; ``where``: the first difference beyond rounding, if there is one."""

    word: str
    where: str | None = None


def agreement(ours: Training, theirs: Training, exact: Training | None) -> Agreement:
    """Compare parameters, saved states and scales.

    ROUNDING: at most four times as far from float64 as torch, plus one rounding. ``exact`` is the same training in
    float64 (see exact.py); without it (None), ROUNDING is one rounding from torch. Two computations
    of one formula differ by the roundings on their way; torch's distance from float64 shows how large these are here,
    and one last rounding of each value comes on top.
    """
    our, their, true = (_values(each) for each in (ours, theirs, exact or theirs))
    if our.keys() != their.keys():
        return Agreement(DIFFERS, f"saved on one side alone: {', '.join(sorted(our.keys() ^ their.keys()))}")
    found = (_beyond_rounding(name, our[name], their[name], true[name]) for name in our)
    same = all(_same_bits(our[name], their[name]) for name in our)
    where = None if same else next((text for text in found if text is not None), None)
    if where is None and ours.scales != theirs.scales:
        where = f"scales {ours.scales}, torch's {theirs.scales}"
    if where is not None:
        return Agreement(DIFFERS, where)
    return Agreement(EQUAL if same else ROUNDING)


def _values(training: Training) -> dict[str, Tensor]:
    """Return parameters and every number of the saved state, by name."""
    state = pytree.tree_leaves_with_path(training.optimizer.state_dict()["state"])
    numbers = {f"state{pytree.keystr(path)}": leaf for path, leaf in state if isinstance(leaf, (Tensor, int, float))}
    parameters = {f"parameter {at}": each.detach() for at, each in enumerate(training.parameters)}
    return parameters | {name: torch.as_tensor(value) for name, value in numbers.items()}


def _same_bits(our: Tensor, their: Tensor) -> bool:
    """float32 and integers of a training's size are exact in float64; bits tell zeros and NaNs apart."""
    if our.shape != their.shape:
        return False
    return torch.equal(*(each.double().contiguous().view(torch.int64).cpu() for each in (our, their)))


def _beyond_rounding(name: str, our: Tensor, their: Tensor, true: Tensor) -> str | None:
    """Return what is wrong with ``our``, None if nothing is."""
    if our.shape != their.shape or (name.startswith("parameter") and our.dtype != their.dtype):
        return f"{name} is {_kind(our)}, torch's {_kind(their)}"
    if not our.isfinite().all() and their.isfinite().all():
        return f"{name} is not finite, torch's is"
    if not our.numel():
        return None
    wide = true.double().cpu()
    off, bound = ((each.double().cpu() - wide).abs().max().item() for each in (our, their))
    allowed = 4 * bound + torch.finfo(torch.float32).eps * (1 + wide.abs().max().item())
    return None if off <= allowed else f"{name} is {off:.1e} from float64, torch's {bound:.1e}"


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
