"""The statements that random programs are made of. A kind is a function that draws its operands and writes its lines.

To add one, write a function under ``@statement`` in one of these files; its name is what counts and failures are
reported under. Failures shrink towards what stands first: among the kinds, in a table, among a draw's options.
"""

from programs.statements import arithmetic, products, layers, indexing, casts, writes, blocks, regions  # noqa: I001  (plainest first)
from programs.statements.registry import STATEMENTS, WEIGHTS

__all__ = [
    "STATEMENTS",
    "WEIGHTS",
    "arithmetic",
    "blocks",
    "casts",
    "indexing",
    "layers",
    "products",
    "regions",
    "writes",
]
