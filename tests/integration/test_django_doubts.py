"""Django's transactions whose end is in doubt: check-back settles them; and what an outbox holds."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from django.db import IntegrityError, connections

from notify.check.question import read_source
from notify.client import Message, TransactionProducer
from notify.client.django import create_tables, drop_tables
from notify.errors import BindingRefused
from notify.movers.relay.relay import Relay
from notify.testing import Crashed, InMemoryServer, crashing
from notify.testing.ports import free_port
from notify.testing.reachable import NotAvailable
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.databases import empty_database
from tests.support.django_project import shop as shops
from tests.support.django_project.dying import POINTS, order_and_die
from tests.support.django_project.shop import Shop
from tests.support.dying import lose_outcomes
from tests.support.pgbouncer import pgbouncer


@pytest.fixture
def shop(django_shop: Shop) -> Shop:
    return django_shop


def test_a_process_that_seems_to_die(shop: Shop) -> None:
    """Before the local commit: nothing happened. After it: the producer that continues answers the check."""
    with pytest.raises(Crashed), crashing("after_half"), shop.atomic():
        shop.order("a")
    with pytest.raises(Crashed), crashing("after_local_commit"), shop.atomic():
        shop.order("b")
    assert len(shop.server.halves(shop.topic)) == 2
    shop.server.advance(10)
    assert shop.delivered() == shop.items() == ["b"]


def test_another_process_sends_messages_left_behind(shop: Shop) -> None:
    with shop.new_producer(mode="auto", half_timeout=0.25, url=f"http://127.0.0.1:{free_port()}") as alone:
        for item in "ab":
            with shop.atomic():
                shop.add(item)
                alone.send(Message(shop.topic, item, key="k"))
    assert (shop.items(), shop.rows(), shop.server.messages(shop.topic)) == (["a", "b"], 2, [])
    with shop.new_producer(mode="auto") as other:
        other.start()
        eventually(lambda: len(shop.server.messages(shop.topic)) == 2, "the rows to be sent")
        with shop.atomic():
            other.send(Message(shop.topic, "c", key="k"))
        assert other.flush(PATIENCE_SECONDS) == []
    assert [message.text for message in shop.server.messages(shop.topic)] == ["a", "b", "c"]


@pytest.mark.parametrize("point", POINTS)
def test_a_process_that_is_killed(shop: Shop, point: str) -> None:
    database = {key: value for key, value in shop.connection.settings_dict.items() if key != "TEST"}
    assert order_and_die(shop.alias, database, shop.server.url, shop.topic, point) == -signal.SIGKILL
    assert len(shop.server.halves(shop.topic)) == 1
    shop.producer.start()  # another instance of the group, which has sent nothing
    shop.server.advance(10)
    assert shop.delivered() == shop.items() == ([] if point == "after_half" else [point])


def test_a_check_while_the_transaction_runs_decides_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The half is stored and the row is inserted, and then the process takes its time before COMMIT."""
    half_sender = shop.producer._half_sender
    prepare_on = half_sender.prepare_on

    def prepare_and_wait(*given: Any) -> None:
        prepare_on(*given)
        shop.server.advance(10)

    monkeypatch.setattr(half_sender, "prepare_on", prepare_and_wait)
    lose_outcomes(shop.producer)
    shop.producer.start()
    with shop.atomic():
        shop.order("a")
    assert len(shop.server.halves(shop.topic)) == 1
    shop.server.advance(60)
    assert shop.delivered() == shop.items() == ["a"]


def test_an_error_of_commit_itself_is_left_to_the_check(shop: Shop) -> None:
    """A foreign key that Django defers fails at COMMIT, after the half was stored."""
    if shop.connection.vendor == "mysql":
        pytest.skip("MySQL and MariaDB check foreign keys with the statement")
    from tests.support.django_project.models import Part

    with pytest.raises(IntegrityError), shop.atomic():
        shop.send("a")
        Part.objects.using(shop.alias).create(order_id=12345)
    assert len(shop.server.halves(shop.topic)) == 1
    with shop.atomic():
        shop.order("b")
    shop.server.advance(10)
    assert shop.delivered() == shop.items() == ["b"]


def test_producers_of_sqlalchemy_and_django_answer_for_each_other(shop: Shop) -> None:
    """They share a group, and the tables of one database."""
    lose_outcomes(shop.producer)
    with shop.atomic():
        shop.order("a")
    shop.producer.close()
    engine = shop.producer._plan.engine
    with TransactionProducer(shop.server.url, group=shop.topic, engine=engine):
        shop.server.advance(10)
        assert shop.delivered() == ["a"]


def test_an_outbox_waits_for_the_relay(shop: Shop) -> None:
    """Its producer needs no server."""
    with shop.new_producer(url="http://127.0.0.1:9", mode="outbox") as producer:
        for item in ("a", "b", "c"):
            with shop.atomic():
                shop.add(item)
                producer.send(Message(shop.topic, {"item": item}, key=item, tag="x", headers={"h": "v"}))
                if item == "b":
                    shops.transaction.set_rollback(True, using=shop.alias)
    moved = asyncio.run(Relay(shop.producer._plan.engine, shop.server.url).run(once=True))
    assert (moved.sent, moved.refused) == (2, 0)
    messages = shop.messages()
    assert sorted((m.json()["item"], m.key, m.tag) for m in messages) == [("a", "a", "x"), ("c", "c", "x")]


def test_rows_that_keep_their_messages(shop: Shop) -> None:
    with shop.new_producer(keep_messages=True) as producer, shop.atomic():
        producer.send(Message(shop.topic, b"\x00\xff", key="k"))
    with shop.connection.cursor() as cursor:
        cursor.execute("SELECT body, mode, state, relayed FROM half_message")
        ((body, *rest),) = cursor.fetchall()
    assert (bytes(body), rest) == (b"\x00\xff", ["half", "COMMITTED", 1])
    (message,) = shop.messages()
    assert message.body == b"\x00\xff"


def test_a_database_without_the_tables(shop: Shop, tmp_path: Path, memory: InMemoryServer) -> None:
    alias = f"{shop.alias}_bare"
    database = shop.connection.settings_dict | {"TEST": {}}
    if shop.connection.vendor == "sqlite":
        database["NAME"] = tmp_path / "bare.db"
    with shops.added(alias, database):
        drop_tables(alias)
        try:
            with Shop(alias, memory, shop.topic).producer as producer:
                with pytest.raises(BindingRefused, match=r"no table half_message.*manage\.py migrate"):
                    with shops.transaction.atomic(using=alias):
                        producer.send(Message(shop.topic, "a"))
                source = create_tables(alias)
                assert create_tables(alias) == source
                with shops.transaction.atomic(using=alias):
                    producer.send(Message(shop.topic, "b"))
        finally:
            create_tables(alias)
    assert shop.delivered() == ["b"]


def test_check_back_opens_connections_as_django_does(shop: Shop) -> None:
    with shop.producer._plan.engine.connect() as connection:
        source, _ = read_source(connection)
        with shop.connection.cursor() as cursor:
            cursor.execute("SELECT id FROM notify_source")
            assert cursor.fetchone()[0] == source
        if shop.connection.vendor == "postgresql":
            assert connection.execute(sa.text("SHOW TimeZone")).scalar() == "UTC"
    assert connections[shop.alias].connection is shop.connection.connection


def test_pgbouncer_in_transaction_mode(
    database_urls: Mapping[str, str], tmp_path: Path, memory: InMemoryServer, unique: str
) -> None:
    """As Django's own documentation says: without server-side cursors."""
    (tmp_path / "pgbouncer").mkdir()
    with ExitStack() as stack:
        direct = stack.enter_context(empty_database("postgresql", database_urls, tmp_path))
        try:
            url = stack.enter_context(pgbouncer(direct, "transaction", tmp_path / "pgbouncer"))
        except NotAvailable as reason:
            pytest.skip(str(reason))
        database = shops.database_of(url, DISABLE_SERVER_SIDE_CURSORS=True)
        alias = stack.enter_context(shops.added("pooled", database))
        shops.make_tables(alias)
        shop = Shop(alias, memory, unique)
        for item in ("a", "b"):
            with pytest.raises(ZeroDivisionError), shop.atomic():
                shop.order(item)
                raise ZeroDivisionError
            with shop.atomic():
                shop.order(item)
        lose_outcomes(shop.producer)
        with shop.atomic():
            shop.order("c")
        memory.advance(10)
        assert shop.delivered() == shop.items() == ["a", "b", "c"]
