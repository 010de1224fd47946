"""`notify`, the Data Source of Spark: a topic's messages as a table, and as a stream into one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from notify.testing.process import ServerProcess
from notify.testing.server import InMemoryServer
from tests.support.http import call
from tests.support.streams import make, run_to_its_end, send

pytest.importorskip("pyspark")
COLUMNS = ["id", "topic", "topic_number", "queue", "offset", "committed_at", "key", "tag", "headers", "body"]


@pytest.fixture(scope="module")
def reading(spark: Any) -> Any:
    from notify.spark.messages.source import NotifySource

    spark.dataSource.register(NotifySource)
    return spark


@pytest.mark.long
def test_a_topic_as_a_table(reading: Any, server: ServerProcess) -> None:
    topic = make(server.url, "as-a-table", 3)
    send(server.url, topic, 0, 100)
    call(server.url, "POST", "/v1/messages", {"messages": [{"topic": topic, "body_base64": "/wA="}]})
    source = reading.read.format("notify").option("servers", server.url).option("topics", topic)
    frame = source.option("schema", "n bigint").option("rowsPerPartition", "40").load()
    assert frame.columns == [*COLUMNS, "value", "rescued"]
    rows = frame.collect()
    assert sorted(row.value.n for row in rows if row.value) == list(range(100))
    assert [(bytes(row.body), row.rescued) for row in rows if row.value is None] == [(b"\xff\x00", "base64:/wA=")]
    assert all(row.headers == {"n": str(row.value.n)} and row.key == f"k{row.value.n % 5}" for row in rows if row.value)
    assert len({(row.topic_number, row.queue, row.offset) for row in rows}) == 101
    inferred = source.option("schema", "infer").option("columns", "value,offset").load()
    assert inferred.dtypes == [("value", "struct<n:bigint>"), ("offset", "bigint")]
    assert inferred.where("value.n < 10").count() == 10


@pytest.mark.long
def test_times_are_instants_whatever_type_a_session_prefers(reading: Any) -> None:
    """They were wall clocks of UTC, which a table of another session refused."""
    with InMemoryServer() as server:
        topic = make(server.url, "instants", 1)
        reading.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
        try:
            frame = reading.read.format("notify").option("servers", server.url).option("topics", topic).load()
        finally:
            reading.conf.unset("spark.sql.timestampType")
    assert dict(frame.dtypes)["committed_at"] == "timestamp"


@pytest.mark.long
def test_an_unreadable_source_raises_an_error_with_a_remedy(reading: Any, server: ServerProcess) -> None:
    source = reading.read.format("notify").option("servers", server.url)
    for options, said in (
        ({"topics": "no-such-topic"}, "notify topic create no-such-topic"),
        ({"topics": "x", "columns": "value"}, "there is no value"),
        ({"topics": "x", "schema": "n blob"}, "(?i)blob"),
    ):
        with pytest.raises(Exception, match=said):
            source.options(**options).load().count()


@pytest.mark.long
def test_a_stream_of_messages_each_once(reading: Any, server: ServerProcess, tmp_path: Path) -> None:
    topic = make(server.url, "as-a-stream", 2)
    send(server.url, topic, 0, 30)
    source = reading.readStream.format("notify").option("servers", server.url).option("topics", topic)
    frame = source.option("startingOffsets", "earliest").option("maxRowsPerTrigger", "12").load()
    sizes: list[int] = []

    def run(most: int) -> None:
        """Read what is there, in micro-batches; a batch fails after it was written, as where a reader dies."""

        def write(batch: Any, number: int) -> None:
            batch.write.mode("overwrite").parquet(str(tmp_path / "table" / f"batch={number}"))
            sizes.append(batch.count())
            if len(sizes) == most:
                raise RuntimeError("the reader is killed")

        run_to_its_end(frame.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "checkpoint")))

    with pytest.raises(Exception, match="the reader is killed"):
        run(2)
    send(server.url, topic, 30, 40)
    run(-1)
    read = reading.read.parquet(str(tmp_path / "table"))
    assert sorted(json.loads(bytes(row.body))["n"] for row in read.collect()) == list(range(40))
    assert max(sizes) <= 12
    offsets = sorted((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    last = json.loads(offsets[-1].read_text().splitlines()[-1])
    assert sum(last[topic]["next"].values()) == 40  # offsets by queue, for people to read


@pytest.mark.long
def test_a_stream_begins_at_the_end_by_default_and_ends_where_it_was_when_it_began(reading: Any) -> None:
    with InMemoryServer() as server:
        topic = make(server.url, "from-the-end", 1)
        send(server.url, topic, 0, 5)
        frame = reading.readStream.format("notify").option("servers", server.url).option("topics", topic).load()
        run_to_its_end(frame.writeStream.format("memory").queryName("from_the_end"))
        assert reading.table("from_the_end").count() == 0
