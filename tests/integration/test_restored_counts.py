"""A log that was restored from a store has a gap in its offsets; what counts messages does not count the gap."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from notify.storage.log import LogStore
from notify.storage.log.disk import Disk
from notify.storage.log.gaps import OFFSETS_APART
from notify.storage.log.restored_start import begin_at_the_end
from notify.testing.process import ServerProcess
from tests.support.commands import cli
from tests.support.disks import UnsyncedDisk
from tests.support.groups import publish, subscribe
from tests.support.http import admin, call


async def _restored(log: Path) -> None:
    begin_at_the_end(Disk(log), 1)
    store = LogStore(log, disk=UnsyncedDisk(log))
    await store.open(1)
    await store.begin_generation(2, 1)
    await store.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose log was restored: three messages, and a group that has settled none."""
    running = ServerProcess(tmp_path / "data").start()
    publish(running.url, "t", ["a", "b", "c"])
    subscribe(running.url, "g", "t", start="earliest")
    running.stop()
    asyncio.run(_restored(tmp_path / "data" / "log"))
    running.start()
    yield running
    running.stop()


def test_messages_are_counted_and_not_offsets(server: ServerProcess) -> None:
    (row,) = admin(server.url, "GET", "topics?sort=kept")["topics"]
    assert row["queues"][0]["end"] == OFFSETS_APART + 3
    assert row["newest_at"]
    page = call(server.url, "GET", "/topics")
    assert 'data-l="Kept">3</td>' in page and 'data-l="Sent in all">3</td>' in page

    asked = {"topic": "t", "reason": "looked at", "dry_run": True}
    (moved,) = admin(server.url, "POST", "groups/g/reset", asked | {"to": "latest"})["result"]["queues"]
    assert (moved["again"], moved["left_out"]) == (0, 3)
    purge = {"before": "latest", "force": True, "reason": "looked at", "dry_run": True}
    purged = admin(server.url, "POST", "topics/t/purge", purge)["result"]
    assert (purged["queues"][0]["dropped"], purged["missed"]) == (3, {"g": 3})
    code, told = cli("topic", "delete", "t", "--reason", "looked at", "--dry-run", "--url", server.url)
    assert code == 0 and "its 3 messages at most" in str(told), told

    admin(server.url, "POST", "groups/g/reset", asked | {"to": "latest", "dry_run": False})
    (moved,) = admin(server.url, "POST", "groups/g/reset", asked | {"to": "earliest"})["result"]["queues"]
    assert (moved["again"], moved["left_out"]) == (3, 0)


def test_tail_shows_the_messages_on_both_sides_of_the_gap(server: ServerProcess) -> None:
    publish(server.url, "t", ["d"])
    code, shown = cli("topic", "tail", "t", "--last", "3", "--url", server.url)
    lines = shown["text"].splitlines()
    assert (code, [line.split("\t")[-1] for line in lines]) == (0, ["b", "c", "d"])
    assert lines[-1].startswith(f"t/0@{OFFSETS_APART + 3}")
