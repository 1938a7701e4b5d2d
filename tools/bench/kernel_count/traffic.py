"""The bytes that a compiled kernel moves, from Triton's last IR that still has whole tensors."""

import math
import re
from collections.abc import Mapping

from fxamp.tools.bench.kernel_count.sections import Section

_ACCESS = re.compile(r"= \w+\.(?:buffer_)?load |^\s*\w+\.(?:buffer_)?store ")
_TENSOR = re.compile(r"tensor<((?:\d+x)+)(?:!tt\.ptr<)?[a-z]+(\d+)")
_USE = re.compile(r"loc\(#loc(\d+)\)\s*$")
_PLACE = re.compile(r'^#loc(\d+) = loc\("[^"]+":(\d+):\d+\)')
_NAMED = re.compile(r'^#loc(\d+) = loc\("[^"]+"\(#loc(\d+)\)\)')


def bytes_of_a_block(ttgir: str, lines: Mapping[int, Section]) -> int:
    """Return the bytes that a program reads and writes for one whole block: each element once for each access."""
    places = {
        name: int(line) for name, line in (found.groups() for found in map(_PLACE.match, ttgir.splitlines()) if found)
    }
    for found in filter(None, map(_NAMED.match, ttgir.splitlines())):
        places[found[1]] = places.get(found[2], 0)
    total = 0
    for row in ttgir.splitlines():
        use, tensors = _USE.search(row), _TENSOR.findall(row)
        if use and tensors and _ACCESS.search(row) and lines.get(places.get(use[1], 0)) is Section.WHOLE:
            shape, bits = tensors[-1]
            total += math.prod(map(int, shape.rstrip("x").split("x"))) * max(int(bits), 8) // 8
    return total
