"""The comparison as a bar chart in SVG: how many times a peer's figure Notify's is, on a logarithmic axis.

The inverse of a latency is drawn, so that a longer bar is better for Notify in every line. A thin line over a bar shows
the range of the rounds.
"""

from __future__ import annotations

import math
from html import escape

from tools.bench.compare.ratios import Spread
from tools.bench.peers.comparison import Comparison, Row, rows

LEFT, WIDTH, RIGHT, TOP = 430, 520, 90, 56
BAR, GAP = 14, 12
COLOURS = ("#2f6f9f", "#c0562f", "#5b8c3a")
INK, FAINT = "#333333", "#cccccc"


def chart(comparison: Comparison) -> str:
    """The picture as text. Lines without a ratio say so."""
    peers = comparison.peers()
    compared = [
        (row, [better(comparison.spread(peer.name, row), row) for peer in peers]) for row in rows(comparison.work)
    ]
    low, high = _decades([spread for _, spreads in compared for spread in spreads if spread])
    height = TOP + len(compared) * (len(peers) * BAR + GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" '
        f'font-family="sans-serif" font-size="12" fill="{INK}">',
        "<title>Notify beside its peers: how many times theirs</title>",
        *_axis(low, high, height),
        *_legend([peer.title for peer in peers]),
    ]
    y = TOP
    for row, spreads in compared:
        middle = y + len(peers) * BAR / 2 + 4
        label = row.label + (", inverse" if row.is_latency else "")
        parts.append(f'<text x="{LEFT - 10}" y="{middle:g}" text-anchor="end">{escape(label)}</text>')
        for colour, spread in zip(COLOURS, spreads, strict=False):
            parts += _bar(y, colour, spread, low, high)
            y += BAR
        y += GAP
    return "\n".join([*parts, "</svg>", ""])


def better(spread: Spread | None, row: Row) -> Spread | None:
    """The ratios so that more is better: those of a latency are inverted."""
    if spread is None or not row.is_latency:
        return spread
    low, high = spread.quartiles
    return Spread(1 / spread.median, 1 / spread.maximum, (1 / high, 1 / low), 1 / spread.minimum)


def _decades(spreads: list[Spread]) -> tuple[int, int]:
    """The powers of ten that the axis begins and ends at; it always has 1 and 10."""
    low = min([0, *(math.floor(math.log10(spread.minimum)) for spread in spreads)])
    high = max([1, *(math.ceil(math.log10(spread.maximum)) for spread in spreads)])
    return low, high


def _x(value: float, low: int, high: int) -> float:
    return LEFT + WIDTH * (math.log10(value) - low) / (high - low)


def _axis(low: int, high: int, height: int) -> list[str]:
    parts = []
    for power in range(low, high + 1):
        x, value = _x(10**power, low, high), f"{10.0**power:g}"
        line = INK if power == 0 else FAINT
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{height - 22}" stroke="{line}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">{value}</text>')
    return parts


def _legend(titles: list[str]) -> list[str]:
    parts, x = ['<text x="10" y="22" font-weight="bold">Notify by …</text>'], LEFT
    for colour, title in zip(COLOURS, titles, strict=False):
        parts.append(f'<rect x="{x}" y="12" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="22">{escape(title)}</text>')
        x += 170
    return parts


def _bar(y: int, colour: str, spread: Spread | None, low: int, high: int) -> list[str]:
    base = y + BAR - 4
    if spread is None:
        return [f'<text x="{_x(1, low, high) + 4:.1f}" y="{base}" fill="{colour}">not measured</text>']
    one, end = _x(1, low, high), _x(spread.median, low, high)
    least, most = _x(spread.minimum, low, high), _x(spread.maximum, low, high)
    y_middle = y + BAR / 2 - 1
    return [
        f'<rect x="{min(one, end):.1f}" y="{y}" width="{abs(end - one):.1f}" height="{BAR - 2}" fill="{colour}"/>',
        f'<line x1="{least:.1f}" y1="{y_middle:g}" x2="{most:.1f}" y2="{y_middle:g}" stroke="{INK}"/>',
        f'<text x="{max(one, end, most) + 6:.1f}" y="{base}">{spread.median:.3g}</text>',
    ]
