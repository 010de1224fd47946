"""A proxy that answers instead of the server, with its own page or with another request's answer: nothing is taken for
stored that is not, and nobody ends for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from notify.client import Consumer, Message, TransactionProducer
from notify.client.producer.packing import pack
from notify.client.producer.transactions import HALVES, OUTCOMES
from notify.client.transport.http import HttpClient
from notify.errors import Unavailable
from notify.movers.outbox import source_name
from notify.movers.relay.relay import Relay
from notify.protocol import ids
from notify.protocol.wire import Item, Items, encode_msgpack
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.bridges import move, numbers, outbox
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import lag, publish, running, subscribe
from tests.support.shop import make_engine

PAGE = b"<html>We are back in a minute</html>"


@pytest.fixture
def answered_first(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """By route, what its next request is answered with; the server does not hear of that one."""
    instead: dict[str, bytes] = {}
    ask = HttpClient.ask

    async def asked(
        self: HttpClient, method: str, path: str, *arguments: object, **options: object
    ) -> tuple[int, bytes]:
        answer = instead.pop(path.partition("?")[0], None)
        return await ask(self, method, path, *arguments, **options) if answer is None else (200, answer)  # type: ignore[arg-type]

    monkeypatch.setattr(HttpClient, "ask", asked)
    return instead


FOREIGN = encode_msgpack(Items([Item(id=ids.to_text(ids.new_id()), status=201, state="PREPARED")]))
"""The answer to another transaction."""


@pytest.mark.parametrize(
    "answer", [PAGE, b"", FOREIGN, encode_msgpack(Items([]))], ids=["page", "empty", "other", "none"]
)
def test_a_half_and_an_outcome_are_sent_until_the_server_answers_to_them(
    answered_first: dict[str, bytes], memory: InMemoryServer, unique: str, answer: bytes
) -> None:
    with TransactionProducer(memory.url, group=unique) as producer:
        answered_first.update({HALVES: answer, OUTCOMES: answer})
        transaction_id = ids.to_text(ids.new_id())
        item = producer.outgoing.store_half(transaction_id, [pack(Message(unique, "1"))], "")
        assert item.id == transaction_id and [half.text for half in memory.halves(unique)] == ["1"]
        producer.outgoing.outcome_soon(transaction_id, item.shard, "COMMIT")
        memory.wait_for(unique, 1, PATIENCE_SECONDS)
    assert not answered_first


def test_a_consumer_goes_on_behind_a_page(answered_first: dict[str, bytes], server: ServerProcess, unique: str) -> None:
    """A page of maintenance, say. It ended the consumer."""
    got: list[str] = []
    consumer = Consumer(server.url, group=unique)
    consumer.subscribe(unique)(lambda message: got.append(message.text))
    for route in (f"subscriptions/{unique}", "receive", "settle"):
        answered_first[f"/v1/groups/{unique}/{route}"] = PAGE
    with running(consumer, subscribed=True):
        publish(server.url, unique, ["1", "2"])
        eventually(lambda: sorted(got) == ["1", "2"] and not lag(server.url, unique), "both to be acknowledged")
    assert not answered_first


@pytest.mark.long
def test_a_bridge_goes_on_behind_a_page(
    answered_first: dict[str, bytes], binlog_url: str, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    outbox(binlog_url, unique, range(3))
    with closing_engine(binlog_url) as engine, engine.connect() as connection:
        source = source_name(connection)
    answered_first.update({f"/v1/bridge/{source}": PAGE, f"/v1/bridge/{source}/batches": PAGE})
    move(binlog_url, server)
    assert numbers(server, unique, 3) == [0, 1, 2] and not answered_first


def test_a_relay_goes_on_behind_a_page_and_marks_nothing_for_it(
    answered_first: dict[str, bytes], server: ServerProcess, unique: str, tmp_path: Path
) -> None:
    subscribe(server.url, unique, unique)
    url = f"sqlite:///{tmp_path}/shop.db"
    outbox(url, unique, range(1))
    for answer in (PAGE, FOREIGN):
        answered_first[HALVES] = answer
        with closing_engine(url) as engine, pytest.raises(Unavailable):
            asyncio.run(Relay(engine, server.url).run(once=True))
        assert not answered_first
    with closing_engine(url) as engine:
        assert asyncio.run(Relay(engine, server.url).run(once=True)).sent == 1
    assert numbers(server, unique, 1) == [0]


@contextmanager
def closing_engine(url: str) -> Iterator[sa.Engine]:
    engine = make_engine(url)
    yield engine
    engine.dispose()
