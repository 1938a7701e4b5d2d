"""What is stepped: GPT-2's parameters, as many and as wide as asked for."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice
from typing import Any

VOCABULARY, POSITIONS = 50_257, 1024


@dataclass(frozen=True)
class Setup:
    """``parameters``: how many tensors; ``width``: GPT-2's, 768 in its smallest model, whose tensors are 148.

    ``threads``: of the CPU; ``lowering``: of fxamp's compiled step.
    """

    parameters: int
    width: int
    device: str
    threads: int
    lowering: str

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters, in the order of GPT-2's with the last norm first."""
        return list(islice(_shapes(self.width), self.parameters))

    def as_dict(self) -> dict[str, Any]:
        """JSON's values, under the names of the fields."""
        return asdict(self)


def _shapes(width: int) -> Iterator[tuple[int, ...]]:
    yield from ((VOCABULARY, width), (POSITIONS, width), (width,), (width,))
    for _ in count():
        yield from ((width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,))
        yield from ((width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,))
