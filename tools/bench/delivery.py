"""`notify bench delivery`: measures several groups that each receive and acknowledge every message."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.cli.bench import children
from notify.cli.bench.requests import subscribe
from notify.errors import NotifyError
from notify.testing.process import ServerProcess

LONGEST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`groups` in `processes` consumer processes, which receive a backlog of `messages`.

    `client`: one of CLIENTS. `batch`: the most messages in a call of the SDK's handler; None: one.
    """

    groups: int = 15
    messages: int = 300_000
    topics: int = 1
    body: int = 256
    processes: int = 1
    mode: str = "shared"
    keys: int = 0
    client: str = "wire"
    batch: int | None = None


def run(plan: Plan) -> dict[str, Any]:
    """Measure, and return the figures by name. Raises NotifyError if a process could not run."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-bench-")))
        server = ServerProcess(directory / "data").start()
        stack.callback(server.stop)
        names = [f"group-{n}" for n in range(plan.groups)]
        topics = [f"bench-{n}" for n in range(plan.topics)]
        for group in names:
            for topic in topics:
                subscribe(server.url, group, topic, mode=plan.mode)
        spec = {"url": server.url, "messages": plan.messages, "body": plan.body, "topics": plan.topics}
        children.result(children.start("notify.cli.bench.load", spec | {"keys": plan.keys}))
        cpu = server.cpu_seconds()
        spec = {
            "url": server.url, "topics": topics, "expected": plan.messages, "client": plan.client, "mode": plan.mode,
            "batch": plan.batch, "seconds": LONGEST_SECONDS,
        }  # fmt: skip
        consumers = [
            children.start("notify.cli.bench.clients", spec | {"groups": names[number :: plan.processes]})
            for number in range(plan.processes)
        ]
        for child in consumers:
            stack.callback(children.end, child)
        results = [children.result(child, LONGEST_SECONDS + 120) for child in consumers]
        cpu = server.cpu_seconds() - cpu
    received = [group for result in results for group in result["groups"]]
    if any(group.get("body_bytes", 0) not in (0, group["received"] * plan.body) for group in received):
        raise NotifyError("messages did not have the bodies that were sent")
    seconds = max(result["seconds"] for result in results)
    unique = sum(group["unique"] for group in received)
    if seconds >= LONGEST_SECONDS:
        raise NotifyError(f"{unique:,} messages were received in {seconds:.0f} s: take fewer, with --messages")
    return {
        "deliveries_per_second": round(unique / seconds),
        "groups": plan.groups,
        "lost": plan.groups * plan.messages - unique,
        "duplicated": sum(group["received"] for group in received) - unique,
        "flush": "sync",
        "cores": round(cpu / seconds, 3),
        "client_cores": round(sum(result["cpu_seconds"] for result in results) / seconds, 3),
    }
