"""Transactions that are over leave nothing in memory, and one that the database has rolled back sends no message."""

from __future__ import annotations

import gc
import threading

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from notify.client import Inbox, Message, TransactionProducer
from notify.client.producer.binding import listeners_of
from notify.client.producer.half_sender import PendingMessages
from notify.errors import BindingRefused, InvalidRequest
from notify.protocol.message import ReceivedMessage
from tests.support.clock import PATIENCE_SECONDS
from tests.support.shop import Order, Shop
from tests.support.transactions import new_id

FIRST, SECOND = 900_001, 900_002
"""Ids beyond those that a database gives by itself."""
HEAVY = 200
"""Rows that a deadlock's other transaction has written: InnoDB rolls back the one that has written less."""


def _in_memory() -> int:
    gc.collect()
    return sum(type(one) is PendingMessages for one in gc.get_objects())  # lazy objects answer isinstance by loading


def _send_in_each_way(shop: Shop) -> None:
    for number in range(5):
        with shop.sessions() as session, session.begin():
            shop.send(session, f"session {number}")
        with shop.sessions() as session:
            shop.send(session, "rolled back")
            session.rollback()
        with shop.engine.connect() as connection, shop.producer.transaction(connection) as tx:
            tx.send(Message(shop.topic, f"connection {number}"))


@pytest.mark.long
def test_nothing_is_kept_of_transactions_that_are_over(shop: Shop) -> None:
    """Each left its messages in memory until the process ended."""
    before = _in_memory()
    _send_in_each_way(shop)
    assert _in_memory() <= before  # an earlier test may have left some
    assert len(shop.messages()) == 10


def _have_it_rolled_back(session: Session) -> None:
    """Have the database fail a statement, and roll back the whole transaction with it; PostgreSQL aborts it."""
    engine = session.connection().engine
    if engine.dialect.name == "sqlite":
        session.execute(sa.text(f"INSERT OR ROLLBACK INTO orders (id, item) VALUES ({FIRST}, 'again')"))
    elif engine.dialect.name == "postgresql":
        session.execute(sa.insert(Order).values(id=FIRST, item="again"))
    else:
        _meet_a_deadlock(session, engine)


def _meet_a_deadlock(session: Session, engine: sa.Engine) -> None:
    has_second = threading.Event()

    def other() -> None:
        with engine.begin() as connection:
            connection.execute(sa.update(Order).where(Order.id == SECOND).values(item="theirs"))
            connection.execute(sa.insert(Order), [{"item": "heavy"}] * HEAVY)
            has_second.set()
            connection.execute(sa.update(Order).where(Order.id == FIRST).values(item="theirs"))

    session.execute(sa.update(Order).where(Order.id == FIRST).values(item="ours"))
    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert has_second.wait(PATIENCE_SECONDS)
        session.execute(sa.update(Order).where(Order.id == SECOND).values(item="ours"))
    finally:
        thread.join(PATIENCE_SECONDS)


def test_no_message_of_a_transaction_that_the_database_has_rolled_back(shop: Shop) -> None:
    """A caught deadlock left SQLAlchemy's transaction open: the commit sent the message of an order that was gone."""
    with shop.sessions() as session, session.begin():
        session.add_all([Order(id=FIRST, item="first"), Order(id=SECOND, item="second")])
    with shop.sessions() as session:
        session.add(Order(item="lost"))
        session.flush()
        shop.send(session, "lost")
        with pytest.raises(DBAPIError):
            _have_it_rolled_back(session)
        if shop.engine.dialect.name != "postgresql":
            with pytest.raises(BindingRefused, match="rolled back the whole transaction"):
                shop.send(session, "more")
        with pytest.raises((BindingRefused, DBAPIError)):
            session.commit()
        session.rollback()
        session.add(Order(item="repeated"))
        shop.send(session, "repeated")
        session.commit()
    assert "lost" not in shop.items()
    assert shop.delivered() == ["repeated"]


def test_no_first_message_after_the_database_has_rolled_back(shop: Shop) -> None:
    if shop.engine.dialect.name == "postgresql":
        pytest.skip("PostgreSQL refuses all statements of an aborted transaction")
    with shop.sessions() as session, session.begin():
        session.add_all([Order(id=FIRST, item="first"), Order(id=SECOND, item="second")])
    with shop.sessions() as session:
        with pytest.raises(DBAPIError):
            _have_it_rolled_back(session)
        with pytest.raises(BindingRefused, match="rolled back the whole transaction"):
            shop.send(session, "late")
        session.commit()  # without a message it is the database's and SQLAlchemy's own affair
    assert shop.delivered() == []


def test_an_error_that_undoes_its_statement_alone_is_no_reason(shop: Shop) -> None:
    if shop.engine.dialect.name == "postgresql":
        pytest.skip("PostgreSQL aborts the transaction with every error")
    with shop.sessions() as session, session.begin():
        session.add(Order(id=FIRST, item="first"))
        session.flush()
        shop.send(session, "sent")
        with pytest.raises(DBAPIError):
            session.execute(sa.insert(Order).values(id=FIRST, item="again"))
    assert (shop.items(), shop.delivered()) == (["first"], ["sent"])


@pytest.mark.parametrize("statement", ["ROLLBACK", "COMMIT"])
def test_the_end_of_a_transaction_as_sql_is_noticed_on_sqlite(shop: Shop, statement: str) -> None:
    """The commit sent the message of an order that was gone. Other databases begin a new transaction in silence."""
    if shop.engine.dialect.name != "sqlite":
        pytest.skip("only SQLite's driver knows without a question whether there is a transaction")
    with shop.sessions() as session:
        session.add(Order(item="before"))
        session.flush()
        shop.send(session, "sent")
        session.execute(sa.text(statement))
        session.add(Order(item="behind"))
        with pytest.raises(BindingRefused, match="ended with SQL"):
            session.commit()
        session.rollback()
        session.add(Order(item="repeated"))
        shop.send(session, "repeated")
        session.commit()
    assert shop.delivered() == ["repeated"]


def test_a_closed_producer_hears_of_no_errors(shop: Shop) -> None:
    producer = TransactionProducer(shop.server.url, group=f"{shop.topic}-closed", engine=shop.engine)
    bound = producer.binding
    assert bound in listeners_of(shop.engine).bindings
    producer.close()
    assert bound not in listeners_of(shop.engine).bindings


def test_a_handler_that_goes_on_after_it_has_no_effect(shop: Shop) -> None:
    """The inbox's savepoint is gone with the transaction: the message is not handled, and comes again."""
    with shop.sessions() as session, session.begin():
        session.add_all([Order(id=FIRST, item="first"), Order(id=SECOND, item="second")])
    inbox = Inbox(shop.engine)
    message = ReceivedMessage(f"{new_id()}.0", "t", 0, 0, b"repeated", None, None, {}, 1, "")

    def careless(message: ReceivedMessage, session: Session) -> None:
        session.add(Order(item="lost"))
        session.flush()
        with pytest.raises(DBAPIError):
            _have_it_rolled_back(session)

    def careful(message: ReceivedMessage, session: Session) -> None:
        session.add(Order(item=message.text))
        shop.send(session, message.text)

    with pytest.raises(InvalidRequest, match=r"has ended|was aborted"):
        inbox.run("g", message, careless)
    assert "lost" not in shop.items()
    assert inbox.run("g", message, careful)
    assert shop.delivered() == ["repeated"]
