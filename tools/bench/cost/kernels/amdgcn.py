"""Read AMD's machine code from the assembly that Triton's compiler returns.

The compiler gives line 0 to instructions that it merged from several lines.
"""

import re
from collections.abc import Iterator

from fxamp.tools.bench.cost.kernels.instruction import Binary, Block, Instruction, Unit

_LOC = re.compile(r"^\s+\.loc\s+\d+ (\d+) .*?; (?P<places>.*)$")
_PLACE = re.compile(r"([\w.]+\.py):(\d+)")
_FACT = re.compile(r"^\s+\.(\w+):\s+(\d+)$", re.MULTILINE)
_WAIT = re.compile(r"(vmcnt|lgkmcnt)\((\d+)\)")
_LABEL = re.compile(r"^(?:(\.LBB\d+_\d+):|; %bb)")
_JUMP = re.compile(r"^\ts_(?:c?branch\w* (?P<target>\.LBB\d+_\d+)|endpgm)")
_INSTRUCTION = re.compile(r"^\t[a-z]+_\w")
_WIDTHS = {
    "x4": 16,
    "x3": 12,
    "x2": 8,
    "b128": 16,
    "b64": 8,
    "short": 2,
    "u16": 2,
    "b16": 2,
    "byte": 1,
    "u8": 1,
    "b8": 1,
}
_SLOW = ("v_exp", "v_log", "v_rcp", "v_rsq", "v_sqrt", "v_mul_lo_u32", "v_mul_hi", "v_div_fmas_f64", "v_div_scale_f64")


def read_binary(text: str, source: str) -> Binary:
    """Read a kernel; ``source``: the name of the generated file, whose lines the instructions have."""
    facts: dict[str, int] = {name: int(value) for name, value in _FACT.findall(text)}
    stack = facts["private_segment_fixed_size"]
    return Binary(tuple(_blocks(text, source)), facts["vgpr_count"], facts["group_segment_fixed_size"], stack)


def _blocks(text: str, source: str) -> Iterator[Block]:
    line, label, current = 0, "", list[Instruction]()
    for row in text.splitlines():
        if place := _LOC.match(row):
            lines = [int(at) for name, at in _PLACE.findall(place["places"]) if name == source]
            line = lines[-1] if lines else line
        elif target := _LABEL.match(row):
            yield Block(tuple(current), label)
            label, current = target[1] or "", []
        elif row.startswith((".Lfunc_end", "\t.section")):
            break
        elif _INSTRUCTION.match(row):
            current.append(_instruction(row.split(";")[0].strip(), line))
            if jump := _JUMP.match(row):
                yield Block(tuple(current), label, jump["target"] or "", falls=row.startswith("\ts_c"))
                label, current = "", []
    yield Block(tuple(current), label)


def _instruction(text: str, line: int) -> Instruction:
    opcode = text.split()[0]
    moves = opcode.startswith(("global_", "buffer_", "flat_", "scratch_", "ds_"))
    width = next((size for mark, size in _WIDTHS.items() if mark in opcode), 4) if moves else 0
    if opcode == "s_waitcnt":
        return Instruction(
            opcode, line, Unit.OTHER, waits=tuple((c, int(n)) for c, n in _WAIT.findall(text)), slots=0.0
        )
    far = opcode.startswith(("global_", "buffer_", "flat_", "scratch_", "s_load"))
    counter = "lgkmcnt" if opcode.startswith(("ds_", "s_load")) else "vmcnt"
    slow = opcode.startswith(_SLOW)
    return Instruction(
        opcode=opcode,
        line=line,
        unit=_unit(opcode),
        busy=4.0 if slow else max(1.0, width / 4),
        clocks=16.0 if slow else 4.0 if opcode.startswith("v_") else 1.0,
        width=width,
        signals=(counter,) if moves or opcode.startswith("s_load") else (),
        far=far,
        spill=opcode.startswith("scratch_"),
        slots=0.0 if opcode.startswith("s_") else 4.0 if slow else 1.0,
    )


def _unit(opcode: str) -> Unit:
    if opcode.startswith(("global_", "buffer_", "flat_", "scratch_", "ds_")):
        return Unit.MEMORY
    if not opcode.startswith("v_"):
        return Unit.OTHER
    if opcode.startswith(("v_cvt", "v_exp", "v_log", "v_rcp", "v_rsq", "v_sqrt", "v_floor", "v_rndne")):
        return Unit.CONVERSION
    if "f64" in opcode:
        return Unit.FP64
    return Unit.FP32 if "f32" in opcode and "cmp" not in opcode else Unit.INTEGER
