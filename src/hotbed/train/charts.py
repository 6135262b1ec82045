"""Charts as inline SVG, in colours of the page's style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

__all__ = ["STYLE", "Line", "bar_chart", "line_chart"]

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 42
_MOST_POINTS = 400
_MOST = 1e300
"""Beyond it values are drawn no more than infinite ones, as axes are wider than their ends."""
_LEAST = 1e-300
"""Range of an axis: what is divided by less is not exact, or infinite."""
_COLOURS = 6

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2128; --faint: #646d76; --rule: #d8dee4;
  --c0: #c2410c; --c1: #1d6fb8; --c2: #2e7d32; --c3: #8e44ad; --c4: #a16207; --c5: #0f766e; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --ink: #e3e8ee; --faint: #98a2ad;
  --rule: #333b44; --c0: #fb923c; --c1: #60a5fa; --c2: #6ee78a; --c3: #d8a4f2; --c4: #eac54f;
  --c5: #5eead4; } }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--faint); font: 12px system-ui, sans-serif; }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .ideal { stroke: var(--faint); stroke-width: 1; stroke-dasharray: 5 4; }
""" + "\n".join(
    f".s{n} {{ stroke: var(--c{n}); }} .f{n} {{ fill: var(--c{n}); background: var(--c{n}); }}"
    for n in range(_COLOURS)
)


class Line(NamedTuple):
    """One line of a chart; points that are infinite or NaN are left out, and the line is broken there."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class _Axis(NamedTuple):
    """A range of values, and the pixels at its ends."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 2)

    def ticks(self, count: int = 5) -> list[float]:
        """Return round values in the range."""
        rough = (self.high - self.low) / count
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


def line_chart(
    title: str, lines: Sequence[Line], x_name: str, *, marks: bool = False, diagonal: bool = False
) -> str:
    """Return the SVG of lines over one x axis, with a legend; a sentence where there are no points.

    Args:
        marks: draw the points, too.
        diagonal: draw y = x, on axes of the same range.
    """
    lines = [Line(line.name, *_thinned(line.x, line.y)) for line in lines]
    points = [
        (x, y) for line in lines for x, y in zip(line.x, line.y, strict=True) if _finite(x, y)
    ]
    if not points:
        return "<p class=none>Nothing to draw yet.</p>"
    xs, ys = ([*each] for each in zip(*points, strict=True))
    if diagonal:
        xs = ys = [*xs, *ys]
    across = _Axis(*_range(xs), _LEFT, _WIDTH - _RIGHT)
    up = _Axis(*_range(ys), _HEIGHT - _BOTTOM, _TOP)
    drawn = [*_grid(across, up, x_name)]
    if diagonal:
        drawn.append(
            f'<line class="ideal" x1="{across.begin}" y1="{up.begin}" x2="{across.end}" y2="{up.end}"/>'
        )
    for n, line in enumerate(lines):
        colour = n % _COLOURS
        drawn.append(f'<path class="line s{colour}" d="{_path(line, across, up)}"/>')
        if marks or len(line.x) < 3:
            drawn += [
                f'<circle class="f{colour}" r="3.5" cx="{across.at(x)}" cy="{up.at(y)}"/>'
                for x, y in zip(line.x, line.y, strict=True)
                if _finite(x, y)
            ]
    return _svg(title, _HEIGHT, drawn) + (_legend(lines) if len(lines) > 1 else "")


def bar_chart(title: str, bars: Mapping[str, tuple[float, str]]) -> str:
    """Return the SVG of horizontal bars: name → (length, text behind the bar)."""
    most = max((length for length, _ in bars.values()), default=0.0)
    if not bars:
        return "<p class=none>Nothing to draw yet.</p>"
    drawn = []
    for n, (name, (length, text)) in enumerate(bars.items()):
        y, width = 8 + 24 * n, round(300 * length / most, 2) if most else 0
        drawn.append(f'<text x="130" y="{y + 13}" text-anchor="end">{_text(name, 20)}</text>')
        drawn.append(f'<rect class="f0" x="138" y="{y}" width="{width}" height="18" rx="2"/>')
        drawn.append(f'<text x="{144 + width}" y="{y + 13}">{_text(text, 40)}</text>')
    return _svg(title, 16 + 24 * len(bars), drawn)


def _svg(title: str, height: int, drawn: Sequence[str]) -> str:
    name = html.escape(title)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{name}"><title>{name}</title>'
        + "".join(drawn)
        + "</svg>"
    )


def _grid(across: _Axis, up: _Axis, x_name: str) -> Iterator[str]:
    for value in up.ticks():
        y = up.at(value)
        yield f'<line class="grid" x1="{across.begin}" y1="{y}" x2="{across.end}" y2="{y}"/>'
        yield f'<text x="{across.begin - 8}" y="{y + 4}" text-anchor="end">{_short(value)}</text>'
    bottom = up.begin
    yield f'<line class="grid" x1="{across.begin}" y1="{bottom}" x2="{across.end}" y2="{bottom}"/>'
    for value in across.ticks():
        x = across.at(value)
        yield f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{_short(value)}</text>'
    middle = (across.begin + across.end) / 2
    yield f'<text x="{middle}" y="{bottom + 35}" text-anchor="middle">{html.escape(x_name)}</text>'


def _legend(lines: Sequence[Line]) -> str:
    shown = (
        f'<span><i class="f{n % _COLOURS}"></i>{html.escape(line.name)}</span>'
        for n, line in enumerate(lines)
    )
    return f'<p class="legend">{"".join(shown)}</p>'


def _path(line: Line, across: _Axis, up: _Axis) -> str:
    parts, pen = [], "M"
    for x, y in zip(line.x, line.y, strict=True):
        if _finite(x, y):
            parts.append(f"{pen}{across.at(x)} {up.at(y)}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def _thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return means of neighbours, so that there are no more points than can be seen."""
    size = -(-len(x) // _MOST_POINTS) or 1
    cuts = range(0, len(x), size)
    return [_mean(x[cut : cut + size]) for cut in cuts], [
        _mean(y[cut : cut + size]) for cut in cuts
    ]


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(value / len(finite) for value in finite) if finite else math.nan


def _finite(x: float, y: float) -> bool:
    return abs(x) < _MOST and abs(y) < _MOST


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis; those of equal values lie around them."""
    low, high = min(values), max(values)
    if high - low <= max(1e-12 * max(abs(low), abs(high)), _LEAST):
        margin = abs(high) / 10 if abs(high) > 10 * _LEAST else 1.0
        return low - margin, high + margin
    return low, high


def _short(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}" if abs(value) > 1e-12 else "0"


def _text(text: str, most: int) -> str:
    return html.escape(text if len(text) <= most else f"{text[: most - 1]}…")
