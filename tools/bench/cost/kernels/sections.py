"""Which lines of a generated kernel run how often: once, for each whole block, or at a gradient's end.

The bytes that it moves for a block are those of the lines of whole blocks, in Triton's last IR that still has tensors.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum

from fxamp.graph.depth_first import depth_first
from fxamp.tools.bench.cost.kernels.instruction import Block, Instruction

_ACCESS = re.compile(r"= \w+\.(?:buffer_)?load |^\s*\w+\.(?:buffer_)?store ")
_TENSOR = re.compile(r"tensor<((?:\d+x)+)(?:!tt\.ptr<)?[a-z]+(\d+)")
_USE = re.compile(r"loc\(#loc(\d+)\)\s*$")
_PLACE = re.compile(r'^#loc(\d+) = loc\("[^"]+":(\d+):\d+\)')
_NAMED = re.compile(r'^#loc(\d+) = loc\("[^"]+"\(#loc(\d+)\)\)')


class Section(Enum):
    """``ONCE``: before or after the loop; ``LOOP``: its head; ``WHOLE``, ``PART``: a block without and with a mask."""

    ONCE = "once"
    LOOP = "loop"
    WHOLE = "whole"
    PART = "part"


def sections(text: str) -> Mapping[int, Section]:
    """Return the section of each line, from 1; a kernel without a loop over blocks has one section."""
    result: dict[int, Section] = {}
    current, depth = Section.ONCE, 0
    for number, line in enumerate(text.splitlines(), start=1):
        indent = len(line) - len(line.lstrip())
        stripped = line.strip()
        if stripped.startswith("for start in"):
            current, depth = Section.LOOP, indent
        elif current is not Section.ONCE and stripped and indent <= depth:
            current = Section.ONCE
        elif current is not Section.ONCE and indent == depth + 4:
            current = Section.LOOP
        result[number] = current
        if stripped.startswith("if start +"):
            current = Section.WHOLE
        elif stripped.startswith("elif start"):
            current = Section.PART
    return result


def by_section(blocks: Sequence[Block], lines: Mapping[int, Section]) -> Mapping[Section, tuple[Instruction, ...]]:
    """Return the instructions of each section, in order; those of cold blocks are in none.

    A block belongs where most of its instructions come from, as a compiler moves some of them to other blocks.
    """
    result: dict[Section, tuple[Instruction, ...]] = dict.fromkeys(Section, ())
    looping = _looping(blocks)
    warm = [(at, block.instructions) for at, block in enumerate(blocks) if block.instructions and not block.cold]
    chosen = {at: _section(own, lines) for at, own in warm}
    unrolled = not any(section is Section.WHOLE and at in looping for at, section in chosen.items())
    began = False
    for at, own in warm:
        section = chosen[at]
        began |= section in (Section.WHOLE, Section.PART)
        if section is None:  # code merged from that of whole blocks and of others serves both
            section = Section.WHOLE if at in looping or began else Section.ONCE
        if at not in looping and section is not Section.PART and not (unrolled and section is Section.WHOLE):
            section = Section.ONCE  # the compiler moved the code out of the loop
        result[section] += own
    return result


def _section(instructions: Sequence[Instruction], lines: Mapping[int, Section]) -> Section | None:
    """Return the section of most instructions; None if most have no line."""
    ((chosen, _),) = Counter(lines.get(instruction.line) for instruction in instructions).most_common(1)
    return chosen


def _looping(blocks: Sequence[Block]) -> set[int]:
    """Return the indices of blocks that can run again after they have run."""
    places = {block.label: at for at, block in enumerate(blocks) if block.label}

    def following(at: int) -> list[int]:
        jump = [places[blocks[at].jump]] if blocks[at].jump in places else []
        return [*jump, at + 1] if blocks[at].falls and at + 1 < len(blocks) else jump

    return {at for at in range(len(blocks)) if at in depth_first(following(at), following)}


def bytes_of_a_block(ttgir: str, lines: Mapping[int, Section]) -> int:
    """Return the bytes that a program reads and writes for one whole block: each element once for each access."""
    rows, total = ttgir.splitlines(), 0
    places = {place[1]: int(place[2]) for place in filter(None, map(_PLACE.match, rows))}
    for name in filter(None, map(_NAMED.match, rows)):
        places[name[1]] = places.get(name[2], 0)
    for row in rows:
        use, tensors = _USE.search(row), _TENSOR.findall(row)
        if use and tensors and _ACCESS.search(row) and lines.get(places.get(use[1], 0)) is Section.WHOLE:
            shape, bits = tensors[-1]
            total += math.prod(map(int, shape.rstrip("x").split("x"))) * max(int(bits), 8) // 8
    return total
