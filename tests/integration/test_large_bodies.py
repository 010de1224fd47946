"""Large bodies go to an object store before the COMMIT, and consumers get them as they were sent."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from backports import zstd
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from notify.client import (
    AsyncConsumer,
    AsyncTransactionProducer,
    Consumer,
    Inbox,
    Message,
    ReceivedMessage,
    TransactionProducer,
)
from notify.client.bodies import sending
from notify.client.bodies.reading import BODY_BYTES, BodyReader
from notify.client.bodies.sending import USED_WITHIN_SECONDS
from notify.errors import InvalidRequest, TooLarge, TransactionRefused, Unavailable
from notify.movers.relay.relay import Relay
from notify.movers.sinks.sink import running_beside
from notify.object_store.store import Store
from notify.protocol.large_bodies import FOLDER, PLACE, STORED, reference_of
from notify.protocol.limits import LIMITS
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import cli
from tests.support.django_project.shop import Shop as DjangoShop
from tests.support.groups import drain, running, subscribe
from tests.support.http import admin, call
from tests.support.object_store import s3_server
from tests.support.shop import Base, Order
from tests.support.stored_bodies import LARGE, BodyStore

BODY = os.urandom(LARGE)


@pytest.fixture
def body_store(tmp_path: Path) -> BodyStore:
    return BodyStore(tmp_path / "store")


def handled(url: str, topic: str, count: int, **options: Any) -> list[ReceivedMessage]:
    """The messages that a consumer's handler gets, once there are `count`; those of a key in their order."""
    consumer = Consumer(url, group=f"{topic}-readers", concurrency=1, **options)
    got: list[ReceivedMessage] = []
    consumer.subscribe(topic, start="earliest")(got.append)
    with running(consumer):
        eventually(lambda: len(got) >= count, f"{count} messages")
    return got


def letter(url: str, topic: str, **options: Any) -> str:
    """The reason of the dead letter that the only message of a topic becomes after one attempt."""
    consumer = Consumer(url, group=f"{topic}-refusing", **options)
    got: list[ReceivedMessage] = []
    consumer.subscribe(topic, start="earliest", max_attempts=1)(got.append)
    path = f"groups/{consumer.group}/dead-letters"
    with running(consumer):
        eventually(lambda: admin(url, "GET", path)["messages"], "a dead letter")
    assert not got, "the handler was called"
    (dead,) = admin(url, "GET", path)["messages"]
    return str(dead["headers"]["notify-dead-letter-reason"])


def forged(url: str, topic: str, store: str, name: str, size: int = 5, sha256: str = "0" * 64) -> None:
    """Publish a message that says that its body lies anywhere."""
    body = json.dumps({"store": store, "name": name, "size": size, "sha256": sha256})
    call(url, "POST", "/v1/messages", {"messages": [{"topic": topic, "body": body, "headers": {PLACE: STORED}}]})


# --- sending ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["half", "outbox", "auto"])
def test_a_body_is_stored_with_its_transaction(
    mode: Any, engine: sa.Engine, notify_server: InMemoryServer, body_store: BodyStore, unique: str
) -> None:
    Base.metadata.create_all(engine)
    url = notify_server.url
    subscribe(url, "raw", unique)
    with TransactionProducer(url, group=unique, engine=engine, mode=mode, store=body_store.url) as producer:
        with Session(engine) as session, session.begin():
            session.add(Order(item="book"))
            producer.send(session, Message(unique, BODY, key="k", headers={"h": "v"}))
            producer.send(session, Message(unique, "small", key="k"))
        assert len(body_store.names()) == 1
        with pytest.raises(ZeroDivisionError), Session(engine) as session, session.begin():
            producer.send(session, Message(unique, BODY))
            raise ZeroDivisionError
        assert len(body_store.names()) == 1, "a transaction that rolls back uploads nothing"
    if mode == "outbox":
        asyncio.run(Relay(engine, url).run(once=True))
    first, second = drain(url, "raw", unique, 2)
    reference = reference_of(first["body"])
    assert reference is not None and {reference.name} == body_store.names()
    assert reference.name.startswith(f"{FOLDER}/{unique}/{mode}/") and reference.size == LARGE
    assert (first["headers"], second["headers"]) == ({"h": "v", PLACE: STORED}, second["headers"])
    large, small = handled(url, unique, 2, store=body_store.url)
    assert (large.body, large.headers, large.key) == (BODY, {"h": "v"}, "k")
    assert small.text == "small"


def test_a_large_body_without_a_transaction_is_stored(
    notify_server: InMemoryServer, body_store: BodyStore, unique: str
) -> None:
    with TransactionProducer(notify_server.url, group=unique, store=body_store.url, store_above=10) as producer:
        producer.publish(Message(unique, {"n": "x" * 100}, key="k"))
        prepared = producer.prepare([Message(unique, "y" * n, key="k") for n in (10, 11)])
        prepared.commit()
    got = handled(notify_server.url, unique, 3, store=[body_store.url])
    assert got[0].json() == {"n": "x" * 100} and got[0].headers["content-type"] == "application/json"
    assert sorted(len(message.body) for message in got[1:]) == [10, 11]
    assert len(body_store.names()) == 2


def test_coroutines_send_and_read(
    async_engine: AsyncEngine, notify_server: InMemoryServer, body_store: BodyStore, unique: str
) -> None:
    """Several bodies of one transaction are stored at once, and the loop continues meanwhile."""

    async def scenario() -> list[bytes]:
        engine = async_engine
        url, got = notify_server.url, []
        async with AsyncTransactionProducer(url, group=unique, engine=engine, store=body_store.url) as producer:
            async with AsyncSession(engine) as session, session.begin():
                for n in range(10):
                    await producer.send(session, Message(unique, bytes([n]) + BODY))
            await producer.publish(Message(unique, b"p" + BODY))
        consumer = AsyncConsumer(url, group="async", store=body_store.url)

        @consumer.subscribe(unique, start="earliest")
        async def on_message(message: ReceivedMessage) -> None:
            got.append(message.body)
            if len(got) == 11:
                consumer.stop()

        await asyncio.wait_for(consumer.run(), PATIENCE_SECONDS)
        return got

    bodies = asyncio.run(scenario())
    assert sorted(bodies) == sorted([*(bytes([n]) + BODY for n in range(10)), b"p" + BODY])


def test_a_large_body_that_django_sends_is_stored(django_shop: DjangoShop, body_store: BodyStore) -> None:
    shop = django_shop
    with shop.new_producer(store=body_store.url) as producer:
        with shop.atomic():
            shop.add("a")
            producer.send(Message(shop.topic, BODY))
    (message,) = handled(shop.server.url, shop.topic, 1, store=body_store.url)
    assert message.body == BODY and len(body_store.names()) == 1


def test_a_store_that_is_away_stops_the_commit(
    engine: sa.Engine, notify_server: InMemoryServer, tmp_path: Path, unique: str
) -> None:
    Base.metadata.create_all(engine)
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    with TransactionProducer(notify_server.url, group=unique, engine=engine, store=f"file://{blocked}/x") as producer:
        with pytest.raises(TransactionRefused, match="nothing is committed") as raised:
            with Session(engine) as session, session.begin():
                session.add(Order(item="book"))
                producer.send(session, Message(unique, BODY))
        assert raised.value.code == "object_store_failed" and raised.value.retryable
    with Session(engine) as session:
        assert session.scalars(sa.select(Order)).all() == []


def test_an_upload_that_takes_too_long_stops_the_commit(
    engine: sa.Engine,
    notify_server: InMemoryServer,
    body_store: BodyStore,
    monkeypatch: pytest.MonkeyPatch,
    unique: str,
) -> None:
    with TransactionProducer(
        notify_server.url, group=unique, engine=engine, store=body_store.url, store_timeout=0.2
    ) as producer:
        hang = Hanging(monkeypatch)
        with pytest.raises(TransactionRefused, match=r"within store_timeout|no sign of life"):
            with Session(engine) as session, session.begin():
                producer.send(session, Message(unique, BODY))
        hang.end()


class Hanging:
    """A disk that does not answer: writing an object waits until `end`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._over = threading.Event()
        monkeypatch.setattr(Store, "_write", self._wait)

    def _wait(self, *given: object) -> None:
        self._over.wait(PATIENCE_SECONDS)
        raise OSError("the disk came back")

    def end(self) -> None:
        self._over.set()


def test_an_old_upload_is_not_relied_on(
    engine: sa.Engine,
    notify_server: InMemoryServer,
    body_store: BodyStore,
    monkeypatch: pytest.MonkeyPatch,
    unique: str,
) -> None:
    """A producer that was stopped between upload and COMMIT does not name a body that a sweep may have deleted."""
    with TransactionProducer(notify_server.url, group=unique, engine=engine, store=body_store.url) as producer:
        monkeypatch.setattr(sending, "USED_WITHIN_SECONDS", -1.0)
        with pytest.raises(TransactionRefused, match="run the transaction again"):
            with Session(engine) as session, session.begin():
                producer.send(session, Message(unique, BODY))
        monkeypatch.setattr(sending, "USED_WITHIN_SECONDS", USED_WITHIN_SECONDS)
        eventually(lambda: notify_server.halves(unique) == [], "the half to be rolled back")
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "later"))
    assert [m.text for m in handled(notify_server.url, unique, 1)] == ["later"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"store": "nowhere"}, "is not a store"),
        ({"store": 5}, "named by its URL"),
        ({"store": "s3://key:secret@bucket/x"}, "credentials"),
        ({"store_above": -1, "compress_above": 1}, "store_above"),
        ({"store_timeout": 0, "compress_above": 1}, "store_timeout"),
        ({"compress_above": 2 << 20}, "compress_above"),
    ],
)
def test_options_are_checked_when_a_producer_is_made(options: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        TransactionProducer("http://127.0.0.1:9", group="g", **options)


def test_a_larger_body_needs_a_store(notify_server: InMemoryServer, unique: str) -> None:
    with TransactionProducer(notify_server.url, group=unique) as producer:
        with pytest.raises(TooLarge, match="give the producer store="):
            producer.publish(Message(unique, bytes(LIMITS.message_bytes + 1)))


# --- reading ------------------------------------------------------------------------------------------------------


@dataclass
class Item:
    name: str
    photo: str


def test_a_batch_gets_its_large_bodies_without_the_one_that_is_lost(
    engine: sa.Engine, notify_server: InMemoryServer, body_store: BodyStore, unique: str
) -> None:
    """In a batch a body that cannot be read fails alone."""
    with TransactionProducer(notify_server.url, group=unique, store=body_store.url, store_above=100) as producer:
        for n in range(6):
            producer.publish(Message(unique, {"name": str(n), "photo": "x" * (n * 100)}))
    lost = next(name for name in body_store.names() if b'"5"' in body_store.path(name).read_bytes())
    body_store.path(lost).unlink()
    consumer = Consumer(notify_server.url, group="typed", inbox=Inbox(engine), store=body_store.url)
    got: list[Item] = []

    @consumer.subscribe(unique, start="earliest", batch=10, max_attempts=1)
    def on_items(items: list[Item], session: Session) -> None:
        got.extend(items)

    path = "groups/typed/dead-letters"
    with running(consumer):
        eventually(lambda: len(got) == 5 and admin(notify_server.url, "GET", path)["messages"], "5 items, 1 letter")
    assert sorted((item.name, len(item.photo)) for item in got) == [(str(n), n * 100) for n in range(5)]
    (dead,) = admin(notify_server.url, "GET", path)["messages"]
    assert "is not in its store" in dead["headers"]["notify-dead-letter-reason"]


def test_a_consumer_opens_only_its_own_stores(
    notify_server: InMemoryServer, body_store: BodyStore, tmp_path: Path, unique: str
) -> None:
    """Neither an address nor a path that a message names is opened."""
    url = notify_server.url
    secret = tmp_path / "elsewhere" / FOLDER / "g" / "half" / "01900000-0000-7000-8000-000000000000"
    secret.parent.mkdir(parents=True)
    secret.write_text("secret")
    name = f"{FOLDER}/g/half/{secret.name}"
    forged(url, f"{unique}-1", f"file://{tmp_path}/elsewhere", name)
    assert "may not read" in letter(url, f"{unique}-1", store=body_store.url)
    forged(url, f"{unique}-0", body_store.url, name)
    assert "give it store=" in letter(url, f"{unique}-0")
    for number, odd in enumerate((f"{FOLDER}/../../elsewhere/{name}", "/etc/passwd", f"../elsewhere/{name}"), 2):
        forged(url, f"{unique}-{number}", body_store.url, odd)
        assert "is not a reference" in letter(url, f"{unique}-{number}", store=body_store.url)
    forged(url, f"{unique}-9", f"{body_store.url}/", name)
    assert "may not read" in letter(url, f"{unique}-9", store=body_store.url), "letter by letter"


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: path.unlink(), "or its disk is not mounted here"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "altered"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "larger than"),
        (lambda path: path.write_bytes(b"x" * LARGE), "altered"),
    ],
    ids=["missing", "shorter", "longer", "other"],
)
def test_a_body_that_was_harmed_is_not_handled(
    harm: Callable[[Path], object], reason: str, notify_server: InMemoryServer, body_store: BodyStore, unique: str
) -> None:
    with TransactionProducer(notify_server.url, group=unique, store=body_store.url) as producer:
        producer.publish(Message(unique, BODY))
    (name,) = body_store.names()
    harm(body_store.path(name))
    assert reason in letter(notify_server.url, unique, store=body_store.url)


def test_a_body_beyond_the_bound_is_a_dead_letter(
    notify_server: InMemoryServer, body_store: BodyStore, unique: str
) -> None:
    with TransactionProducer(notify_server.url, group=unique, store=body_store.url) as producer:
        producer.publish(Message(unique, BODY))
    assert "larger body_bytes=" in letter(notify_server.url, unique, store=body_store.url, body_bytes=LARGE - 1)


# --- compression --------------------------------------------------------------------------------------------------


def test_small_bodies_are_compressed(notify_server: InMemoryServer, body_store: BodyStore, unique: str) -> None:
    url = notify_server.url
    subscribe(url, "raw", unique)
    options: dict[str, Any] = {"store": body_store.url, "compress_above": 1000}
    with TransactionProducer(url, group=unique, **options) as producer:
        for body in (b"x" * 1000, b"x" * 1001, os.urandom(2000), b"x" * LARGE):
            producer.publish(Message(unique, body, key="k"))
        producer.publish(Message(unique, b"y" * 2000, key="k", headers={"content-encoding": "br"}))
    raw = drain(url, "raw", unique, 5)
    assert [m["headers"].get("content-encoding") for m in raw] == [None, "zstd", None, "zstd", "br"]
    (name,) = body_store.names()
    assert body_store.path(name).stat().st_size < 1000, "what is stored is compressed, too"
    got = handled(url, unique, 5, store=body_store.url)
    assert [len(m.body) for m in got] == [1000, 1001, 2000, LARGE, 2000]
    assert [dict(m.headers) for m in got] == [{}, {}, {}, {}, {"content-encoding": "br"}], "others are left as they are"


def received(body: bytes, **headers: str) -> ReceivedMessage:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ReceivedMessage("m", "t", 0, 0, body, None, None, named, 1, "2026-01-01T00:00:00Z")


def test_a_bomb_is_refused() -> None:
    reader = BodyReader(None, 1 << 20)
    for body in (zstd.compress(bytes(1 << 30)), b"".join([zstd.compress(bytes(1 << 19))] * 3)):
        with pytest.raises(Exception, match="more than 1,048,576 bytes"):
            reader.read(received(body, content_encoding="zstd"))
    with pytest.raises(Exception, match="more than 1,000 frames"):
        reader.read(received(zstd.compress(b"") * 2000, content_encoding="zstd"))
    exactly = zstd.compress(bytes(1 << 19)) * 2
    assert reader.read(received(exactly, content_encoding="zstd")).body == bytes(1 << 20)


@pytest.mark.parametrize("body", [b"plain", zstd.compress(os.urandom(5000))[:-7]], ids=["other", "cut"])
def test_a_body_that_cannot_be_decompressed_is_a_dead_letter(body: bytes) -> None:
    with pytest.raises(Exception, match=r"is not in Zstandard's format|it is cut short") as raised:
        BodyReader(None, BODY_BYTES).read(received(body, content_encoding="zstd"))
    assert type(raised.value).__name__ == "DeadLetter"


# --- what people see ----------------------------------------------------------------------------------------------


def test_people_see_where_a_body_lies(notify_server: InMemoryServer, body_store: BodyStore, unique: str) -> None:
    url = notify_server.url
    with TransactionProducer(url, group=unique, store=body_store.url, compress_above=100) as producer:
        message_id = producer.publish(Message(unique, BODY))
        producer.publish(Message(unique, b"z" * 5000))
    (name,) = body_store.names()
    page = call(url, "GET", f"/messages/{message_id}")
    assert f"in a store: {body_store.url}/{name}, 300.0 KiB" in page
    status, found = cli("message", "find", "--topic", unique, "--url", url)
    assert status == 0 and "in a store" in found["text"] and ", compressed (zstd)" in found["text"]


def test_a_dead_letter_with_a_stored_body_is_corrected_and_sent_again(
    notify_server: InMemoryServer, body_store: BodyStore, unique: str
) -> None:
    """A new body stands in the message itself; without one the reference stays."""
    url = notify_server.url
    with TransactionProducer(url, group=unique, store=body_store.url) as producer:
        producer.publish(Message(unique, BODY, headers={"h": "1"}))
        producer.publish(Message(unique, BODY))
    group = "correcting"
    consumer = Consumer(url, group=group, store=body_store.url)
    got: list[ReceivedMessage] = []

    @consumer.subscribe(unique, start="earliest", max_attempts=1)
    def on_message(message: ReceivedMessage) -> None:
        got.append(message)
        if message.first_id == message.id:
            raise ValueError("not yet")

    path = f"groups/{group}/dead-letters"
    with running(consumer):
        eventually(lambda: len(admin(url, "GET", path)["messages"]) == 2, "two dead letters")
        first, second = admin(url, "GET", path)["messages"]
        admin(url, "POST", f"{path}/edit", {"id": first["id"], "body": "a small one"})
        admin(url, "POST", f"{path}/edit", {"id": second["id"], "tag": "new"})
        eventually(lambda: len(got) == 4, "both again")
    again = {message.first_id: message for message in got[2:]}
    assert (again[first["id"]].text, again[first["id"]].headers.get(PLACE)) == ("a small one", None)
    assert (again[second["id"]].body, again[second["id"]].tag) == (BODY, "new")


# --- object stores ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_large_bodies_are_stored_in_s3_and_swept_there(
    notify_server: InMemoryServer, engine: sa.Engine, unique: str
) -> None:
    """Through a store's own protocol, and a sweep by its own clock."""
    with s3_server() as s3:
        with TransactionProducer(notify_server.url, group=unique, engine=engine, store=s3.url) as producer:
            with Session(engine) as session, session.begin():
                producer.send(session, Message(unique, BODY))
        (message,) = handled(notify_server.url, unique, 1, store=s3.url)
        assert message.body == BODY
        words = ("store", "sweep", s3.url, "--url", notify_server.url, "--group", unique, "--json")
        status, swept = cli(*words)
        assert (status, swept["objects"], swept["young"], swept["swept"]) == (0, 1, 1, 0)


@pytest.mark.long
def test_large_bodies_reach_consumers_over_kafka(
    kafka_url: str, engine: sa.Engine, body_store: BodyStore, unique: str
) -> None:
    """Through an outbox and a relay: the reference is the record's value."""
    options: dict[str, Any] = {"mode": "outbox", "store": body_store.url, "compress_above": 1000}
    with TransactionProducer("http://127.0.0.1:9", group=unique, engine=engine, **options) as producer:
        with Session(engine) as session, session.begin():
            for body in (BODY, b"x" * 5000):
                producer.send(session, Message(unique, body, key="k", headers={"h": "v"}))

    def is_moved() -> bool:
        with suppress(Unavailable):  # a busy node may take longer for a transaction than a relay waits
            return asyncio.run(Relay(engine, kafka_url).run(once=True)).refused == 0
        return False

    with running_beside(kafka_url):
        eventually(is_moved, "the relay")
    large, small = handled(kafka_url, unique, 2, store=body_store.url)
    assert (large.body, large.headers) == (BODY, {"h": "v"})
    assert (small.body, small.headers) == (b"x" * 5000, {"h": "v"})


@pytest.mark.long
def test_without_a_store_its_library_is_not_imported() -> None:
    """Neither by a producer nor by a consumer."""
    code = (
        "import sys; from notify.client import Consumer, TransactionProducer\n"
        "TransactionProducer('http://127.0.0.1:9', group='g').close(); Consumer('http://127.0.0.1:9', group='g')\n"
        "sys.exit(', '.join({'fsspec', 'backports.zstd', 'compression.zstd'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
