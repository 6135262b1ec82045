"""A page with a picture of each column's skew: the share of lookups over the share of ids."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from hotbed.data.statistics import ColumnStatistics
from hotbed.text import printable

__all__ = ["page_of"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 260, 170, 40, 26, 12
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
  color: #222; background: #fff; }
main { display: flex; flex-wrap: wrap; gap: 1.2rem; }
figure { margin: 0; } figcaption { font-weight: 600; } small { color: #666; font-weight: 400; }
svg text { font-size: 10px; fill: #666; } .grid { stroke: #ddd; }
.even { stroke: #bbb; stroke-dasharray: 3 3; }
.skew { fill: none; stroke: #d2491e; stroke-width: 2; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818; } .grid { stroke: #333; }
  .even { stroke: #666; } small, svg text { color: #999; fill: #999; } }
"""


def page_of(columns: Sequence[ColumnStatistics], source: str) -> str:
    """Return an HTML page that needs no other file. The axis of ids is logarithmic.

    Args:
        columns: of ids.
        source: the data, for the heading.
    """
    figures = "\n".join(map(_figure, columns)) or "<p>No column has ids.</p>"
    rows = max((column.rows for column in columns), default=0)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Skew of {_text(source)}</title>
<style>{_STYLE}</style>
<h1>Skew of {_text(source)}</h1>
<p>Share of lookups that the most frequent ids get, over their share of all ids, in {rows:,} rows. The higher
the curve on the left, the more lookups a small fast tier serves. Dashed: all ids are used alike.</p>
<main>
{figures}
</main>
</html>
"""


def _figure(column: ColumnStatistics) -> str:
    least = min(math.log10(max(column.skew.curve[0][0], 1e-9)), -1.0) if column.skew.curve else -1.0
    decades = range(math.ceil(least), 1)

    def x(share: float) -> float:
        return _LEFT + _WIDTH * (1 - math.log10(max(share, 1e-9)) / least)

    def y(share: float) -> float:
        return _TOP + _HEIGHT * (1 - share)

    def line(points: Sequence[tuple[float, float]], style: str) -> str:
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        return f'<polyline class="{style}" fill="none" points="{path}"/>'

    even = [(10 ** (least * (1 - i / 40)), 10 ** (least * (1 - i / 40))) for i in range(41)]
    parts = [line([(10**decade, 0.0), (10**decade, 1.0)], "grid") for decade in decades]
    parts += [line([(10**least, share), (1.0, share)], "grid") for share in (0.0, 0.5, 1.0)]
    parts += [line(even, "even"), line(column.skew.curve, "skew")]
    for decade in decades:
        label = f"{100 * 10.0**decade:g} %"
        parts.append(
            f'<text x="{x(10.0**decade):.1f}" y="{y(0) + 14:.1f}" text-anchor="middle">{label}</text>'
        )
    for share in (0.0, 0.5, 1.0):
        parts.append(
            f'<text x="{_LEFT - 4}" y="{y(share) + 3:.1f}" text-anchor="end">{share:.0%}</text>'
        )
    about = "" if column.is_exact else "about "
    first = "1 % of them get" if column.distinct >= 100 else "the first gets"
    said = f"{about}{column.distinct:,} ids; {first} {column.skew.hundredth:.0%} of lookups"
    size = f'width="{_LEFT + _WIDTH + 16}" height="{_TOP + _HEIGHT + _BOTTOM}"'
    return (
        f"<figure><figcaption>{_text(column.name)} <small>{said}</small></figcaption>"
        f'<svg role="img" aria-label="{_text(column.name)}: {said}" {size}>{"".join(parts)}</svg></figure>'
    )


def _text(name: str) -> str:
    return html.escape(printable(name))
