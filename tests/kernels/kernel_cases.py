"""Gradients to try the kernels on, and what torch's own op makes of them: the oracle."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fxamp.kernels import check_unscale, check_unscale_

BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
# Loss scales, and the reciprocals that the kernels get: normal, inexact, inf, 0, subnormal, NaN.
SCALES = (1.0, 65536.0, 3.0, 0.0, float("inf"), 2.0**127, 2.0**-127, float("nan"))


def inverse(scale: float, device: str = "cpu") -> Tensor:
    """Return 1 / scale as GradScaler takes it: in float64, then rounded to float32."""
    return torch.tensor(scale, dtype=torch.float64, device=device).reciprocal().float()


def finite_bits(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return uniformly random bit patterns without inf and NaN, so that every exponent and subnormals occur."""
    integers = BITS[dtype]
    limits = torch.iinfo(integers)
    bits = torch.randint(limits.min, limits.max, (numel,), dtype=integers, generator=generator)
    infinity = torch.tensor(float("inf"), dtype=dtype).view(integers)
    return torch.where(bits & infinity == infinity, bits & ~infinity, bits).view(dtype)


def spoil(gradient: Tensor, generator: torch.Generator) -> None:
    """Put inf, -inf or NaN in one place: the first, the last or a random one."""
    flat = gradient.flatten()
    place = [0, flat.numel() - 1, random_int(0, flat.numel(), generator)][random_int(0, 3, generator)]
    flat[place] = [float("inf"), float("-inf"), float("nan")][random_int(0, 3, generator)]
    gradient.copy_(flat.reshape(gradient.shape))


def random_int(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high, (), generator=generator))


def random_gradients(seed: int, dtypes: tuple[torch.dtype, ...]) -> list[Tensor]:
    """Return six gradients of random dtypes, shapes, layouts and alignments, about a third of them not finite."""
    generator = torch.Generator().manual_seed(seed)
    gradients = []
    for _ in range(6):
        dtype = dtypes[random_int(0, len(dtypes), generator)]
        gradient = _shaped(finite_bits(6000, dtype, generator), random_int(0, 9, generator), generator)
        if gradient.numel() and random_int(0, 3, generator) == 0:
            spoil(gradient, generator)
        gradients.append(gradient)
    return gradients


def _shaped(storage: Tensor, kind: int, generator: torch.Generator) -> Tensor:
    """Carve a tensor of some layout out of 6000 elements; most start at an address that no 16-byte access can use."""
    start, rows = random_int(0, 9, generator), random_int(1, 60, generator)
    kinds = {
        0: storage[:0].view(3, 0),
        1: storage[start],
        2: storage[: rows * 60].view(rows, 60),
        3: storage[start : start + rows * 60].view(rows, 60).t(),
        4: storage[: rows * 64].view(4, rows, 4, 4).permute(0, 3, 1, 2),
        5: storage[start : start + rows * 60].view(rows, 60)[:, ::2],
        6: storage[start::3],
    }
    return kinds.get(kind, storage[start : start + 2040 + rows])


@dataclass(frozen=True)
class Expected:
    """What torch's op makes of gradients: their true values, one flag each, and the common flag."""

    true: list[Tensor]
    flags: list[int]
    found_inf: float


def expected(gradients: list[Tensor], inv_scale: Tensor, dtype: torch.dtype | None = None) -> Expected:
    """Run torch's op on copies, one at a time, cast to float32 first where ``dtype`` asks for another dtype.

    bfloat16 is always cast to float32 first, and rounded once: on CUDA torch's op does not support it.
    """
    true, flags = [], []
    for gradient in gradients:
        found_inf = torch.zeros((), device=gradient.device)
        copy = gradient.clone()
        if gradient.dtype is torch.bfloat16 or (dtype is not None and dtype != gradient.dtype):
            copy = copy.to(torch.promote_types(gradient.dtype, torch.float32))
        torch._amp_foreach_non_finite_check_and_unscale_([copy], found_inf, inv_scale)
        true.append(copy.to(dtype or gradient.dtype))
        flags.append(int(found_inf))
    return Expected(true, flags, float(any(flags)))


def require_in_place(gradients: list[Tensor], inv_scale: Tensor) -> None:
    """Fail unless gradients are unscaled in place as by torch's op, whatever the flags held before."""
    reference = expected(gradients, inv_scale)
    found_inf = torch.zeros((), device=inv_scale.device)
    flags = torch.full((len(gradients),), 7, dtype=torch.int32, device=inv_scale.device)
    check_unscale_(gradients, inv_scale, found_inf, flags)
    assert (flags.tolist(), found_inf.item()) == (reference.flags, reference.found_inf)
    assert all(map(same_bits, gradients, reference.true))


def require_cast(gradients: list[Tensor], inv_scale: Tensor, dtype: torch.dtype) -> None:
    """Fail unless gradients are unscaled to ``dtype`` as by a cast and torch's op, and stay as they are."""
    before, reference = [gradient.clone() for gradient in gradients], expected(gradients, inv_scale, dtype)
    true, flags = check_unscale(gradients, inv_scale, dtype)
    assert flags.tolist() == reference.flags
    assert all(map(same_bits, true, reference.true)) and all(map(same_bits, gradients, before))


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Return whether both hold the same bits (signed zeros, subnormals), where NaN equals NaN of any payload."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    integers = BITS[actual.dtype]
    equal = actual.contiguous().view(integers) == expected.contiguous().view(integers)
    return bool((equal | (actual.isnan() & expected.isnan())).all())
