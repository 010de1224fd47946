"""Transactions of Django's ORM carry messages, savepoints included, on each database."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import IntegrityError, ProgrammingError, close_old_connections, connections, transaction
from django.db.transaction import TransactionManagementError

from notify.client import Message, WithdrawalOutcome
from notify.client.django import transactions as listening
from notify.errors import BindingRefused, Closed, InvalidRequest, TransactionRefused
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.django_project import shop as shops
from tests.support.django_project.shop import Shop


@pytest.fixture
def shop(django_shop: Shop) -> Shop:
    return django_shop


# --- transactions -------------------------------------------------------------------------------------------------


def test_commit_makes_it_a_message(shop: Shop) -> None:
    with shop.atomic():
        order = shop.add("a")
        shop.send({"item": "a"}, key=order.pk, tag="vip", headers={"h": "v"})
        shop.send("second", key=lambda: order.pk)
        assert not shop.server.halves(shop.topic)
    first, second = shop.messages()
    assert (first.json(), first.key, first.tag) == ({"item": "a"}, str(order.pk), "vip")
    assert (second.text, second.key) == ("second", str(order.pk))
    assert (shop.items(), shop.rows()) == (["a"], 2)


def test_a_block_that_is_rolled_back_sends_nothing(shop: Shop) -> None:
    with pytest.raises(ZeroDivisionError), shop.atomic():
        shop.order("a")
        raise ZeroDivisionError
    with shop.atomic():
        shop.order("b")
        transaction.set_rollback(True, using=shop.alias)
    with shop.atomic():
        shop.order("c")
    assert (shop.delivered(), shop.items(), shop.rows()) == (["c"], ["c"], 1)


def test_messages_belong_to_their_savepoint(shop: Shop) -> None:
    with shop.atomic():
        shop.order("a")
        with pytest.raises(ZeroDivisionError), shop.atomic():
            shop.order("b")
            with shop.atomic():
                shop.order("c")
            raise ZeroDivisionError
        with shop.atomic():
            shop.order("d")
            with pytest.raises(IntegrityError), shop.atomic():
                shop.order("e")
                shop.order("a")
        shop.order("f")
    assert shop.delivered() == shop.items() == ["a", "d", "f"]


def test_withdrawals_belong_to_their_savepoint(shop: Shop) -> None:
    producer, topic = shop.producer, shop.topic
    with shop.atomic():
        names = ("kept", "cancelled", "first", "stays")
        sent = {name: producer.send(Message(topic, name, delay=3600)) for name in names}
    with shop.atomic():
        with contextlib.suppress(ZeroDivisionError), shop.atomic():
            undone = [producer.cancel(sent["kept"]), producer.replace(sent["stays"], Message(topic, "not sent"))]
            raise ZeroDivisionError
        with shop.atomic():
            done = [producer.cancel(sent["cancelled"].id, topic=topic)]
        done.append(producer.replace(sent["first"], Message(topic, "second", delay=60)))
    assert [each.outcome() for each in undone] == [WithdrawalOutcome.ROLLED_BACK] * 2
    assert [each.outcome() for each in done] == [WithdrawalOutcome.WITHDRAWN] * 2
    with contextlib.suppress(ZeroDivisionError), shop.atomic():
        undone = [producer.cancel(sent["kept"])]
        assert undone[0].outcome() is WithdrawalOutcome.UNDECIDED
        raise ZeroDivisionError
    with shop.atomic():
        undone.append(producer.cancel(sent["kept"]))
        transaction.set_rollback(True, using=shop.alias)
    assert [each.outcome(0) for each in undone] == [WithdrawalOutcome.ROLLED_BACK] * 2
    shop.server.advance(3601)
    eventually(lambda: sorted(m.text for m in shop.messages()) == ["kept", "second", "stays"], "what is left of them")


def test_the_first_message_is_sent_within_a_savepoint(shop: Shop) -> None:
    with shop.atomic():
        with pytest.raises(ZeroDivisionError), shop.atomic():
            with shop.atomic():
                shop.order("a")
            raise ZeroDivisionError
        shop.add("b")
    assert (shop.delivered(), shop.items()) == ([], ["b"])


def test_savepoints_that_are_made_by_hand(shop: Shop) -> None:
    """`transaction.on_commit` knows nothing of these; messages do."""
    with shop.atomic():
        early = transaction.savepoint(using=shop.alias)
        shop.order("a")
        late = transaction.savepoint(using=shop.alias)
        shop.order("b")
        transaction.savepoint_rollback(late, using=shop.alias)
        shop.order("c")
        kept = transaction.savepoint(using=shop.alias)
        shop.order("d")
        transaction.savepoint_commit(kept, using=shop.alias)
    with shop.atomic():
        early = transaction.savepoint(using=shop.alias)
        shop.order("e")
        transaction.savepoint_rollback(early, using=shop.alias)
    assert shop.delivered() == shop.items() == ["a", "c", "d"]


def test_a_block_without_a_savepoint_takes_the_whole_transaction_with_it(shop: Shop) -> None:
    with shop.atomic():
        shop.order("a")
        with pytest.raises(ZeroDivisionError), shop.atomic(savepoint=False):
            shop.order("b")
            raise ZeroDivisionError
        with pytest.raises(TransactionManagementError):
            shop.send("c")
    assert (shop.delivered(), shop.items()) == ([], [])


def test_a_durable_block_sends_at_its_commit_and_cannot_be_nested(shop: Shop) -> None:
    with shop.atomic(durable=True):
        shop.order("a")
        with pytest.raises(RuntimeError, match="durable"), shop.atomic(durable=True):
            shop.order("b")
    assert shop.delivered() == shop.items() == ["a"]


def test_without_a_transaction_it_is_refused(shop: Shop) -> None:
    with pytest.raises(BindingRefused, match=r"transaction\.atomic\(\).*publish\(\)"):
        shop.send("a")
    refused: list[BaseException] = []

    def too_late() -> None:
        with pytest.raises(BindingRefused) as caught:
            shop.send("b")
        refused.append(caught.value)

    with shop.atomic():
        shop.order("c")
        transaction.on_commit(too_late, using=shop.alias)
    assert len(refused) == 1
    shop.producer.publish(Message(shop.topic, "published"))
    assert shop.delivered() == ["c", "published"]


def test_transactions_that_are_managed_by_hand(shop: Shop) -> None:
    transaction.set_autocommit(False, using=shop.alias)
    try:
        shop.order("a")
        transaction.rollback(using=shop.alias)
        shop.order("b")
        with pytest.raises(ZeroDivisionError), shop.atomic():
            shop.order("c")
            raise ZeroDivisionError
        transaction.commit(using=shop.alias)
        shop.order("d")
        transaction.rollback(using=shop.alias)
    finally:
        transaction.set_autocommit(True, using=shop.alias)
    assert shop.delivered() == shop.items() == ["b"]


def test_sqlite_cannot_commit_what_is_managed_by_hand_with_a_savepoint(shop: Shop) -> None:
    """One that began with a savepoint was committed as that was released: a rollback then took the message alone."""
    transaction.set_autocommit(False, using=shop.alias)
    try:
        with contextlib.suppress(BindingRefused), shop.atomic():
            shop.order("a")
        transaction.rollback(using=shop.alias)
        shop.send("b")
        with shop.atomic():
            shop.order("c")
        transaction.rollback(using=shop.alias)
        shop.send("d")
        with shop.atomic():
            shop.order("e")
        transaction.commit(using=shop.alias)
    finally:
        transaction.set_autocommit(True, using=shop.alias)
    assert (shop.delivered(), shop.items()) == (["d", "e"], ["e"])


def test_autocommit_is_not_turned_on_over_messages(shop: Shop) -> None:
    """MySQL's drivers and sqlite3 commit then: the change was there, and its messages went with the next transaction of
    the connection, or not at all."""
    transaction.set_autocommit(False, using=shop.alias)
    try:
        shop.order("a")
        with pytest.raises(BindingRefused, match="would commit the transaction"):
            transaction.set_autocommit(True, using=shop.alias)
        transaction.rollback(using=shop.alias)
        shop.order("b")
        with pytest.raises(BindingRefused, match="would commit the transaction"):
            transaction.set_autocommit(True, using=shop.alias)
        transaction.commit(using=shop.alias)
    finally:
        transaction.set_autocommit(True, using=shop.alias)
    with pytest.raises(ZeroDivisionError), shop.atomic():
        shop.order("c")
        raise ZeroDivisionError
    assert shop.delivered() == shop.items() == ["b"]


@pytest.mark.parametrize("end", ["the block fails", "its half is refused"])
def test_a_rollback_that_is_interrupted_commits_nothing(shop: Shop, end: str) -> None:
    """Django's atomic() turned autocommit on, with which MySQL's drivers and sqlite3 committed the change alone."""
    connections[shop.alias].close()
    del connections[shop.alias]
    interrupts = [KeyboardInterrupt()]
    rollback = shop.connection._rollback

    def interrupted() -> None:
        if interrupts:
            raise interrupts.pop()
        rollback()

    shop.connection._rollback = interrupted
    with pytest.raises((KeyboardInterrupt, BindingRefused, ProgrammingError)), shop.atomic():
        shop.add("a")
        shop.send("a", key=(lambda: 1 // 0) if end == "its half is refused" else None)
        if end == "the block fails":
            raise ZeroDivisionError
    assert not interrupts
    close_old_connections()  # as Django does between requests
    with shop.atomic():
        shop.order("b")
    assert shop.delivered() == shop.items() == ["b"]


def test_callbacks_run_once_the_outcome_is_on_its_way(shop: Shop) -> None:
    order: list[str] = []
    outcome_soon = shop.producer.outgoing.outcome_soon

    def noted(*given: Any) -> None:
        order.append("outcome")
        outcome_soon(*given)

    shop.producer.outgoing.outcome_soon = noted  # type: ignore[method-assign]
    with shop.atomic():
        transaction.on_commit(lambda: order.append("first"), using=shop.alias)
        shop.order("a")
        transaction.on_commit(lambda: order.append("second"), using=shop.alias)
    assert order == ["outcome", "first", "second"]
    assert shop.delivered() == ["a"]


# --- commits that are stopped -------------------------------------------------------------------------------------


def test_a_refused_half_stops_the_commit(shop: Shop) -> None:
    """The next transaction of the connection commits nothing of it, and runs none of its callbacks."""
    called: list[str] = []
    with pytest.raises(TransactionRefused, match=r"nothing is committed.*deliver_at"), shop.atomic():
        shop.add("a")
        transaction.on_commit(lambda: called.append("a"), using=shop.alias)
        shop.send("a", deliver_at=datetime.now(UTC) + timedelta(days=41))
    assert shop.connection.get_autocommit() and not shop.connection.in_atomic_block
    with shop.atomic():
        shop.order("b")
        transaction.on_commit(lambda: called.append("b"), using=shop.alias)
    assert (shop.delivered(), shop.items(), called) == (["b"], ["b"], ["b"])


def test_nothing_is_committed_while_the_server_is_away(shop: Shop) -> None:
    with shop.new_producer(url="http://127.0.0.1:9", half_timeout=0.3) as producer:
        with pytest.raises(TransactionRefused), shop.atomic():
            shop.add("a")
            producer.send(Message(shop.topic, "a"))
    assert shop.items() == []


def test_a_key_that_cannot_be_stops_the_commit(shop: Shop) -> None:
    with pytest.raises(InvalidRequest, match="key"), shop.atomic():
        shop.add("a")
        shop.send("a", key=lambda: None)
    assert (shop.delivered(), shop.items()) == ([], [])


def test_a_row_that_cannot_be_inserted_stops_the_commit(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a check has said rollback before, whose tombstone stands."""
    with shop.atomic():
        shop.order("a")
    with shop.connection.cursor() as cursor:
        cursor.execute("SELECT transaction_id FROM half_message")
        (taken,) = cursor.fetchone()
    stored: list[str] = []

    def store_half(transaction_id: str, *given: Any) -> Any:
        stored.append(transaction_id)
        return half(transaction_id, *given)

    half = shop.producer.outgoing.store_half
    monkeypatch.setattr(shop.producer.outgoing, "store_half", store_half)
    rows = shop.producer._half_sender._rows
    insert = rows.insert
    monkeypatch.setattr(rows, "insert", lambda connection, name, *given: insert(connection, taken, *given))
    with pytest.raises(TransactionRefused, match="longer than check_after"), shop.atomic():
        shop.order("b")
    monkeypatch.undo()
    with shop.atomic():
        shop.order("c")
    assert len(stored) == 1
    assert shop.delivered() == shop.items() == ["a", "c"]


def test_a_producer_that_is_closed_stops_the_commit_and_later_sends(shop: Shop) -> None:
    with pytest.raises(TransactionRefused, match="closed"), shop.atomic():
        shop.order("a")
        shop.producer.close()
    with pytest.raises(Closed), shop.atomic():
        shop.order("b")
    assert shop.items() == []


def test_two_producers_in_one_transaction_are_refused(shop: Shop) -> None:
    with shop.new_producer() as other, shop.atomic():
        with pytest.raises(ZeroDivisionError), shop.atomic():
            shop.order("a")
            raise ZeroDivisionError
        other.send(Message(shop.topic, "b"))
        with pytest.raises(BindingRefused, match="another producer"):
            shop.send("c")
    assert shop.delivered() == ["b"]


# --- connections --------------------------------------------------------------------------------------------------


def test_connections_that_django_closes_between_requests(shop: Shop) -> None:
    """CONN_MAX_AGE is 0: each request has a connection of its own."""
    drivers = set()
    for item in ("a", "b"):
        with shop.atomic():
            shop.order(item)
            drivers.add(shop.connection.connection)
        close_old_connections()
        assert shop.connection.connection is None
    assert len(drivers) == 2
    assert shop.delivered() == shop.items() == ["a", "b"]


def test_a_connection_that_is_closed_in_its_transaction(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    with shop.atomic():
        shop.order("a")
        shop.connection.close()
        with pytest.raises(TransactionManagementError):
            shop.send("b")
    assert "its 1 messages are dropped" in caplog.text
    with shop.atomic():
        shop.order("c")
    assert shop.delivered() == shop.items() == ["c"]


def test_each_thread_has_its_own_transaction(shop: Shop) -> None:
    def place(number: int) -> None:
        try:
            with shop.atomic():
                shop.order(f"{number:02}")
                if number % 4 == 3:
                    transaction.set_rollback(True, using=shop.alias)
        finally:
            shop.connection.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(place, range(24), timeout=PATIENCE_SECONDS))
    wanted = [f"{n:02}" for n in range(24) if n % 4 != 3]
    assert shop.delivered() == shop.items() == wanted


def test_coroutines_leave_transactions_to_threads(shop: Shop) -> None:
    def place() -> None:
        try:
            with shop.atomic():
                shop.order("a")
        finally:
            shop.connection.close()

    async def view() -> None:
        with pytest.raises(SynchronousOnlyOperation):
            shop.send("b")
        await sync_to_async(place)()

    asyncio.run(view())
    assert shop.delivered() == shop.items() == ["a"]


def test_each_database_has_transactions_and_messages_of_its_own(
    shop: Shop, memory: InMemoryServer, unique: str, tmp_path: Path
) -> None:
    """Each has transactions of its own, whose messages share the fate of that one."""
    with shops.added("second", shops.database_of(f"sqlite:///{tmp_path}/second.db")) as second:
        shops.make_tables(second)
        other = Shop(second, memory, unique + "-second")
        with shop.atomic(), other.atomic():
            shop.order("a")
            other.order("a")
        with shop.atomic(), pytest.raises(ZeroDivisionError):
            shop.order("b")
            with other.atomic():
                other.order("b")
                raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError), shop.atomic():
            with other.atomic():
                shop.order("c")
                other.order("c")
            raise ZeroDivisionError
        assert shop.delivered() == shop.items() == ["a", "b"]
        assert other.delivered() == other.items() == ["a", "c"]


def test_a_connection_listens_from_its_first_message_on(shop: Shop) -> None:
    connections[shop.alias].close()
    del connections[shop.alias]
    with shop.atomic():
        shop.add("a")
        assert not hasattr(shop.connection, listening.ATTRIBUTE)
        shop.send("a")
        assert hasattr(shop.connection, listening.ATTRIBUTE)
    assert not hasattr(shop.connection.copy(), listening.ATTRIBUTE)
    assert shop.delivered() == ["a"]
