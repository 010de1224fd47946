"""Kills a log at named points while it drops segments, and checks what remains.

It needs no server, because the log's retention is one call.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path

from notify.protocol import ids
from notify.storage import crash_point
from notify.storage.checks import Due
from notify.storage.crash_point import POINTS
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log import LogStore
from notify.storage.records import State
from notify.storage.topics import Topic
from notify.testing import forked
from tests.support.clock import PATIENCE_SECONDS
from tests.support.disks import UnsyncedDisk
from tests.support.transactions import bodies_in, content, sent

T0 = 1_800_000_000_000_000
HOUR = 3_600_000_000
WHILE_DROPPING = tuple(point for point in POINTS if point.startswith(("carry.", "retention.")))

_UNDECIDED = ids.from_text("018f0e4c-3a5b-7c6d-8e9f-a0b1c2d3e4f5")
_OLD = [b"old %d" % n + bytes(200) for n in range(60)]
_NEW = [b"new %d" % n + bytes(200) for n in range(30)]
_WAITING = (*range(20, 30), *range(55, 60))
"""The offsets of old messages that the group has not settled."""


def killed_at(directory: Path, point: str) -> list[str]:
    """Fill a log and drop its segments in a process that is killed at `point` (`name:count`); return broken promises.

    Raises AssertionError if the point was not reached.
    """
    process = forked.context().Process(target=_fill_and_drop, args=(directory, point))
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == -signal.SIGKILL, f"{point} was not reached: the process ended with {process.exitcode}"
    broken = [f"{point}: {violation}" for violation in asyncio.run(_broken(directory))]
    shutil.rmtree(directory)
    return broken


def _opened(directory: Path) -> LogStore:
    return LogStore(directory, disk=UnsyncedDisk(directory), segment_bytes=4096, retention_us=HOUR)


def _fill_and_drop(directory: Path, point: str) -> None:
    asyncio.run(_fill(directory, point))


async def _fill(directory: Path, point: str) -> None:
    store = _opened(directory)
    await store.open(T0)
    await store.create_topic(Topic("t"))
    await store.subscribe(Subscription("c", "t"), [0])
    await _commit(store, _OLD, T0)
    undecided, delayed = sent(b"undecided"), sent(b"delayed", delay_us=100 * HOUR)
    undecided.id = _UNDECIDED
    await store.put([undecided, delayed], T0)
    await store.decide([(delayed.id, "g", State.COMMITTED)], T0)
    await store.settle("c", "t", 0, [(0, 20), (30, 25)], SettleKind.ACK, T0)
    await _commit(store, _NEW, T0 + 2 * HOUR)
    crash_point.arm(point)
    await store.retain(T0 + 2 * HOUR)


async def _commit(store: LogStore, bodies: list[bytes], at: int) -> None:
    for body in bodies:
        t = sent(body)
        await store.put([t], at)
        await store.decide([(t.id, "g", State.COMMITTED)], at)
    await store.sealed_up()


async def _broken(directory: Path) -> list[str]:
    """The broken promises of the log after the kill, and again after it has dropped the rest."""
    broken = []
    for when in ("after the kill", "after the next dropping"):
        store = _opened(directory)
        await store.open(T0 + 2 * HOUR)
        broken += [f"{when}: {violation}" for violation in await _missing(store)]
        if when == "after the kill":
            await store.retain(T0 + 2 * HOUR)
        elif store.release_due(T0 + 102 * HOUR, 10) != 1:
            broken.append("promise 6: the delayed message is gone")
        await store.close()
    return broken


async def _missing(store: LogStore) -> list[str]:
    readable = [m for m in store.read("t", 0, 0, 1000, 1 << 30) if not m.corrupt]
    bodies = dict(zip([m.offset for m in readable], bodies_in(readable), strict=True))
    wanted = {offset: _OLD[offset] for offset in _WAITING} | dict(enumerate(_NEW, len(_OLD)))
    missing = [f"promise 4: offset {offset} is gone" for offset, body in wanted.items() if bodies.get(offset) != body]
    if await store.half_contents([Due(_UNDECIDED, 0, "", "", 0, ())]) != [[content(b"undecided")]]:
        missing.append("promise 1: the undecided half is gone")
    if store.bounds("t", 0)[1] != len(_OLD) + len(_NEW) or store.progress("c", "t", 0).floor < 20:
        missing.append("promise 8: offsets or progress went back")
    return missing
