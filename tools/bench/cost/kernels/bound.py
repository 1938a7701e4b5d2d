"""The share of a GPU's memory bandwidth that a kernel's machine code permits, and the unit that limits it.

Per multiprocessor and clock, as many elements can be finished as

1. the schedulers can issue instructions for,
2. each unit can execute instructions for: FP32, FP64, integer, memory, conversions,
3. there are programs, each of which takes as long as one of its warps needs alone: its instructions with the waits that
   the compiler encoded in them, and an answer of memory for each group of loads. That is the bound of bytes in flight.

Instructions that run once a program are shared by its elements. The bound is the least of these over the elements whose
bytes the bandwidth carries; 1 where memory itself is the limit. A plain copy reaches about 0.9 of a data sheet's.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from fxamp.tools.bench.cost.kernels.count import Count
from fxamp.tools.bench.cost.kernels.devices import LOADED, Device
from fxamp.tools.bench.cost.kernels.sections import Section

#: Clocks until shared memory, a conversion or a special function has answered, or operands of a store have been read.
_ANSWER = 30.0


@dataclass(frozen=True)
class Bound:
    """``shares``: of the bandwidth, by what limits it, each maybe above 1; ``warps``: that a multiprocessor holds."""

    shares: Mapping[str, float]
    warps: int

    @property
    def share(self) -> float:
        """The share of the bandwidth that is possible, at most 1."""
        return min(1.0, *self.shares.values())

    @property
    def limit(self) -> str:
        """What limits it: "memory" itself, or the name of a unit."""
        least = min(self.shares, key=lambda name: self.shares[name])
        return "bandwidth" if self.shares[least] >= 1 else least


def bound(count: Count, device: Device) -> Bound:
    """Return the bound of a kernel that handles elements."""
    needed = device.bytes_a_clock / count.moved
    chunk, threads = count.program.chunk, count.threads

    def possible(rate: float, own: float) -> float:
        return rate * chunk / threads / own / needed if own else float("inf")

    sections = [(count.code[Section.ONCE], 1), (count.whole, chunk / count.elements)]
    shares = {"issue": possible(device.issue, sum(times * sum(i.slots for i in code) for code, times in sections))}
    for unit, rate in device.rates.items():
        busy = sum(times * sum(i.busy for i in code if i.unit is unit) for code, times in sections)
        shares[unit.value] = possible(rate, busy)
    warps = _warps(count, device)
    programs = warps * device.wave // threads
    shares["bytes in flight"] = programs * chunk / _duration(count, device) / needed
    return Bound(shares, warps)


def _warps(count: Count, device: Device) -> int:
    """How many warps a multiprocessor holds, by registers, shared memory and its own limits; a program is whole."""
    lanes, grain = device.registers
    own = count.threads // device.wave
    registers = max(grain, -(-count.binary.registers // grain) * grain)
    by_registers = 4 * (lanes // registers) // own
    by_shared = device.shared // (count.binary.shared + 1024) if count.binary.shared else device.programs
    return own * min(by_registers, by_shared, device.programs, device.warps // own)


def _duration(count: Count, device: Device) -> float:
    """Return the clocks of a program's warp that has its scheduler to itself.

    An instruction that waits for a counter waits for all that raised it before, in order.
    """
    raised: dict[str, list[float]] = defaultdict(list)
    now = 0.0
    order = [
        (count.code[Section.ONCE], 1, device.near),
        (count.whole, round(count.program.chunk / count.elements), device.far),
    ]
    for code, times, answer in order:
        for instruction in code * times:
            for counter, still in instruction.waits:
                if len(raised[counter]) > still:
                    now = max(now, raised[counter][-1 - still])
            answered = now + (answer * LOADED if instruction.far else _ANSWER)
            ends = dict.fromkeys(instruction.reads, now + _ANSWER) | dict.fromkeys(instruction.signals, answered)
            for counter, end in ends.items():
                raised[counter].append(max([end, *raised[counter][-1:]]))
            now += instruction.clocks
    return now
