"""Measures a server with a backlog of undelivered messages: its memory, and its start after kill -9."""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from notify.client.loop import new_event_loop
from notify.client.packing import pack
from notify.client.transactions import TransactionClient
from notify.message import Message
from notify.testing.process import ServerProcess

CALLERS = 1024
TOPICS = 16


@dataclass(frozen=True, slots=True)
class Pile:
    """`anonymous_mb`: RssAnon with the backlog. `ready_seconds`: after each kill, from the process's start to ready."""

    anonymous_mb: float
    ready_seconds: list[float]


def measure(messages: int, starts: int = 3) -> Pile:
    """Commit transactions of 256 bytes without a consumer, then kill and start the server `starts` times."""
    with tempfile.TemporaryDirectory(prefix="notify-pile-") as directory:
        server = ServerProcess(Path(directory) / "data").start()
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(_load(server.url, messages))
            time.sleep(3)  # lets the server finish sealing a segment
            anonymous = server.anonymous_bytes() / (1 << 20)
            ready = []
            for _ in range(starts):
                server.kill()
                ready.append(server.start().ready_seconds)
        finally:
            server.stop()
    return Pile(anonymous, ready)


async def _load(url: str, messages: int) -> None:
    client = TransactionClient(url, "pile", instance="pile", half_seconds=60)
    packed = [pack(Message(f"pile-{n}", bytes(256))) for n in range(TOPICS)]
    numbers = iter(range(messages))

    async def caller() -> None:
        for number in numbers:
            item = await client.half([packed[number % TOPICS]])
            await client.outcome_soon(item.id, item.shard, "COMMIT")

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    await client.close()
