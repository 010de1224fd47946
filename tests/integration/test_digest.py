"""Each local row keeps the digest of its message's body; a table that an older version made works without."""

from __future__ import annotations

import asyncio
import threading

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Message, TransactionProducer
from notify.client.tables.creation import create_tables
from notify.client.tables.definitions import half_message
from notify.client.tables.half_rows import Mode
from notify.movers.relay.relay import Relay
from notify.protocol.message import body_digest
from notify.testing.process import ServerProcess
from tests.support.groups import drain, subscribe
from tests.support.shop import Base, Order

BODIES = (b"", b"\x00\xff", "größer".encode() * 1000)


def sell(url: str, engine: sa.Engine, group: str, mode: Mode) -> None:
    Base.metadata.create_all(engine)
    with TransactionProducer(url, group=group, engine=engine, mode=mode) as producer:
        with Session(engine) as session, session.begin():
            session.add(Order(item="x"))
            for body in BODIES:
                producer.send(session, Message(group, body))


def digests(engine: sa.Engine, group: str) -> list[int | None]:
    t = half_message.c
    with engine.connect() as connection:
        return list(connection.scalars(sa.select(t.digest).where(t.topic == group).order_by(t.message_no)))


def without_digests(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE half_message DROP COLUMN digest")


@pytest.mark.parametrize("mode", ["half", "outbox"])
def test_a_row_has_its_bodys_digest(engine: sa.Engine, server: ServerProcess, unique: str, mode: Mode) -> None:
    sell(server.url, engine, unique, mode)
    assert digests(engine, unique) == [body_digest(body) for body in BODIES]
    assert len(set(digests(engine, unique))) == len(BODIES)


@pytest.mark.parametrize("mode", ["half", "outbox"])
def test_a_table_without_the_column_goes_on(engine: sa.Engine, server: ServerProcess, unique: str, mode: Mode) -> None:
    without_digests(engine)
    subscribe(server.url, unique, unique)
    sell(server.url, engine, unique, mode)
    if mode == "outbox":
        asyncio.run(Relay(engine, server.url).run(once=True))
    assert len(drain(server.url, unique, unique, len(BODIES))) == len(BODIES)
    # Whoever makes the tables adds the column, and keeps the rows; several at once do no harm.
    failures: list[BaseException] = []

    def make() -> None:
        try:
            create_tables(engine)
        except BaseException as error:
            failures.append(error)

    makers = [threading.Thread(target=make) for _ in range(4)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert not failures
    assert digests(engine, unique) == [None] * len(BODIES)


def test_the_digest_of_a_body_is_fixed() -> None:
    """Audits compare it with what other versions have written."""
    assert body_digest(b"") == -1970711489451281740
    assert body_digest(b"paid") == -6646894288217823117
