"""Which lines of a generated kernel run how often: before the loop, for each whole block, at a gradient's end, after."""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum

from fxamp.tools.bench.kernel_count.instruction import Block, Instruction


class Section(Enum):
    """``ONCE``: before or after the loop; ``LOOP``: its head; ``WHOLE``, ``PART``: a whole block, and one with a mask."""

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

    A block belongs where most of its instructions come from: a compiler moves some of them to other blocks.
    """
    result: dict[Section, tuple[Instruction, ...]] = dict.fromkeys(Section, ())
    for block in blocks:
        if block.cold or not block.instructions:
            continue
        votes = Counter(lines.get(each.line, Section.ONCE) for each in block.instructions)
        chosen, _ = votes.most_common(1)[0]
        result[chosen] += block.instructions
    return result
