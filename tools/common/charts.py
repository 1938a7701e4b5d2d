"""Charts by matplotlib, which the extra ``fxamp[charts]`` installs: curves of losses, bars of times."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What to do where matplotlib is missing.
MISSING = "matplotlib is not installed; pip install matplotlib, or 'fxamp[charts]'"

#: Inches of a line chart; the height of a bar chart depends on its bars.
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
class Bar:
    """A finite value of at least 0, and the ends of its range."""

    name: str
    value: float
    low: float
    high: float


def available() -> bool:
    """Whether charts can be drawn here."""
    return find_spec("matplotlib") is not None


def line_chart(title: str, curves: Sequence[Curve], x_label: str, y_label: str) -> str:
    """Return an SVG document; later curves are drawn on top."""
    figure, axes = _figure(_HEIGHT)
    for curve in curves:
        steps = range(1, len(curve.values) + 1)
        axes.plot(steps, curve.values, label=curve.name, color=curve.colour, linewidth=curve.thickness)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return _svg(figure)


def bar_chart(title: str, bars: Sequence[Bar], label: str) -> str:
    """Return an SVG document: a horizontal bar from 0 for each value, with its range; a line marks the value 1."""
    figure, axes = _figure(1.3 + 0.36 * len(bars))
    ranges = [[bar.value - bar.low for bar in bars], [bar.high - bar.value for bar in bars]]
    drawn = axes.barh(
        [bar.name for bar in bars], [bar.value for bar in bars], xerr=ranges, color="#7aa6c2", ecolor="#1d3557"
    )
    axes.bar_label(drawn, fmt="%.2f", padding=4)
    axes.axvline(1.0, color="#333333", linewidth=1)
    axes.set(xlabel=label, xmargin=0.1)
    axes.set_title(title, fontsize="medium")
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    return _svg(figure)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return for each value the mean of it and of the values before it, ``window`` in all or as many as there are."""
    parts = (values[max(0, at - window + 1) : at + 1] for at in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def _figure(height: float) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: "Figure") -> str:
    from matplotlib import rc_context

    written = io.StringIO()
    # Texts stay texts, and the same numbers give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fxamp"}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()
