"""A stream of messages into a table: each message once, whoever is killed, and wherever it is killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from notify.object_store.store import NEXT, Store
from notify.spark.messages.source import NotifySource
from notify.spark.tables import manifest as manifests
from notify.spark.tables.reading import tidy, urls_of
from notify.spark.tables.source import NotifyTable
from notify.testing.process import ServerProcess
from tests.support.streams import make, run_to_its_end, send


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server to kill."""
    server = ServerProcess(tmp_path_factory.mktemp("own") / "data").start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def lake(spark: Any) -> Any:
    """The session with both sources."""
    spark.dataSource.register(NotifySource)
    spark.dataSource.register(NotifyTable)
    return spark


def numbers(spark: Any, url: str) -> list[int]:
    rows = spark.read.format("notify_table").load(url).select("body").collect()
    return sorted(json.loads(bytes(row.body))["n"] for row in rows)


def forget_the_last_commit(checkpoint: Path) -> None:
    """Leave a checkpoint as a reader does that is killed after it wrote a micro-batch, and before Spark knows."""
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)


@pytest.mark.long
def test_each_message_once_beside_kills(lake: Any, own_server: ServerProcess, tmp_path: Path) -> None:
    url, table = own_server.url, f"file://{tmp_path}/table"
    topic = make(url, "into-a-table", 2)
    send(url, topic, 0, 40)
    frame = (
        lake.readStream.format("notify")
        .options(servers=url, topics=topic, startingOffsets="earliest", maxRowsPerTrigger="15")
        .load()
    )

    def run(checkpoint: str = "checkpoint") -> None:
        writing = frame.writeStream.format("notify_table").option("path", table)
        run_to_its_end(writing.option("checkpointLocation", str(tmp_path / checkpoint)))

    # The files are written, and the manifest cannot be.
    (tmp_path / "table" / f"manifest.json{NEXT}").mkdir(parents=True)
    with pytest.raises(Exception, match=r"manifest\.json"):
        run()
    (tmp_path / "table" / f"manifest.json{NEXT}").rmdir()
    left = set(Store(table).names("data"))
    assert left
    run()
    assert numbers(lake, table) == list(range(40))
    # The last micro-batch is repeated, by a reader that finds the server restarted after a crash.
    forget_the_last_commit(tmp_path / "checkpoint")
    own_server.kill()
    own_server.start()
    send(url, topic, 40, 50)
    run()
    assert numbers(lake, table) == list(range(50))
    # Another checkpoint begins again, and adds nothing to what the table has.
    send(url, topic, 50, 53)
    run("another")
    manifest = manifests.load(Store(table))
    assert manifest.rows == 53 and sum(manifest.offsets[topic]["next"].values()) == 53
    # The files that the killed writer left are in no manifest, and go.
    assert set(tidy(table, 0)) == left
    rows = lake.read.parquet(*urls_of(table)).select("body").collect()
    assert sorted(json.loads(bytes(row.body))["n"] for row in rows) == list(range(53))
    # The table says where a query continues that has no checkpoint; and batches are added in the same way.
    source = lake.read.format("notify").options(servers=url, topics=topic)
    assert source.option("startingOffsets", json.dumps(manifest.offsets)).load().count() == 0
    send(url, topic, 53, 60)
    everything = source.option("startingOffsets", "earliest").load()
    everything.write.format("notify_table").mode("append").save(table)
    assert numbers(lake, table) == list(range(60))
    with pytest.raises(Exception, match="topic_number is missing"):
        everything.drop("topic_number").write.format("notify_table").mode("append").save(table)


@pytest.mark.long
def test_a_store_that_is_away(lake: Any, server: ServerProcess, tmp_path: Path) -> None:
    topic = make(server.url, "store-away", 1)
    send(server.url, topic, 0, 5)
    table = tmp_path / "table"
    source = lake.read.format("notify").options(servers=server.url, topics=topic).load()
    adding = source.write.format("notify_table").mode("append")
    adding.save(f"file://{table}")
    shutil.move(table, tmp_path / "away")
    table.write_text("a file where the store was")
    with pytest.raises(Exception, match="cannot"):
        adding.save(f"file://{table}")
    table.unlink()
    shutil.move(tmp_path / "away", table)
    adding.save(f"file://{table}")
    assert numbers(lake, f"file://{table}") == list(range(5))
