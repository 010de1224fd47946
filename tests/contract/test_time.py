"""The log's time index: delayed messages come due in order, none early, none twice, over restarts and kills."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from notify.storage.log import LogStore, times
from notify.storage.records import NewTransaction
from notify.storage.topics import Topic
from tests.contract.stores import SECOND, T0, Bench, bodies, commit
from tests.support.disks import UnsyncedDisk
from tests.support.transactions import sent


def delayed(number: int, due_us: int) -> NewTransaction:
    return sent(b"%d" % number, group="", deliver_at_us=due_us, committed=True)


def opened(directory: Path, segment_bytes: int = 1 << 20) -> LogStore:
    return LogStore(directory, segment_bytes=segment_bytes, disk=UnsyncedDisk(directory))


@pytest.mark.parametrize("load", [3, 50, times.LOAD])
@pytest.mark.parametrize("segment_bytes", [4096, 1 << 20])
def test_they_come_due_in_order_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: int, segment_bytes: int
) -> None:
    """The index agrees with a plain list of many due times, many equal, far more than it loads at once."""
    monkeypatch.setattr(times, "LOAD", load)

    async def run() -> None:
        rng = random.Random(load)
        expected: list[tuple[int, int]] = []
        released: list[int] = []
        now_us = T0
        store = opened(tmp_path / "log", segment_bytes)
        await store.open(now_us)
        await store.create_topic(Topic("t"))
        number = 0
        for _ in range(25):
            batch = []
            for _ in range(rng.randrange(20)):
                due_us = now_us + rng.choice([1, 5, 5, 40, 3600, 40 * 86_400]) * SECOND + rng.choice([0, 0, 1])
                expected.append((due_us, number))
                batch.append(delayed(number, due_us))
                number += 1
            if batch:
                await store.put(batch, now_us)
            now_us += rng.choice([0, 1, 3, 30]) * SECOND
            while store.release_due(now_us, rng.choice([1, 7, 1000])):
                pass
            await store.sync()
            due = sorted(e for e in expected if e[0] <= now_us)
            expected = [e for e in expected if e[0] > now_us]
            released += [n for _, n in due]
            assert [int(b) for b in bodies(store)] == released
            assert store.next_due_us() == min((e[0] for e in expected), default=None)
            if rng.random() < 0.3:
                await store.close()
                store = opened(tmp_path / "log", segment_bytes)
                await store.open(now_us)
        while expected:
            now_us = max(e[0] for e in expected)
            while store.release_due(now_us, 1000):
                pass
            await store.sync()
            released += [n for _, n in sorted(expected)]
            expected = []
        assert [int(b) for b in bodies(store)] == released
        assert store.delayed() == 0
        await store.close()

    asyncio.run(run())


def test_a_clock_set_back_hides_no_delayed_message(run: Any) -> None:
    """A message due before the last release and committed after it is delivered at once."""

    async def scenario(b: Bench) -> None:
        await commit(b.store, sent(b"first", delay_us=10 * SECOND))
        assert b.store.release_due(T0 + 20 * SECOND, 10) == 1
        await b.store.sync()
        await commit(b.store, sent(b"second", deliver_at_us=T0 + 5 * SECOND), at=T0 + 1 * SECOND)
        await b.restart()
        while b.store.release_due(T0 + 60 * SECOND, 10):
            pass
        await b.store.sync()
        assert sorted(bodies(b.store)) == [b"first", b"second"]

    run(scenario)


def test_a_release_that_was_not_durable_is_repeated(tmp_path: Path) -> None:
    """After a kill between release and sync each message is in the queue once."""

    async def run() -> None:
        store = opened(tmp_path / "log")
        await store.open(T0)
        await store.create_topic(Topic("t"))
        await store.put([delayed(n, T0 + SECOND) for n in range(10)], T0)
        shutil.copytree(tmp_path / "log", tmp_path / "before")
        assert store.release_due(T0 + SECOND, 4) == 4
        await store.sync()
        shutil.copytree(tmp_path / "log", tmp_path / "between")
        await store.close()
        for name in ("before", "between"):
            again = opened(tmp_path / name)
            await again.open(T0)
            while again.release_due(T0 + SECOND, 3):
                pass
            await again.sync()
            assert [int(b) for b in bodies(again)] == list(range(10))
            await again.close()

    asyncio.run(run())


def test_ordered_keys_and_delay_meet_in_the_queue(run: Any) -> None:
    """A delayed message takes its place among those of its key when it is due."""

    async def scenario(b: Bench) -> None:
        await commit(b.store, sent(b"late", key="k", delay_us=SECOND), sent(b"now", key="k"))
        assert b.store.release_due(T0 + SECOND, 10) == 1
        await commit(b.store, sent(b"after", key="k"), at=T0 + 2 * SECOND)
        await b.restart()
        assert bodies(b.store) == [b"now", b"late", b"after"]

    run(scenario)
