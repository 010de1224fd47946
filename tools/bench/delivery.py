"""`python -m tools.bench delivery`: measures several groups that each receive and acknowledge every message."""

from __future__ import annotations

from typing import Any

from notify.cli.bench.runner import Bench, subscribe
from notify.errors import NotifyError
from tools.bench.fill import filled

LONGEST_SECONDS = 600.0


def run(
    *,
    groups: int = 15,
    messages: int = 300_000,
    topics: int = 1,
    body: int = 256,
    processes: int = 1,
    mode: str = "shared",
    keys: int = 0,
    client: str = "wire",
    batch: int | None = None,
) -> dict[str, Any]:
    """Measure `groups` in `processes` consumer processes, which receive a pile of `messages`; the figures by name.

    `client`: one of transactions.CLIENTS. `batch`: the most messages in a call of the SDK's handler; None: one. Raises
    NotifyError if a process could not run.
    """
    with Bench() as bench:
        server = bench.server()
        names = [f"group-{n}" for n in range(groups)]
        of_topics = [f"bench-{n}" for n in range(topics)]
        for group in names:
            for topic in of_topics:
                subscribe(server.url, group, topic, mode=mode)
        filled(server.url, messages=messages, body=body, topics=topics, keys=keys)
        cpu = server.cpu_seconds()
        spec = {
            "url": server.url, "topics": of_topics, "expected": messages, "client": client, "mode": mode,
            "batch": batch, "seconds": LONGEST_SECONDS,
        }  # fmt: skip
        consumers = [
            bench.start("tools.bench.clients", spec | {"groups": names[number::processes]})
            for number in range(processes)
        ]
        results = [consumer.result(LONGEST_SECONDS + 120) for consumer in consumers]
        cpu = server.cpu_seconds() - cpu
    received = [group for result in results for group in result["groups"]]
    if any(group.get("body_bytes", 0) not in (0, group["received"] * body) for group in received):
        raise NotifyError("messages did not have the bodies that were sent")
    seconds = max(result["seconds"] for result in results)
    unique = sum(group["unique"] for group in received)
    if seconds >= LONGEST_SECONDS:
        raise NotifyError(f"{unique:,} messages were received in {seconds:.0f} s: take fewer, with --messages")
    return {
        "deliveries_per_second": round(unique / seconds),
        "groups": groups,
        "lost": groups * messages - unique,
        "duplicated": sum(group["received"] for group in received) - unique,
        "flush": "sync",
        "cores": round(cpu / seconds, 3),
        "client_cores": round(sum(result["cpu_seconds"] for result in results) / seconds, 3),
    }
