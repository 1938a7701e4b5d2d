"""Compile a kernel for a GPU that need not be here, and count its machine code."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import compile as compile_kernel
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fxamp.kernels.store import load_function, write_source
from fxamp.tools.bench.cost.kernels import amdgcn, sass
from fxamp.tools.bench.cost.kernels.instruction import Binary, Instruction, Unit
from fxamp.tools.bench.cost.kernels.sections import Section, by_section, bytes_of_a_block, sections
from fxamp.tools.bench.cost.kernels.subjects import Program

#: What Triton compiles for: its name, and Triton's target.
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_WIDE = ("sm_89", "sm_90", "sm_100")


@dataclass(frozen=True)
class Count:
    """The machine code of a kernel, counted.

    Attributes:
        program: the kernel.
        threads: of a program.
        binary: with its registers and shared memory.
        moved: bytes that it reads and writes per element; 0 for a kernel without elements.
        code: the instructions by section.
    """

    program: Program
    threads: int
    binary: Binary
    moved: float
    code: Mapping[Section, tuple[Instruction, ...]]

    @property
    def widest(self) -> int:
        """The bytes of the widest access to memory within whole blocks."""
        return max((instruction.width for instruction in self.code[Section.WHOLE] if instruction.far), default=0)

    @property
    def elements(self) -> int:
        """How many elements the code of whole blocks handles: several blocks if the compiler unrolled the loop."""
        own = sum(instruction.width for instruction in self.code[Section.WHOLE] if instruction.far) * self.threads
        return self.program.block * max(1, round(own / self.moved / self.program.block)) if self.moved else 0

    @property
    def whole(self) -> tuple[Instruction, ...]:
        """The instructions of a whole block, or of several."""
        return (*self.code[Section.LOOP], *self.code[Section.WHOLE])

    def an_element(self, unit: Unit) -> float:
        """Return the unit's instructions for one element, without those that run once a program; 0 without elements."""
        if not self.elements:
            return 0.0
        return sum(instruction.unit is unit for instruction in self.whole) * self.threads / self.elements

    def once(self, unit: Unit) -> int:
        """Return the instructions of a unit that each thread executes once a program."""
        return sum(instruction.unit is unit for instruction in self.code[Section.ONCE])


def compiled(program: Program, arch: str) -> tuple[Any, Binary]:
    """Compile the kernel as a launch would; return Triton's compiled kernel, and its machine code.

    Nothing comes from Triton's cache: machine code in it names the file of an equal kernel with another docstring.

    Raises:
        OptionError: this Triton ships no disassembler.
    """
    target = TARGETS[arch]
    attributes = {(at,): [["tt.divisibility", 16]] for at in range(program.aligned)}
    function = load_function(program.name, program.text)
    source = ASTSource(function, dict(program.signature), constexprs={}, attrs=attributes)
    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        result = compile_kernel(source, target=target, options=dict(program.options))
    file = Path(write_source(program.name, program.text)).name
    if target.backend == "hip":
        return result, amdgcn.read_binary(result.asm["amdgcn"], file)
    return result, sass.read_binary(result.asm["cubin"], file, arch in _WIDE)


def count(program: Program, arch: str) -> Count:
    """Compile the kernel as :func:`compiled` does, and count."""
    result, binary = compiled(program, arch)
    lines = sections(program.text)
    code = by_section(binary.blocks, lines)
    moved = bytes_of_a_block(result.asm["ttgir"], lines) / program.block if program.block else 0.0
    return Count(program, int(program.options["num_warps"]) * TARGETS[arch].warp_size, binary, moved, code)
