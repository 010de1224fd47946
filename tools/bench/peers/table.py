"""The comparison as a table in Markdown: medians of the rounds, and ratios with their range."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from tools.bench.compare.ratios import Spread
from tools.bench.peers.comparison import NOTIFY, Comparison, Row, rows


def table(comparison: Comparison, versions: Mapping[str, str]) -> str:
    """A line for each figure: Notify's, and of each peer its own and the ratio of ours to it."""
    peers = comparison.peers()
    head = ["", "Notify"]
    for peer in peers:
        head += [" ".join(filter(None, (peer.title, versions.get(peer.name)))), "ratio"]
    lines = [_line(head), "|---" * len(head) + "|"]
    for row in rows(comparison.work):
        cells = [row.label, _value(comparison, NOTIFY, row.ours, row)]
        for peer in peers:
            cells += [_value(comparison, peer.name, row.theirs, row), _ratio(comparison.spread(peer.name, row))]
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _value(comparison: Comparison, system: str, figure: str, row: Row) -> str:
    values = comparison.values(system, figure)
    if not values:
        return "not measured"
    return f"{statistics.median(values):,.2f}" if row.is_latency else f"{statistics.median(values):,.0f}"


def _ratio(spread: Spread | None) -> str:
    if spread is None:
        return ""
    digits = 2 if spread.maximum < 10 else 1
    if spread.maximum < 0.1:
        digits = 3
    if spread.minimum == spread.maximum:
        return f"{spread.median:,.{digits}f}"
    return f"{spread.median:,.{digits}f} ({spread.minimum:,.{digits}f} to {spread.maximum:,.{digits}f})"
