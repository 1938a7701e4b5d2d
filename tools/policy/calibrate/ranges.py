"""The statistics of the values at one place over all batches: how many values have each power of two.

A value |x| in [2**(e-1), 2**e) counts at exponent e. The limits of a 16-bit dtype are powers of two, or a known point
within one exponent. So shares are exact for every power of two that the values are multiplied by later: the loss scale
need not be known when gradients are watched.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

#: Exponents that frexp returns for float32 values, including subnormal ones: -148 for 2**-149, 128 for 2**127.
_LEAST, _MOST = -148, 128
_COUNT = _MOST - _LEAST + 1

_MASK = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Format:
    """The range of a dtype.

    ``tiny``: exponent of the smallest normal number, 2**tiny. ``top``: numbers of at least 2**top * (1 - 2**-digits-1)
    round to infinity; ``digits`` is the number of significant bits.
    """

    name: str
    tiny: int
    top: int
    digits: int

    @staticmethod
    def of(dtype: torch.dtype) -> "Format":
        """Return the range of ``dtype``."""
        name = str(dtype).removeprefix("torch.")
        if dtype is torch.float4_e2m1fn_x2:  # torch.finfo rejects it
            return Format(name, 0, 3, 2)
        info = torch.finfo(dtype)
        return Format(name, round(math.log2(info.tiny)), math.frexp(info.max)[1], 1 - round(math.log2(info.eps)))

    @staticmethod
    def of_name(name: str) -> "Format":
        """Return the range of the dtype called ``name``, such as ``"float16"``."""
        return Format.of(getattr(torch, name))

    @property
    def brink(self) -> float:
        """The smallest mantissa in [0.5, 1) that rounds up to the next power of two."""
        return 1.0 - 2.0 ** -(self.digits + 1)


@dataclass
class Range:
    """The values seen at one place, for one format.

    ``count``: all values; ``amax``: the largest finite magnitude; ``nonfinite``: inf and NaN; ``masked``: values equal
    to plus or minus float32's largest number, which represent infinity in attention masks and are counted only here.
    ``exponents`` and ``brink`` count the other nonzero values: all of them, and those that round up.
    """

    format: Format
    count: int = 0
    nonfinite: int = 0
    masked: int = 0
    amax: float = 0.0
    exponents: Tensor = field(default_factory=lambda: torch.zeros(_COUNT, dtype=torch.int64))
    brink: Tensor = field(default_factory=lambda: torch.zeros(_COUNT, dtype=torch.int64))

    def add(self, value: Tensor) -> None:
        """Count the values of a floating-point tensor of any shape and device."""
        flat = value.detach().reshape(-1).double().abs()
        finite = flat.isfinite()
        masked = flat == _MASK
        counted = flat[finite & ~masked & (flat > 0)]
        self.count += flat.numel()
        self.nonfinite += int((~finite).sum())
        self.masked += int(masked.sum())
        if not counted.numel():
            return
        self.amax = max(self.amax, float(counted.max()))
        mantissa, exponent = torch.frexp(counted)
        at = (exponent.long() - _LEAST).clamp(0, _COUNT - 1)
        self.exponents += torch.bincount(at, minlength=_COUNT).cpu()
        self.brink += torch.bincount(at[mantissa >= self.format.brink], minlength=_COUNT).cpu()

    @property
    def nonzero(self) -> int:
        """The number of values that are finite, not zero, and not masked."""
        return int(self.exponents.sum())

    def underflow(self, shift: int = 0) -> float:
        """Return the share of nonzero values that, times 2**shift, are zero or subnormal."""
        # 2**(e-1) <= |x|: below 2**tiny are those with e <= tiny.
        return self._share(int(self.exponents[: max(0, self.format.tiny - shift - _LEAST + 1)].sum()))

    def overflow(self, shift: int = 0) -> float:
        """Return the share of nonzero values that, times 2**shift, round to infinity."""
        at = self.format.top - shift - _LEAST
        above = int(self.exponents[max(0, at + 1) :].sum())
        brink = int(self.brink[at]) if 0 <= at < _COUNT else 0
        return self._share(above + brink)

    def largest_shift(self) -> int | None:
        """Return the largest power of two, as an exponent, at which no value overflows; None if there is no value."""
        positions = self.exponents.nonzero()
        if not positions.numel():
            return None
        at = int(positions[-1])
        return self.format.top - (at + _LEAST) - (1 if int(self.brink[at]) else 0)

    def _share(self, part: int) -> float:
        return part / self.nonzero if part else 0.0
