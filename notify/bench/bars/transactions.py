"""`make bench`: every main bar in one run, medians of repeated runs with their range, and a verdict."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from notify.bench import pile
from notify.bench.bars.judged import Tell, judge
from notify.bench.reference import Reference
from notify.bench.reference import measure as measure_reference
from notify.bench.transactions import Plan, run
from notify.ending import exiting_when_told

PILE_MB = 400
READY = 1000.0
"""The start after kill -9 may take so many times as long as a transaction of the reference with 1,024 callers."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure of a plan's result, and the bar of its ratio to a figure of the reference with so many callers."""

    name: str
    plan: Plan
    figure: str
    bar: float
    reference: Callable[[Reference], float]
    reference_callers: int
    at_most: bool = False


def bars(seconds: float) -> list[Bar]:
    def rate(name: str, figure: str, bar: float, **options: Any) -> Bar:
        plan = Plan(seconds=seconds, **options)
        return Bar(name, plan, figure, bar, lambda r: r.transactions_per_second, plan.clients)

    def latency(name: str, figure: str, bar: float, **options: Any) -> Bar:
        plan = Plan(seconds=seconds, **options)
        return Bar(name, plan, figure, bar, lambda r: r.p50_ms, 1, at_most=True)

    recorded = "transactions_per_second"
    paced = {"clients": 64, "rate": 2000, "consume": True}
    return [
        rate("1,024 callers, transactions/s", recorded, 0.15, clients=1024),
        rate("1,024 callers, delivered and acknowledged/s", "delivered_per_second", 0.11, clients=1024, consume=True),
        rate("128 callers, transactions/s", recorded, 0.18, clients=128),
        latency("1 caller, p50 in ms", "p50_ms", 3.0, clients=1),
        rate("one request a half, 128 callers, transactions/s", recorded, 0.06, clients=128, batching=False),
        latency("2,000/s, commit to handler, p50 in ms", "handler_p50_ms", 1.5, **paced),
        latency("2,000/s, commit to handler, p99 in ms", "handler_p99_ms", 8.0, **paced),
    ]


def measure(bar: Bar, repeats: int, tell: Tell) -> list[str]:
    """Judge repeated runs; names of what is missed, and of runs in which a message was lost or doubled."""
    figures: list[float] = []
    references: list[float] = []
    wrong = 0
    for _ in range(repeats):
        references.append(bar.reference(measure_reference(bar.reference_callers)))
        result = run(bar.plan)
        figures.append(float(result[bar.figure]))
        wrong += result["lost"] + result["duplicated"]
    missed = judge(tell, bar.name, figures, bar.bar, at_most=bar.at_most, references=references)
    return missed + [f"{bar.name}: {wrong} lost or doubled"] * bool(wrong)


def measure_pile(messages: int, tell: Tell) -> list[str]:
    """Measure memory with a backlog, and the start after kill -9; names of what is missed."""
    seconds = measure_reference(pile.CALLERS).p50_ms / 1000
    memory = pile.measure(messages)
    missed = judge(
        tell, f"{messages:,} undelivered messages, RssAnon in MB", [memory.anonymous_mb], PILE_MB, at_most=True
    )
    ready = [statistics.median(memory.ready_seconds)]
    return missed + judge(tell, "ready after kill -9, in s", ready, READY, at_most=True, references=[seconds])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--pile", type=int, default=5_000_000, help="undelivered messages; 0 leaves that out")
    options = parser.parse_args()

    def tell(line: str) -> None:
        print(line, flush=True)

    missed = [name for bar in bars(options.seconds) for name in measure(bar, options.repeats, tell)]
    if options.pile:
        missed += measure_pile(options.pile, tell)
    print(f"VERDICT: {'FAIL ' + '; '.join(missed) if missed else 'PASS every bar is met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    with exiting_when_told():
        sys.exit(main())
