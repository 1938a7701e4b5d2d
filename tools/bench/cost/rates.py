"""What the counted GPU does in a second, from which times are estimated."""

from dataclasses import dataclass

from fxamp.dtypes import DTYPES


@dataclass(frozen=True)
class Rates:
    """What a GPU does in a second: bytes of memory, FLOPs of products in 16 bits and in float32, and bytes to the host.

    The latter go over PCIe, as many in each direction. 16 lanes of its fifth generation, as an H100 has, carry 64 GB/s;
    NVIDIA's nvbandwidth shows 55.6 to the GPU and 52.8 to the host.
    """

    bandwidth: float = 3.0e12
    flops16: float = 600e12
    flops32: float = 50e12
    host: float = 50e9

    def of(self, dtype: str) -> float:
        """FLOPs per second of products of ``dtype``; float8 has twice the rate of 16 bits, float4 four times.

        On a B200: 2.25, 4.5 and 9 PFLOPS, dense (NVIDIA's data sheet).
        """
        for bits, times in (("float8", 2), ("float4", 4)):
            if dtype.startswith(bits):
                return times * self.flops16
        return self.flops16 if dtype in DTYPES else self.flops32
