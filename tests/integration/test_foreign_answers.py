"""A proxy or a login page that answers instead of the server: whatever the status, the server counts as unreachable.

Nothing is taken for stored, refused or settled that is not; nobody ends for it; and the log says who answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import (
    AsyncConsumer,
    AsyncReader,
    AsyncTransactionProducer,
    Consumer,
    Message,
    TransactionProducer,
)
from notify.client.producer.packing import pack
from notify.client.producer.transactions import HALVES, OUTCOMES
from notify.client.transport.foreign_answers import PollTime
from notify.errors import ForeignAnswer, TooLarge, Unavailable
from notify.movers.relay.relay import Relay
from notify.protocol import ids
from notify.protocol.wire import Item, Items, encode_msgpack
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.background import in_background
from tests.support.bridges import move, numbers, outbox
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import cli
from tests.support.groups import lag, publish, running, subscribe, taken_by
from tests.support.stranger import FEW, PAGES, Stranger, page, stranger

SHORT_SECONDS = 0.4
SOME = [pytest.param(PAGES[name], id=name, marks=[] if name in FEW else pytest.mark.long) for name in PAGES]
OF_ANOTHER_REQUEST = [
    pytest.param(page("200 OK", "application/msgpack", encode_msgpack(Items(items))), id=name)
    for name, items in (
        ("of another request", [Item(id=ids.to_text(ids.new_id()), status=201, state="PREPARED")]),
        ("of no item", []),
    )
]


@pytest.fixture
def between(memory: InMemoryServer) -> Iterator[Stranger]:
    with stranger(memory.url) as between:
        yield between


@pytest.fixture
def engine(sqlite_engine: sa.Engine) -> sa.Engine:
    return sqlite_engine


# --- producers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [*SOME, *OF_ANOTHER_REQUEST])
def test_a_producer_sends_until_the_server_answers(
    between: Stranger, memory: InMemoryServer, unique: str, answer: bytes
) -> None:
    with TransactionProducer(between.url, group=unique) as producer:
        if b" 413 " in answer:  # says which request it does not take: a send is refused, see below
            answer = PAGES["404"]
        between.answer(answer, f"POST ({HALVES}|/v1/messages)", times=3)
        transaction_id = ids.to_text(ids.new_id())
        item = producer.outgoing.store_half(transaction_id, [pack(Message(unique, "1"))], "")
        assert item.id == transaction_id and between.is_done
        between.answer(answer, f"POST {OUTCOMES}", times=2)
        producer.outgoing.outcome_soon(transaction_id, item.shard, "COMMIT")
        memory.wait_for(unique, 1, PATIENCE_SECONDS)
        between.answer(answer, "POST /v1/messages", times=2)
        producer.publish(Message(unique, "2"))
        memory.wait_for(unique, 2, PATIENCE_SECONDS)
    assert sorted(message.text for message in memory.messages(unique)) == ["1", "2"]


@pytest.mark.parametrize("name", ["404 of an ingress", "200 with a login page", "302", "a problem of another program"])
def test_a_send_that_fails_says_who_answered(
    between: Stranger, unique: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    words = {
        "404 of an ingress": ["404", "nginx/1.22.1", "text/plain", "“default backend - 404”"],
        "200 with a login page": ["200", "text/html", "“Sign in”"],
        "302": ["302", "https://login.example/"],
        "a problem of another program": ["404", "application/problem+json"],
    }[name]
    between.answer(PAGES[name], times=None)
    with TransactionProducer(between.url, group=unique, half_timeout=SHORT_SECONDS) as producer:
        with pytest.raises(ForeignAnswer) as raised:
            producer.outgoing.store_half(ids.to_text(ids.new_id()), [pack(Message(unique, "1"))], "")
        assert raised.value.code == "foreign_answer" and raised.value.retryable
        for word in (*words, "POST", between.url):
            assert word in str(raised.value)
    said = [record.getMessage() for record in caplog.records if record.name == "notify.client"]
    assert len(said) == 1 and all(word in said[0] for word in words), "a line a minute"


def test_a_message_that_is_too_large_for_a_proxy_is_refused_before_the_commit(between: Stranger, unique: str) -> None:
    between.answer(PAGES["413"], "POST", times=None, from_bytes=10_000)
    with TransactionProducer(between.url, group=unique) as producer:
        large = [pack(Message(unique, b"x" * 10_000))]
        with pytest.raises(TooLarge, match="client_max_body_size") as raised:
            producer.outgoing.store_half(ids.to_text(ids.new_id()), large, "")
        assert raised.value.code == "proxy_bound"
        with pytest.raises(TooLarge, match="client_max_body_size"):
            producer.publish(Message(unique, b"x" * 10_000))
        item = producer.outgoing.store_half(ids.to_text(ids.new_id()), [pack(Message(unique, b"x" * 100))], "")
        assert item.status == 201


@pytest.mark.parametrize("name", ["413", "nothing"], ids=["413", "cut"])
def test_requests_become_smaller_until_a_proxy_takes_them(
    between: Stranger, memory: InMemoryServer, unique: str, name: str
) -> None:
    """200 messages of 10,000 bytes at once; a proxy takes 100,000 bytes."""
    between.answer(PAGES[name], "POST /v1/(messages|transactions)", times=None, from_bytes=100_000)

    async def run() -> None:
        async with AsyncTransactionProducer(between.url, group=unique) as producer:
            for n in range(2):
                body = str(n).encode() * 10_000
                await asyncio.gather(*(producer.publish(Message(unique, body)) for _ in range(100)))
                refused_at_first = between.given
                await asyncio.gather(*(producer.publish(Message(unique, body)) for _ in range(100)))
                assert between.given == refused_at_first, "it has learned the bound"

    asyncio.run(run())
    assert len(memory.messages(unique)) == 400 and max(between.sizes) < 100_000


# --- consumers and readers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", SOME)
def test_a_consumer_goes_on(between: Stranger, memory: InMemoryServer, unique: str, answer: bytes) -> None:
    got: list[str] = []
    consumer = Consumer(between.url, group=unique)
    consumer.subscribe(unique)(lambda message: got.append(message.text))
    path = f"/v1/groups/{unique}/"
    between.answer(answer, f"PUT {path}", times=2)
    with running(consumer):
        eventually(lambda: between.is_done, "the subscription to be refused")
        between.answer(answer, f"POST {path}receive", times=2)
        eventually(lambda: between.is_done, "requests to receive to be refused")
        between.answer(answer, f"POST {path}settle", times=2)
        publish(memory.url, unique, ["1", "2"])
        eventually(lambda: sorted(got) == ["1", "2"] and not lag(memory.url, unique), "both to be acknowledged")
        assert between.is_done


@pytest.mark.long
@pytest.mark.parametrize("name", ["404", "413", "301", "401", "200 with a login page"])
def test_an_async_consumer_goes_on(between: Stranger, memory: InMemoryServer, unique: str, name: str) -> None:
    got: list[str] = []
    consumer = AsyncConsumer(between.url, group=unique)
    consumer.subscribe(unique)(taken_by(consumer, lambda message: got.append(message.text)))
    subscribe(memory.url, unique, unique)
    between.answer(PAGES[name], "/v1/(groups|members)", times=6)
    with running(consumer):
        eventually(lambda: between.is_done, "six answers")
        publish(memory.url, unique, ["1"])
        eventually(lambda: got == ["1"], "the message")


@pytest.mark.parametrize("name", ["404", "502", "200 with JSON"])
def test_a_reader_reads_on(between: Stranger, memory: InMemoryServer, unique: str, name: str) -> None:
    publish(memory.url, unique, [str(n) for n in range(4)])

    async def run() -> list[str]:
        async with AsyncReader(between.url, batch=2) as reader:
            texts = []
            async for message in reader.read(unique):
                texts.append(message.text)
                if len(texts) == 1:
                    between.answer(PAGES[name], "/messages", times=2)
            return texts

    assert asyncio.run(run()) == ["0", "1", "2", "3"] and between.is_done


def test_a_poll_is_shorter_than_a_proxy_waits() -> None:
    poll = PollTime(20.0)
    timeout = ForeignAnswer("504", answered=504)
    assert not poll.was_cut(ForeignAnswer("502", answered=502), 5.0) and poll.seconds == 20.0
    assert not poll.was_cut(timeout, 60.0) and poll.seconds == 20.0, "the server was slow"
    assert poll.was_cut(timeout, 5.0) and poll.seconds == 3.75
    assert not poll.was_cut(timeout, 0.1) and poll.seconds == 1.0, "a pause follows"


# --- movers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [*SOME, *OF_ANOTHER_REQUEST])
def test_a_relay_refuses_nothing_and_keeps_the_order(
    between: Stranger, memory: InMemoryServer, unique: str, engine: sa.Engine, answer: bytes
) -> None:
    """Eleven of a hundred good ones were refused, and later ones of their keys overtook them."""
    outbox(str(engine.url), unique, range(12))
    between.answer(answer, f"POST {HALVES}", times=3)
    relay = Relay(engine, between.url)
    with in_background(relay.run(interval=0.02)) as relaying:
        relaying.until(lambda: relay.total.sent == 9, "the relay to have moved all")
    assert relay.total.refused == 0 and between.is_done
    assert [message.json()["n"] for message in memory.messages(unique)] == [n for n in range(12) if n % 4 != 3]


@pytest.mark.long
@pytest.mark.parametrize("name", ["413", pytest.param("403", marks=pytest.mark.long), "nothing"])
def test_only_the_item_that_a_proxy_blocks_waits(
    between: Stranger, memory: InMemoryServer, unique: str, engine: sa.Engine, name: str
) -> None:
    """Others continue, and later ones of its key do not overtake it; it follows once the proxy lets it pass."""
    large = "x" * 100_000
    with TransactionProducer("http://127.0.0.1:9", group=unique, engine=engine, mode="outbox") as producer:
        for key, body in (("a", "a0"), ("b", large), ("b", "b1"), ("a", "a1"), ("b", "b2"), ("c", "c0")):
            with Session(engine) as session, session.begin():
                producer.send(session, Message(unique, body, key=key))
    between.answer(PAGES[name], f"POST {HALVES}", times=None, from_bytes=90_000)
    relay = Relay(engine, between.url)
    with in_background(relay.run(interval=0.02)) as relaying:
        relaying.until(lambda: relay.total.sent == 3, "the others")
        assert {m.text for m in memory.messages(unique)} == {"a0", "a1", "c0"} and between.given < 12
        between.stop()
        relaying.until(lambda: relay.total.sent == 6, "the large one")
    assert relay.total.refused == 0
    texts = [message.text for message in memory.messages(unique)]
    assert [text for text in texts if text in (large, "b1", "b2")] == [large, "b1", "b2"]


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "404",
        "413",
        *[pytest.param(name, marks=pytest.mark.long) for name in ("400", "200 with a login page", "nothing")],
    ],
)
def test_a_bridge_loses_and_refuses_nothing(
    binlog_url: str, server: ServerProcess, unique: str, name: str, between_process: Stranger
) -> None:
    subscribe(server.url, unique, unique)
    outbox(binlog_url, unique, range(40))
    between_process.answer(PAGES[name], "/v1/bridge/", times=5)
    moved = move(binlog_url, between_process)
    assert moved.totals.refused == 0 and between_process.is_done
    assert numbers(server, unique, 30) == [n for n in range(40) if n % 4 != 3]


@pytest.fixture
def between_process(server: ServerProcess) -> Iterator[Stranger]:
    with stranger(server.url) as between:
        yield between


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("command", [["topic", "list"], ["transaction", "list"], ["overview"]], ids=" ".join)
def test_a_command_says_in_one_sentence_who_answered(between: Stranger, command: list[str], answer: bytes) -> None:
    between.answer(answer, times=None)
    code, shown = cli(*command, "--url", between.url)
    assert code == 2, shown


def test_a_command_behind_a_page_prints_one_line(
    between: Stranger, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    between.answer(PAGES["404 of an ingress"], times=None)
    code, shown = cli("topic", "list", "--url", between.url)
    assert code == 2 and "default backend - 404" in str(shown)
    assert logging.getLogger("notify.client").handlers, "lines of the client do not reach the terminal beside it"


def test_unavailable_is_what_strangers_answers_are() -> None:
    assert issubclass(ForeignAnswer, Unavailable) and ForeignAnswer("", answered=404).status == 503
