"""The errors of a model under two policies as parts, and where the two first diverge."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fxamp.tools.common.formatting import op_name, place
from fxamp.tools.common.table import Column, Layout
from fxamp.tools.diff.part import Cells, Part

if TYPE_CHECKING:
    from fxamp.tools.diff.diverge import Divergence
    from fxamp.tools.diff.numbers import Errors, Numbers

_VALUE = "relative error against float64"
_LAYOUT = Layout(
    (Column(_VALUE, "middle", least=16, good=32), Column("old", right=True), Column("new", right=True)), (_VALUE,)
)

#: The maximum number of parameters to list.
_NAMED = 5


def numbers_parts(numbers: "Numbers") -> Iterator[Part]:
    """Yield the parts for one model."""
    yield Part(numbers.file)
    names = [column.title for column in _LAYOUT.columns]
    yield Part("", _LAYOUT, list(_error_rows(numbers)), remarks=list(_remarks(numbers)), prose=names)


def _error_rows(numbers: "Numbers") -> Iterator[Cells]:
    """Yield each measured value with its errors under the old and the new policy; the worst parameters come last."""
    old, new = numbers.errors
    yield "outputs", _error(old.output), _error(new.output)
    yield "gradient", _error(old.gradient), _error(new.gradient)
    for name in _worst(old, new):
        yield f"  {name}", _error(old.parameters[name]), _error(new.parameters[name])
    if old.scale is not None or new.scale is not None:
        yield "loss scale", _scale(old.scale), _scale(new.scale)


def _remarks(numbers: "Numbers") -> Iterator[str]:
    """Yield where the policies first diverge, and warnings about the numbers."""
    where = numbers.where
    if where is None:
        yield "no op differs by more than rounding"
    elif isinstance(where, str):
        yield f"the first divergence is {where}"
    else:
        yield f"they first diverge at {_place(where)}"
    if numbers.random:
        yield "the model draws random numbers (dropout?): the errors include their effect; model.eval() avoids that"


def _place(where: "Divergence") -> str:
    entry = where.new
    line = f" at {place(entry.source)}" if entry.source is not None else ""
    module = f" in {entry.module}" if entry.module else ""
    dtypes = where.old.dtype if where.old.dtype == entry.dtype else f"{where.old.dtype} -> {entry.dtype}"
    return f"{entry.name} ({op_name(entry)}){line}{module}: {dtypes}, relative difference {_error(where.difference)}"


def _worst(old: "Errors", new: "Errors") -> list[str]:
    """Return the parameters with the largest errors under either policy."""
    worst = {name: max(error, new.parameters[name]) for name, error in old.parameters.items()}
    return sorted(worst, key=lambda name: -worst[name])[:_NAMED]


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"


def _scale(scale: float | None) -> str:
    return "none" if scale is None else f"{scale:g}"
