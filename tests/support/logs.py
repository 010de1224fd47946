"""Logs of small segments, written without a server."""

from __future__ import annotations

import asyncio
from pathlib import Path

from notify.storage.log import LogStore
from notify.storage.records import NewTransaction, State
from notify.storage.topics import Topic
from tests.support.transactions import sent

T0 = 1_800_000_000_000_000
SMALL_SEGMENT = 4096


async def commit(store: LogStore, one: NewTransaction, at: int = T0) -> None:
    """Store a transaction, and its outcome."""
    await store.put([one], at)
    await store.decide([(one.id, one.producer_group, State.COMMITTED)], at)


def write_log(data_dir: Path, count: int = 60, first: int = 0) -> None:
    """Commit messages with the bodies `first`, `first` + 1, … (six digits) to topic t, and stop."""

    async def run() -> None:
        store = LogStore(data_dir / "log", segment_bytes=SMALL_SEGMENT)
        await store.open(T0)
        if not store.has_topic("t"):
            await store.create_topic(Topic("t", 1))
        for n in range(first, first + count):
            await commit(store, sent(b"%06d" % n, key=f"k{n}", tag="a" if n % 2 else None))
        await store.sealed_up()
        await store.close()

    data_dir.mkdir(exist_ok=True)
    asyncio.run(run())
