"""Bar charts as SVG text: one horizontal bar per name, with the range of the measurements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from fxamp.tools.common.line_chart import ticks

WIDTH = 720
_LEFT, _RIGHT, _TOP, _BOTTOM, _PITCH, _THICK = 190, 90, 56, 52, 36, 22


@dataclass(frozen=True)
class Bar:
    """A finite value of at least 0, and the ends of its range."""

    name: str
    value: float
    low: float
    high: float


def bar_chart(title: str, bars: Sequence[Bar], label: str) -> str:
    """Return an SVG document, 720 pixels wide and as high as the bars need; a line marks the value 1.

    Bars start at 0, so that their lengths can be compared. A title that is too long gets a smaller font.
    """
    marks = ticks(0.0, max([1.0, *(max(bar.value, bar.high) for bar in bars)]))
    bottom = _TOP + _PITCH * len(bars)
    height = bottom + _BOTTOM
    type_size = min(16.0, 1.7 * (WIDTH - 32) / max(len(title), 1))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="13" role="img" aria-label={quoteattr(title)}>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(16, 26, title, f'font-size="{type_size:.1f}" font-weight="bold"'),
        *(_grid(mark, marks[-1], bottom) for mark in marks),
        *(_bar(bar, row, marks[-1]) for row, bar in enumerate(bars)),
        _grid(1.0, marks[-1], bottom, "#333", named=False),
        _text((_LEFT + WIDTH - _RIGHT) / 2, height - 12, label, 'text-anchor="middle"'),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(value: float, most: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * value / most


def _grid(mark: float, most: float, bottom: int, colour: str = "#ddd", named: bool = True) -> str:
    x = _x(mark, most)
    line = f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="{colour}"/>'
    return line + (_text(x, bottom + 20, f"{mark:g}", 'text-anchor="middle"') if named else "")


def _bar(bar: Bar, row: int, most: float) -> str:
    assert math.isfinite(bar.value)
    y = _TOP + _PITCH * row + (_PITCH - _THICK) / 2
    middle = y + _THICK / 2
    ends = [_x(value, most) for value in (bar.low, bar.high)]
    return "".join(
        [
            f'<rect class="bar" x="{_LEFT}" y="{y:.1f}" width="{_x(bar.value, most) - _LEFT:.1f}" height="{_THICK}" '
            f'fill="#7aa6c2"><title>{escape(bar.name)}: {bar.value:.2f}</title></rect>',
            f'<path d="M{ends[0]:.1f} {middle:.1f}H{ends[1]:.1f}" stroke="#1d3557" stroke-width="2"/>',
            _text(_LEFT - 8, middle + 4, bar.name, 'text-anchor="end"'),
            _text(max(_x(bar.value, most), ends[1]) + 6, middle + 4, f"{bar.value:.2f}"),
        ]
    )


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="#222" {style}>{escape(text)}</text>'
