"""Judge the evidence for each place: whether its values and gradients fit 16 bits, and operands in fp8 their 8 bits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import frexp

import torch

from fxamp.policy.model.loss_scale import FLOAT32_MAX
from fxamp.tools.policy.calibrate.evidence import Sample, Scaled
from fxamp.tools.policy.calibrate.ranges import Format, Range
from fxamp.tools.policy.places import ModuleOp

#: Up to this share of values below the normal numbers, underflow adds no more error than rounding. Let u be half of
#: the dtype's eps. Rounding a normal number x has an error of up to u|x|; rounding one below the smallest normal number
#: t, of up to u*t. If at most half of n values are below t, the others have a 2-norm of at least t*sqrt(n/2), so their
#: rounding error bound is at least u*t*sqrt(n/2); that of all values below t together is not larger.
UNDERFLOW = 0.5


@dataclass(frozen=True)
class Trouble:
    """Why values at a place do not fit: ``kind`` is "overflow", "underflow" or "fp8", ``words`` states the numbers."""

    place: ModuleOp
    kind: str
    share: float
    words: str


@dataclass(frozen=True)
class Limits:
    """The criteria: the dtype's range, gradients times 2**shift, the largest share that may underflow."""

    format: Format
    shift: int
    underflow: float = UNDERFLOW

    def troubles(self, sample: Sample) -> list[Trouble]:
        """Return the troubles of one value of one call; empty if it fits."""
        scale = f" times the loss scale {2.0**self.shift:g}" if self.shift else ""
        troubles = [
            *self._judge(sample, sample.forward, 0, sample.what),
            *self._judge(sample, sample.gradient, self.shift, f"gradient at the {sample.what}{scale}"),
        ]
        return sorted(troubles, key=lambda trouble: -trouble.share)

    def fp8_troubles(self, scaled: Scaled) -> list[Trouble]:
        """Return the trouble of an operand of a product in fp8; empty if it fits. Its scales let nothing overflow."""
        values = scaled.range
        under = values.underflow()
        if under <= self.underflow:
            return []
        counted = f"{share(under)} of {values.nonzero} nonzero values of the {scaled.operand.words},"
        words = f"{counted} are below {values.format.name}'s normal {2.0**values.format.tiny:.3g} after scaling"
        return [Trouble(scaled.place, "fp8", under, words)]

    def _judge(self, sample: Sample, values: Range, shift: int, what: str) -> Iterable[Trouble]:
        name = self.format.name
        info = torch.finfo(getattr(torch, name))
        counted = f"of {values.nonzero} nonzero values of the {what}"
        largest = f"the largest is {values.amax * 2.0**shift:.3g}"
        over, under = values.overflow(shift), values.underflow(shift)
        if over:
            words = f"{share(over)} {counted} exceed {name}'s {info.max:.6g}, {largest}"
            yield Trouble(sample.place, "overflow", over, words)
        if under > self.underflow:
            words = f"{share(under)} {counted} are below {name}'s normal {info.tiny:.3g}, {largest}"
            yield Trouble(sample.place, "underflow", under, words)


def share(part: float) -> str:
    """Return a share as a percentage with two digits, three from 99.5% on; never 0% for a nonzero share."""
    return f"{100 * part:.{3 if part >= 0.995 else 2}g}%"


def fitting_shift(samples: Sequence[Sample], init_scale: float) -> int:
    """Return the exponent of the largest loss scale up to ``init_scale`` at which no 16-bit gradient overflows."""
    most = [shift for s in samples if not s.raised and (shift := s.gradient.largest_shift()) is not None]
    return min([exponent(init_scale), *most])


def exponent(scale: float) -> int:
    """Return the exponent of the largest power of two not above ``scale``."""
    return frexp(min(scale, FLOAT32_MAX))[1] - 1
