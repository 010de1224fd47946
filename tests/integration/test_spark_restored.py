"""A query of Spark over a server that ships to S3, loses its disk, and is restored: it continues, and reads each
once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from notify.errors import ObjectStoreFailed
from notify.object_store.store import Store
from notify.spark.messages.offsets import Offsets
from notify.spark.messages.options import Options
from notify.spark.messages.planning import Planning
from notify.spark.messages.reading import Reading
from notify.spark.messages.shipped import ShippedMessages
from notify.storage.shipped.manifest import segments_from
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.http import admin, post
from tests.support.object_store import S3Server, listed, s3_server
from tests.support.servers import stop_if_running

TOPIC = "orders"
SHIPPING_SECONDS = 240.0
MANY = 1 << 30


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


def send(server: ServerProcess, first: int, end: int) -> None:
    messages = [{"topic": TOPIC, "key": f"k{n}", "body": str(n)} for n in range(first, end)]
    items = post(server.url, "/v1/messages", {"messages": messages})["items"]
    assert {item["status"] for item in items} == {201}


def shipped(url: str) -> int:
    """Messages in the store."""
    found = listed(url)
    return 0 if found is None else sum(segment.messages for segment in segments_from(Store(url), found))


def read(options: Options, start: Offsets | None = None) -> tuple[Offsets, list[int]]:
    """The offsets at the end, and the messages up to there from `start` on, or from the first one."""
    with closing(Planning(options)) as planning, Reading(options) as reading:
        at = start if start is not None else planning.beginning()
        end = planning.following(at, None)
        rows = [batch for piece in planning.pieces(at, end) for batch in reading.rows(piece)]
        return end, sorted(int(body) for batch in rows for body in batch.column("body").to_pylist())


@pytest.mark.long
def test_a_query_goes_on_after_the_disk_was_lost(s3: S3Server, tmp_path: Path) -> None:
    flags = ["--ship-to", s3.url, "--ship-every", "1"]
    server = ServerProcess(tmp_path / "data", flags=flags).start()
    restored = ServerProcess(tmp_path / "restored", flags=flags)
    try:
        admin(server.url, "PUT", f"topics/{TOPIC}", {"queues": 2})
        send(server, 0, 30)
        eventually(lambda: shipped(s3.url) == 30, "the messages to be shipped", SHIPPING_SECONDS)
        s3.refuse(after=0)  # from here on nothing is shipped
        send(server, 30, 40)
        options = Options.of({"servers": server.url, "topics": TOPIC, "store": s3.url}, "earliest")
        at, numbers = read(options)
        assert numbers == list(range(40))
        server.kill()
        shutil.rmtree(tmp_path / "data")
        s3.refuse(after=MANY)
        code, answer = cli("restore", "--from", s3.url, "--data-dir", str(tmp_path / "restored"), "--json")
        assert code == 0, answer
        restored.start()
        send(restored, 40, 45)
        options = Options.of({"servers": restored.url, "topics": TOPIC, "store": s3.url}, "earliest")
        end, numbers = read(options, at)
        assert numbers == list(range(40, 45))  # and no offset is taken for lost that no message ever had
        assert read(options, end) == (end, [])
        assert read(options)[1] == [*range(30), *range(40, 45)]
    finally:
        stop_if_running(server)
        stop_if_running(restored)


def test_a_store_that_refuses_is_told_within_its_time(s3: S3Server) -> None:
    given = {"servers": "http://127.0.0.1:1", "topics": "t", "store": s3.url, "timeoutSeconds": "1"}
    options = Options.of(given, "latest")
    s3.refuse(after=0)
    try:
        with pytest.raises(ObjectStoreFailed, match="cannot read"):
            ShippedMessages(options)
    finally:
        s3.refuse(after=MANY)
