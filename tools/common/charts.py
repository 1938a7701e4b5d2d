"""Charts by matplotlib, which the extra ``fxamp[charts]`` installs."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What to do where matplotlib is missing.
MISSING = "matplotlib is not installed; pip install matplotlib, or 'fxamp[charts]'"

#: Inches of a chart.
_WIDTH, _HEIGHT = 7.2, 4.2


@dataclass(frozen=True)
class Curve:
    """One line: its name in the legend, one value per step (from step 1), its colour, its thickness in points.

    A value that is not finite leaves a gap.
    """

    name: str
    values: Sequence[float]
    colour: str
    thickness: float = 2.0


@dataclass(frozen=True)
class Point:
    """One mark: its name beside it, its position, the range of its vertical position, its colour."""

    name: str
    x: float
    y: float
    range: tuple[float, float]
    colour: str


def available() -> bool:
    """Whether charts can be drawn here."""
    return find_spec("matplotlib") is not None


def line_chart(title: str, curves: Sequence[Curve], x_label: str, y_label: str) -> str:
    """Return an SVG document; later curves are drawn on top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        steps = range(1, len(curve.values) + 1)
        axes.plot(steps, curve.values, label=curve.name, color=curve.colour, linewidth=curve.thickness)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return svg(figure)


def point_chart(title: str, points: Sequence[Point], x_label: str, y_label: str) -> str:
    """Return an SVG document with at least one point; both axes begin at zero."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axes = figure.subplots()
    for point in points:
        low, high = point.range
        axes.plot([point.x, point.x], [low, high], color=point.colour, linewidth=1)
        axes.plot([point.x], [point.y], "o", color=point.colour)
        axes.annotate(point.name, (point.x, point.y), xytext=(7, 4), textcoords="offset points", fontsize=8)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.set_xlim(0, 1.3 * max(point.x for point in points))  # with room for the names
    axes.set_ylim(0, 1.1 * max(max(point.y, *point.range) for point in points))
    axes.grid(alpha=0.3)
    return svg(figure)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return for each value the mean of it and of the values before it, ``window`` in all or as many as there are."""
    parts = (values[max(0, at - window + 1) : at + 1] for at in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def svg(figure: "Figure") -> str:
    """Return ``figure`` as an SVG document."""
    from matplotlib import rc_context

    written = io.StringIO()
    # Texts stay texts, and the same numbers give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fxamp"}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()
