"""A small log of one topic, whose segments retention drops."""

from __future__ import annotations

from pathlib import Path

from notify.storage.groups import Subscription
from notify.storage.log import LogStore
from notify.storage.records import State
from notify.storage.topics import Topic
from tests.contract.stores import T0
from tests.support.disks import UnsyncedDisk
from tests.support.transactions import bodies_in, sent

HOUR = 3_600_000_000


async def fill(store: LogStore, count: int, at: int) -> list[bytes]:
    """Store committed messages over several segments; return their bodies."""
    bodies = []
    for n in range(count):
        body = b"%d-%d" % (at, n) + bytes(200)
        t = sent(body)
        bodies.append(body)
        await store.put([t], at)
        await store.decide([(t.id, "g", State.COMMITTED)], at)
    await store.sealed_up()
    return bodies


def opened(directory: Path, retention_us: int = HOUR, retention_bytes: int = 0) -> LogStore:
    disk = UnsyncedDisk(directory)
    return LogStore(
        directory, segment_bytes=4096, disk=disk, retention_us=retention_us, retention_bytes=retention_bytes
    )


async def subscribed(directory: Path, retention_us: int = HOUR, retention_bytes: int = 0) -> LogStore:
    """A new log, open, with the topic `t`, which the group `c` consumes from the start."""
    store = opened(directory, retention_us, retention_bytes)
    await store.open(T0)
    await store.create_topic(Topic("t"))
    await store.subscribe(Subscription("c", "t"), [0])
    return store


def rest(store: LogStore) -> dict[int, bytes]:
    """The bodies that can still be read, by offset."""
    readable = [m for m in store.read("t", 0, 0, 10_000, 1 << 30) if not m.corrupt]
    return dict(zip([m.offset for m in readable], bodies_in(readable), strict=True))
