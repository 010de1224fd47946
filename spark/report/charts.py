"""Draws plots as SVG, so that a report opens anywhere, for years, without a library."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 28


@dataclass(frozen=True)
class Line:
    """One series of (instant in microseconds, value); None leaves a gap. `style` is a CSS class: s1 to s3, or
    `goal` for a line that others are compared with."""

    name: str
    points: Sequence[tuple[int, float | None]]
    style: str


def lines(
    title: str, series: Sequence[Line], show: Callable[[float], str], *, log: bool = False, most: float = math.inf
) -> str:
    """A plot over time. `show` formats a value; `log`: logarithmic scale; `most`: the upper end of the scale."""
    values = [v for line in series for _, v in line.points if v is not None and (v > 0 or not log)]
    times = [t for line in series for t, _ in line.points]
    if not values or not times:
        return f'<p class="quiet">{escape(title)}: no data.</p>'
    scale: Callable[[float], float] = (lambda v: math.log10(max(v, 1e-9))) if log else (lambda v: v)
    low, high = scale(min(values)), scale(max(values))
    if not log:
        low = min(low, 0.0) if high - low > high * 0.2 else low
    if high - low < 1e-9:
        low, high = low - (abs(low) * 0.05 or 0.5), min(most, high + (abs(high) * 0.05 or 0.5))
    first, last = min(times), max(times)
    span = max(1, last - first)

    def x(at: int) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (at - first) / span

    def y(value: float) -> float:
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - (scale(value) - low) / (high - low))

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
    ]
    for i in range(5):
        level = low + (high - low) * i / 4
        value = 10**level if log else level
        at = y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(show(value))}</text>')
    for i in range(5):
        moment = first + span * i // 4
        anchor = "start" if i == 0 else "end" if i == 4 else "middle"
        parts.append(f'<text x="{x(moment):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{_clock(moment, span)}</text>')
    for line in series:
        for run in _runs(line.points, log):
            if len(run) == 1:
                parts.append(f'<circle class="{line.style}" cx="{x(run[0][0]):.1f}" cy="{y(run[0][1]):.1f}" r="3"/>')
            else:
                points = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in run)
                parts.append(f'<polyline class="{line.style}" points="{points}"/>')
    parts.append("</svg>")
    legend = "".join(f'<span class="key {line.style}">{escape(line.name)}</span>' for line in series)
    return f'<figure tabindex="0"><figcaption>{escape(title)} {legend}</figcaption>{"".join(parts)}</figure>'


def _runs(points: Sequence[tuple[int, float | None]], log: bool) -> list[list[tuple[int, float]]]:
    runs: list[list[tuple[int, float]]] = [[]]
    for at, value in points:
        if value is None or (log and value <= 0):
            if runs[-1]:
                runs.append([])
        else:
            runs[-1].append((at, value))
    return [run for run in runs if run]


def _clock(us: int, span: int) -> str:
    form = "%H:%M:%S" if span < 3_600_000_000 else "%H:%M" if span < 86_400_000_000 else "%m-%d %H:%M"
    return time.strftime(form, time.gmtime(us / 1e6))
