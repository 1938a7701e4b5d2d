"""Read NVIDIA's machine code with the tools that Triton ships: instructions, their source lines and control bits.

The upper half of an instruction's 128 bits holds, from bit 41: 4 bits of clocks to wait, 1 to yield, 3 for the barrier
that is set when the result is there, 3 for the one set when the operands were read, 6 that name barriers to wait for
(Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", arXiv 1804.06826).
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton

from fxamp.errors import OptionError
from fxamp.tools.bench.cost.kernels.instruction import Binary, Block, Instruction, Unit

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

_LINE = re.compile(r'//## File "(?P<file>[^"]+)", line (?P<line>\d+)')
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?P<text>[^;]+);\s+/\* 0x[0-9a-f]{16} \*/")
_UPPER = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_JUMP = re.compile(r"^(?:@!?U?P\w+\s+)?BRA.*`\((\.L_x_\d+)\)")
_END = re.compile(r"^(?:BRA\S*\s+`|EXIT|RET)")
_BITS = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}
_CONVERSIONS = ("F2F", "F2I", "I2F", "FRND", "MUFU", "F2FP", "I2FP")
_FAR = ("LDG", "ATOMG", "ATOM", "RED", "LDL", "LD")
_MEMORY = (*_FAR, "STG", "ST", "LDS", "STS", "STL", "SHFL", "LDSM", "STSM")
_OTHER = ("BRA", "BAR", "EXIT", "CALL", "RET", "NOP", "BSSY", "BSYNC", "S2R", "S2UR", "CS2R", "R2UR", "LDC", "WARPSYNC")
_FP32 = ("FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2", "IMAD", "FADD2", "FMUL2", "FFMA2")


def read_binary(cubin: bytes, source: str, wide: bool) -> Binary:
    """Disassemble a kernel.

    Args:
        cubin: the binary.
        source: the name of the generated file, whose lines the instructions have.
        wide: whether the device has as many FP32 units as issue slots; then integer products use half of them.

    Raises:
        OptionError: this Triton ships no disassembler.
    """
    if not (TOOLS / "nvdisasm").exists():
        raise OptionError(f"this Triton has no nvdisasm in {TOOLS}; its wheels for Linux have one")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _run("nvdisasm", "-c", "-gi", "-hex", file.name)
        usage = _run("cuobjdump", "-res-usage", file.name)
    numbers = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
    assert numbers is not None, usage
    registers, stack, shared = map(int, numbers.groups())
    return Binary(tuple(_blocks(text, source, wide)), registers, shared, stack)


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _blocks(text: str, source: str, wide: bool) -> Iterator[Block]:
    """The blocks of the kernel, without the subroutines that follow it."""
    line, first, label, current = 0, "", "", list[Instruction]()
    for row in text.splitlines():
        if place := _LINE.search(row):
            line = int(place["line"]) if Path(place["file"]).name == source else line
        elif target := _LABEL.match(row):
            yield _block(current, label)
            label, current = target[1], []
        elif row.startswith("$"):
            break
        elif match := _INSTRUCTION.search(row):
            first = match["text"].strip()
        elif first and (upper := _UPPER.match(row)):
            current.append(_instruction(first, line, int(upper[1], 16), wide))
            if current[-1].opcode.startswith(("BRA", "EXIT")):
                jump = _JUMP.match(first)
                yield _block(current, label, jump[1] if jump else "", _END.match(first) is None)
                label, current = "", []
            first = ""
    yield _block(current, label)


def _block(instructions: list[Instruction], label: str, jump: str = "", falls: bool = True) -> Block:
    cold = any(instruction.opcode.startswith("CALL") for instruction in instructions)
    return Block(tuple(instructions), label, jump, falls, cold)


def _instruction(text: str, line: int, upper: int, wide: bool) -> Instruction:
    opcode = re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]
    base = opcode.split(".")[0]
    unit = _unit(base)
    width = next((size for mark, size in _BITS.items() if mark in opcode), 4) if unit is Unit.MEMORY else 0
    control = upper >> 41
    written, read, waits = (control >> 5) & 7, (control >> 8) & 7, (control >> 11) & 63
    signals, reads = ((f"barrier {at}",) if at != 7 else () for at in (written, read))
    return Instruction(
        opcode=opcode,
        line=line,
        unit=unit,
        busy=max(1.0, width / 4) if width else (2.0 if base == "IMAD" and wide else 1.0),
        clocks=max(1, control & 15),
        width=width,
        signals=signals,
        reads=reads,
        waits=tuple((f"barrier {at}", 0) for at in range(6) if waits >> at & 1),
        far=base in _FAR or base in ("STG", "ST"),
        spill=base in ("LDL", "STL"),
    )


def _unit(base: str) -> Unit:
    if base in _MEMORY:
        return Unit.MEMORY
    if base in _CONVERSIONS:
        return Unit.CONVERSION
    if base in _OTHER or base.startswith("U"):
        return Unit.OTHER
    if base in _FP32:
        return Unit.FP32
    return Unit.FP64 if base in ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX") else Unit.INTEGER
