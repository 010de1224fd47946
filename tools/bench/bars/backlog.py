"""`make bench-backlog MESSAGES=…`: the bars of a backlog of messages, and a verdict."""

from __future__ import annotations

import argparse
import json
import sys

from notify.runtime.signals import exit_on_signal
from tools.bench.backlog import run
from tools.bench.bars.judged import judge

BARS = {
    "ratio_to_empty": (0.95, False),
    "resident_mb": (600, True),
    "producers_beside_drain": (0.7, False),
    "head_latency_ratio": (2, True),
}
"""Each figure's bar, and whether the bar is an upper bound."""
DRAIN, READY = 0.45, 1600.0
"""Bars of the drain's rate by the reference's, and of the start after kill -9 by a transaction of the reference."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=20_000_000)
    parser.add_argument("--body", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    figures = run(messages=options.messages, body=options.body, runs=options.runs, seconds=options.seconds)
    print(json.dumps(figures), flush=True)
    missed = (
        [f"{figures['lost']} lost, {figures['duplicated']} doubled"] if figures["lost"] or figures["duplicated"] else []
    )
    for name, (limit, at_most) in BARS.items():
        missed += judge(print, name, [figures[name]], limit, at_most=at_most)
    rates, seconds = figures["reference_rate"], figures["reference_seconds"]
    missed += judge(print, "drain_per_second", [figures["drain_per_second"]], DRAIN, references=[rates])
    missed += judge(print, "ready_seconds", [figures["ready_seconds"]], READY, at_most=True, references=[seconds])
    print(f"VERDICT: {'FAIL ' + '; '.join(missed) if missed else 'PASS every bar is met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    with exit_on_signal():
        sys.exit(main())
