"""`make bench-queue`: the bars of the queue in one run: topics, fan-out, a stopped group, order, delayed messages."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from notify.runtime.signals import exit_on_signal
from tools.bench import delayed, delivery, slow_group, topics
from tools.bench.bars.judged import Tell, judge
from tools.bench.reference import measure as measure_reference

CALLERS = 1024
"""The reference of deliveries and of delayed messages has so many callers."""


def measure_topics(tell: Tell, runs: int) -> list[str]:
    figures = topics.run(runs=runs)
    tell(f"topics: {figures}")
    missed = judge(tell, "10,000 topics against 16", [figures["ratio_10000_to_16"]], 0.9)
    missed += judge(tell, "100,000 topics against 16", [figures["ratio_100000_to_16"]], 0.75)
    missed += judge(tell, "bytes an idle topic", [figures["bytes_per_idle_topic"]], 600, at_most=True)
    return missed + ["topics lost or doubled"] * bool(figures["lost"] or figures["duplicated"])


def measure_delivery(tell: Tell, runs: int) -> list[str]:
    missed: list[str] = []
    kinds: dict[str, tuple[dict[str, Any], float]] = {
        "15 groups over one topic, deliveries/s": ({}, 0.7),
        "ordered, 10,000 keys, messages/s": ({"groups": 1, "mode": "ordered", "keys": 10_000}, 0.4),
    }
    for name, (options, limit) in kinds.items():
        references, results = [], []
        for _ in range(runs):
            references.append(measure_reference(CALLERS).transactions_per_second)
            results.append(delivery.run(**options))
        rates = [r["deliveries_per_second"] for r in results]
        missed += judge(tell, name, rates, limit, references=references)
        missed += [f"{name}: lost or doubled"] * any(r["lost"] or r["duplicated"] for r in results)
    return missed


def measure_slow_group(tell: Tell, runs: int) -> list[str]:
    figures = slow_group.run(runs=runs)
    tell(f"one of 15 groups stopped: {figures}")
    missed = judge(tell, "the other 14 with one of 15 stopped", [figures["ratio_others"]], 0.95)
    return missed + judge(tell, "producers with one of 15 stopped", [figures["ratio_producers"]], 0.95)


def measure_delayed(tell: Tell, _: int) -> list[str]:
    missed = []
    for kills in (0, 2):
        seconds = measure_reference(CALLERS).p50_ms / 1000
        try:
            came, words = delayed.run(1_000_000, 60, 30, kills)
        except AssertionError as error:
            tell(f"delayed: BROKEN {error}")
            missed.append(f"delayed messages with {kills} kills")
            continue
        tell(words)
        if not came.was_filled_in_time:
            missed.append("delayed messages: filling took longer than the lead")
        elif not kills:
            missed += judge(tell, "p99 lateness in s", [came.p99], 60, at_most=True, references=[seconds])
    return missed


PARTS = {
    "topics": measure_topics,
    "delivery": measure_delivery,
    "slow-group": measure_slow_group,
    "delayed": measure_delayed,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--part", choices=PARTS, action="append")
    options = parser.parse_args()

    def tell(line: str) -> None:
        print(line, flush=True)

    missed = [name for part in options.part or PARTS for name in PARTS[part](tell, options.runs)]
    print(f"VERDICT: {'FAIL ' + '; '.join(missed) if missed else 'PASS every bar is met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    with exit_on_signal():
        sys.exit(main())
