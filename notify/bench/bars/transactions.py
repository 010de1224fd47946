"""`make bench`: every main bar in one run, medians of repeated runs with their range, and a verdict.

Timings are noisy on a shared machine; a bar missed by less than the range is marked so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from notify.bench import pile
from notify.bench.transactions import Plan, run

PILE_MB = 400
READY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure of a plan's result, and its bar: a lower bound (`at_least`) or an upper bound."""

    name: str
    plan: Plan
    figure: str
    bar: float
    at_least: bool = True

    def is_met(self, value: float) -> bool:
        return value >= self.bar if self.at_least else value <= self.bar


def bars(seconds: float) -> list[Bar]:
    def plan(**options: Any) -> Plan:
        return Plan(seconds=seconds, **options)

    rate = "transactions_per_second"
    paced = plan(clients=64, rate=2000, consume=True)
    return [
        Bar("1,024 callers", plan(clients=1024), rate, 60_000),
        Bar(
            "1,024 callers, delivered and acknowledged",
            plan(clients=1024, consume=True),
            "delivered_per_second",
            45_000,
        ),
        Bar("128 callers", plan(clients=128), rate, 40_000),
        Bar("1 caller, p50 ms", plan(clients=1), "p50_ms", 1.0, at_least=False),
        Bar("one request a half, 128 callers", plan(clients=128, batching=False), rate, 12_000),
        Bar("2,000/s, commit to handler, p50 ms", paced, "handler_p50_ms", 5.0, at_least=False),
        Bar("2,000/s, commit to handler, p99 ms", paced, "handler_p99_ms", 20.0, at_least=False),
    ]


def measure(bar: Bar, repeats: int, tell: Callable[[str], None]) -> bool:
    """Measure the median of repeated runs; False if the bar is missed, or a message was lost or doubled."""
    results = [run(bar.plan) for _ in range(repeats)]
    values = [float(r[bar.figure]) for r in results]
    median = statistics.median(values)
    wrong = sum(r["lost"] + r["duplicated"] for r in results)
    met = bar.is_met(median) and not wrong
    sign = "≥" if bar.at_least else "≤"
    verdict = "met" if met else "MISSED"
    tell(
        f"{bar.name}: {median:,.1f} ({min(values):,.1f} to {max(values):,.1f}), bar {sign} {bar.bar:,g}: {verdict}"
        + (f", {wrong} LOST OR DOUBLED" if wrong else "")
    )
    return met


def measure_pile(messages: int, tell: Callable[[str], None]) -> bool:
    """Measure memory with a backlog, and the start after kill -9; False if a bar is missed."""
    memory = pile.measure(messages)
    ready = statistics.median(memory.ready_seconds)
    met = memory.anonymous_mb <= PILE_MB and ready <= READY_SECONDS
    tell(
        f"{messages:,} undelivered messages: RssAnon {memory.anonymous_mb:,.0f} MB, bar ≤ {PILE_MB}; "
        f"ready after kill -9 in {ready:.2f} s ({min(memory.ready_seconds):.2f} to {max(memory.ready_seconds):.2f}), "
        f"bar ≤ {READY_SECONDS:g}: {'met' if met else 'MISSED'}"
    )
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--pile", type=int, default=5_000_000, help="undelivered messages; 0 leaves that out")
    options = parser.parse_args()

    def tell(line: str) -> None:
        print(line, flush=True)

    missed = [b.name for b in bars(options.seconds) if not measure(b, options.repeats, tell)]
    if options.pile and not measure_pile(options.pile, tell):
        missed.append("pile")
    print(f"VERDICT: {'FAIL ' + '; '.join(missed) if missed else 'PASS every bar is met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
