"""``--chart``: time of a step against its memory, as a picture."""

import argparse

from fxamp.errors import OptionError
from fxamp.tools.bench.train.result import Comparison, value_of
from fxamp.tools.bench.train.table import title
from fxamp.tools.common import charts
from fxamp.tools.common.charts import Point, point_chart
from fxamp.tools.common.output import require_folder, write_text

_OURS, _OTHERS = "#1d3557", "#f4a261"


def require_chart(options: argparse.Namespace) -> None:
    """Raise OptionError if ``--chart`` was given and the picture cannot be drawn or written."""
    if options.chart and not charts.available():
        raise OptionError(f"--chart: {charts.MISSING}")
    require_folder(options.chart, *options.policy, option="--chart")


def write_chart(comparison: Comparison, file: str) -> None:
    """Draw each contender: its memory across, its time upwards with the range of its starts."""
    unit, word = 1e6, "MB"
    points = []
    for contender in comparison.contenders:
        memory, ratio = value_of(contender, "memory_peak"), comparison.time_ratio(contender)
        if memory is None or ratio is None:
            continue
        ours = comparison.experiment.contenders[contender.name].compiler == "fxamp"
        low, high = min(ratio.starts), max(ratio.starts)
        colour = _OURS if ours else _OTHERS
        points.append(Point(contender.label, memory / unit, ratio.spread.median, (low, high), colour))
    base = comparison.named(comparison.baseline)
    over = base.label if base else comparison.baseline
    x_label, y_label = f"peak memory, {word}", f"time of a step, over that of {over}"
    write_text(point_chart(title(comparison).partition(",")[0], points, x_label, y_label), file)
