"""Sessions that read on another engine: a routing session of SQLAlchemy may commit with messages, whatever its order of
steps, as long as it only reads there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from notify.client import AsyncTransactionProducer, Message, TransactionProducer, create_tables, use_explicit_begin
from notify.errors import BindingRefused, InvalidRequest
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS
from tests.support.shop import make_async_engine


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[sa.Engine, sa.Engine]]:
    """A writer and a reader. The reader is a database of its own, with the same tables."""
    writer, reader = (sa.create_engine(f"sqlite:///{tmp_path}/{name}.db") for name in ("writer", "reader"))
    for engine in (writer, reader):
        use_explicit_begin(engine)
        create_tables(engine)
        Base.metadata.create_all(engine)
    yield writer, reader
    writer.dispose()
    reader.dispose()


def routing(writer: sa.Engine, reader: sa.Engine) -> type[Session]:
    """The session of SQLAlchemy's documentation."""

    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **options: Any) -> Any:
            is_write = self._flushing or isinstance(clause, sa.Update | sa.Delete | sa.Insert)
            return writer if is_write else options.get("bind") or reader

    return Routing


def read(session: Session) -> None:
    session.scalars(sa.select(Order)).all()


def add(session: Session) -> None:
    session.add(Order(item="a"))


def write(session: Session) -> None:
    session.add(Order(item="a"))
    session.flush()


SEND = object()
ORDERS: dict[str, list[Any]] = {
    "send": [SEND],
    "add, send": [add, SEND],
    "read, add, send": [read, add, SEND],
    "add, send, read": [add, SEND, read],
    "write, read, send": [write, read, SEND],
    "send, read, write": [SEND, read, write],
    "read, send, write, read": [read, SEND, write, read],
}


@pytest.mark.parametrize("steps", ORDERS.values(), ids=ORDERS.keys())
def test_whatever_the_order_of_steps(
    memory: InMemoryServer, engines: tuple[sa.Engine, sa.Engine], unique: str, steps: list[Callable[[Session], None]]
) -> None:
    """Where the session had read, or read later, its commit was refused."""
    writer, reader = engines
    with TransactionProducer(memory.url, group=unique, engine=writer, readers=[reader]) as producer:
        with routing(writer, reader)() as session, session.begin():
            for step in steps:
                if step is SEND:
                    producer.send(session, Message(unique, "sent"))
                else:
                    step(session)
        memory.wait_for(unique, 1, PATIENCE_SECONDS)
        with routing(writer, reader)() as session:
            for step in steps:
                if step is SEND:
                    producer.send(session, Message(unique, "rolled back"))
                else:
                    step(session)
            session.rollback()
    assert [message.text for message in memory.messages(unique)] == ["sent"]


@pytest.mark.parametrize("steps", ORDERS.values(), ids=ORDERS.keys())
def test_an_async_session_that_reads_from_a_replica_sends_its_message(
    memory: InMemoryServer, engines: tuple[sa.Engine, sa.Engine], unique: str, steps: list[Callable[[Session], None]]
) -> None:
    writer, reader = (make_async_engine(engine.url) for engine in engines)
    kind = routing(writer.sync_engine, reader.sync_engine)

    async def run() -> None:
        async with AsyncTransactionProducer(memory.url, group=unique, engine=writer, readers=[reader]) as producer:
            async with AsyncSession(sync_session_class=kind) as session, session.begin():
                for step in steps:
                    if step is SEND:
                        await producer.send(session, Message(unique, "sent"))
                    else:
                        await session.run_sync(step)
        await writer.dispose()
        await reader.dispose()

    asyncio.run(run())
    assert [message.text for message in memory.wait_for(unique, 1, PATIENCE_SECONDS)] == ["sent"]


def raw(statement: str) -> Callable[[Session, sa.Engine], None]:
    return lambda session, reader: session.execute(sa.text(statement), bind_arguments={"bind": reader}) and None


WRITES: dict[str, Callable[[Session, sa.Engine], Any]] = {
    "an insert": lambda session, reader: session.connection(bind_arguments={"bind": reader}).execute(
        sa.insert(Order).values(item="b")
    ),
    "text": raw("INSERT INTO orders (item) VALUES ('b')"),
    "text behind a comment": raw("/* a */ /* b */ -- c\n UPDATE orders SET item = 'b'"),
    "text with WITH": raw("WITH x AS (SELECT 1) DELETE FROM orders"),
    "a bulk of rows": lambda session, reader: session.connection(bind_arguments={"bind": reader}).execute(
        sa.insert(Order), [{"item": "b"}, {"item": "c"}]
    ),
}


@pytest.mark.parametrize("write_there", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("is_first", [True, False], ids=["before the send", "after the send"])
def test_a_reader_that_has_written_is_refused(
    memory: InMemoryServer,
    engines: tuple[sa.Engine, sa.Engine],
    unique: str,
    write_there: Callable[[Session, sa.Engine], Any],
    is_first: bool,
) -> None:
    writer, reader = engines
    with TransactionProducer(memory.url, group=unique, engine=writer, readers=[reader]) as producer:
        with pytest.raises(BindingRefused, match=r"has written through .*reader\.db"):
            with routing(writer, reader)() as session, session.begin():
                if is_first:
                    write_there(session, reader)
                producer.send(session, Message(unique, "sent"))
                if not is_first:
                    write_there(session, reader)
        for engine in engines:
            with engine.connect() as connection:
                assert connection.scalar(sa.text("SELECT count(*) FROM orders")) == 0
        # The same connections, used again, have written in an earlier transaction.
        with routing(writer, reader)() as session, session.begin():
            read(session)
            producer.send(session, Message(unique, "again"))
    assert [message.text for message in memory.wait_for(unique, 1, PATIENCE_SECONDS)] == ["again"]


def test_text_that_only_reads_is_taken(
    memory: InMemoryServer, engines: tuple[sa.Engine, sa.Engine], unique: str
) -> None:
    writer, reader = engines
    with TransactionProducer(memory.url, group=unique, engine=writer, readers=[reader]) as producer:
        with routing(writer, reader)() as session, session.begin():
            for statement in (
                "SELECT 'INSERT INTO orders'",
                "WITH x AS (SELECT 1 AS updated) SELECT updated FROM x",
                "-- DELETE\nSELECT 1",
            ):
                raw(statement)(session, reader)
            producer.send(session, Message(unique, "sent"))
    memory.wait_for(unique, 1, PATIENCE_SECONDS)


def test_a_reader_that_is_the_writer_with_options(
    memory: InMemoryServer, engines: tuple[sa.Engine, sa.Engine], unique: str
) -> None:
    """Such as one in AUTOCOMMIT: it takes its connections from the same pool."""
    writer, _ = engines
    reader = writer.execution_options(isolation_level="AUTOCOMMIT")
    with TransactionProducer(memory.url, group=unique, engine=writer, readers=[reader]) as producer:
        with routing(writer, reader)() as session, session.begin():
            read(session)
            producer.send(session, Message(unique, "sent"))
    memory.wait_for(unique, 1, PATIENCE_SECONDS)


def test_other_engines_are_refused_as_before(
    memory: InMemoryServer, engines: tuple[sa.Engine, sa.Engine], unique: str
) -> None:
    writer, reader = engines
    with TransactionProducer(memory.url, group=unique, engine=writer) as producer:
        with pytest.raises(BindingRefused, match=r"readers=\[…\]"):
            with routing(writer, reader)() as session, session.begin():
                read(session)
                producer.send(session, Message(unique, "sent"))
        with pytest.raises(BindingRefused, match=r"readers=\[…\]"):
            with routing(writer, reader)() as session, session.begin():
                producer.send(session, Message(unique, "sent"))
                read(session)
    for wrong in (writer, "an engine"):
        with pytest.raises(InvalidRequest, match="readers"):
            TransactionProducer(memory.url, group=unique, engine=writer, readers=[wrong])  # type: ignore[list-item]


def test_a_routing_session_of_flask_sqlalchemy_sends_its_message(
    memory: InMemoryServer, engines: tuple[sa.Engine, sa.Engine], unique: str
) -> None:
    flask = pytest.importorskip("flask")
    flask_sqlalchemy = pytest.importorskip("flask_sqlalchemy")
    writer, reader = engines

    class Routing(flask_sqlalchemy.session.Session):  # type: ignore[misc,name-defined]
        def get_bind(self, mapper: Any = None, clause: Any = None, bind: Any = None, **options: Any) -> Any:
            if bind is not None or self._flushing:
                return bind or db.engines[None]
            return db.engines["replica"]

    app = flask.Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = str(writer.url)
    app.config["SQLALCHEMY_BINDS"] = {"replica": str(reader.url)}
    db = flask_sqlalchemy.SQLAlchemy(app, session_options={"class_": Routing})
    with app.app_context():
        use_explicit_begin(db.engine)
        use_explicit_begin(db.engines["replica"])
        readers = [db.engines["replica"]]
        with TransactionProducer(memory.url, group=unique, engine=db.engine, readers=readers) as producer:
            for steps in ([read, add, SEND], [add, SEND, read], [SEND, read, write]):
                for step in steps:
                    if step is SEND:
                        producer.send(db.session, Message(unique, "sent"))
                    else:
                        step(db.session)  # type: ignore[operator]
                db.session.commit()
        for engine in db.engines.values():
            engine.dispose()
    memory.wait_for(unique, 3, PATIENCE_SECONDS)


def test_a_statement_of_a_reader_goes_on_while_producers_are_made_and_closed(
    engines: tuple[sa.Engine, sa.Engine], notify_server: InMemoryServer, unique: str
) -> None:
    """It failed with "deque mutated during iteration", in any thread that read meanwhile."""
    writer, reader = engines
    made: list[TransactionProducer] = []

    def make() -> TransactionProducer:
        return TransactionProducer(notify_server.url, group=unique, engine=writer, readers=[reader])

    def meanwhile(*_: Any) -> None:
        made.append(make())
        made.pop(0).close()

    made.append(make())
    sa.event.listen(reader, "after_cursor_execute", meanwhile)
    with Session(reader) as session:
        read(session)
    made[0].close()
