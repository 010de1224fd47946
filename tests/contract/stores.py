"""Storages under test, closed or killed and reopened during a scenario, with helpers of all their tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from notify.protocol import ids
from notify.storage.log import LogStore
from notify.storage.memory import MemoryStore
from notify.storage.queues import Store
from notify.storage.records import NewMessage, NewTransaction, State
from notify.storage.sql.rows import payload_of
from notify.storage.sql.store import SqlStore
from notify.storage.sql.tables import server_half_message
from notify.storage.topics import Topic
from tests.support.disks import UnsyncedDisk
from tests.support.transactions import bodies_in

T0 = 1_800_000_000_000_000
SECOND = 1_000_000


class Bench:
    """A store under test, which a scenario may restart."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.directory = directory
        self.copies = 0
        self.store: Any = self._make()

    def _make(self) -> Store:
        if self.kind == "memory":
            return MemoryStore()
        segment_bytes = 1 << 20 if self.kind == "log" else 4096
        return LogStore(self.directory, segment_bytes=segment_bytes, disk=UnsyncedDisk(self.directory))

    async def restart(self, now_us: int = T0) -> None:
        """Restart the store: reopen `log`, reopen a copy of `small-segments` as after a kill, keep `memory`."""
        if self.kind == "memory":
            return
        if self.kind == "small-segments":
            await self.store.sync()
            await self.store.sealed_up()
            self.copies += 1
            copy = self.directory.parent / f"copy-{self.copies}"
            shutil.copytree(self.directory, copy)
            await self.store.close()
            self.directory = copy
        else:
            await self.store.close()
        self.store = self._make()
        await self.store.open(now_us)

    async def queues(self) -> Any:
        """The queues with all committed messages."""
        return self.store

    async def bodies(self, topic: str = "t", queue: int = 0) -> list[bytes]:
        """The bodies in a queue, in order."""
        return bodies(await self.queues(), topic, queue)


class SqlBench(Bench):
    """A database as the storage, and queues in memory that get its committed messages."""

    def __init__(self, kind: str, directory: Path, url: str) -> None:
        """`url`: of a database with the server's tables."""
        self._url = url
        super().__init__(kind, directory)

    def _make(self) -> Any:
        return SqlStore(self._url)

    async def restart(self, now_us: int = T0) -> None:
        await self.store.close()
        self.store = self._make()
        await self.store.open(now_us)

    async def queues(self) -> Any:
        queue = MemoryStore()
        await queue.create_topic(Topic("t"))
        t = server_half_message
        with self.store.engine.connect() as connection:
            wanted = sa.select(t).where(t.c.state == "COMMITTED").order_by(t.c.decided_at, t.c.transaction_id)
            rows = connection.execute(wanted.order_by(t.c.message_no)).mappings().all()
        by_id: dict[str, list[NewMessage]] = {}
        for row in rows:
            by_id.setdefault(row["transaction_id"], []).append(NewMessage(row["topic"], payload_of(row)))
        for name, messages in by_id.items():
            await queue.put([NewTransaction(ids.from_text(name), "g", messages, committed=True)], T0)
        return queue


Scenario = Callable[[Bench], Coroutine[Any, Any, None]]


async def commit(store: Store, *transactions: NewTransaction, at: int = T0) -> None:
    await store.put(transactions, at)
    await store.decide([(t.id, t.producer_group, State.COMMITTED) for t in transactions], at)


def bodies(store: Any, topic: str = "t", queue: int = 0) -> list[bytes]:
    return bodies_in(store.read(topic, queue, 0, 10_000, 1 << 30))
