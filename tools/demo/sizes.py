"""The sizes of the model that ``fxamp-demo`` trains."""

from dataclasses import dataclass

from fxamp.tools.demo.text import VOCABULARY


@dataclass(frozen=True)
class Size:
    """Dimensions of the model: ``width`` is divided among ``heads``; ``length`` is the longest text in tokens."""

    layers: int
    heads: int
    width: int
    length: int
    vocabulary: int


TINY = Size(layers=2, heads=4, width=64, length=64, vocabulary=VOCABULARY)
#: The products of a step take long enough that a CPU with units for bfloat16 gains by them.
SMALL = Size(layers=4, heads=8, width=512, length=256, vocabulary=VOCABULARY)
#: GPT-2's smallest: 124 million parameters, and 39 million in a head of its own. The text uses 256 tokens; the
#: vocabulary is GPT-2's, rounded up to a multiple of 64, so that the last matrix product has its real cost.
REAL = Size(layers=12, heads=12, width=768, length=1024, vocabulary=50304)
