"""The errors of a model under two policies as text, and where the two first diverge."""

from collections.abc import Iterator

from fxamp.tools.common.formatting import op_name, place
from fxamp.tools.common.table import Column, printable, render
from fxamp.tools.common.terminal import Look
from fxamp.tools.diff.diverge import Divergence
from fxamp.tools.diff.numbers import Errors, Numbers

COLUMNS = (
    Column("relative error against float64", "middle", least=16, good=32),
    Column("old", right=True),
    Column("new", right=True),
)

#: The maximum number of parameters to list.
_NAMED = 5


def numbers_lines(numbers: Numbers, look: Look) -> Iterator[str]:
    """Yield the lines for one model."""
    yield printable(numbers.file)
    yield ""
    rows = [tuple(map(printable, row)) for row in error_rows(numbers)]
    yield from render(COLUMNS, rows, look.width, (COLUMNS[0].title,))
    yield ""
    yield from map(printable, remarks(numbers))


def error_rows(numbers: Numbers) -> Iterator[tuple[str, str, str]]:
    """Yield each measured value with its errors under the old and the new policy; the worst parameters come last."""
    old, new = numbers.errors
    yield "outputs", _error(old.output), _error(new.output)
    yield "gradient", _error(old.gradient), _error(new.gradient)
    for name in _worst(old, new):
        yield f"  {name}", _error(old.parameters[name]), _error(new.parameters[name])
    if old.scale is not None or new.scale is not None:
        yield "loss scale", _scale(old.scale), _scale(new.scale)


def remarks(numbers: Numbers) -> Iterator[str]:
    """Yield where the policies first diverge, and warnings about the numbers."""
    where = numbers.where
    if where is None:
        yield "the policies nowhere differ by more than rounding"
    elif isinstance(where, str):
        yield f"where they first diverge is {where}"
    else:
        yield f"they first diverge at {_place(where)}"
    if numbers.random:
        yield "the model draws random numbers (dropout?): its errors hold these too; model.eval() leaves them out"


def _place(where: Divergence) -> str:
    entry = where.new
    line = f" at {place(entry.source)}" if entry.source is not None else ""
    module = f" in {entry.module}" if entry.module else ""
    dtypes = where.old.dtype if where.old.dtype == entry.dtype else f"{where.old.dtype} -> {entry.dtype}"
    return f"{entry.name} ({op_name(entry)}){line}{module}: {dtypes}, relative difference {_error(where.difference)}"


def _worst(old: Errors, new: Errors) -> list[str]:
    """Return the parameters with the largest errors under either policy."""
    worst = {name: max(error, new.parameters[name]) for name, error in old.parameters.items()}
    return sorted(worst, key=lambda name: -worst[name])[:_NAMED]


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"


def _scale(scale: float | None) -> str:
    return "none" if scale is None else f"{scale:g}"
