"""The policies that were measured, as a picture: time over memory, the error as colour."""

from typing import Any

from fxamp.tools.common.charts import svg
from fxamp.tools.policy.fit.choice import Limits
from fxamp.tools.policy.fit.search import Candidate, Search

#: Policies that take this many times the base's time are left out: all others would be on one line.
_LONGEST = 2.0

#: Inches of the chart, and the side of a mark in points.
_SIZE, _MARK = (7.6, 4.6), 64


def frontier_chart(title: str, search: Search, best: Candidate | None, limits: Limits) -> str:
    """Return an SVG document: squares are shipped policies, circles fitted ones; a line joins the frontier's.

    A dashed line is the limit of memory, a ring is around ``best``. What takes twice the base's time is left out.
    """
    from matplotlib.figure import Figure

    base = search.base
    near = [one for one in search.candidates.values() if one.price.milliseconds < _LONGEST * base.milliseconds]
    frontier = [one for one in search.frontier() if one in near]
    candidates = [one for one in near if not one.options or one is best or one in frontier]
    unit, word = (2**30, "GiB") if base.memory > 2**30 else (2**20, "MiB")
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()

    def place(one: Candidate) -> tuple[float, float]:
        return one.price.memory / unit, one.price.milliseconds / base.milliseconds

    front = sorted(place(one) for one in frontier)
    axes.plot(*zip(*front, strict=True), color="0.7", linewidth=1.2, zorder=1)
    errors = [one.price.error / (base.error or 1.0) for one in candidates]
    colours: Any = {"cmap": "viridis_r", "vmin": min(errors), "vmax": max(errors), "edgecolors": "0.1"}
    marks = None
    for mark, fitted in (("s", False), ("o", True)):
        some = [
            (place(one), error) for one, error in zip(candidates, errors, strict=True) if bool(one.options) is fitted
        ]
        if some:
            points, shades = zip(*some, strict=True)
            label = "fitted" if fitted else "shipped"
            across, up = zip(*points, strict=True)
            marks = axes.scatter(across, up, c=shades, marker=mark, s=_MARK, label=label, **colours)
    for one in candidates:
        words = "" if one.options and one is not best else one.name.removeprefix(f"{search.pricing.base.name}-")
        axes.annotate(words, place(one), xytext=(7, 5), textcoords="offset points", fontsize=8)
    if best is not None:
        x, y = place(best)
        axes.scatter([x], [y], s=4 * _MARK, facecolors="none", edgecolors="crimson", linewidths=1.5)
    if limits.memory / unit <= 1.1 * max(place(one)[0] for one in candidates):
        axes.axvline(limits.memory / unit, color="crimson", linestyle="--", linewidth=1, label="limit")
    if marks is not None:
        figure.colorbar(marks, ax=axes, label="error of the gradient, over the base's")
    axes.set(title=title, xlabel=f"memory of a step, {word}", ylabel="estimated time, over the base's")
    axes.margins(x=0.12, y=0.1)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)
