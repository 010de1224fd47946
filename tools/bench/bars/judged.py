"""Bars: whether a figure, or its ratio to the reference, is on the right side of its bar, and how that is printed.

A timing depends on the machine and on its neighbours, so the bar of a timing is a ratio to the reference
(`tools/bench/reference.py`) that ran just before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

Tell = Callable[[str], None]
"""Prints a line."""


def judge(
    tell: Tell,
    name: str,
    figures: Sequence[float],
    bar: float,
    *,
    at_most: bool = False,
    references: Sequence[float] = (),
) -> list[str]:
    """Print the median of a figure, and whether it meets its bar; the name in a list if it does not.

    `at_most`: the bar is an upper bound. `references`: the reference's figure for each of `figures`, in the same unit;
    the bar is one of the median ratio then.
    """
    judged = list(figures)
    if references:
        judged = [figure / reference for figure, reference in zip(figures, references, strict=True)]
    ratio = statistics.median(judged)
    met = ratio <= bar if at_most else ratio >= bar
    line = f"{name}: {_shown(figures)}"
    if references:
        line += f", by the reference {_shown(judged)}"
    tell(f"{line}, bar {'≤' if at_most else '≥'} {bar:,g}: {'met' if met else 'MISSED'}")
    return [] if met else [name]


def _shown(values: Sequence[float]) -> str:
    """The median, and the range of several values."""
    spread = f" ({_rounded(min(values))} to {_rounded(max(values))})" if len(values) > 1 else ""
    return _rounded(statistics.median(values)) + spread


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
