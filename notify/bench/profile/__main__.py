"""`make profile BASE=<revision>`: microseconds of CPU a transaction by function, of a commit and of the working tree.

Both sides run `notify bench transactions` once with a sampler in server and client (sampled/sitecustomize.py). Prints
two tables in Markdown, one for each process. Use a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.bench.compare import checkout
from notify.bench.compare.checkout import Checkout, NotComparable
from notify.ending import exiting_when_told

SAMPLER = Path(__file__).parent / "sampled"
START_SECONDS, SAMPLE_SECONDS, BENCH_SECONDS = 6.0, 6.0, 14.0
"""The time from the start of a process to its first sample, from there to the last one, and of the whole load."""
RUN_SECONDS = 300.0
ROLES = ("server", "client")
LEAST_SHARE = 0.01
"""Functions with a smaller share are added up in one line."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One side. `costs`: by process and function, microseconds of CPU a transaction."""

    commit: str
    rate: float
    costs: dict[str, dict[str, float]]


def profiled(side: Checkout, clients: int) -> Profile:
    """Run the bench of a tree with its processes sampled. Raises NotComparable."""
    with tempfile.TemporaryDirectory(prefix="notify-profile-") as directory:
        environment = checkout.environment() | {
            "PYTHONPATH": str(SAMPLER),
            "PROFILED_TO": directory,
            "PROFILED_SECONDS": f"{START_SECONDS} {SAMPLE_SECONDS}",
        }
        words = ["bench", "transactions", "--clients", str(clients), "--seconds", str(BENCH_SECONDS), "--json"]
        done = subprocess.run(
            [side.python, "-m", "notify.cli.main", *words],
            cwd=side.tree, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, check=False,
        )  # fmt: skip
        if done.returncode:
            raise NotComparable(f"the bench of {side.commit[:12]} failed: {done.stderr[-500:]}")
        figures: dict[str, Any] = json.loads(done.stdout)
        counts = {role: json.loads((Path(directory) / role).read_text()) for role in ROLES}
    rate = figures["transactions_per_second"]
    cores = {"server": figures["cores"], "client": figures["client_cores"]}
    costs = {role: _costs(side.tree, counts[role], cores[role] * 1e6 / rate) for role in ROLES}
    return Profile(side.commit, rate, costs)


def _costs(tree: Path, counts: dict[str, int], microseconds: float) -> dict[str, float]:
    """The part of each function in what a transaction costs, by the function's name for people."""
    named: Counter[str] = Counter()
    for place, count in counts.items():
        file, _, function = place.rpartition(":")
        named[f"{_module(tree, file)} {function.replace('<locals>.', '')}"] += count
    return {name: microseconds * count / sum(counts.values()) for name, count in named.items()}


def _module(tree: Path, file: str) -> str:
    """A file by its path in the tree, or in the library that it belongs to."""
    path = Path(file)
    if path.is_relative_to(tree):
        inside = str(path.relative_to(tree)).removeprefix("notify/")
        return inside.removesuffix(".py")
    parts = path.with_suffix("").parts
    return "/".join(parts[-2:])


def table(role: str, before: Profile | None, after: Profile) -> str:
    """A line for each function that has a share on either side, the dearest first."""
    sides = [side.costs[role] for side in (before, after) if side is not None]
    names = {name for costs in sides for name, cost in costs.items() if cost >= LEAST_SHARE * sum(costs.values())}
    dearest = sorted(names, key=lambda name: -max(costs.get(name, 0.0) for costs in sides))
    heads = [side.commit[:7] for side in (before, after) if side is not None]
    lines = [
        f"| {role}, µs of CPU a transaction | {' | '.join(heads)} |",
        "|---" * (1 + len(heads)) + "|",
        f"| all | {_cells([sum(costs.values()) for costs in sides])} |",
        *[f"| `{name}` | {_cells([costs.get(name, 0.0) for costs in sides])} |" for name in dearest],
    ]
    others = [sum(cost for name, cost in costs.items() if name not in names) for costs in sides]
    return "\n".join([*lines, f"| functions below {LEAST_SHARE:.0%} | {_cells(others)} |"])


def _cells(values: list[float]) -> str:
    return " | ".join(f"{value:.2f}" if value else "" for value in values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="a revision to profile as well")
    parser.add_argument("--clients", type=int, default=1024, help="callers")
    given = parser.parse_args()
    try:
        base = None
        if given.base:
            base = profiled(checkout.committed(checkout.commit_of(given.base), print), given.clients)
        head = profiled(checkout.working_tree(), given.clients)
    except NotComparable as error:
        print(f"profile: {error}", file=sys.stderr)
        return 2
    for side in (base, head):
        if side is not None:
            print(f"{side.commit}: {side.rate:,} transactions/s with {given.clients:,} callers")
    for role in ROLES:
        print("\n" + table(role, base, head))
    return 0


if __name__ == "__main__":
    with exiting_when_told():
        sys.exit(main())
