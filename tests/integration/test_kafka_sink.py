"""Kafka as a sink, on a real node: positions, topics, sizes, headers, and relays that take turns."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client import create_tables
from notify.client.tables.definitions import half_message, notify_refused
from notify.errors import InvalidRequest, Unavailable
from notify.movers.relay.relay import Relay
from notify.movers.relay.rows import Rows
from notify.movers.sinks.sink import Sink, running_beside
from notify.protocol import ids
from notify.protocol.limits import LIMITS
from notify.protocol.wire import Bridged, BridgedTransaction, PackedBridgeBatch, PackedMessage
from tests.support.background import in_background, repeated
from tests.support.bridges import move
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.databases import empty_database
from tests.support.kafka import KafkaNode, Wrapped, committed, open_transaction, patient_sink
from tests.support.shop import make_engine

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import NewPartitions, NewTopic  # type: ignore[attr-defined]

from notify.kafka import table
from notify.kafka.brokers import make_topics
from notify.kafka.cluster import Cluster
from notify.kafka.positions import standing
from notify.kafka.records import POSITIONS, header, listed, own_headers
from notify.kafka.table import latest
from notify.movers.sinks import kafka

MURMUR2 = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "a-little-bit-longer-string": -1486304829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    "abc": 479470107,
}
"""Hashes of Java's client for these keys (UtilsTest of Apache Kafka)."""


@pytest.fixture
def url(kafka_node: KafkaNode) -> str:
    return kafka_node.url


@contextmanager
def postgresql(database_urls: Mapping[str, str], directory: Path) -> Iterator[sa.Engine]:
    """An empty database with an outbox."""
    with empty_database("postgresql", database_urls, directory) as database:
        engine = make_engine(database)
        create_tables(engine)
        yield engine
        engine.dispose()


def add(engine: sa.Engine, topic: str, body: bytes | str, **fields: Any) -> str:
    """Insert an outbox transaction of one message; its id."""
    name = ids.to_text(ids.new_id())
    row = {
        "transaction_id": name, "message_no": 0, "producer_group": "g", "mode": "outbox", "state": "COMMITTED",
        "shards": "", "topic": topic, "key": "k", "relayed": 0, "created_at": datetime.now(UTC).replace(tzinfo=None),
        "body": body.encode() if isinstance(body, str) else body,
    }  # fmt: skip
    with engine.begin() as connection:
        connection.execute(half_message.insert().values(row | fields))
    return name


def refused_codes(engine: sa.Engine) -> dict[str, str]:
    with engine.connect() as connection:
        return {r.transaction_id: r.code for r in connection.execute(sa.select(notify_refused))}


def texts(url: str, topic: str, wanted: int = 0) -> list[str]:
    return [m.value().decode() for m in committed(url, topic, wanted)]


def sent(topic: str, body: str | bytes, **fields: Any) -> BridgedTransaction:
    message = PackedMessage(topic=topic, body=body.encode() if isinstance(body, str) else body, **fields)
    return BridgedTransaction(id=ids.to_text(ids.new_id()), producer_group="g", messages=[message])


def use(url: str, work: Callable[[Sink], Awaitable[None]]) -> None:
    async def run() -> None:
        sink = patient_sink(url)
        try:
            await work(sink)
        finally:
            await sink.close()

    asyncio.run(run())


async def append(
    sink: Sink, source: str, epoch: int, position: str, *some: BridgedTransaction, **fields: Any
) -> Bridged:
    batch = PackedBridgeBatch(epoch=epoch, expected_position="", position=position, transactions=list(some), **fields)
    return await sink.append(source, batch)


# --- positions ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_an_open_transaction_of_another_source_hides_no_position(url: str, unique: str) -> None:
    other = f"other-{unique}"

    async def work(sink: Sink) -> None:
        epoch, _ = await sink.claim(unique)
        await append(sink, unique, epoch, "1")
        make_topics(Cluster.of(url), [f"{POSITIONS}.{other}"], compacted=True)
        others = open_transaction(url, f"0-{unique}", f"{POSITIONS}.{other}", other, '{"epoch": 9, "position": "x"}')
        await append(sink, unique, epoch, "2")
        again = patient_sink(url)
        assert await again.position(unique) == "2"
        assert await again.claim(unique) == (epoch + 1, "2")
        await again.close()
        others.abort_transaction(PATIENCE_SECONDS)

    use(url, work)


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "later"])
def test_positions_whose_topic_has_several_partitions_are_found(url: str, unique: str, when: str) -> None:
    """As brokers or administrators make them: positions went where their keys belong, and each claim began anew."""
    topic = f"{POSITIONS}.{unique}"
    admin = Cluster.of(url).admin()
    if when == "before":
        admin.create_topics([NewTopic(topic, 8, -1, config={"cleanup.policy": "compact"})])[topic].result(
            PATIENCE_SECONDS
        )

    async def work(sink: Sink) -> None:
        epoch, _ = await sink.claim(unique)
        await append(sink, unique, epoch, "1")
        if when == "later":
            admin.create_partitions([NewPartitions(topic, 8)])[topic].result(PATIENCE_SECONDS)
        again = patient_sink(url)
        assert await again.claim(unique) == (epoch + 1, "1")
        await append(again, unique, epoch + 1, "2")
        await again.close()
        last = patient_sink(url)
        assert await last.claim(unique) == (epoch + 2, "2")
        await last.close()

    use(url, work)


@pytest.mark.long
def test_a_topic_whose_positions_would_be_deleted_is_told(
    url: str, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As brokers make it for themselves. A source that rested for a week began anew without a word."""
    topic = f"{POSITIONS}.{unique}"
    admin = Cluster.of(url).admin()
    made = admin.create_topics([NewTopic(topic, 1, -1, config={"cleanup.policy": "compact,delete"})])
    made[topic].result(PATIENCE_SECONDS)

    async def work(sink: Sink) -> None:
        await sink.claim(unique)

    use(url, work)
    assert f"topic {topic} has cleanup.policy=compact,delete" in caplog.text
    assert f"--entity-name {topic} --add-config cleanup.policy=compact" in caplog.text
    assert "notify-delayed" not in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("length", [1, 2_000_000], ids=["short", "long"])
def test_a_position_whose_topic_is_deleted_is_written_again(
    url: str, unique: str, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The next claim found none, and the bridge published everything again."""
    topic = f"{POSITIONS}.{unique}"
    admin = Cluster.of(url).admin()
    positions = ["1" * length + str(n) for n in range(3)]

    async def work(sink: Sink) -> None:
        epoch, _ = await sink.claim(unique)
        for position in positions:
            await append(sink, unique, epoch, position)
        admin.delete_topics([topic])[topic].result(PATIENCE_SECONDS)
        eventually(lambda: topic not in admin.list_topics().topics, "the topic to go")
        assert await sink.claim(unique) == (epoch + 1, positions[-1])
        again = patient_sink(url)
        assert await again.claim(unique) == (epoch + 2, positions[-1])
        await append(again, unique, epoch + 2, positions[-1] + "0")
        assert await again.position(unique) == positions[-1] + "0"
        await again.close()

    use(url, work)
    assert f"{topic} has lost the position of source {unique}" in caplog.text


class Counting(Wrapped):
    """A consumer of Kafka that counts the records it gives."""

    records = 0

    def poll(self, timeout: float) -> Any:
        message = self._client.poll(timeout)
        Counting.records += message is not None
        return message

    def consume(self, most: int, timeout: float) -> Any:
        messages = self._client.consume(most, timeout)
        Counting.records += len(messages)
        return messages


@pytest.mark.long
def test_a_position_is_read_from_the_end(url: str, unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy source writes a record a batch: all of a week's were read at each claim, within 20 s or never."""
    topic, cluster = f"{POSITIONS}.{unique}", Cluster.of(url)
    make_topics(cluster, [topic], compacted=True)
    producer = cluster.producer({"transactional.id": f"writes-{unique}"})
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b'{"epoch": 7, "position": "own"}', unique.encode())
    for n in range(5000):
        producer.produce(topic, f'{{"epoch": 3, "position": "{n}"}}'.encode(), b"another")
    producer.commit_transaction(PATIENCE_SECONDS)
    committed(url, topic, 5001)  # brokers write the end of a transaction after they have answered
    consumer = Cluster.consumer
    monkeypatch.setattr(Cluster, "consumer", lambda self, own: Counting(consumer(self, own)))
    assert standing(cluster, unique).position == "own"  # it is behind whatever is looked at first
    producer.begin_transaction()
    producer.produce(topic, b'{"epoch": 8, "position": "newest"}', unique.encode())
    producer.commit_transaction(PATIENCE_SECONDS)

    def is_newest() -> bool:
        Counting.records = 0
        return standing(cluster, unique).position == "newest"

    eventually(is_newest, "the newest position")
    assert Counting.records < 1100


@pytest.mark.long
def test_closing_a_sink_ends_its_open_transaction(url: str, unique: str) -> None:
    """Else whoever reads the topic would wait for Kafka to end it."""

    async def work(sink: Sink) -> None:
        epoch, _ = await sink.claim(unique)
        await append(sink, unique, epoch, "1", sent(unique, "part", key="k"), prepare=True)
        await asyncio.to_thread(committed, url, unique, 1, uncommitted=True)
        await sink.close()
        other = patient_sink(url)
        epoch, _ = await other.claim(f"other-{unique}")
        await append(other, f"other-{unique}", epoch, "1", sent(unique, "whole", key="k"))
        assert texts(url, unique) == ["whole"]
        await other.close()

    use(url, work)


@pytest.mark.long
def test_a_mover_that_was_frozen_for_too_long_goes_on_where_nobody_took_over(
    url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka ends a transaction that is open for too long, and fences whoever began it, as if another one published."""
    monkeypatch.setattr(kafka, "TRANSACTION_SECONDS", 1.0)
    part = sent(unique, "part", key="k")

    async def work(frozen: Sink) -> None:
        epoch, _ = await frozen.claim(unique)
        await append(frozen, unique, epoch, "1", part, prepare=True)
        await asyncio.to_thread(committed, url, unique, 1, uncommitted=True)
        other = patient_sink(url)
        at, _ = await other.claim(f"other-{unique}")
        await append(other, f"other-{unique}", at, "1", sent(unique, "whole", key="k"))
        await other.close()
        # It is in front of what is visible now only because Kafka has taken it back.
        assert await asyncio.to_thread(texts, url, unique, 1) == ["whole"]
        with pytest.raises(Unavailable):
            await append(frozen, unique, epoch, "1", commit=[part.id])
        assert await frozen.claim(unique, take_back=False) == (epoch + 1, "")
        await append(frozen, unique, epoch + 1, "1", part)

    use(url, work)
    assert texts(url, unique, 2) == ["whole", "part"]


# --- topics, sizes, partitions --------------------------------------------------------------------------------


@pytest.mark.long
def test_topics_are_made_with_the_partitions_asked_for_and_keys_go_where_java_puts_them(url: str, unique: str) -> None:
    async def work(sink: Sink) -> None:
        epoch, _ = await sink.claim(unique)
        await append(sink, unique, epoch, "1", *[sent(unique, key, key=key) for key in MURMUR2])

    use(f"{url}?notify.partitions=7", work)
    placed = {m.key().decode(): m.partition() for m in committed(url, unique, len(MURMUR2))}
    assert placed == {key: (hashed & 0x7FFFFFFF) % 7 for key, hashed in MURMUR2.items()}


@pytest.mark.parametrize("value", ["0", "many", "20000"])
def test_partitions_that_are_no_number_are_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match=r"notify\.partitions"):
        Cluster.of(f"kafka://127.0.0.1:9?notify.partitions={value}")


@pytest.mark.long
def test_a_topic_of_small_records_takes_what_fits_and_the_rest_is_refused(url: str, unique: str) -> None:
    """The brokers bound a whole batch: the client's batches are made smaller."""
    small = f"small-{unique}"
    admin = Cluster.of(url).admin()
    made = admin.create_topics([NewTopic(small, 1, 1, config={"max.message.bytes": "50000"})])
    made[small].result(PATIENCE_SECONDS)
    some = [sent(small, ids.new_id() * 1250, key="k") for _ in range(20)]  # 20,000 bytes each
    large = sent(small, ids.new_id() * 4000)

    async def work(sink: Sink) -> None:
        epoch, _ = await sink.claim(unique)
        batch = [*some[:10], large, *some[10:]]
        with pytest.raises(Unavailable, match="smaller batches"):
            await append(sink, unique, epoch, "1", *batch)
        epoch, _ = await sink.claim(unique, take_back=False)
        refused = (await append(sink, unique, epoch, "1", *batch)).refused
        batch.remove(large)
        assert not (await append(sink, unique, epoch, "1", *batch)).refused
        assert [(item.id, item.status, item.code) for item in refused] == [(large.id, 413, "too_large")]
        assert "max.message.bytes" in str(refused[0].detail)

    use(url, work)
    assert [m.value() for m in committed(url, small, 20)] == [t.messages[0].body for t in some]


@pytest.mark.long
def test_a_refusal_of_the_client_concerns_only_its_record(
    url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that knows that a topic is not granted takes no record of it, which ended it and named nobody."""
    make, forbidden = Cluster.producer, sent(f"forbidden-{unique}", "x")
    some = [sent(unique, "a"), forbidden, sent(unique, "b")]

    class Knowing(Wrapped):
        def produce(self, topic: str, *given: Any, **named: Any) -> None:
            if topic == forbidden.messages[0].topic:
                raise KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "Unable to produce message"))
            self._client.produce(topic, *given, **named)

    monkeypatch.setattr(Cluster, "producer", lambda self, own: Knowing(make(self, own)))

    async def work(sink: Sink) -> None:
        epoch, _ = await sink.claim(unique)
        refused = (await append(sink, unique, epoch, "1", *some)).refused
        assert [(item.id, item.status, item.code) for item in refused] == [(forbidden.id, 422, "refused")]
        assert "Write on the topic" in str(refused[0].detail)
        some.remove(forbidden)
        assert not (await append(sink, unique, epoch, "1", *some)).refused

    use(url, work)
    assert [m.value() for m in committed(url, unique, 2)] == [b"a", b"b"]


@pytest.fixture(params=["relay", "bridge"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[sa.Engine, Callable[[str], int]]]:
    """A database with an outbox, and a function that moves it to Kafka and says how many transactions were refused."""
    if request.param == "relay":
        with postgresql(request.getfixturevalue("database_urls"), tmp_path) as engine:
            yield engine, lambda url: asyncio.run(Relay(engine, url).run(once=True)).refused
        return
    database: str = request.getfixturevalue("binlog_url")
    engine = sa.create_engine(database)
    create_tables(engine)
    yield engine, lambda url: move(database, url).totals.refused
    engine.dispose()


def poison(engine: sa.Engine, topic: str) -> set[str]:
    """Outbox rows that Kafka never takes, among others that it takes; the ids of the first."""
    add(engine, topic, "first")
    never = {
        add(engine, topic.replace(".", "_"), "a topic that collides with another"),
        add(engine, "no topic", "x"),
        add(engine, "notify-delayed", "one of Notify's own"),
        add(engine, topic, b"x" * ((1 << 20) + 1)),
    }
    add(engine, topic, b"y" * 1_000_000)
    add(engine, topic, b"z" * (1 << 20))
    add(engine, topic, "last")
    return never


@pytest.mark.long
def test_a_relay_that_runs_once_ends_while_rows_are_written(
    url: str, database_urls: Mapping[str, str], unique: str, tmp_path: Path
) -> None:
    with postgresql(database_urls, tmp_path) as engine:
        for n in range(5):
            add(engine, unique, str(n))
        with repeated(lambda: add(engine, unique, "later"), threads=1, pause_seconds=0.001, passing=()):
            asyncio.run(asyncio.wait_for(Relay(engine, url).run(once=True), PATIENCE_SECONDS))
    assert texts(url, unique, 5)[:5] == [str(n) for n in range(5)]


def test_a_topic_is_read_to_its_end_while_it_is_written(url: str, unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka's client reports the end of a partition only when nothing was written for a moment: the position of a busy
    bridge could not be read."""
    monkeypatch.setattr(table, "FETCH_MILLISECONDS", 1000)
    cluster = Cluster.of(url)
    make_topics(cluster, [unique], compacted=True)
    producer, numbers = cluster.producer({"linger.ms": 0}), itertools.count()

    def write() -> None:
        producer.produce(unique, str(next(numbers)).encode(), b"k")
        assert not producer.flush(PATIENCE_SECONDS)

    write()
    with (
        ThreadPoolExecutor(1) as pool,
        repeated(write, threads=2, pause_seconds=0.001, passing=()),
    ):
        value = pool.submit(latest, cluster, unique, b"k").result(PATIENCE_SECONDS)
    assert value is not None and 0 <= int(value) < next(numbers)


@pytest.mark.long
def test_messages_that_kafka_refuses_are_listed_and_the_others_go_on(
    url: str, source: tuple[sa.Engine, Callable[[str], int]], unique: str
) -> None:
    engine, move = source
    topic = f"order.{unique}"
    never = poison(engine, topic)
    assert move(url) == 4
    assert [(text[:5], len(text)) for text in texts(url, topic, 4)] == [
        ("first", 5), ("yyyyy", 1_000_000), ("zzzzz", 1 << 20), ("last", 4),
    ]  # fmt: skip
    assert refused_codes(engine).keys() == never


@pytest.mark.long
def test_neighbours_of_a_refused_record_are_stored(url: str, unique: str) -> None:
    """A broker refuses all that is sent together for the sake of one: its neighbours were refused for good."""
    cluster = Cluster.of(url)
    config = {"cleanup.policy": "compact"}
    admin = cluster.admin()
    made = admin.create_topics([NewTopic(unique, num_partitions=1, replication_factor=1, config=config)])
    made[unique].result(PATIENCE_SECONDS)
    good = [sent(unique, f"{n}", key="k") for n in range(5)]

    async def append_until_it_is_there(sink: Sink, position: str, some: list[BridgedTransaction]) -> set[str]:
        """As a bridge does it: claims again, and leaves out what is refused, whose ids these are."""
        refused: set[str] = set()
        for _ in range(20):
            try:
                epoch, _ = await sink.claim(unique, take_back=False)
                while named := (await append(sink, unique, epoch, position, *some)).refused:
                    refused |= {item.id for item in named}
                    some = [t for t in some if t.id not in refused]
                return refused
            except Unavailable:
                continue
        raise AssertionError("it is never there")

    async def work(sink: Sink) -> None:
        bad = [sent(unique, "no key") for _ in range(2)]
        some = [*good[:2], bad[0], *good[2:3], bad[1], good[3]]
        assert await append_until_it_is_there(sink, "1", some) == {each.id for each in bad}
        one = sent(unique, "no key")
        assert await append_until_it_is_there(sink, "2", [one, good[4]]) == {one.id}

    use(url, work)
    assert texts(url, unique, 5) == [f"{n}" for n in range(5)]


@pytest.mark.long
def test_a_messages_own_headers_are_never_taken_for_notifys(url: str, unique: str) -> None:
    own = {"notify-topic": "elsewhere", "notify-expires": "never", "notify-own-x": "1", "notify-id": "no", "a": "b"}

    async def work(sink: Sink) -> None:
        epoch, _ = await sink.claim(unique)
        await append(sink, unique, epoch, "1", sent(unique, "x", headers=own, ttl=60))

    use(url, work)
    (record,) = committed(url, unique, 1)
    headers = listed(record)
    assert own_headers(headers) == own
    assert str(header(headers, "notify-expires")).isdecimal()
    assert str(header(headers, "notify-id")).endswith(".0") and header(headers, "notify-topic") is None


@pytest.mark.long
@pytest.mark.parametrize("headers", ['["a", "b"]', "[]", "0", '"text"', '{"a": 1}'])
def test_headers_of_a_row_that_are_no_texts_by_name_are_refused(
    url: str, source: tuple[sa.Engine, Callable[[str], int]], unique: str, headers: str
) -> None:
    """A JSON list ended the relay at every start, since no list has `items`."""
    engine, move = source
    bad = add(engine, unique, "bad", headers=headers)
    add(engine, unique, "good")
    assert move(url) == 1
    assert refused_codes(engine) == {bad: "invalid_headers"}
    assert texts(url, unique, 1) == ["good"]


# --- relays ---------------------------------------------------------------------------------------------------


class Killed(Exception):
    """Stands for the death of a process."""


@pytest.mark.long
def test_a_relay_marks_what_was_published_before_it_died(
    url: str, database_urls: Mapping[str, str], unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise Killed

    with postgresql(database_urls, tmp_path) as engine:
        for n in range(30):
            add(engine, unique, f"{n:02}", key=f"k{n % 5}")
        with monkeypatch.context() as planted:
            planted.setattr(Rows, "note", dies)
            with pytest.raises(Killed):
                asyncio.run(Relay(engine, url).run(once=True))
        assert asyncio.run(Relay(engine, url).run(once=True)).sent == 0
    assert sorted(texts(url, unique, 30)) == [f"{n:02}" for n in range(30)]


@pytest.mark.long
def test_a_marking_that_fails_publishes_nothing_twice(
    url: str, database_urls: Mapping[str, str], unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same relay continues: it asks Kafka what became of the batch."""
    note = Rows.note
    failures = iter([True, True])

    def fails(rows: Rows, *arguments: Any) -> None:
        if next(failures, False):
            raise sa.exc.OperationalError("UPDATE", {}, Exception("the session ended"))
        note(rows, *arguments)

    monkeypatch.setattr(Rows, "note", fails)
    with postgresql(database_urls, tmp_path) as engine:
        for n in range(20):
            add(engine, unique, f"{n:02}")
        own = make_engine(engine.url.render_as_string(hide_password=False))  # the relay disposes of its own meanwhile

        def left() -> int:
            with own.connect() as connection:
                waiting = sa.select(sa.func.count()).where(half_message.c.relayed == 0)
                return int(connection.scalar(waiting) or 0)

        with in_background(Relay(engine, url).run()) as relaying:
            relaying.until(lambda: not left(), "everything to be marked")
        own.dispose()
    assert texts(url, unique, 20) == [f"{n:02}" for n in range(20)]


@pytest.mark.long
def test_a_second_relay_stands_by_and_takes_over(
    url: str, database_urls: Mapping[str, str], unique: str, tmp_path: Path
) -> None:
    """Both held half of the keys, and neither published."""
    with postgresql(database_urls, tmp_path) as engine:
        other = make_engine(str(engine.url.render_as_string(hide_password=False)))
        relays = [Relay(engine, url), Relay(other, url)]

        def present() -> int:
            """Relays of any kind hold a lock of this number while they are there."""
            with engine.connect() as connection:
                database = "(SELECT oid FROM pg_database WHERE datname = current_database())"
                held = f"SELECT count(*) FROM pg_locks WHERE granted AND objid = 74002 AND database = {database}"
                return int(connection.exec_driver_sql(held).scalar() or 0)

        def moved() -> int:
            return sum(relay.total.sent for relay in relays)

        with in_background(relays[0].run()) as first, in_background(relays[1].run()) as second:
            eventually(lambda: present() == 2, "both relays to be there")
            for rows in (range(20), range(20, 40)):  # the first move may come before the shares are given back
                for n in rows:
                    add(engine, unique, f"{n:02}", key=f"k{n}")
                eventually(lambda rows=rows: moved() == rows.stop, "all to be moved")  # type: ignore[misc]
            assert 0 in (relays[0].total.sent, relays[1].total.sent), "one publishes, the other stands by"
            (first if relays[0].total.sent else second).stop()
            for n in range(40, 60):
                add(engine, unique, f"{n:02}", key=f"k{n}")
            eventually(lambda: moved() == 60, "all to be moved")
        other.dispose()
    assert sorted(texts(url, unique, 60)) == [f"{n:02}" for n in range(60)]


@pytest.mark.long
def test_the_largest_message_may_be_delayed(url: str, unique: str) -> None:
    largest = sent(unique, b"x" * LIMITS.message_bytes, key="k" * LIMITS.key_bytes, delay=0.5)

    async def work(sink: Sink) -> None:
        epoch, _ = await sink.claim(unique)
        assert not (await append(sink, unique, epoch, "1", largest)).refused

    use(url, work)
    with running_beside(url):
        (record,) = committed(url, unique, 1)
    assert len(record.value()) == LIMITS.message_bytes
