"""A sink stores a position of a megabyte by what differs, with the messages before it, and another sink reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from notify.binlog_bridge.binlog.position import MySqlSet, Position
from notify.errors import Conflict, InvalidRequest
from notify.kafka.records import SCHEME
from notify.movers.sinks.sink import Sink, open_sink
from notify.protocol import ids
from notify.protocol.limits import BASE_CHARACTERS
from notify.protocol.wire import BridgedTransaction, PackedBridgeBatch, PackedMessage
from notify.testing.process import ServerProcess
from tests.support.binlog import megabyte


@pytest.fixture(params=["server", pytest.param("kafka", marks=pytest.mark.long)])
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "kafka":
        pytest.importorskip("confluent_kafka")
        yield request.getfixturevalue("kafka_url")
    else:
        server: ServerProcess = request.getfixturevalue("server")
        yield server.url


def message(topic: str) -> BridgedTransaction:
    return BridgedTransaction(ids.to_text(ids.new_id()), "g", [PackedMessage(topic=topic, body=b"x")])


def test_positions_of_a_megabyte(target: str, unique: str) -> None:
    gtids = MySqlSet.parse(megabyte())
    server = str(gtids)[:36]

    def position(number: int) -> str:
        gtids.add(server, number)
        return Position(str(gtids), "binlog.000004", number).text

    async def append(
        sink: Sink, epoch: int, before: str, after: str, *transactions: BridgedTransaction, **more: Any
    ) -> Any:
        batch = PackedBridgeBatch(epoch, before, after, transactions=list(transactions), **more)
        return await sink.append(unique, batch)

    async def run() -> None:
        sink, other = open_sink(target), open_sink(target)
        try:
            epoch, at = await sink.claim(unique)
            assert (epoch, at) == (1, "")
            for number in range(200_000, 200_005):
                after = position(number)
                answer = await append(sink, epoch, at, after, message(unique))
                assert (answer.position, answer.stored, answer.refused) == (after, 1, [])
                at = after
                assert await other.position(unique) == at
            # Parts of a large transaction, and a message that no target takes: the position stays.
            part = message(unique)
            assert (await append(sink, epoch, at, at, part, prepare=True)).position == at
            answer = await append(sink, epoch, at, position(200_005), commit=[part.id])
            at = answer.position
            bad = message("no such/topic")
            answer = await append(sink, epoch, at, position(200_006), message(unique), bad)
            assert [item.id for item in answer.refused] == [bad.id] and answer.position == at
            assert await other.position(unique) == at
            # Another bridge continues there, and what it has nothing in common with becomes the base.
            epoch, claimed = await other.claim(unique)
            assert (epoch, claimed) == (2, at)
            for after in (position(200_007), at.replace("100", "900"), "short", position(200_008)):
                assert (await append(other, epoch, at, after, message(unique))).position == after
                at = after
            with pytest.raises(Conflict):
                await append(sink, 1, at, position(200_009), message(unique))
            too_long = Position("x" * BASE_CHARACTERS).text
            with pytest.raises(InvalidRequest, match="too many gaps"):
                await append(other, epoch, at, too_long, message(unique))
            assert await open_again(at) == at
            if target.startswith(SCHEME):
                assert await asyncio.to_thread(shown_by_servers) == [unique]
        finally:
            await sink.close()
            await other.close()

    async def open_again(at: str) -> str:
        third = open_sink(target)
        try:
            _, claimed = await third.claim(unique)
            assert await third.position(unique) == claimed
            return claimed
        finally:
            await third.close()

    def shown_by_servers() -> list[str]:
        """The sources that servers show, which read the topic's records one by one."""
        from notify.kafka.cluster import Cluster
        from notify.kafka.positions import positions_topic
        from notify.server.groups.kafka.brokers import Brokers
        from notify.server.groups.kafka.sources import Sources, shown

        sources = Sources(Brokers(Cluster.of(target)))
        try:
            rows = shown(sources.read([positions_topic(unique)]), 0)
        finally:
            sources.close()
        assert all(len(row["position"]) < 500 for row in rows)
        return [row["source"] for row in rows]

    asyncio.run(run())
