"""A bridge to Kafka, which knows no ids: whatever was published is published once, however often bridges die."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from notify.binlog_bridge import backfill
from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.refusals import Refusals
from notify.client.tables.definitions import half_message, notify_refused
from notify.errors import InvalidRequest
from notify.movers.refused import Refusal, retry
from notify.movers.relay.relay import Relay
from notify.movers.relay.rows import Rows
from notify.movers.sinks.kafka import KafkaSink
from notify.protocol import ids
from notify.protocol.wire import Bridged, PackedBridgeBatch
from notify.runtime.clock import wall_clock
from tests.support.background import in_background
from tests.support.bridges import move, outbox
from tests.support.clock import PATIENCE_SECONDS
from tests.support.kafka import KafkaNode, committed

pytest.importorskip("confluent_kafka")

from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from notify.kafka.brokers import make_topics
from notify.kafka.cluster import Cluster

t, r = half_message.c, notify_refused.c


class Killed(Exception):
    """Stands for the death of a process."""


@pytest.fixture
def url(kafka_node: KafkaNode) -> str:
    return kafka_node.url


@pytest.fixture
def source(binlog_url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(binlog_url)
    yield engine
    engine.dispose()


def numbers(url: str, topic: str, wanted: int) -> list[int]:
    return sorted(json.loads(m.value())["n"] for m in committed(url, topic, wanted))


def move_until_nothing_is_listed(binlog_url: str, url: str, source: sa.Engine) -> None:
    """Run a bridge until it has sent all that a person has had tried again."""

    def listed() -> bool:
        with source.connect() as connection:
            return bool(connection.scalars(sa.select(r.transaction_id)).all())

    with in_background(Bridge([binlog_url], url).run()) as bridging:
        bridging.until(lambda: not listed(), "the list to be empty")


def refuse_one(source: sa.Engine, topic: str) -> str:
    """Make a message of a topic one that Kafka never takes; its transaction's id."""
    with source.begin() as connection:
        name = str(connection.scalar(sa.select(t.transaction_id).where(t.topic == topic).limit(1)))
        connection.execute(half_message.update().where(t.transaction_id == name).values(producer_group="no group"))
    return name


def have_it_tried_again(source: sa.Engine, name: str) -> None:
    with source.begin() as connection:
        connection.execute(half_message.update().where(t.transaction_id == name).values(producer_group="g"))
        assert retry(connection, [name], "its group has a name now") == [name]


@pytest.mark.long
def test_a_backfill_to_kafka_says_what_it_would_send_again(url: str, binlog_url: str, unique: str) -> None:
    """It sent everything of the last hour again, unasked. A position of nothing needs no such question."""
    outbox(binlog_url, unique, range(3))
    move(binlog_url, url, fill=True)
    assert numbers(url, unique, 3) == [0, 1, 2]
    with pytest.raises(InvalidRequest, match="--backfill-from"):
        move(binlog_url, url, fill=True)
    since = wall_clock()
    outbox(binlog_url, unique, range(4, 6))
    move(binlog_url, url, fill=True, fill_since_us=since)
    assert numbers(url, unique, 5) == [0, 1, 2, 4, 5]


@pytest.mark.long
def test_a_bridge_that_dies_before_it_has_marked_what_it_sent_again_sends_it_once(
    url: str, binlog_url: str, source: sa.Engine, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka has the retried transaction, and its row still says that it is to be tried: the next bridge asks Kafka."""
    outbox(binlog_url, unique, range(2))
    name = refuse_one(source, unique)
    move(binlog_url, url, fill=True)
    assert len(numbers(url, unique, 1)) == 1
    have_it_tried_again(source, name)

    def dies(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as planted, pytest.raises(Killed):
        planted.setattr(Refusals, "taken", dies)
        move(binlog_url, url)
    assert numbers(url, unique, 2) == [0, 1]
    move_until_nothing_is_listed(binlog_url, url, source)
    outbox(binlog_url, unique, range(4, 5))
    move(binlog_url, url)
    assert numbers(url, unique, 3) == [0, 1, 4]


@pytest.mark.long
@pytest.mark.parametrize("decided", ["before the next bridge", pytest.param("after it", marks=pytest.mark.long)])
def test_a_bridge_that_dies_between_a_refusals_note_and_its_position_leaves_the_rest_to_the_list(
    url: str, binlog_url: str, source: sa.Engine, unique: str, monkeypatch: pytest.MonkeyPatch, decided: str
) -> None:
    """The next bridge reads it again, and Kafka takes it by now: it was published for the binlog and for the list."""
    cluster = Cluster.of(url)
    bound(cluster, unique, 4_000)
    outbox(binlog_url, unique, range(2))
    name = grow_one(source, unique, 5)
    outbox(binlog_url, unique, range(6, 7))
    note = Bridge._note

    async def notes_and_dies(self: Bridge, refusals: list[Refusal]) -> None:
        await note(self, refusals)
        if refusals:
            raise Killed

    with monkeypatch.context() as planted, pytest.raises(Killed):
        planted.setattr(Bridge, "_note", notes_and_dies)
        move(binlog_url, url)
    bound(cluster, unique, 1 << 20)
    if decided == "after it":
        move(binlog_url, url)
        assert numbers(url, unique, 3) == [0, 1, 6]
    have_it_tried_again(source, name)
    move_until_nothing_is_listed(binlog_url, url, source)
    outbox(binlog_url, unique, range(8, 9))
    move(binlog_url, url)
    assert numbers(url, unique, 5) == [0, 1, 5, 6, 8]


def bound(cluster: Cluster, topic: str, size: int) -> None:
    """Have a topic take records of so many bytes."""
    make_topics(cluster, [topic])
    entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    wanted = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    admin = cluster.admin()
    admin.incremental_alter_configs([wanted])[wanted].result(PATIENCE_SECONDS)


def grow_one(source: sa.Engine, topic: str, number: int) -> str:
    """Insert a transaction whose message is larger than the others; its id."""
    with source.begin() as connection:
        row = connection.execute(sa.select(half_message).where(t.topic == topic).limit(1)).mappings().one()
        body = json.dumps({"n": number, "x": ids.to_text(ids.new_id()) * 200}).encode()
        values = dict(row) | {"transaction_id": ids.to_text(ids.new_id()), "body": body}
        connection.execute(half_message.insert().values(values))
    return str(values["transaction_id"])


@pytest.mark.long
def test_a_backfill_leaves_what_is_to_be_tried_again_to_the_list(
    url: str, binlog_url: str, source: sa.Engine, unique: str
) -> None:
    """Such rows wait in the tables and stand on the list: they were sent for both."""
    outbox(binlog_url, unique, range(2))
    name = refuse_one(source, unique)
    move(binlog_url, url, fill=True)
    have_it_tried_again(source, name)
    move(binlog_url, url, fill=True, fill_since_us=1)
    move_until_nothing_is_listed(binlog_url, url, source)
    outbox(binlog_url, unique, range(4, 5))
    move(binlog_url, url)
    (other,) = {0, 1} - {refused_number(source, name)}
    # The one that was published is there again: it is behind the instant that the backfill was given.
    assert numbers(url, unique, 4) == sorted([0, 1, other, 4])


def refused_number(source: sa.Engine, name: str) -> int:
    with source.connect() as connection:
        body = connection.scalar(sa.select(t.body).where(t.transaction_id == name))
        return int(json.loads(bytes(body or b""))["n"])


@pytest.mark.long
@pytest.mark.parametrize("repeated", ["by the command", pytest.param("by a plain start", marks=pytest.mark.long)])
def test_a_backfill_that_is_cut_off_goes_on_where_it_stood(
    url: str, binlog_url: str, source: sa.Engine, unique: str, monkeypatch: pytest.MonkeyPatch, repeated: str
) -> None:
    """Each is published once: what was before the cut, what is left, and what commits until the repetition."""
    monkeypatch.setattr(backfill, "TRANSACTIONS", 2)
    outbox(binlog_url, unique, range(12))
    append, appended = KafkaSink.append, []

    async def dies(sink: KafkaSink, name: str, batch: PackedBridgeBatch) -> Bridged:
        if len(appended) == 2:
            raise Killed
        answer = await append(sink, name, batch)
        appended.append(batch)
        return answer

    with monkeypatch.context() as planted, pytest.raises(Killed):
        planted.setattr(KafkaSink, "append", dies)
        move(binlog_url, url, fill=True, fill_since_us=1)
    assert numbers(url, unique, 4) == [0, 1, 2, 4]
    outbox(binlog_url, unique, range(12, 14))
    _copy_oldest(source, unique, 20)  # written long ago, in a transaction that commits only now
    if repeated == "by the command":
        move(binlog_url, url, fill=True, fill_since_us=1)
    else:
        move(binlog_url, url)
    move(binlog_url, url)
    assert numbers(url, unique, 12) == [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 20]


def _copy_oldest(source: sa.Engine, topic: str, number: int) -> None:
    with source.begin() as connection:
        row = connection.execute(sa.select(half_message).where(t.topic == topic).order_by(t.created_at)).mappings()
        values = dict(row.first() or {}) | {"transaction_id": ids.to_text(ids.new_id())}
        connection.execute(half_message.insert().values(values | {"body": json.dumps({"n": number}).encode()}))


@pytest.mark.long
def test_a_bridge_goes_on_where_its_relay_has_died(
    url: str, wal_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay published rows and died before it marked them: the bridge of PostgreSQL does not publish them again."""
    outbox(wal_url, unique, range(3))
    engine = sa.create_engine(wal_url)

    def dies(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as planted:
        planted.setattr(Rows, "note", dies)
        with pytest.raises(Killed):
            asyncio.run(Relay(engine, url).run(once=True))
    with engine.connect() as connection:
        assert set(connection.scalars(sa.select(t.relayed))) == {0}
    outbox(wal_url, unique, range(4, 6))
    move(wal_url, url)
    outbox(wal_url, unique, range(8, 10))
    assert move(wal_url, url).totals.rows == 2
    assert numbers(url, unique, 7) == [0, 1, 2, 4, 5, 8, 9]
    with pytest.raises(InvalidRequest, match="a bridge has taken this source over"):
        asyncio.run(Relay(engine, url).run(once=True))
    assert numbers(url, unique, 7) == [0, 1, 2, 4, 5, 8, 9]
    engine.dispose()
