"""One machine instruction of any vendor, with what the count and the bound need."""

from dataclasses import dataclass
from enum import Enum


class Unit(Enum):
    """What executes an instruction; the value is the unit's name in tables."""

    FP32 = "FP32"
    FP64 = "FP64"
    INTEGER = "integer"
    MEMORY = "memory"
    CONVERSION = "conversion"
    OTHER = "other"


@dataclass(frozen=True)
class Instruction:
    """An instruction of one lane.

    Attributes:
        opcode: as the disassembler writes it.
        line: of the generated source, 0 if unknown.
        unit: what executes it.
        busy: how many of the unit's results per clock it takes: 1 for most.
        clocks: until the same warp can issue its next instruction.
        width: bytes that a lane moves between registers and memory of any kind; 0 for other instructions.
        signals: the counters that it raises until what it asked for has answered.
        reads: the counters that it raises until its operands have been read; a store asks for nothing else.
        waits: counters, each with the number that may still be raised when this instruction is issued.
        far: whether memory answers it; else shared memory or another unit does.
        spill: whether it moves a register to or from the stack.
        slots: issue slots of the lanes that it takes; a scalar instruction of AMD takes none.
    """

    opcode: str
    line: int
    unit: Unit
    busy: float = 1.0
    clocks: float = 1.0
    width: int = 0
    signals: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    waits: tuple[tuple[str, int], ...] = ()
    far: bool = False
    spill: bool = False
    slots: float = 1.0


@dataclass(frozen=True)
class Block:
    """Instructions that run one after another.

    Attributes:
        instructions: in order.
        label: where other blocks jump to; empty if none does.
        jump: the label of the block that its last instruction may jump to; empty if it is not a jump.
        falls: whether the next block in memory may run after it.
        cold: whether it calls a subroutine for rare values, such as subnormals.
    """

    instructions: tuple[Instruction, ...]
    label: str = ""
    jump: str = ""
    falls: bool = True
    cold: bool = False


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: its blocks in their order in memory, and what it needs of the device."""

    blocks: tuple[Block, ...]
    registers: int
    shared: int
    stack: int

    @property
    def spills(self) -> int:
        """Instructions that move registers to or from the stack, or the stack's bytes if more."""
        moves = sum(instruction.spill for block in self.blocks for instruction in block.instructions)
        return max(moves, self.stack)
