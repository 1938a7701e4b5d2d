"""The GPUs that a policy is fitted to, and amounts of memory.

Rates are those of the data sheets times the factors that the count uses for an H100: 0.9 of the bandwidth, 0.61 of the
dense products in 16 bits. Kernels are those that Inductor makes for an H100.
"""

import re
from argparse import ArgumentTypeError
from dataclasses import dataclass
from types import MappingProxyType

from fxamp.policy.model.match import EXPERTS_CAPABILITY, LEAST_CAPABILITY, OF_EXPERTS, Match, machine
from fxamp.tools.bench.cost.rates import Rates

_UNITS = {unit: 1024**at for at, unit in enumerate(("b", "kib", "mib", "gib", "tib"))}
_UNITS |= {unit: 1000**at for at, unit in enumerate(("b", "kb", "mb", "gb", "tb"))}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


@dataclass(frozen=True)
class Gpu:
    """Bytes a second of its memory, FLOPs a second of dense products in 16 bits, its memory, and which GPU it is.

    NVIDIA's GPUs are identified by their compute capability, AMD's by their architecture.
    """

    bandwidth: float
    flops16: float
    memory: int
    capability: tuple[int, int] | None = None
    arch: str | None = None

    @property
    def formats(self) -> tuple[str, ...]:
        """The casts below 16 bits in which it multiplies; those of products of experts end with ``OF_EXPERTS``."""
        casts = [*LEAST_CAPABILITY, *(cast + OF_EXPERTS for cast in EXPERTS_CAPABILITY)]
        here = machine(None, self.capability, None, self.arch)
        return tuple(cast for cast in casts if not [*Match("cuda").mismatches(here, [cast])])

    @property
    def rates(self) -> Rates:
        """The rates that the count assumes, as parts of those in the data sheet."""
        return Rates(0.9 * self.bandwidth, 0.61 * self.flops16, 0.61 * self.flops16 / 12)


GPUS = MappingProxyType(
    {
        "a100": Gpu(2.039e12, 312e12, 80 << 30, (8, 0)),
        "a100-40gb": Gpu(1.555e12, 312e12, 40 << 30, (8, 0)),
        "rtx4090": Gpu(1.008e12, 165e12, 24 << 30, (8, 9)),
        "h100": Gpu(3.35e12, 989e12, 80 << 30, (9, 0)),
        "h200": Gpu(4.8e12, 989e12, 141 * 10**9, (9, 0)),
        "b200": Gpu(8.0e12, 2250e12, 180 * 10**9, (10, 0)),
        "mi300x": Gpu(5.3e12, 1307.4e12, 192 * 10**9, arch="gfx942"),
        "mi355x": Gpu(8.0e12, 2516.6e12, 288 * 10**9, arch="gfx950"),
    }
)
"""By the name that ``--gpu`` takes: NVIDIA's data sheets, and AMD's of the Instinct MI300X and MI355X."""


def amount(text: str) -> int:
    """An argparse ``type``: bytes, such as ``"40GiB"``, ``"500 MB"``."""
    match = _AMOUNT.fullmatch(text.strip().lower())
    bytes_ = float(match[1]) * _UNITS.get(match[2] or "b", 0) if match else 0.0
    if not 1 <= bytes_ < float("inf"):
        raise ArgumentTypeError(
            f"{text!r} is not a size of memory; accepted: a number above 0 with B, KiB, MiB, GiB, TiB, kB, MB, GB or TB"
        )
    return int(bytes_)
