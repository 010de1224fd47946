"""PostgreSQL's log to Kafka, which knows no ids: what was published, also by a relay, is published once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from notify.binlog_bridge.bridge import Bridge
from notify.client.tables.definitions import half_message
from notify.errors import InvalidRequest
from notify.movers.relay.relay import Relay
from notify.movers.relay.rows import Rows
from tests.support.bridges import outbox
from tests.support.clock import PATIENCE_SECONDS
from tests.support.kafka import KafkaNode, committed

pytest.importorskip("confluent_kafka")


@pytest.fixture
def kafka(kafka_node: KafkaNode) -> str:
    return kafka_node.url


@pytest.fixture
def source(wal_url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(wal_url)
    yield engine
    engine.dispose()


def move(wal_url: str, kafka: str) -> Bridge:
    bridge = Bridge([wal_url], kafka)
    asyncio.run(asyncio.wait_for(bridge.run(once=True), 2 * PATIENCE_SECONDS))
    return bridge


def numbers(kafka: str, topic: str, wanted: int) -> list[int]:
    return sorted(json.loads(m.value())["n"] for m in committed(kafka, topic, wanted))


@pytest.mark.long
def test_a_bridge_goes_on_where_its_relay_has_died(
    kafka: str, wal_url: str, source: sa.Engine, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay published rows and died before it marked them: the bridge does not publish them again."""
    outbox(wal_url, unique, range(3))

    class Killed(Exception):
        """Stands for the death of a process."""

    def dies(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as planted:
        planted.setattr(Rows, "note", dies)
        with pytest.raises(Killed):
            asyncio.run(Relay(source, kafka).run(once=True))
    with source.connect() as connection:
        assert set(connection.scalars(sa.select(half_message.c.relayed))) == {0}
    outbox(wal_url, unique, range(4, 6))
    move(wal_url, kafka)
    outbox(wal_url, unique, range(8, 10))
    assert move(wal_url, kafka).totals.rows == 2
    assert numbers(kafka, unique, 7) == [0, 1, 2, 4, 5, 8, 9]
    with pytest.raises(InvalidRequest, match="a bridge has taken this source over"):
        asyncio.run(Relay(source, kafka).run(once=True))
    assert numbers(kafka, unique, 7) == [0, 1, 2, 4, 5, 8, 9]
