"""Charts by matplotlib: their texts, their proportions, gaps, and the same file for the same numbers."""

from xml.etree import ElementTree as ET

import pytest

from fxamp.tools.common import charts
from fxamp.tools.common.charts import Curve, line_chart, smooth


def paths(svg: str, colour: str) -> list[str]:
    return [e.get("d", "") for e in ET.fromstring(svg).iter() if colour in e.get("style", "") and e.get("d")]


def texts(svg: str) -> list[str]:
    return [e.text for e in ET.fromstring(svg).iter() if e.text and e.text.strip()]


def test_a_curve_with_a_gap_and_a_name_that_needs_escaping() -> None:
    svg = line_chart("a < b", [Curve("x & y", [1.0, 2.0, float("nan"), 3.0, 4.0], "#123456")], "step", "loss")
    assert {"a < b", "x & y", "step", "loss"} <= set(texts(svg))
    curve = max(paths(svg, "stroke: #123456"), key=len)  # the legend has a line of that colour too
    assert curve.count("M") == 2


def test_the_same_numbers_give_the_same_file() -> None:
    charts = [line_chart("t", [Curve("a", [1.0, 2.0], "red")], "x", "y") for _ in range(2)]
    assert charts[0] == charts[1]


def test_smooth_is_the_mean_of_the_last() -> None:
    assert smooth([1.0, 2.0, 3.0, 5.0], 2) == [1.0, 1.5, 2.5, 4.0]


def test_it_is_known_whether_charts_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert charts.available()
    monkeypatch.setattr(charts, "find_spec", lambda name: None)
    assert not charts.available()
