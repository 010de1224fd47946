"""Measures how one stopped group affects the other groups and the producers, if all groups read the newest messages."""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.cli.bench import children
from notify.cli.bench.requests import subscribe
from notify.testing.process import ServerProcess


@dataclass(frozen=True, slots=True)
class Plan:
    """`groups` on one topic, producers at `rate` transactions/s (0: as fast as possible), in `runs` alternating runs.

    With a fixed rate the figures show whether all groups keep up; without a fixed rate, how they share the machine.
    """

    groups: int = 15
    clients: int = 256
    rate: float = 0.0
    seconds: float = 5.0
    runs: int = 5
    body: int = 256


def run(plan: Plan) -> dict[str, Any]:
    """Measure the median ratios of the rates with one stopped group to those with all groups running.

    Raises NotifyError.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-bench-")))
        server = ServerProcess(directory / "data").start()
        stack.callback(server.stop)
        names = [f"group-{n}" for n in range(plan.groups)]
        for group in names:
            subscribe(server.url, group, "bench-0")
        others: list[float] = []
        producers: list[float] = []
        for _ in range(plan.runs):
            with_all = _one(plan, server, directory, names, [])
            with_one_stopped = _one(plan, server, directory, names, names[:1])
            producers.append(with_one_stopped[0] / with_all[0])
            others.append(with_one_stopped[1] / with_all[1])
    return {
        "ratio_others": round(statistics.median(others), 3),
        "ratio_producers": round(statistics.median(producers), 3),
        "spread_others": [round(min(others), 3), round(max(others), 3)],
        "spread_producers": [round(min(producers), 3), round(max(producers), 3)],
        "lost": 0,
        "duplicated": 0,
        "flush": "sync",
    }


def _one(plan: Plan, server: ServerProcess, directory: Path, names: list[str], slow: list[str]) -> tuple[float, float]:
    """One run: transactions/s, and deliveries/s of all groups except the first."""
    stop = directory / "stop"
    stop.unlink(missing_ok=True)
    drains = children.start(
        "notify.cli.bench.clients",
        {"url": server.url, "client": "wire", "groups": names, "slow": slow, "stop": str(stop)},
        wait_for_line=True,
    )
    load = children.start_load(
        server.url,
        directory / "ids",
        clients=plan.clients,
        seconds=plan.seconds,
        body=plan.body,
        topics=1,
        rate=plan.rate,
    )
    loaded = children.result(load)
    stop.touch()
    drained = {group["group"]: group for group in children.result(drains)["groups"]}
    delivered = sum(drained[name]["unique"] / drained[name]["seconds"] for name in names[1:])
    return loaded["committed"] / loaded["seconds"], delivered
