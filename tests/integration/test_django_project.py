"""A Django project meets more than `send`: views, migrations, checks, commands, and tests of its own."""

from __future__ import annotations

import contextlib
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.test import Client, TestCase, override_settings

from notify.client import Message
from notify.client.django import DjangoProducer, configured, producer, publish, schedule, send, tables, unschedule
from notify.client.django.system_checks import check_settings, check_tables
from notify.errors import BindingRefused, InvalidRequest
from notify.testing import InMemoryServer
from notify.testing.django import captured_messages
from tests.support.clock import PATIENCE_SECONDS
from tests.support.django_project import shop as shops
from tests.support.django_project.shop import Shop


@pytest.fixture
def shop(django_shop: Shop) -> Shop:
    return django_shop


# --- ATOMIC_REQUESTS ----------------------------------------------------------------------------------------------


@pytest.fixture
def client(shop: Shop) -> Iterator[Client]:
    """A client of the project's views, each of which is a transaction."""
    known = connections.settings[shop.alias]
    known["ATOMIC_REQUESTS"] = True
    shops.SERVED.append(shop)
    yield Client(raise_request_exception=False)
    shops.SERVED.remove(shop)
    known["ATOMIC_REQUESTS"] = False


def test_a_request_is_a_transaction(shop: Shop, client: Client) -> None:
    assert client.get("/orders/book").content == b"placed"
    assert client.get("/orders/unlucky").status_code == 500
    assert shop.delivered() == shop.items() == ["book"]


def test_a_request_whose_half_is_refused_fails(shop: Shop, client: Client) -> None:
    """The server does not take it: the client sees that the order was not placed."""
    with shop.server.down():
        shop.producer._plan.half_timeout = 0.3
        assert client.get("/orders/book").status_code == 500
    assert shop.items() == []


# --- the setting NOTIFY -------------------------------------------------------------------------------------------


def test_producers_of_the_setting(shop: Shop) -> None:
    given = {"URL": shop.server.url, "GROUP": shop.topic, "HALF_TIMEOUT": PATIENCE_SECONDS, "KEEP_MESSAGES": True}
    with override_settings(NOTIFY=given):
        with shop.atomic():
            send(Message(shop.topic, "a"), using=shop.alias)
        made = producer(shop.alias)
        assert made is producer(shop.alias) and producer() is not made
        publish(Message(shop.topic, "b"))
        (first, *_) = schedule(shop.topic, Message(shop.topic, "daily"), cron="0 7 * * *", zone="Asia/Tokyo")
        assert (first.hour, unschedule(shop.topic)) == (22, True)
    assert made.outgoing.is_closed, "the setting has changed"
    assert shop.delivered() == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (None, "write NOTIFY"),
        ({"URL": "http://127.0.0.1:7400"}, "lacks GROUP"),
        ({"URL": "", "GROUP": "shop", "MODE": "half"}, "lacks URL"),
        ({"URL": "http://127.0.0.1:7400", "GROUP": "shop", "TIMEOUT": 3}, "unknown keys: TIMEOUT"),
        ({"URL": "http://127.0.0.1:7400", "GROUP": "shop", "MODE": "hafl"}, "none of half, outbox, auto"),
        ({"URL": "http://127.0.0.1:7400", "GROUP": "no group"}, "producer_group"),
    ],
)
def test_a_setting_that_cannot_be_is_told(given: Any, complaint: str) -> None:
    shops.set_up()
    with override_settings(NOTIFY=given):
        (found,) = check_settings()
    assert complaint in found.msg and found.id == "notify.E001" and found.is_serious()


def test_a_good_setting_passes() -> None:
    shops.set_up()
    assert check_settings() == []
    with override_settings(NOTIFY={"URL": "http://127.0.0.1:7400", "GROUP": "shop"}):
        assert check_settings() == []


def test_a_database_that_cannot_carry_messages_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with shops.added("dummy", {"ENGINE": "django.db.backends.dummy"}) as alias:
        with pytest.raises(BindingRefused, match="PostgreSQL, MariaDB, MySQL or SQLite"):
            DjangoProducer("http://127.0.0.1:7400", group="g", using=alias)
        monkeypatch.setattr("notify.client.django.system_checks.DEFAULT_DB_ALIAS", alias)
        with override_settings(NOTIFY={"URL": "http://127.0.0.1:7400", "GROUP": "shop"}):
            (found,) = check_settings()
        assert found.id == "notify.E002"


# --- migrations and commands --------------------------------------------------------------------------------------


def test_migrations_make_the_tables_and_take_them_away(shop: Shop) -> None:
    def migrate(target: str) -> list[str]:
        call_command("migrate", "notify", target, database=shop.alias, verbosity=0)
        return tables.missing_tables(shop.alias)

    tables.drop_tables(shop.alias)
    (warning,) = check_tables(databases=[shop.alias])
    assert "half_message" in warning.msg and "migrate notify" in warning.hint
    try:
        assert migrate("0001") == []
        assert check_tables(databases=[shop.alias]) == []
        with shop.atomic():
            shop.order("a")
        assert shop.delivered() == ["a"]
        assert len(migrate("zero")) == 4
    finally:
        assert migrate("0001") == []


def test_commands_say_what_is_missing(shop: Shop) -> None:
    with pytest.raises(CommandError, match="the setting NOTIFY"):
        call_command("notify_check", database=shop.alias)
    tables.drop_tables(shop.alias)
    try:
        with override_settings(NOTIFY={"URL": shop.server.url, "GROUP": shop.topic}):
            with pytest.raises(CommandError, match=r"lacks Notify's tables half_message.*manage\.py migrate"):
                call_command("notify_check", database=shop.alias)
    finally:
        tables.create_tables(shop.alias)
    with pytest.raises(CommandError, match=r"no consumer nowhere\.to\.be"):
        call_command("notify_consume", "nowhere.to.be")
    with pytest.raises(CommandError, match=r"is a function: name a notify\.client\.Consumer"):
        call_command("notify_consume", "tests.support.django_project.shop.set_up")


# --- test cases ---------------------------------------------------------------------------------------------------


def run_as_test_case(alias: str, function: Any) -> None:
    """Run a function in the transaction of a TestCase."""

    class Case(TestCase):
        databases = {alias}  # noqa: RUF012
        runTest = staticmethod(function)

    result = unittest.TestResult()
    unittest.TestSuite([Case()]).run(result)
    failures = [text for _, text in (*result.errors, *result.failures)]
    assert result.testsRun == 1 and not failures, failures


def test_a_test_case_sends_nothing_and_tells_what_it_would_send(shop: Shop) -> None:
    def test() -> None:
        shop.send("before")
        with captured_messages(shop.alias) as messages:
            with shop.atomic(durable=True):
                shop.order("a")
                shop.send({"item": "b"}, key=lambda: 7, tag="t", headers={"h": "v"}, delay=5)
            with pytest.raises(ZeroDivisionError), shop.atomic():
                shop.order("c")
                raise ZeroDivisionError
        first, second = messages
        assert (first.text, first.key) == ("a", None)
        assert (second.json(), second.key, second.tag, second.delay) == ({"item": "b"}, "7", "t", 5)
        assert second.headers["h"] == "v"
        with captured_messages(shop.alias) as none:
            pass
        assert none == []

    run_as_test_case(shop.alias, test)
    assert (shop.delivered(), shop.items(), shop.rows()) == ([], [], 0)


def test_a_test_case_sees_bodies_as_handlers_get_them(shop: Shop, tmp_path: Path) -> None:
    """It saw Zstandard's bytes, and a reference instead of the body."""

    def test() -> None:
        with captured_messages(shop.alias) as messages, shop.atomic():
            for size in (1, 100, 1000):
                producer.send(Message(shop.topic, {"item": "x" * size}, headers={"h": "v"}))
        assert [len(message.json()["item"]) for message in messages] == [1, 100, 1000]
        assert [sorted(message.headers) for message in messages] == [["content-type", "h"]] * 3

    producer = shop.new_producer(compress_above=50, store=f"file://{tmp_path}", store_above=500)
    run_as_test_case(shop.alias, test)
    assert list(tmp_path.iterdir()) == []
    producer.close()


def test_a_test_case_tries_any_number_of_transactions(shop: Shop) -> None:
    """All of them are one transaction for the database: the 101st message was refused."""

    def test() -> None:
        with captured_messages(shop.alias, execute=True):
            for number in range(3):
                with shop.atomic(), contextlib.suppress(ZeroDivisionError), shop.atomic():
                    for _ in range(50):
                        shop.send(str(number))
                    if number == 1:
                        raise ZeroDivisionError
        with shop.atomic():
            for _ in range(100):
                shop.send("full")
            with pytest.raises(InvalidRequest, match="at most 100"):
                shop.send("one more")

    run_as_test_case(shop.alias, test)
    assert Counter(shop.delivered()) == {"0": 50, "2": 50}


def test_a_test_case_can_have_its_messages_delivered(shop: Shop) -> None:
    def test() -> None:
        with captured_messages(shop.alias, execute=True), shop.atomic():
            shop.order("a")

    run_as_test_case(shop.alias, test)
    assert (shop.delivered(), shop.items()) == (["a"], [])


def test_a_producer_runs_nothing_before_its_first_commit(shop: Shop) -> None:
    with shop.atomic():
        shop.order("a")
        transaction.set_rollback(True, using=shop.alias)
    assert shop.producer.outgoing._started is None
    with shop.atomic():
        shop.order("b")
    assert shop.producer.outgoing._started is not None
    assert shop.delivered() == ["b"]


def test_the_process_closes_its_producers_as_it_ends(memory: InMemoryServer, unique: str) -> None:
    shops.set_up()
    with override_settings(NOTIFY={"URL": memory.url, "GROUP": unique}):
        made = producer()
        configured.close()
        assert made.outgoing.is_closed and producer() is not made
