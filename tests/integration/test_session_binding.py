"""A message shares its SQLAlchemy transaction's end, whichever it is, on each database."""

from __future__ import annotations

import gc
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.horizontal_shard import ShardedSession
from sqlalchemy.orm import Session

from notify.client import Inbox, Message, TransactionProducer, create_tables, use_explicit_begin
from notify.errors import BindingRefused, TransactionRefused
from notify.testing import InMemoryServer
from tests.support.shop import Order, Shop, make_engine


@pytest.fixture
def engine(emptied_shop: sa.Engine) -> sa.Engine:
    """The engine of a database without orders and halves."""
    return emptied_shop


def test_commit_makes_it_a_message(shop: Shop) -> None:
    with shop.sessions() as session, session.begin():
        session.add(Order(item="a"))
        shop.send(session, "a")
    assert shop.delivered() == ["a"]


def test_a_session_that_is_rolled_back_sends_nothing(shop: Shop) -> None:
    with shop.sessions() as session:
        session.add(Order(item="a"))
        shop.send(session, "a")
        session.rollback()
        session.add(Order(item="b"))
        shop.send(session, "b")
        session.commit()
    assert shop.delivered() == ["b"]
    assert shop.items() == ["b"]


@pytest.mark.parametrize("end", ["close", "reset", "invalidate", "exception"])
def test_a_session_that_ends_without_commit_sends_nothing(shop: Shop, end: str) -> None:
    with pytest.raises(ZeroDivisionError), shop.sessions() as session:
        session.add(Order(item="a"))
        shop.send(session, "a")
        if end != "exception":
            getattr(session, end)()
        raise ZeroDivisionError
    assert shop.delivered() == []


def test_a_session_that_is_garbage_collected_sends_nothing(shop: Shop) -> None:
    if shop.engine.dialect.name == "sqlite":
        shop.engine.dispose()
    gc.freeze()  # garbage of other tests is collected before
    try:
        session = shop.sessions()
        session.add(Order(item="a"))
        session.flush()
        shop.send(session, "a")
        connection = session.connection()
        connection.close()
        del session, connection
        gc.collect()
    finally:
        gc.unfreeze()
    assert shop.delivered() == []


def test_autoincrement_key_is_known_at_the_commit(shop: Shop) -> None:
    with shop.sessions() as session, session.begin():
        order = Order(item="a")
        session.add(order)
        shop.send(session, "a", key=lambda: order.id)
        session.flush()
        number = order.id
    assert [m.key for m in shop.messages()] == [str(number)]


def test_messages_belong_to_their_savepoint(shop: Shop) -> None:
    with shop.sessions() as session, session.begin():
        shop.send(session, "root")
        with session.begin_nested():
            shop.send(session, "released")
            with pytest.raises(ZeroDivisionError), session.begin_nested():
                shop.send(session, "rolled back")
                raise ZeroDivisionError
        outer = session.begin_nested()
        with session.begin_nested():
            shop.send(session, "released into a rolled-back one")
        outer.rollback()
        shop.send(session, "after")
    assert shop.delivered() == ["after", "released", "root"]


def test_a_root_that_commits_over_an_open_savepoint(shop: Shop) -> None:
    with shop.sessions() as session, session.begin():
        session.begin_nested()
        session.add(Order(item="a"))
        shop.send(session, "a")
    assert shop.items() == ["a"]
    assert shop.delivered() == ["a"]


def test_several_messages_keep_their_order(shop: Shop) -> None:
    with shop.sessions() as session, session.begin():
        for n in range(10):
            shop.send(session, str(n))
    assert [m.text for m in shop.messages()] == [str(n) for n in range(10)]


def test_nested_use_joins_and_the_owner_commits(shop: Shop) -> None:
    with shop.sessions() as session:
        with shop.producer.transaction(session) as outer:
            outer.send(Message(shop.topic, "outer"))
            with shop.producer.transaction(session) as inner:
                inner.send(Message(shop.topic, "inner"))
            assert session.in_transaction()
        assert not session.in_transaction()
    assert shop.delivered() == ["inner", "outer"]


def test_a_transactional_function_sends_only_if_it_returns(shop: Shop) -> None:
    @shop.producer.transactional(shop.sessions)
    def place(session: Session, item: str, fail: bool = False) -> str:
        session.add(Order(item=item))
        shop.send(session, item)
        if fail:
            raise ZeroDivisionError
        return item

    assert place("a") == "a"
    with pytest.raises(ZeroDivisionError):
        place("b", fail=True)
    assert shop.items() == ["a"]
    assert shop.delivered() == ["a"]


def test_a_core_connection_sends_only_what_it_commits(shop: Shop) -> None:
    with shop.engine.connect() as connection:
        with shop.producer.transaction(connection) as tx:
            connection.execute(sa.insert(Order).values(item="a"))
            tx.send(Message(shop.topic, "a"))
        with pytest.raises(ZeroDivisionError), shop.producer.transaction(connection) as tx:
            tx.send(Message(shop.topic, "b"))
            raise ZeroDivisionError
    assert shop.delivered() == ["a"]
    assert shop.items() == ["a"]


def test_core_connection_whose_owner_commits_is_resolved_by_check_back(shop: Shop) -> None:
    with shop.engine.begin() as connection, shop.producer.transaction(connection) as tx:
        tx.send(Message(shop.topic, "a"))
    shop.server.advance(60)  # by then the server has checked
    assert shop.delivered() == ["a"]


def test_a_refused_half_stops_the_commit_and_every_later_one(shop: Shop) -> None:
    session = shop.sessions()
    session.add(Order(item="a"))
    shop.send(session, "a", deliver_at=datetime.now(UTC) + timedelta(days=41))
    with pytest.raises(TransactionRefused, match="deliver_at"):
        session.commit()
    with pytest.raises(Exception, match=r"inactive|failed|rolled back"):
        session.commit()
    session.close()
    with shop.sessions() as other, other.begin():
        other.add(Order(item="b"))
    assert shop.items() == ["b"]


def test_no_business_change_without_its_message_when_the_server_is_away(engine: sa.Engine, unique: str) -> None:
    producer = TransactionProducer("http://127.0.0.1:9", group=unique, engine=engine, half_timeout=0.3)
    try:
        with pytest.raises(TransactionRefused), Session(engine) as session, session.begin():
            session.add(Order(item="a"))
            producer.send(session, Message(unique, "a"))
        with Session(engine) as session:
            assert list(session.scalars(sa.select(Order.item))) == []
    finally:
        producer.close()


def test_a_failed_insert_of_the_row_rolls_both_back(shop: Shop) -> None:
    with shop.sessions() as session, session.begin():
        shop.send(session, "before")  # the producer knows the table
    expected = pytest.raises(BindingRefused, match="no table half_message")
    with expected, shop.sessions() as session, session.begin():
        shop.send(session, "a")
        session.execute(sa.text("DROP TABLE half_message"))
    create_tables(shop.engine)
    assert shop.delivered() == ["before"]


def test_a_commit_goes_on_while_producers_of_its_engine_come_and_go(shop: Shop) -> None:
    """It failed with "deque mutated during iteration", in any thread whose half was on its way."""
    earlier = TransactionProducer(shop.server.url, group=f"{shop.topic}-earlier", engine=shop.engine)

    def come_and_go(connection: sa.Connection) -> None:
        earlier.close()
        TransactionProducer(shop.server.url, group=f"{shop.topic}-later", engine=shop.engine).close()
        Inbox(shop.engine)

    sa.event.listen(shop.engine, "commit", come_and_go)
    try:
        with shop.sessions.begin() as session:
            session.add(Order(item="kept"))
            shop.send(session, "sent")
    finally:
        sa.event.remove(shop.engine, "commit", come_and_go)
    assert (shop.items(), shop.delivered()) == (["kept"], ["sent"])


def test_a_pooled_connection_does_not_carry_a_dead_transaction(shop: Shop) -> None:
    session = shop.sessions()
    shop.send(session, "dead")
    session.close()
    with shop.sessions() as other, other.begin():
        other.add(Order(item="b"))
    assert shop.delivered() == []


def test_a_session_that_chooses_its_engine_by_what_it_writes(shop: Shop) -> None:
    """A message that was sent before any work raised an AssertionError of SQLAlchemy's."""
    session = ShardedSession(
        shards={"a": shop.engine},
        shard_chooser=lambda *given, **options: "a",
        identity_chooser=lambda *given, **options: ["a"],
        execute_chooser=lambda context: ["a"],
    )
    with session, session.begin():
        shop.send(session, "a")
        session.add(Order(item="a"))
    assert shop.delivered() == shop.items() == ["a"]


def test_joined_external_transaction_is_refused(shop: Shop) -> None:
    with shop.engine.connect() as connection, connection.begin(), Session(bind=connection) as session:
        with pytest.raises(BindingRefused, match="bound to a Connection"):
            shop.send(session, "a")


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_transaction_that_was_ended_on_the_connection(shop: Shop, end: str) -> None:
    """The next message raised a TypeError."""
    with shop.sessions() as session:
        session.add(Order(item="a"))
        session.flush()
        shop.send(session, "a")
        getattr(session.connection().get_transaction(), end)()
        with pytest.raises(BindingRefused, match="ended on its connection"):
            shop.send(session, "b")
        with pytest.warns(sa.exc.SAWarning, match="already deassociated"):
            session.rollback()
        session.add(Order(item="c"))
        shop.send(session, "c")
        session.commit()
    shop.server.advance(10)
    assert shop.delivered() == shop.items() == (["a", "c"] if end == "commit" else ["c"])


@pytest.mark.parametrize("change", ["new", "changed", "deleted"])
def test_changes_that_its_connection_would_leave_out_stop_the_commit(shop: Shop, change: str) -> None:
    """The message was sent without them: only the commit of the session itself flushes."""
    with shop.sessions() as session, session.begin():
        session.add(Order(item="old"))
    with shop.sessions() as session:
        order = session.scalars(sa.select(Order)).one()
        if change == "new":
            session.add(Order(item=change))
        elif change == "changed":
            order.item = change
        else:
            session.delete(order)
        shop.send(session, change)
        with pytest.raises(BindingRefused, match="not flushed"):
            session.connection().commit()
    assert (shop.items(), shop.delivered()) == (["old"], [])


def test_a_message_after_the_commit_is_refused_with_the_remedy(shop: Shop) -> None:
    """As it is sent from habit where messages are published after the commit. SQLAlchemy's error said why alone."""
    with shop.sessions() as session:
        sa.event.listen(session, "after_commit", lambda session: shop.send(session, "late"))
        session.add(Order(item="a"))
        shop.send(session, "a")
        with pytest.raises(BindingRefused, match="at the latest in the session's event before_commit"):
            session.commit()
    shop.server.advance(10)
    assert shop.delivered() == shop.items() == ["a"]


def test_two_phase_sessions_are_refused(shop: Shop) -> None:
    with Session(shop.engine, twophase=True) as session, pytest.raises(BindingRefused, match="two-phase"):
        shop.send(session, "a")


def test_autocommit_engines_are_refused(shop: Shop) -> None:
    autocommit = shop.engine.execution_options(isolation_level="AUTOCOMMIT")
    with Session(autocommit) as session, pytest.raises(BindingRefused, match="AUTOCOMMIT"):
        shop.send(session, "a")


def test_a_pooled_connection_that_was_in_autocommit_carries_messages(shop: Shop) -> None:
    with shop.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(sa.select(1))
    with shop.sessions() as session, session.begin():
        shop.send(session, "a")
    assert shop.delivered() == ["a"]


def test_another_engine_is_refused(shop: Shop) -> None:
    other = make_engine(shop.engine.url.render_as_string(hide_password=False))
    with Session(other) as session, pytest.raises(BindingRefused, match="same transaction"):
        shop.send(session, "a")
    other.dispose()


def test_several_engines_in_one_commit_are_refused(shop: Shop, tmp_path: Any) -> None:
    second = sa.create_engine(f"sqlite:///{tmp_path}/second.db")
    use_explicit_begin(second)
    with Session(shop.engine) as session:
        shop.send(session, "a")
        session.connection(bind_arguments={"bind": second})
        with pytest.raises(BindingRefused, match="several databases"):
            session.commit()
    second.dispose()
    assert shop.delivered() == []


def test_sqlite_without_explicit_begin_is_refused(memory: InMemoryServer, unique: str, tmp_path: Any) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/plain.db")
    create_tables(engine)
    producer = TransactionProducer(memory.url, group=unique, engine=engine)
    with Session(engine) as session, pytest.raises(BindingRefused, match="use_explicit_begin"):
        producer.send(session, Message(unique, "a"))
    producer.close()
    engine.dispose()


def test_the_row_names_the_shard_and_the_state(shop: Shop) -> None:
    with shop.sessions() as session, session.begin():
        shop.send(session, "a", tag="vip")
    with shop.engine.connect() as connection:
        row = connection.execute(sa.text("SELECT * FROM half_message")).mappings().one()
    assert (row["state"], row["shards"], row["tag"], row["mode"]) == ("COMMITTED", "main", "vip", "half")
    assert row["body"] is None
