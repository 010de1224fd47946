"""`make profile BASE=<revision>`: microseconds of CPU by function, of a commit and of the working tree.

Each side runs the bench once, while py-spy samples its server and its client: 500 times a second the function
counts that the thread with the interpreter's lock is in. The time of a call into C, or of a system call that keeps the
lock, counts for the function that called. What a process costs in all is its CPU time, so that what ran without the
lock is spread over the functions. Prints two tables in Markdown, one a process. Use a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.runtime.signals import exit_on_signal
from notify.testing import usage
from tools.bench.compare import checkout
from tools.bench.compare.checkout import Checkout, NotComparable

ROLES = {
    "server": (" serve ",),
    "client": tuple(f".bench.{name} " for name in ("producers", "consumers", "clients", "load", "handled", "drain")),
}
"""The processes that are sampled, by a word of their command."""
SAMPLES_A_SECOND = 500
LOOK_SECONDS = 0.05
RUN_SECONDS = 300.0
LEAST_SHARE = 0.01
"""Functions with a smaller share are added up in one line."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One side. `unit`: what its rate counts. `costs`: by process and function, microseconds of CPU for one of them."""

    commit: str
    unit: str
    rate: float
    costs: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Plan:
    """`bench`: the words after `python -m tools.bench`. `start`: seconds from the client's start to the first sample.

    `seconds`: for how long samples are taken.
    """

    bench: str
    start: float
    seconds: float


def profiled(side: Checkout, plan: Plan) -> Profile:
    """Run the bench of a tree with its processes sampled. Raises NotComparable."""
    with tempfile.TemporaryDirectory(prefix="notify-profile-") as directory:
        output = Path(directory) / "output"
        with output.open("w") as opened:
            bench = subprocess.Popen(
                side.bench(plan.bench),
                cwd=side.tree,
                env=checkout.environment(side.tree),
                stdout=opened,
                stderr=subprocess.PIPE,
                text=True,
            )
        try:
            sampled = _sampled(bench, plan, Path(directory))
            _, errors = bench.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            raise NotComparable(f"the bench was not done after {RUN_SECONDS:g} s") from None
        finally:
            if bench.poll() is None:
                bench.terminate()
                bench.wait()
        if bench.returncode:
            raise NotComparable(f"the bench of {side.commit[:12]} failed: {errors[-500:]}")
        figures: dict[str, Any] = json.loads(output.read_text())
    key = next(name for name in figures if name.endswith("_per_second"))
    cores = {"server": figures["cores"], "client": figures["client_cores"]}
    costs = {role: _costs(side.tree, sampled[role], cores[role] * 1e6 / figures[key]) for role in ROLES}
    unit = {"transactions_per_second": "transaction", "deliveries_per_second": "message"}[key]
    return Profile(side.commit, unit, figures[key], costs)


def _sampled(bench: subprocess.Popen[str], plan: Plan, directory: Path) -> dict[str, dict[str, int]]:
    """Samples of server and client, by role and function. Raises NotComparable."""
    spy = Path(sys.executable).with_name("py-spy")
    if not spy.exists():
        raise NotComparable(f"{spy} is missing: make install")
    while not (found := _processes(bench.pid)).keys() >= ROLES.keys():
        if bench.poll() is not None:
            _, errors = bench.communicate()
            raise NotComparable(f"the bench ended before its client was found: {errors[-500:]}")
        time.sleep(LOOK_SECONDS)
    time.sleep(plan.start)
    options = ["--gil", "--format", "raw", "--function", "--full-filenames", "--rate", str(SAMPLES_A_SECOND)]
    samplers = {
        role: subprocess.Popen(
            [
                spy, "record", *options, "--duration", f"{plan.seconds:g}", "--output", str(directory / role),
                "--pid", str(pid),
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for role, pid in found.items()
    }  # fmt: skip
    counts: dict[str, dict[str, int]] = {}
    for role, sampler in samplers.items():
        _, errors = sampler.communicate(timeout=plan.seconds + RUN_SECONDS)
        if sampler.returncode or not (directory / role).exists():
            raise NotComparable(
                f"py-spy could not sample the {role}: give the bench more to do if it ended early, run as root if "
                f"ptrace is not allowed: {errors[-300:]}"
            )
        counts[role] = by_function((directory / role).read_text())
    return counts


def _processes(root: int) -> dict[str, int]:
    """The processes to sample, by role."""
    found: dict[str, int] = {}
    for pid in usage.tree(root):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue  # it has ended
        for role, words in ROLES.items():
            if any(word in command for word in words) and "py-spy" not in command:
                found.setdefault(role, pid)
    return found


def by_function(raw: str) -> dict[str, int]:
    """Samples by `file:function` of the innermost frame, from py-spy's lines: frames, `;` between them, and a count."""
    counts: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        frame = re.fullmatch(r"(.*) \((.*?)(?::\d+)?\)", stack.rpartition(";")[2])
        if frame is not None:
            counts[f"{frame[2]}:{frame[1]}"] += int(count)
    return counts


def _costs(tree: Path, counts: dict[str, int], microseconds: float) -> dict[str, float]:
    """The part of each function in what a message costs, by the function's name for people."""
    named: Counter[str] = Counter()
    for place, count in counts.items():
        file, _, function = place.rpartition(":")
        named[f"{_module(tree, file)} {function}"] += count
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
        f"| {role}, µs of CPU a {after.unit} | {' | '.join(heads)} |",
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
    parser.add_argument(
        "--bench", default="transactions --clients 1024 --seconds 14", help="the words after `python -m tools.bench`"
    )
    parser.add_argument("--start", type=float, default=3.0, help="seconds from the client's start to the first sample")
    parser.add_argument("--seconds", type=float, default=6.0, help="for how long both are sampled")
    given = parser.parse_args()
    plan = Plan(given.bench, given.start, given.seconds)
    try:
        base = None
        if given.base:
            base = profiled(checkout.committed(checkout.commit_of(given.base), print), plan)
        head = profiled(checkout.working_tree(), plan)
    except NotComparable as error:
        print(f"profile: {error}", file=sys.stderr)
        return 2
    for side in (base, head):
        if side is not None:
            print(f"{side.commit}: {side.rate:,} {side.unit}s/s, bench {plan.bench}")
    for role in ROLES:
        print("\n" + table(role, base, head))
    return 0


if __name__ == "__main__":
    with exit_on_signal():
        sys.exit(main())
