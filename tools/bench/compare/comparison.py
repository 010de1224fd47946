"""The runs of two sides by turns, and what they say together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tools.bench.compare import ratios
from tools.bench.compare.bench_run import RunFailed
from tools.bench.compare.ratios import Verdict

BASE, HEAD = "base", "head"


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its pair (from 1), its side, and its report."""

    pair: int
    side: str
    result: dict[str, Any]

    @property
    def figures(self) -> dict[str, float]:
        return ratios.figures(self.result)


@dataclass(slots=True)
class Comparison:
    """The runs of a comparison so far."""

    base: str
    head: str
    bench: str
    pairs: int
    runs: list[Run] = field(default_factory=list)

    def spreads(self) -> dict[str, ratios.Spread]:
        """The spread of each figure over the complete pairs."""
        sides = {(run.pair, run.side): run.figures for run in self.runs}
        numbers = [pair for pair, side in sides if side == HEAD and (pair, BASE) in sides]
        return ratios.spreads([(sides[n, BASE], sides[n, HEAD]) for n in numbers]) if numbers else {}

    def as_json(self, verdict: Verdict) -> dict[str, Any]:
        measured = {name: spread.as_json() for name, spread in self.spreads().items()}
        runs = [
            {"pair": run.pair, "side": run.side, ratios.CPU + "_us": run.figures.get(ratios.CPU), **run.result}
            for run in self.runs
        ]
        return {
            "base": self.base,
            "head": self.head,
            "bench": self.bench,
            "pairs": self.pairs,
            **dict.fromkeys((ratios.RATE, ratios.CPU, ratios.CLIENT_CPU, *ratios.LATENCIES)),
            **measured,
            "runs": runs,
            "verdict": str(verdict),
        }

    def table(self) -> str:
        """A line for each figure: the ratios, and the medians of both sides."""
        lines = [f"{'head by base':18} {'median':>8} {'min':>8} {'quartiles':>16} {'max':>8} {'base':>12} {'head':>12}"]
        for name, spread in self.spreads().items():
            low, high = spread.quartiles
            medians = [
                statistics.median(run.figures[name] for run in self.runs if run.side == side) for side in (BASE, HEAD)
            ]
            lines.append(
                f"{ratios.label(name):18} {spread.median:8.3f} {spread.minimum:8.3f} {low:7.3f} to {high:.3f}"
                f" {spread.maximum:8.3f} {medians[0]:12,.6g} {medians[1]:12,.6g}"
            )
        return "\n".join(lines)


def order(pairs: int) -> Iterator[tuple[int, str]]:
    """(pair, side) of each run: the side that ran second runs first in the next pair, as the machine changes with time.

    Pair 0 is the warm-up.
    """
    yield from ((0, BASE), (0, HEAD))
    for pair in range(1, pairs + 1):
        yield from ((pair, side) for side in ((BASE, HEAD) if pair % 2 else (HEAD, BASE)))


def measure(comparison: Comparison, run: Callable[[str], dict[str, Any]], tell: Callable[[str], None]) -> None:
    """Make every run of the comparison, by turns. Raises RunFailed; earlier runs are kept."""
    for pair, side in order(comparison.pairs):
        name = f"pair {pair} of {comparison.pairs}, {side}" if pair else f"warm-up, {side}"
        try:
            done = Run(pair, side, run(side))
            tell(f"{name}: {_in_words(done.figures)}")
        except ratios.NoRate as error:
            raise RunFailed(f"{name}: {error}") from None
        except RunFailed as error:
            raise type(error)(f"{name}: {error}") from None
        if pair:
            comparison.runs.append(done)


def _in_words(figures: dict[str, float]) -> str:
    units = {ratios.CPU: " µs"} | dict.fromkeys(ratios.LATENCIES, " ms")
    return ", ".join(f"{ratios.label(name)} {value:,.6g}{units.get(name, '')}" for name, value in figures.items())
