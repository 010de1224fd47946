"""A data directory that is deleted, renamed or replaced while a server runs: the server acknowledged messages that it
wrote into files that no start finds, and it said nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from notify.errors import InvalidRequest, StorageFailed, Unavailable
from notify.server.data_directory import SHARD, keep_shard
from notify.storage.log import LogStore
from notify.storage.topics import Topic
from notify.testing.forked import launch
from notify.testing.ports import free_port
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.databases import empty_database
from tests.support.groups import publish
from tests.support.http import REASON, admin, is_ready
from tests.support.logs import T0, commit
from tests.support.servers import Started, make_storage
from tests.support.transactions import sent

SECOND_US = 1_000_000


def replaced(directory: Path) -> None:
    """As a mount over it does, or a link that leads elsewhere from now on."""
    directory.rename(directory.with_name("before"))
    shutil.copytree(directory.with_name("before"), directory)


def emptied(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()


MOVES = [
    pytest.param(shutil.rmtree, id="deleted"),
    pytest.param(emptied, id="emptied"),
    pytest.param(lambda directory: directory.rename(directory.with_name("renamed")), id="renamed"),
    pytest.param(replaced, id="replaced"),
]


@pytest.mark.parametrize("move", MOVES)
def test_a_log_whose_directory_is_gone_stores_nothing_more(tmp_path: Path, move: Callable[[Path], object]) -> None:
    failures: list[StorageFailed] = []

    async def scenario() -> None:
        store = LogStore(tmp_path / "log", on_failure=failures.append)
        await store.open(T0)
        try:
            await store.create_topic(Topic("t", 1))
            store.tend(T0)
            await commit(store, sent(b"before"))
            move(tmp_path / "log")
            store.tend(T0 + 2 * SECOND_US)
            with pytest.raises(StorageFailed, match="deleted or renamed"):
                await store.put([sent(b"after")], T0)
        finally:
            store.let_go()

    asyncio.run(scenario())
    assert len(failures) == 1 and str(tmp_path / "log") in str(failures[0])


def test_a_log_in_its_place_goes_on(tmp_path: Path) -> None:
    """Also behind a link, and while another server's directory beside it is moved."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    async def scenario() -> None:
        store = LogStore(tmp_path / "link" / "log")
        await store.open(T0)
        await store.create_topic(Topic("t", 1))
        for n in range(3):
            store.tend(T0 + 2 * n * SECOND_US)
            await commit(store, sent(b"%d" % n))
        await store.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("move", [MOVES[0], pytest.param(*MOVES[2].values, id="renamed", marks=pytest.mark.long)])
def test_a_server_whose_directory_is_gone_says_so_and_ends(
    tmp_path: Path, unique: str, move: Callable[[Path], object]
) -> None:
    server = ServerProcess(tmp_path / "data").start()
    try:
        publish(server.url, unique, ["1"])
        move(tmp_path / "data")
        assert server.process is not None and server.process.wait(PATIENCE_SECONDS) == 1
        eventually(lambda: "storage_failed" in "".join(server.output), "the reason in its output")
        assert "deleted or renamed" in "".join(server.output)
    finally:
        server.stop()


@pytest.mark.long
def test_workers_do_not_begin_empty_logs_where_theirs_were(tmp_path: Path) -> None:
    port = free_port()
    process = launch(["serve", "--port", str(port), "--data-dir", str(tmp_path / "data"), "--workers", "2"], os.environ)

    assert process.stdout is not None
    try:
        eventually(lambda: is_ready(f"http://127.0.0.1:{port}"), "the workers")
        (tmp_path / "data").rename(tmp_path / "renamed")
        assert process.wait(PATIENCE_SECONDS) == 2
        assert not list(tmp_path.glob("data/**/*.log"))
        assert "was deleted or renamed while the workers ran" in process.stdout.read()
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()


def test_a_server_whose_messages_are_in_a_database_goes_on(
    tmp_path: Path, database_urls: Mapping[str, str], unique: str
) -> None:
    """Nothing in its directory is missed before a start; but a new token failed with its answer."""
    with empty_database("postgresql", database_urls, tmp_path) as url, ExitStack() as stack:
        make_storage(url)
        server = Started(url, tmp_path, stack).add()
        shutil.rmtree(tmp_path / "s0")
        token = {"name": "t", "rights": ["publish"], "reason": REASON}
        assert admin(server.url, "POST", "credentials", token)["result"]["name"] == "t"
        assert admin(server.url, "GET", "actions")["actions"][0]["what"] == "credential.add"
        publish(server.url, unique, ["1"])
        eventually(lambda: "registry_not_kept" in "".join(server.output), "the reason in its output")


def test_a_log_is_not_served_as_another_shard(tmp_path: Path) -> None:
    """A check would take each half for one on a shard that its row does not name, and roll it back."""
    server = ServerProcess(tmp_path / "data", flags=("--shard", "main"))
    server.start().stop()
    named = ServerProcess(tmp_path / "data", flags=("--shard", "eu"))
    with pytest.raises(Unavailable, match="has the log of shard main"):
        named.start()
    (tmp_path / "data" / "shard").write_text("eu\n")  # as the refusal says
    named.start().stop()


def test_the_directories_of_two_workers_are_not_exchanged(tmp_path: Path) -> None:
    for name in ("worker-1", "worker-2"):
        (tmp_path / name / "log").mkdir(parents=True)
        keep_shard(tmp_path / name, name)
        keep_shard(tmp_path / name, name)
        (tmp_path / name / "log" / "00000000.log").touch()
    (tmp_path / "worker-1").rename(tmp_path / "other")
    (tmp_path / "worker-2").rename(tmp_path / "worker-1")
    with pytest.raises(InvalidRequest, match="has the log of shard worker-2"):
        keep_shard(tmp_path / "worker-1", "worker-1")


def test_a_directory_without_a_log_takes_any_shard(tmp_path: Path) -> None:
    keep_shard(tmp_path, "main")
    keep_shard(tmp_path, "eu")
    keep_shard(tmp_path, "eu")
    assert (tmp_path / SHARD).read_text() == "eu"
