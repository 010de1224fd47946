"""A disk without room: what does not fit leaves nothing behind, and a refused write says why. And a disk's room."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from fastapi.testclient import TestClient

from notify.errors import DiskFull, StorageFailed
from notify.protocol.wire import BridgeBatch
from notify.server.data_directory import Room, put_file, room_of
from notify.server.problems import answer_errors
from notify.storage.log import LogStore
from notify.storage.log.disk import Disk
from notify.storage.log.journal import LOOP_WAITERS, Journal
from notify.storage.topics import Topic
from tests.support.clock import PATIENCE_SECONDS
from tests.support.logs import T0, commit
from tests.support.transactions import sent


def test_a_file_that_does_not_fit_leaves_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "charts"
    put_file(path, b"before")

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("notify.server.data_directory.os.fsync", fsync)
        with pytest.raises(OSError, match="No space"):
            put_file(path, b"after")
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == {"charts": b"before"}
    put_file(path, b"after")
    assert path.read_bytes() == b"after" and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_was_left_readable_is_closed(tmp_path: Path) -> None:
    left = tmp_path / "charts.new"
    left.write_bytes(b"left by a server that was killed")
    left.chmod(0o644)
    put_file(tmp_path / "charts", b"now")
    assert stat.S_IMODE((tmp_path / "charts").stat().st_mode) == 0o600 and not left.exists()


@contextmanager
def recording(directory: Path, *statements: str) -> Iterator[TestClient]:
    """An API with one write, which runs these statements in the records of a directory."""
    engine = sa.create_engine(f"sqlite:///{directory}/admin.db")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE action (what TEXT)")
    api = FastAPI()
    answer_errors(api)

    @api.put("/v1/admin/thing")
    def put() -> Any:
        with engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    yield TestClient(api, raise_server_exceptions=False)
    engine.dispose()


def test_a_write_that_the_records_have_no_room_for_is_507(tmp_path: Path) -> None:
    """It was answered with 503, and said that the database does not answer."""
    with recording(tmp_path, "PRAGMA max_page_count = 2", f"INSERT INTO action VALUES ('{'x' * 100_000}')") as client:
        answer = client.put("/v1/admin/thing")
    assert (answer.status_code, answer.json()["code"]) == (507, "disk_full")


def test_a_file_of_records_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A disk without room for another file, or too many open ones: it was said that the database does not answer."""
    (tmp_path / "data").mkdir()
    with recording(tmp_path / "data", "INSERT INTO action VALUES ('x')") as client:
        assert client.put("/v1/admin/thing").status_code == 200
        shutil.rmtree(tmp_path / "data")
        answer = client.put("/v1/admin/thing")
    assert answer.status_code == 503 and "the file of the server's records cannot be used" in answer.json()["detail"]


def test_a_file_of_the_log_that_does_not_fit_gives_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each checkpoint that did not fit left its beginning behind, under a name of its own, until the next start: on a
    full disk it kept the room that retention needs."""
    disk = Disk(tmp_path)
    write = os.write

    def half(descriptor: int, data: memoryview) -> int:
        if len(data) < 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:3])

    monkeypatch.setattr("notify.storage.log.disk.os.write", half)
    with pytest.raises(OSError, match="No space"):
        disk.replace("a.ckpt", [b"12345"])
    assert disk.names() == []
    monkeypatch.undo()
    disk.replace("a.ckpt", [b"12345"])
    assert (tmp_path / "a.ckpt").read_bytes() == b"12345" and disk.names() == ["a.ckpt"]


class FullDisk(Disk):
    """Has no room for another record while `is_full`."""

    is_full = False

    def reserve(self, fd: int, offset: int, size: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().reserve(fd, offset, size)


async def test_a_checkpoint_that_has_no_room_is_not_made_later(tmp_path: Path) -> None:
    """The state was copied at the next write for each checkpoint that was refused meanwhile, and none of the copies was
    written: retention asks for one every 30 s."""
    disk = FullDisk(tmp_path)
    store = LogStore(tmp_path, disk=disk)
    await store.open(T0)
    try:
        await store.checkpoint()
        newest = store._checkpoints.newest
        store.journal._reserved = 0
        disk.is_full = True
        for _ in range(3):
            with pytest.raises(DiskFull):
                await store.checkpoint()
        disk.is_full = False
        await store.pause("g", True)
        assert (store.journal.on_take, store._checkpoints.newest) == ([], newest)
    finally:
        await store.close()


async def test_a_snapshot_touches_no_directory_that_exists(tmp_path: Path) -> None:
    """It removed the files in it."""
    store = LogStore(tmp_path / "log")
    await store.open(T0)
    try:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "file").write_text("precious")
        with pytest.raises(StorageFailed, match="exists"):
            await store.snapshot(tmp_path / "mine")
        with pytest.raises(StorageFailed, match="No such file"):
            await store.snapshot(tmp_path / "missing" / "mine")
    finally:
        await store.close()
    assert (tmp_path / "mine" / "file").read_text() == "precious"


def test_a_directory_that_was_deleted_is_looked_for_where_it_was(tmp_path: Path) -> None:
    """`/metrics` and the console were answered with 500, and no alarm was looked for any more."""
    usage = shutil.disk_usage(tmp_path)
    assert room_of(tmp_path / "data" / "worker-1").total == room_of(str(tmp_path)).total == usage.total


def test_a_disk_without_a_size_is_not_full() -> None:
    assert Room(0, 0).used_share == 0.0 and Room(200, 50).used_share == 0.75


# --- A batch of a bridge finds room for all that it writes before anything changes ----------------------------------


async def test_room_is_made_for_the_bytes_of_both_positions_and_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room: list[tuple[Journal, int]] = []
    reserve = Journal.reserve

    def noted(journal: Journal, size: int) -> None:
        reserve(journal, size)
        room.append((journal, journal.end + size))

    monkeypatch.setattr(Journal, "reserve", noted)
    store = LogStore(tmp_path)
    await store.open(T0)
    at = ""
    for position, base in (("ö" * 60_000, None), ("1", None), ("2", "ö" * 60_000)):
        batch = BridgeBatch(epoch=1, expected_position=at, position=position, claim=not at, base=base)
        await store.append_from_bridge("s", batch, [], T0)
        journal, until = room[0][0], max(until for _, until in room)
        assert journal.end <= until
        at = position
    await store.close()


class Faulty(Disk):
    """A disk whose writes raise an error that is none of the disk's."""

    error: Exception | None = None

    def write(self, fd: int, data: bytes, offset: int) -> None:
        if self.error is not None:
            raise self.error
        super().write(fd, data, offset)


@pytest.mark.parametrize("waiting", [1, LOOP_WAITERS + 1])
async def test_any_error_of_a_write_stops_the_log(tmp_path: Path, waiting: int) -> None:
    """Everything waited for that frame for ever, and nobody learned why."""
    disk = Faulty(tmp_path)
    store = LogStore(tmp_path, disk=disk)
    await store.open(T0)
    await store.create_topic(Topic("t", 1))
    disk.error = MemoryError("no memory for a frame")
    async with asyncio.timeout(PATIENCE_SECONDS):
        refused = await asyncio.gather(*[store.put([sent(b"x")], T0) for _ in range(waiting)], return_exceptions=True)
        assert [type(error) for error in refused] == [StorageFailed] * waiting
        await store.close()


async def test_a_callback_that_fails_leaves_no_durable_request_without_an_answer(tmp_path: Path) -> None:
    """An error in the delivery of a topic left each request that stored messages of it waiting for ever."""
    raised: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context["exception"]))

    def fail(topics: set[str]) -> None:
        raise KeyError(*topics)

    store = LogStore(tmp_path)
    await store.open(T0)
    await store.create_topic(Topic("t", 1))
    store.on_visible(fail)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await commit(store, sent(b"x"))
    assert [type(error) for error in raised] == [KeyError]
    await store.close()
