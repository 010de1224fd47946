"""`make bench-backlog MESSAGES=…`: the bars of a backlog of messages, and a verdict."""

from __future__ import annotations

import argparse
import json
import sys

from notify.bench.backlog import Plan, run

BARS = {
    "ratio_to_empty": (0.95, False),
    "resident_mb": (600, True),
    "ready_seconds": (5, True),
    "producers_beside_drain": (0.7, False),
    "head_latency_ratio": (2, True),
    "drain_per_second": (150_000, False),
}
"""Each figure's bar, and whether the bar is an upper bound."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=20_000_000)
    parser.add_argument("--body", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    figures = run(Plan(messages=options.messages, body=options.body, runs=options.runs, seconds=options.seconds))
    print(json.dumps(figures), flush=True)
    missed = (
        [f"{figures['lost']} lost, {figures['duplicated']} doubled"] if figures["lost"] or figures["duplicated"] else []
    )
    for name, (limit, at_most) in BARS.items():
        met = figures[name] <= limit if at_most else figures[name] >= limit
        print(f"{name}: {figures[name]:,}, bar {'≤' if at_most else '≥'} {limit:,g}: {'met' if met else 'MISSED'}")
        missed += [] if met else [name]
    print(f"VERDICT: {'FAIL ' + '; '.join(missed) if missed else 'PASS every bar is met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
