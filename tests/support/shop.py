"""The smallest service: a table of orders, a careful engine, and a producer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from notify.client import Message, TransactionProducer, use_explicit_begin
from tests.support.clock import PATIENCE_SECONDS, eventually

if TYPE_CHECKING:
    from notify.testing import InMemoryServer, Stored


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(sa.String(50))


def items(engine: sa.Engine) -> list[str]:
    """The ordered items, in the order of their ids."""
    with Session(engine) as session:
        return list(session.scalars(sa.select(Order.item).order_by(Order.id)))


def make_engine(url: str) -> sa.Engine:
    """An engine for any database; SQLite waits for its lock, and begins transactions explicitly."""
    if url.startswith("sqlite"):
        engine = sa.create_engine(url, connect_args={"timeout": 60})
        use_explicit_begin(engine)
        return engine
    return sa.create_engine(url)


ASYNC_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg", "mysql": "mysql+aiomysql"}


def make_async_engine(url: str | sa.URL, **options: Any) -> AsyncEngine:
    """As `make_engine`, for coroutines; `url` may be that of an engine for threads."""
    url = sa.make_url(url)
    kind = url.get_backend_name()
    url = url.set(drivername=ASYNC_DRIVERS["mysql" if kind == "mariadb" else kind])
    engine = create_async_engine(url.difference_update_query(["ssl_disabled"]), **options)
    if kind == "sqlite":
        use_explicit_begin(engine)
    return engine


class Shop:
    """A producer, its sessions, and its messages on the server."""

    def __init__(self, engine: sa.Engine, server: InMemoryServer, name: str) -> None:
        self.engine = engine
        self.server = server
        self.topic = name
        self.sessions = sessionmaker(engine)
        self.producer = TransactionProducer(server.url, group=name, engine=engine, half_timeout=PATIENCE_SECONDS)

    def send(self, session: Session, body: Any, **options: Any) -> None:
        self.producer.send(session, Message(self.topic, body, **options))

    def messages(self) -> list[Stored]:
        """Close the producer, wait until every half is decided, and return the messages in the order of the queue."""
        eventually(lambda: not self.server.halves(self.topic), "the outcome of every half")
        self.producer.close()
        return self.server.messages(self.topic)

    def delivered(self) -> list[str]:
        return sorted(m.text for m in self.messages())

    def items(self) -> list[str]:
        with self.sessions() as session:
            return sorted(session.scalars(sa.select(Order.item)))
