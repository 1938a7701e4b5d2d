"""The measured work on gradients: by fxamp's kernels, and by torch's foreach ops."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fxamp import kernels
from fxamp.kernels.plan import Asked, Gradient, bytes_moved, make_plan

#: The number of gradients that share the parameters: that of a transformer with 12 layers, large and small.
_SHARES = (64, 64, 16, 16, 1, 1)
_LAYERS = 12

Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One kind of work on the same gradients: by fxamp, by torch, and the bytes that each has to move.

    ``ours`` and ``theirs`` do the work once. ``our_bytes``: gradients read and written, by the kernels' plan.
    ``their_bytes``: the same, op by op: each reads every tensor it is given once, and writes each result once.
    """

    name: str
    ours: Run
    theirs: Run
    our_bytes: int
    their_bytes: int


def cases(parameters: int, dtype: torch.dtype, device: str) -> list[Case]:
    """The work on ``parameters`` gradient elements of ``dtype``: as they come out of a backward, and as float32.

    16-bit gradients become float32 on the way, as a parameter's gradient must; float32 ones change in place.
    """
    gradients = make_gradients(parameters, dtype, device)
    inverse, found = torch.ones((), device=device), torch.zeros((), device=device)
    norm = torch.zeros((), device=device)
    asked = Asked(found_inf=True, flags=True)
    with_norm = Asked(found_inf=True, flags=True, squared_norm=True)
    count, item = sum(gradient.numel() for gradient in gradients), dtype.itemsize
    widened, wide = (item + 4 if item < 4 else 0), 4
    torch_check = count * (widened + 2 * wide)
    flags = torch.zeros(len(gradients), dtype=torch.int32, device=device)

    def widen() -> list[Tensor]:
        return gradients if item == wide else [gradient.float() for gradient in gradients]

    def torch_checks() -> list[Tensor]:
        true = widen()
        torch._amp_foreach_non_finite_check_and_unscale_(true, found, inverse)
        return true

    def torch_checks_and_norm() -> Tensor:
        norms = torch.stack(list(torch._foreach_norm(torch_checks(), 2.0)))
        norm: Tensor = torch.linalg.vector_norm(norms)
        return norm

    def ours(normed: bool) -> Run:
        if item < wide:
            op = kernels.check_unscale_norm if normed else kernels.check_unscale
            return lambda: op(gradients, inverse, torch.float32)
        return lambda: kernels.check_unscale_(gradients, inverse, found, flags, norm if normed else None)

    target = torch.float32 if item < wide else dtype
    return [
        Case("check, unscale", ours(False), torch_checks, _planned(gradients, target, asked), torch_check),
        Case(
            "check, unscale, norm",
            ours(True),
            torch_checks_and_norm,
            _planned(gradients, target, with_norm),
            torch_check + count * wide,
        ),
        _update(device),
    ]


def make_gradients(parameters: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return gradients with ``parameters`` finite elements in total, at least one: matrices and biases of 12 layers."""
    parts = [parameters * share // (sum(_SHARES) * _LAYERS) for share in _SHARES] * _LAYERS
    parts[0] += parameters - sum(parts)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(parameters, generator=generator).to(device, dtype)
    return [part.clone() for part in torch.split(whole, parts) if part.numel()]


def copied(nbytes: int, device: str) -> Run:
    """Return a plain copy that reads and writes ``nbytes`` in total: the lower bound for this traffic."""
    source = torch.zeros(max(nbytes // 8, 1), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _update(device: str) -> Case:
    """Return the update of the scale: a few bytes, so only the launch matters."""
    scale, found = torch.full((), 2.0**16, device=device), torch.zeros((), device=device)
    tracker = torch.zeros((), dtype=torch.int32, device=device)
    return Case(
        "scale update",
        lambda: kernels.update_scale_(scale, tracker, found, 2.0, 0.5, 2000),
        lambda: torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 2000),
        our_bytes=0,
        their_bytes=0,
    )


def _planned(gradients: list[Tensor], target: torch.dtype, asked: Asked) -> int:
    known = tuple(Gradient(gradient.numel(), gradient.dtype, target, True, True) for gradient in gradients)
    return bytes_moved(make_plan(known, asked, wave=32))
