"""Handlers that work with Django's ORM: their effect and the inbox's row are one transaction, on each database."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import IntegrityError, ProgrammingError, connections, transaction

from notify.client import AsyncConsumer, Consumer, Message
from notify.client.django import DjangoInbox
from notify.errors import DeadLetter, InboxUnavailable, InvalidRequest
from notify.protocol.message import ReceivedMessage
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.django_project.shop import Shop
from tests.support.groups import subscribe
from tests.support.transactions import new_id


@pytest.fixture
def shop(django_shop: Shop) -> Shop:
    return django_shop


@pytest.fixture
def inbox(shop: Shop) -> DjangoInbox:
    return DjangoInbox(shop.alias)


def message(body: str = "a", name: str | None = None) -> ReceivedMessage:
    return ReceivedMessage(name or f"{new_id()}.0", "t", 0, 0, body.encode(), None, None, {}, 1, "")


def inbox_rows(shop: Shop) -> int:
    with shop.connection.cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM notify_inbox")
        return int(cursor.fetchone()[0])


def test_a_message_takes_effect_once(shop: Shop, inbox: DjangoInbox) -> None:
    given = message()
    assert inbox.run("g", given, lambda m: shop.add(m.text))
    assert not inbox.run("g", given, lambda m: shop.add(m.text))
    assert inbox.run("another group", given, lambda m: shop.add("b"))
    assert (shop.items(), inbox_rows(shop)) == (["a", "b"], 2)


def test_a_handler_that_fails_leaves_nothing(shop: Shop, inbox: DjangoInbox) -> None:
    def failing(m: ReceivedMessage) -> None:
        shop.add(m.text)
        raise ZeroDivisionError

    given = message()
    with pytest.raises(ZeroDivisionError):
        inbox.run("g", given, failing)
    assert (shop.items(), inbox_rows(shop)) == ([], 0)
    assert inbox.run("g", given, lambda m: shop.add(m.text))


def test_a_batch_is_one_transaction(shop: Shop, inbox: DjangoInbox) -> None:
    first, second, third = (message(body) for body in "abc")
    assert inbox.run("g", first, lambda m: shop.add(m.text))

    def handle(messages: list[ReceivedMessage]) -> None:
        for each in messages:
            shop.order(each.text)
        if len(messages) == 3:
            raise ZeroDivisionError

    assert inbox.run_batch("g", [first, second, second], handle) == 1
    with pytest.raises(ZeroDivisionError):
        inbox.run_batch("g", [first, third, message("d"), message("e")], handle)
    assert inbox.run_batch("g", [third, first], handle) == 1
    assert inbox.run_batch("g", [third, first], handle) == 0
    assert (shop.items(), inbox_rows(shop)) == (["a", "b", "c"], 3)
    assert shop.delivered() == ["b", "c"]


def test_a_session_with_a_former_primary_is_not_used_again(shop: Shop, inbox: DjangoInbox) -> None:
    """It stays open and refuses writes, and Django finds it usable."""
    if shop.connection.vendor == "sqlite":
        pytest.skip("SQLite is a file, which has no standby")
    of_postgresql = shop.connection.vendor == "postgresql"
    with shop.connection.cursor() as cursor:
        cursor.execute(f"SET SESSION {'CHARACTERISTICS AS ' if of_postgresql else ''}TRANSACTION READ ONLY")
    shop.connection.close_at = None  # as with CONN_MAX_AGE = None
    given = message()
    with pytest.raises(InboxUnavailable):
        inbox.run("g", given, lambda m: shop.add(m.text))
    assert inbox.run("g", given, lambda m: shop.add(m.text)) and shop.items() == ["a"]


def test_a_part_may_fail_alone(shop: Shop, inbox: DjangoInbox) -> None:
    def careful(m: ReceivedMessage) -> None:
        shop.add("a")
        with pytest.raises(IntegrityError), shop.atomic():
            shop.add("a")
        shop.add("b")

    assert inbox.run("g", message(), careful)
    assert (shop.items(), inbox_rows(shop)) == (["a", "b"], 1)


def test_a_handler_that_leaves_its_transaction_unusable_is_not_acknowledged(shop: Shop, inbox: DjangoInbox) -> None:
    """Django, or PostgreSQL, would roll it back without a word, and the message would count as handled."""

    def swallowing(m: ReceivedMessage) -> None:
        shop.add("a")
        with pytest.raises(IntegrityError):
            shop.add("a")

    def asking_for_it(m: ReceivedMessage) -> None:
        shop.add("a")
        transaction.set_rollback(True, using=shop.alias)

    def closing(m: ReceivedMessage) -> None:
        shop.add("a")
        shop.connection.close()

    def aborted(m: ReceivedMessage) -> None:
        shop.add("a")
        with pytest.raises(ProgrammingError), shop.connection.cursor() as cursor:
            cursor.execute("SELECT nothing FROM nowhere")

    def rolling_back_in_sql(m: ReceivedMessage) -> None:
        shop.add("a")
        with shop.connection.cursor() as cursor:
            cursor.execute("ROLLBACK")

    handlers = [swallowing, asking_for_it, closing, rolling_back_in_sql]
    if shop.connection.vendor == "postgresql":
        handlers.append(aborted)
    for handler in handlers:
        with pytest.raises(InvalidRequest, match="can only be rolled back"):
            inbox.run("g", message(), handler)
        assert (shop.items(), inbox_rows(shop)) == ([], 0), handler.__name__


def test_a_handler_that_commits_is_refused(shop: Shop, inbox: DjangoInbox) -> None:
    def committing(m: ReceivedMessage) -> None:
        shop.add("a")
        transaction.commit(using=shop.alias)

    with pytest.raises(transaction.TransactionManagementError):
        inbox.run("g", message(), committing)
    assert (shop.items(), inbox_rows(shop)) == ([], 0)


def test_a_part_that_a_handler_commits_does_not_count_as_all(shop: Shop, inbox: DjangoInbox) -> None:
    """The claim stands then: the next attempt was acknowledged, although the rest was never done."""

    def committing(m: ReceivedMessage) -> None:
        shop.add(f"{m.text} 1")
        with shop.connection.cursor() as cursor:
            cursor.execute("COMMIT")
        shop.add(f"{m.text} 2")
        if m.text == "fails":
            raise ZeroDivisionError

    with pytest.raises(DeadLetter, match="a part of its effect may be committed"):
        inbox.run("g", message("fails"), committing)
    with pytest.raises(DeadLetter, match="a part of its effect may be committed"):
        inbox.run_batch("h", [message("returns")], lambda messages: committing(messages[0]))
    # SQLite commits each later statement by itself.
    assert {"fails 1", "returns 1"} <= set(shop.items()) and inbox_rows(shop) == 2


def test_a_database_without_autocommit_is_refused(
    shop: Shop, inbox: DjangoInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of `atomic` commits nothing there: the message counted as handled, and nothing was done."""
    shop.connection.close()
    with monkeypatch.context() as patched:
        patched.setitem(shop.connection.settings_dict, "AUTOCOMMIT", False)
        with pytest.raises(InvalidRequest, match="autocommit is off"):
            inbox.run("g", message(), lambda m: shop.add(m.text))
        with pytest.raises(InvalidRequest, match="autocommit is off"):
            inbox.run_batch("g", [message()], lambda messages: shop.add("a"))
        shop.connection.close()
    assert (shop.items(), inbox_rows(shop)) == ([], 0)


def test_messages_sent_by_a_handler_commit_or_roll_back_with_it(shop: Shop, inbox: DjangoInbox) -> None:
    def forwarding(m: ReceivedMessage) -> None:
        shop.order(m.text)
        if m.text == "b":
            raise ZeroDivisionError

    given = message("a")
    assert inbox.run("g", given, forwarding)
    assert not inbox.run("g", given, forwarding)
    with pytest.raises(ZeroDivisionError):
        inbox.run("g", message("b"), forwarding)
    assert shop.delivered() == ["a"]


def test_a_handler_runs_in_a_transaction_and_again_after_it_failed(shop: Shop, inbox: DjangoInbox) -> None:
    """Handlers run in threads; their connections are closed after each message, as CONN_MAX_AGE says."""
    seen: dict[str, Any] = {}
    consumer = Consumer(shop.server.url, group=shop.topic, inbox=inbox, concurrency=2)

    @consumer.subscribe(shop.topic, retry_min=0.1)
    def on_placed(received: ReceivedMessage) -> None:
        assert connections[shop.alias].in_atomic_block
        shop.add(received.text)
        seen[received.text] = received.attempt
        if received.text == "b" and received.attempt == 1:
            raise ZeroDivisionError

    subscribe(shop.server.url, shop.topic, shop.topic)
    for body in ("a", "b", "c"):
        shop.producer.publish(Message(shop.topic, body))
    thread = threading.Thread(target=consumer.run, kwargs={"signals": False})
    thread.start()

    def is_done() -> bool:
        shop.server.advance(1)  # until the next attempt
        return consumer.handled >= 3

    try:
        eventually(is_done, "three effects")
    finally:
        consumer.stop()
        thread.join(PATIENCE_SECONDS)
    assert (shop.items(), inbox_rows(shop), seen) == (["a", "b", "c"], 3, {"a": 1, "b": 2, "c": 1})


@pytest.mark.parametrize("batch", [None, 1], ids=["messages", "batches"])
def test_a_handler_without_an_inbox_gets_a_new_connection_when_its_own_was_ended(shop: Shop, batch: int | None) -> None:
    """A database that ended a connection made dead letters of all further messages, until the process was restarted."""
    attempts: list[int] = []
    consumer = Consumer(shop.server.url, group=shop.topic, concurrency=1)

    @consumer.subscribe(shop.topic, retry_min=0.1, batch=batch)
    def on_placed(received: Any) -> None:
        first = received[0] if batch else received
        attempts.append(first.attempt)
        shop.add(first.text)
        connections[shop.alias].connection.close()  # as the database does: Django does not notice

    subscribe(shop.server.url, shop.topic, shop.topic)
    for body in ("a", "b", "c"):
        shop.producer.publish(Message(shop.topic, body))
    thread = threading.Thread(target=consumer.run, kwargs={"signals": False})
    thread.start()
    try:
        eventually(lambda: consumer.handled + consumer.failed >= 3, "three calls")
    finally:
        consumer.stop()
        thread.join(PATIENCE_SECONDS)
    assert (shop.items(), attempts) == (["a", "b", "c"], [1, 1, 1])


def test_a_consumer_says_what_is_missing(shop: Shop, inbox: DjangoInbox) -> None:
    consumer = Consumer(shop.server.url, group=shop.topic, inbox=inbox)
    with pytest.raises(InvalidRequest, match=r"with Django's, calls it with \(message\)"):
        consumer.subscribe(shop.topic)(lambda received, session: None)
    consumer.subscribe(shop.topic)(lambda received: None)
    with shop.connection.cursor() as cursor:
        cursor.execute("ALTER TABLE notify_inbox RENAME TO notify_hidden")
    try:
        with pytest.raises(InvalidRequest, match=r"no table notify_inbox: run `manage\.py migrate`"):
            consumer.run(signals=False)
    finally:
        with shop.connection.cursor() as cursor:
            cursor.execute("ALTER TABLE notify_hidden RENAME TO notify_inbox")


def test_coroutines_cannot_have_it(shop: Shop, inbox: DjangoInbox) -> None:
    with pytest.raises(InvalidRequest, match="for Django, use Consumer"):
        AsyncConsumer(shop.server.url, group=shop.topic, inbox=inbox)


def test_the_inbox_is_purged(shop: Shop, inbox: DjangoInbox) -> None:
    assert inbox.run("g", message(), lambda m: None)
    assert inbox.purge(86_400.0) == 0
    with shop.connection.cursor() as cursor:
        cursor.execute("UPDATE notify_inbox SET created_at = '2020-01-01 00:00:00'")
    assert inbox.purge(86_400.0) == 1
