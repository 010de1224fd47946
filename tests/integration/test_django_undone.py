"""A transaction of Django's that the database itself has rolled back sends no message, and handles none."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, OperationalError, connections, transaction

from notify.client.django import DjangoInbox
from notify.errors import BindingRefused, InvalidRequest
from notify.protocol.message import ReceivedMessage
from tests.support.clock import PATIENCE_SECONDS
from tests.support.django_project.shop import Shop
from tests.support.transactions import new_id

HEAVY = 200
"""Rows that a deadlock's other transaction has written: InnoDB rolls back the one that has written less."""
REFUSED = "rolled back the whole transaction"


@pytest.fixture
def shop(django_shop: Shop) -> Shop:
    if django_shop.connection.vendor == "postgresql":
        pytest.skip("PostgreSQL refuses all statements of an aborted transaction")
    django_shop.add("first")
    django_shop.add("second")
    return django_shop


def _execute(shop: Shop, statement: str) -> None:
    with shop.connection.cursor() as cursor:
        cursor.execute(statement)


def _lock(shop: Shop, item: str) -> None:
    _execute(shop, f"SELECT id FROM django_project_order WHERE item = '{item}' FOR UPDATE")


def _have_it_rolled_back(shop: Shop) -> None:
    """Have the database fail a statement, and roll back the whole transaction with it."""
    if shop.connection.vendor == "sqlite":
        _execute(shop, "INSERT OR ROLLBACK INTO django_project_order (item) VALUES ('first')")
    else:
        _meet_a_deadlock(shop)


def _meet_a_deadlock(shop: Shop) -> None:
    has_second = threading.Event()

    def other() -> None:
        with contextlib.closing(connections[shop.alias]), shop.atomic():
            _lock(shop, "second")
            rows = ", ".join(f"('heavy {number}')" for number in range(HEAVY))
            _execute(shop, f"INSERT INTO django_project_order (item) VALUES {rows}")
            has_second.set()
            _lock(shop, "first")
            transaction.set_rollback(True, using=shop.alias)

    _lock(shop, "first")
    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert has_second.wait(PATIENCE_SECONDS)
        _lock(shop, "second")
    finally:
        thread.join(PATIENCE_SECONDS)


def _repeat(shop: Shop) -> None:
    """The connection continues as if nothing had been."""
    with shop.atomic():
        shop.order("repeated")
    assert shop.items() == ["first", "repeated", "second"]
    assert shop.delivered() == ["repeated"]


def test_no_message_of_a_transaction_that_the_database_has_rolled_back(shop: Shop) -> None:
    """The commit sent the message of an order that was gone."""
    with pytest.raises(BindingRefused, match=REFUSED), shop.atomic():
        shop.order("lost")
        with pytest.raises(DatabaseError):
            _have_it_rolled_back(shop)
        with pytest.raises(BindingRefused, match=REFUSED):
            shop.send("more")
        _execute(shop, "INSERT INTO django_project_order (item) VALUES ('half of it')")
    if shop.connection.vendor == "sqlite":  # its statements commit by themselves after that
        _execute(shop, "DELETE FROM django_project_order WHERE item = 'half of it'")
    _repeat(shop)


def test_no_first_message_after_the_database_has_rolled_back(shop: Shop) -> None:
    """Also on a connection that has not carried a message yet."""
    shop.connection.close()
    del connections[shop.alias]
    with shop.atomic():
        shop.add("lost")
        with pytest.raises(DatabaseError):
            _have_it_rolled_back(shop)
        with pytest.raises(BindingRefused, match=REFUSED):
            shop.send("late")
    _repeat(shop)  # without a message the commit was Django's and the database's own affair


def test_a_savepoint_that_is_gone_with_it_is_djangos_affair(shop: Shop) -> None:
    """Django cannot roll back to the savepoint, so that the outermost block rolls back."""
    with shop.atomic():
        shop.order("lost")
        with pytest.raises(DatabaseError), shop.atomic():
            _have_it_rolled_back(shop)
        with pytest.raises(DatabaseError):
            shop.send("more")
    _repeat(shop)


def test_a_transaction_that_is_managed_by_hand(shop: Shop) -> None:
    connection: Any = shop.connection
    connection.set_autocommit(False)
    try:
        shop.send("lost")
        shop.add("lost")
        with pytest.raises(DatabaseError):
            _have_it_rolled_back(shop)
        with pytest.raises(BindingRefused, match=REFUSED):
            connection.commit()
        shop.send("lost as well")
        connection.rollback()
    finally:
        connection.set_autocommit(True)
    _repeat(shop)


def test_the_end_of_a_transaction_as_sql_is_noticed_on_sqlite(shop: Shop) -> None:
    """The commit sent the message of an order that was gone. Other databases begin a new transaction in silence."""
    if shop.connection.vendor != "sqlite":
        pytest.skip("only SQLite's driver knows without a question whether there is a transaction")
    with pytest.raises(BindingRefused, match="ended with SQL"), shop.atomic():
        shop.order("lost")
        _execute(shop, "ROLLBACK")
    _repeat(shop)


def test_an_error_that_undoes_its_statement_alone_is_no_reason(shop: Shop) -> None:
    with shop.atomic():
        shop.order("sent")
        with pytest.raises(IntegrityError):
            _execute(shop, "INSERT INTO django_project_order (item) VALUES ('first')")
        with pytest.raises(OperationalError if shop.connection.vendor == "sqlite" else DatabaseError):
            _execute(shop, "SELECT * FROM no_such_table")
        shop.order("sent, too")
    assert shop.delivered() == ["sent", "sent, too"]


def test_an_error_outside_a_transaction_does_not_stop_later_sends(shop: Shop) -> None:
    with pytest.raises(IntegrityError):
        _execute(shop, f"INSERT {_or_rollback(shop)} INTO django_project_order (item) VALUES ('first')")
    _repeat(shop)


def _or_rollback(shop: Shop) -> str:
    return "OR ROLLBACK" if shop.connection.vendor == "sqlite" else ""


def test_a_handler_that_goes_on_after_it_has_no_effect(shop: Shop) -> None:
    """The inbox's savepoint is gone with the transaction: the message is not handled, and comes again."""
    inbox = DjangoInbox(shop.alias)
    given = ReceivedMessage(f"{new_id()}.0", "t", 0, 0, b"repeated", None, None, {}, 1, "")

    def careless(message: ReceivedMessage) -> None:
        shop.add("lost")
        with pytest.raises(DatabaseError):
            _have_it_rolled_back(shop)

    with pytest.raises(InvalidRequest, match=r"has ended|can only be rolled back"):
        inbox.run("g", given, careless)
    assert shop.items() == ["first", "second"]
    assert inbox.run("g", given, lambda message: shop.order(message.text))
    assert shop.delivered() == ["repeated"]
