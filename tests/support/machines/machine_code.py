"""What matters of the machine code of kernels, compiled for GPUs that need not be here."""

from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("triton", reason="machine code needs triton's compiler")

from fxamp.tools.bench.cost.kernels.count import TARGETS, compiled
from fxamp.tools.bench.cost.kernels.subjects import Program

#: One target of each kind of memory access.
ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")

__all__ = ["ARCHS", "TARGETS", "MachineCode", "Program", "compiled", "machine_code"]


@dataclass(frozen=True)
class MachineCode:
    """Counts of 16-byte accesses, and of spills to memory.

    Scalar registers that AMD keeps in lanes of a vector register are no spill: they move no memory.
    """

    wide_loads: int
    wide_stores: int
    spills: int


def machine_code(name: str, text: str, signature: dict[str, str], options: Any, arch: str) -> MachineCode:
    """Compile a kernel as a launch would, whose first two arguments start at multiples of 16 bytes."""
    _, binary = compiled(Program(name, text, signature, 2, options, 0), arch)
    code = [instruction for block in binary.blocks for instruction in block.instructions]
    wide = [instruction.opcode for instruction in code if instruction.far and instruction.width == 16]
    loads = sum(opcode.startswith("LDG") or "_load_" in opcode for opcode in wide)
    return MachineCode(loads, len(wide) - loads, binary.spills)
