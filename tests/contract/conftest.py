"""Each scenario runs on memory, on the log, and on a log of tiny segments that is killed at each restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from notify.storage.log import journal
from notify.storage.sql.engines import open_engine
from notify.storage.sql.tables import metadata, server_shard
from notify.storage.topics import Topic
from tests.contract.stores import T0, Bench, Scenario, SqlBench
from tests.support.databases import DATABASES, MOST, empty_database
from tests.support.servers import make_storage
from tests.support.targets import Kafka, QueueServer, Target

Runner = Callable[[Scenario], None]

LOGS = ("log", "small-segments")


def write_frames_on_the_loop(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Make `log` write its frames on the event loop, and the other log in its thread, however fast the disk is."""
    monkeypatch.setattr(journal, "LOOP_SYNC_SECONDS", float("inf") if kind == "log" else 0.0)


def runner(bench: Callable[[], Bench]) -> Runner:
    def call(scenario: Scenario) -> None:
        async def whole() -> None:
            b = bench()
            await b.store.open(T0)
            b.store.create_topic_soon(Topic("t"))
            try:
                await scenario(b)
            finally:
                await b.store.close()

        asyncio.run(whole())

    return call


@pytest.fixture(params=["memory", *LOGS])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    write_frames_on_the_loop(monkeypatch, request.param)
    return runner(lambda: Bench(request.param, tmp_path / "log"))


@pytest.fixture(scope="session")
def emptied(
    database_urls: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """A function from a database's kind to the URL of one with the server's tables, which is emptied for each test."""
    urls: dict[str, str] = {}
    with ExitStack() as stack:

        def url_of(kind: str) -> str:
            if kind in urls:
                empty(urls[kind])
            else:
                place = tmp_path_factory.mktemp(kind)
                urls[kind] = stack.enter_context(empty_database(kind, database_urls, place))
                make_storage(urls[kind])
            return urls[kind]

        yield url_of


def empty(url: str) -> None:
    """Delete all rows of the server's tables but the shard's name."""
    engine = open_engine(url)
    with engine.begin() as connection:
        for table in reversed(metadata.sorted_tables):
            if table is not server_shard:
                connection.execute(table.delete())
    engine.dispose()


@pytest.fixture(params=["memory", *LOGS, *MOST])
def transactions(
    request: pytest.FixtureRequest, tmp_path: Path, emptied: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> Runner:
    """As `run`, and on every database: for scenarios of transactions only."""
    if request.param in DATABASES:
        url = emptied(request.param)
        return runner(lambda: SqlBench(request.param, tmp_path, url))
    write_frames_on_the_loop(monkeypatch, request.param)
    return runner(lambda: Bench(request.param, tmp_path / "log"))


@pytest.fixture(params=["queue server", "Kafka"])
def target(request: pytest.FixtureRequest, unique: str) -> Iterator[Target]:
    made: QueueServer | Kafka
    if request.param == "Kafka":
        made = Kafka(request.getfixturevalue("kafka_node"), unique)
    else:
        made = QueueServer(request.getfixturevalue("server"), unique)
    yield made
    made.close()
