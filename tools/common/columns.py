"""Columns that tables of several tools share, and the colours of cells; ``tools/show/text.py`` adds its own."""

from collections.abc import Callable

from fxamp.tools.common.table import Column
from fxamp.tools.common.terminal import Look

NODE = Column("node", "middle", least=12, good=24)
SOURCE = Column("source", "path", least=12, good=28)
MODULE = Column("module", "middle", least=10, good=20)
OP = Column("op", "end", least=10, good=20)
RULE = Column("rule", "end", least=8, good=20)
REASON = Column("reason", "end", least=24, good=32)


def painter(look: Look, *dtypes: str) -> Callable[[str, str], str]:
    """Return a painter for a table: the columns named in ``dtypes`` by their dtype, and the op of each cast."""

    def paint(title: str, cell: str) -> str:
        if title in dtypes:
            return look.dtype(cell.strip(), cell)
        return look.cast(cell) if title == OP.title and cell.strip() == "cast" else cell

    return paint
