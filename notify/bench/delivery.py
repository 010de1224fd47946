"""`notify bench delivery`: measures several groups that each receive and acknowledge every message."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.bench import children
from notify.bench.requests import subscribe
from notify.testing.process import ServerProcess


@dataclass(frozen=True, slots=True)
class Plan:
    """`groups` in `processes` consumer processes, which receive a backlog of `messages`."""

    groups: int = 15
    messages: int = 300_000
    topics: int = 1
    body: int = 256
    processes: int = 1
    mode: str = "shared"
    keys: int = 0


def run(plan: Plan) -> dict[str, Any]:
    """Measure, and return the figures by name. Raises NotifyError if a process could not run."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-bench-")))
        server = ServerProcess(directory / "data").start()
        stack.callback(server.stop)
        names = [f"group-{n}" for n in range(plan.groups)]
        for group in names:
            for n in range(plan.topics):
                subscribe(server.url, group, f"bench-{n}", mode=plan.mode)
        spec = {"url": server.url, "messages": plan.messages, "body": plan.body, "topics": plan.topics}
        children.result(children.start("notify.bench.fill", spec | {"keys": plan.keys}))
        cpu = server.cpu_seconds()
        drains = [
            children.start(
                "notify.bench.drain",
                {"url": server.url, "groups": names[number :: plan.processes], "expected": plan.messages},
            )
            for number in range(plan.processes)
        ]
        results = [children.result(child) for child in drains]
        cpu = server.cpu_seconds() - cpu
    drained = [group for result in results for group in result["groups"]]
    seconds = max(result["seconds"] for result in results)
    unique = sum(group["unique"] for group in drained)
    return {
        "deliveries_per_second": round(unique / seconds),
        "groups": plan.groups,
        "lost": plan.groups * plan.messages - unique,
        "duplicated": sum(group["received"] for group in drained) - unique,
        "flush": "sync",
        "cores": round(cpu / seconds, 2),
    }
