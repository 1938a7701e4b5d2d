"""The GPUs that kernels are counted for, and the figures of their hardware that the bound depends on.

Sources, by number:

1. NVIDIA's data sheets and architecture white papers of A100 80GB SXM, Ada (RTX 4090), H100 SXM, H200 SXM, B200; AMD's
   of Instinct MI300X and its CDNA 3 white paper: bandwidth, boost clock, multiprocessors, units in each of them.
2. CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions": results a clock and multiprocessor; and
   "Technical Specifications per Compute Capability": registers, warps and blocks a multiprocessor.
3. Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking", arXiv 2402.13499:
   latencies of L2 and of global memory on A100, RTX 4090 and H100, without load.
4. Jarmusch et al., "Dissecting the NVIDIA Blackwell Architecture with Microbenchmarks", arXiv 2507.10789: the same on
   Blackwell (of an RTX 5080; none is published for a B200 there).
5. Chips and Cheese, "Testing AMD's Giant MI300X": the same on MI300X, in nanoseconds, times its clock.
6. AMD Instinct MI300 ISA, and LLVM's AMDGPU guide: registers and waves of a SIMD; 4 clocks for a vector instruction.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fxamp.tools.bench.cost.kernels.instruction import Unit

#: How much longer an access takes while memory is busy than what sources 3 to 5 measured on idle memory: an assumption.
LOADED = 2.0


@dataclass(frozen=True)
class Device:
    """One GPU; all rates are those of one multiprocessor (compute unit on AMD) and clock.

    Attributes:
        name: of the product.
        arch: what Triton compiles for.
        bandwidth: bytes a second of its memory.
        clock: Hz.
        processors: the number of multiprocessors.
        wave: lanes of a warp.
        issue: instructions of a lane that can be issued.
        rates: instructions of a lane that each unit takes.
        registers: 32-bit registers for each lane of a scheduler, and of how many at least a warp takes them.
        warps: that a multiprocessor holds at most.
        programs: that it holds at most.
        shared: bytes of shared memory.
        far, near: clocks until memory and until L2 answer, without load.
    """

    name: str
    arch: str
    bandwidth: float
    clock: float
    processors: int
    wave: int
    issue: float
    rates: Mapping[Unit, float]
    registers: tuple[int, int]
    warps: int
    programs: int
    shared: int
    far: float
    near: float

    @property
    def bytes_a_clock(self) -> float:
        """The share of one multiprocessor in the bandwidth."""
        return self.bandwidth / self.clock / self.processors


def _rates(fp32: float, fp64: float) -> Mapping[Unit, float]:
    return MappingProxyType(
        {Unit.FP32: fp32, Unit.FP64: fp64, Unit.INTEGER: 64.0, Unit.MEMORY: 32.0, Unit.CONVERSION: 16.0}
    )


_NVIDIA = (512, 8)
_AMD = MappingProxyType(dict.fromkeys((Unit.FP32, Unit.FP64, Unit.INTEGER, Unit.MEMORY, Unit.CONVERSION), 64.0))

DEVICES = (
    Device("A100", "sm_80", 2.039e12, 1.41e9, 108, 32, 128, _rates(64, 32), _NVIDIA, 64, 32, 164 << 10, 466, 262),
    Device("RTX 4090", "sm_89", 1.008e12, 2.52e9, 128, 32, 128, _rates(128, 2), _NVIDIA, 48, 24, 100 << 10, 542, 273),
    Device("H100", "sm_90", 3.35e12, 1.98e9, 132, 32, 128, _rates(128, 64), _NVIDIA, 64, 32, 228 << 10, 479, 263),
    Device("H200", "sm_90", 4.8e12, 1.98e9, 132, 32, 128, _rates(128, 64), _NVIDIA, 64, 32, 228 << 10, 479, 263),
    Device("B200", "sm_100", 8.0e12, 1.965e9, 148, 32, 128, _rates(128, 64), _NVIDIA, 64, 32, 228 << 10, 877, 358),
    Device("MI300X", "gfx942", 5.3e12, 2.1e9, 304, 64, 64, _AMD, (512, 8), 32, 16, 64 << 10, 720, 240),
)
