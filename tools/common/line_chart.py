"""Line charts as SVG text, without a plotting library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

WIDTH, HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 56, 52


@dataclass(frozen=True)
class Curve:
    """One line: its name in the legend, one value per step (from step 1), CSS colour, and thickness in pixels."""

    name: str
    values: Sequence[float]
    colour: str
    thickness: float = 2.0


@dataclass(frozen=True)
class _Frame:
    """Converts data coordinates to pixels."""

    steps: int
    low: float
    high: float

    def x(self, step: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (step - 1) / max(self.steps - 1, 1)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (value - self.low) / (self.high - self.low)


def line_chart(title: str, curves: Sequence[Curve], x_label: str, y_label: str) -> str:
    """Return an SVG document, 720 by 420 pixels. Later curves are drawn on top; a non-finite value leaves a gap."""
    finite = [value for curve in curves for value in curve.values if math.isfinite(value)]
    marks = ticks(min(finite, default=0.0), max(finite, default=1.0))
    frame = _Frame(max((len(curve.values) for curve in curves), default=1), marks[0], marks[-1])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="13" role="img" aria-label={quoteattr(title)}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(_LEFT, 24, title, 'font-size="16" font-weight="bold"'),
        *_axes(frame, marks, x_label, y_label),
        *(_line(curve, frame) for curve in curves),
        *_legend(curves),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Return about ``about`` round numbers, 1, 2 or 5 times a power of ten apart, that enclose ``low`` to ``high``."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * about >= span)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the running mean over the last ``window`` values (fewer at the start)."""
    return [math.fsum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def _axes(frame: _Frame, marks: Sequence[float], x_label: str, y_label: str) -> list[str]:
    left, right, bottom = _LEFT, WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = [f'<path d="M{left} {_TOP}V{bottom}H{right}" fill="none" stroke="#333"/>']
    for mark in marks:
        y = frame.y(mark)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(_text(left - 8, y + 4, f"{mark:g}", 'text-anchor="end"'))
    for mark in ticks(1, frame.steps):
        if 1 <= mark <= frame.steps and mark == int(mark):
            x = frame.x(mark)
            parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="#333"/>')
            parts.append(_text(x, bottom + 20, f"{mark:g}", 'text-anchor="middle"'))
    parts.append(_text((left + right) / 2, HEIGHT - 12, x_label, 'text-anchor="middle"'))
    middle = (_TOP + bottom) / 2
    parts.append(_text(18, middle, y_label, f'text-anchor="middle" transform="rotate(-90 18 {middle:.1f})"'))
    return parts


def _line(curve: Curve, frame: _Frame) -> str:
    path, pen = [], "M"
    for step, value in enumerate(curve.values, start=1):
        if not math.isfinite(value):
            pen = "M"
            continue
        path.append(f"{pen}{frame.x(step):.1f} {frame.y(value):.1f}")
        pen = "L"
    style = f'fill="none" stroke="{curve.colour}" stroke-width="{curve.thickness:g}" stroke-linejoin="round"'
    return f'<path class="curve" d="{"".join(path)}" {style}><title>{escape(curve.name)}</title></path>'


def _legend(curves: Sequence[Curve]) -> list[str]:
    parts = []
    for row, curve in enumerate(curves):
        x, y = WIDTH - _RIGHT - 230, _TOP + 18 + 22 * row
        parts.append(f'<path d="M{x} {y}h32" stroke="{curve.colour}" stroke-width="{curve.thickness:g}"/>')
        parts.append(_text(x + 42, y + 4, curve.name))
    return parts


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="#222" {style}>{escape(text)}</text>'
