"""The check finds the outcomes that a producer cannot know: a commit cut off, an answer lost, a process killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Message, TransactionProducer
from notify.errors import TransactionRefused
from notify.testing import InMemoryServer
from tests.support import dying
from tests.support.clock import eventually
from tests.support.proxy import Proxy, unencrypted
from tests.support.shop import Order, items

PAST_THE_FIRST_CHECK = 60.0
"""Seconds; without `check_after` the first check comes after 5."""


@pytest.fixture
def engine(shared_engine: sa.Engine) -> sa.Engine:
    """The engine of a database without orders."""
    with shared_engine.begin() as connection:
        connection.execute(sa.delete(Order))
    return shared_engine


@pytest.fixture
def proxied(engine: sa.Engine) -> Iterator[tuple[Proxy, sa.Engine]]:
    """A proxy in front of the database, and an engine through it."""
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite is a file: its COMMIT has no connection that could be cut")
    with Proxy(engine.url.host or "", engine.url.port or 0) as proxy:
        through = sa.create_engine(unencrypted(engine.url).set(host="127.0.0.1", port=proxy.port))
        yield proxy, through
        through.dispose()


def sell(engine: sa.Engine, producer: TransactionProducer, topic: str, item: str) -> None:
    """An order and its message in one transaction."""
    with Session(engine) as session, session.begin():
        session.add(Order(item=item))
        producer.send(session, Message(topic, item))


def delivered(server: InMemoryServer, topic: str) -> list[str]:
    """The messages in the order of the queue, once the server has checked every half without an outcome."""
    server.advance(PAST_THE_FIRST_CHECK)
    eventually(lambda: not server.halves(topic), "the outcome of every half")
    return [m.text for m in server.messages(topic)]


@pytest.mark.parametrize("executed", [False, True], ids=["before it arrives", "before its answer arrives"])
def test_a_commit_that_is_cut_off(
    proxied: tuple[Proxy, sa.Engine], executed: bool, memory: InMemoryServer, unique: str
) -> None:
    """The service sees an error either way; the message is delivered if, and only if, the database committed."""
    proxy, engine = proxied
    with TransactionProducer(memory.url, group=unique, engine=engine, check_after=PAST_THE_FIRST_CHECK - 1) as producer:
        sell(engine, producer, unique, "first")  # from here on the server knows the source
        # Checks must be over: a check commits, too, and would be cut off instead.
        eventually(lambda: not memory.halves(unique), "the outcome of the first")
        proxy.cut_at(rb"COMMIT(\0|$)", answer=executed)
        with pytest.raises(sa.exc.DBAPIError):
            sell(engine, producer, unique, "ambiguous")
        assert proxy.cuts == 1
        assert delivered(memory, unique) == (["first", "ambiguous"] if executed else ["first"])
        sell(engine, producer, unique, "last")
        assert delivered(memory, unique) == items(engine)
    assert items(engine) == (["first", "ambiguous", "last"] if executed else ["first", "last"])


def test_a_connection_that_is_lost_before_the_commit(
    proxied: tuple[Proxy, sa.Engine], memory: InMemoryServer, unique: str
) -> None:
    """A connection lost between half and COMMIT rolls the half back at once, and the pool continues."""
    proxy, engine = proxied
    with TransactionProducer(memory.url, group=unique, engine=engine, answer_checks=False) as producer:
        sell(engine, producer, unique, "first")
        proxy.cut_at(rb"(?i)into half_message", answer=False)
        with pytest.raises(sa.exc.OperationalError):
            sell(engine, producer, unique, "lost")
        assert proxy.cuts == 1
        sell(engine, producer, unique, "last")
        assert delivered(memory, unique) == ["first", "last"]
    assert items(engine) == ["first", "last"]


def test_a_half_whose_answer_is_lost(engine: sa.Engine, memory: InMemoryServer, unique: str) -> None:
    """The server stored the half, the producer does not know: nothing is committed, and the check rolls it back."""
    address = urlsplit(memory.url)
    with Proxy(address.hostname or "", address.port or 0) as proxy:
        proxy.drop_answers = True
        with TransactionProducer(
            f"http://127.0.0.1:{proxy.port}", group=unique, engine=engine, half_timeout=0.3, answer_checks=False
        ) as producer:

            def is_lost() -> bool:
                with pytest.raises(TransactionRefused) as refused:
                    sell(engine, producer, unique, "lost")
                assert refused.value.retryable
                return bool(memory.halves(unique))

            # On a slow machine the time may be over before the half is sent: then the next one counts.
            eventually(is_lost, "a half that reached the server")
    with TransactionProducer(memory.url, group=unique, engine=engine):  # answers the check
        assert delivered(memory, unique) == []
    assert items(engine) == []


@pytest.mark.parametrize("point", dying.POINTS)
def test_a_producer_killed_at_its_worst_moments(
    point: str, engine: sa.Engine, memory: InMemoryServer, unique: str
) -> None:
    dsn = engine.url.render_as_string(hide_password=False)
    assert dying.order_and_die(memory.url, unique, dsn, point) == -signal.SIGKILL
    assert len(memory.halves(unique)) == 1
    with TransactionProducer(memory.url, group=unique, engine=engine):  # another instance answers
        assert delivered(memory, unique) == items(engine)
    assert items(engine) == ([] if point == "after half" else [point])
