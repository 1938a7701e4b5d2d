"""The priced policies as a picture: time over memory, the error as colour."""

from typing import Any

from fxamp.tools.common.charts import svg
from fxamp.tools.policy.fit.choice import PricedPolicies

#: Policies that take this many times the base's time are left out: all others would lie on one line.
_LONGEST = 2.0

#: Inches of the chart, and the area of a mark in square points.
_SIZE, _MARK = (7.6, 4.6), 64


def frontier_chart(title: str, choice: PricedPolicies) -> str:
    """Return an SVG document: squares are shipped policies, circles are combinations; a line joins the frontier.

    A dashed line is the limit of memory, and a ring marks the answer. What takes twice the base's time is left out.
    """
    from matplotlib.figure import Figure

    base = choice.base
    near = {name: pair for name, pair in choice.priced.items() if pair[1].milliseconds < _LONGEST * base.milliseconds}
    unit, word = (2**30, "GiB") if base.memory > 2**30 else (2**20, "MiB")
    places = {name: (price.memory / unit, price.milliseconds / base.milliseconds) for name, (_, price) in near.items()}
    errors = {name: price.error / (base.error or 1.0) for name, (_, price) in near.items()}
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.plot(
        *zip(*sorted(places[name] for name in choice.frontier() if name in near), strict=True), color="0.7", zorder=1
    )
    colours: Any = {
        "cmap": "viridis_r",
        "vmin": min(errors.values()),
        "vmax": max(errors.values()),
        "edgecolors": "0.1",
    }
    for mark, label, combined in (("s", "shipped", False), ("o", "combination", True)):
        names = [name for name, (candidate, _) in near.items() if candidate.combined is combined]
        if names:
            across, up = zip(*(places[name] for name in names), strict=True)
            shades = [errors[name] for name in names]
            marks = axes.scatter(across, up, c=shades, marker=mark, s=_MARK, label=label, **colours)
    figure.colorbar(marks, ax=axes, label="error of the gradient, over the base's")
    stem = next(iter(choice.priced))
    for name, place in places.items():
        axes.annotate(name.removeprefix(f"{stem}-"), place, xytext=(7, 5), textcoords="offset points", fontsize=8)
    if choice.best is not None and choice.best[0].name in places:
        x, y = places[choice.best[0].name]
        axes.scatter([x], [y], s=4 * _MARK, facecolors="none", edgecolors="crimson", linewidths=1.5)
    if choice.limits.memory / unit <= 1.1 * max(across for across, _ in places.values()):
        axes.axvline(choice.limits.memory / unit, color="crimson", linestyle="--", linewidth=1, label="limit")
    axes.set(title=title, xlabel=f"memory of a step, {word}", ylabel="estimated time, over the base's")
    axes.margins(x=0.12, y=0.1)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)
