"""What a producer cannot know, the check finds out: commits cut off, answers lost, processes killed in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Message, TransactionProducer, create_tables
from notify.errors import TransactionRefused
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.groups import drain, subscribe
from tests.support.proxy import Proxy
from tests.support.shop import Base, Order, make_engine


@pytest.fixture
def proxied(engine_url: str, database: str) -> Iterator[tuple[Proxy, sa.Engine]]:
    """A proxy in front of the database, and an engine through it."""
    if database == "sqlite":
        pytest.skip("SQLite is a file: its COMMIT has no connection that could be cut")
    url = sa.make_url(engine_url)
    with Proxy(url.host or "", url.port or 0) as proxy:
        engine = sa.create_engine(url.set(host="127.0.0.1", port=proxy.port))
        create_tables(engine)
        Base.metadata.create_all(engine)
        yield proxy, engine
        engine.dispose()


@pytest.mark.parametrize("executed", [False, True], ids=["before it arrives", "before its answer arrives"])
def test_a_commit_that_is_cut_off(
    proxied: tuple[Proxy, sa.Engine], executed: bool, server: ServerProcess, unique: str
) -> None:
    """The service sees an error either way; the message follows what the database did."""
    proxy, engine = proxied
    subscribe(server.url, unique, unique)
    with TransactionProducer(server.url, group=unique, engine=engine, check_after=0.5) as producer:
        with Session(engine) as session, session.begin():  # the source is known from here on
            producer.send(session, Message(unique, "first"))
        assert [m["body"] for m in drain(server.url, unique, unique, 1)] == ["first"]
        proxy.cut_at(rb"COMMIT(\0|$)", answer=executed)
        with pytest.raises(sa.exc.DBAPIError):
            with Session(engine) as session, session.begin():
                session.add(Order(item="ambiguous"))
                producer.send(session, Message(unique, "ambiguous"))
        assert proxy.cuts == 1
        found = drain(server.url, unique, unique, int(executed), wait=15)
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "last"))
        found += drain(server.url, unique, unique, 1)
        with Session(engine) as session:
            orders = session.scalars(sa.select(Order.item)).all()
        eventually(lambda: not undecided(server.url, unique))
    assert orders == (["ambiguous"] if executed else [])
    assert [m["body"] for m in found] == [*orders, "last"]


def test_a_connection_that_is_lost_before_the_commit(
    proxied: tuple[Proxy, sa.Engine], server: ServerProcess, unique: str
) -> None:
    """Between half and COMMIT, while the rows are written: rolled back at once, and the pool goes on."""
    proxy, engine = proxied
    subscribe(server.url, unique, unique)
    with TransactionProducer(server.url, group=unique, engine=engine, answer_checks=False) as producer:
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "first"))
        proxy.cut_at(rb"(?i)insert into half_message", answer=False)
        with pytest.raises(sa.exc.OperationalError):
            with Session(engine) as session, session.begin():
                session.add(Order(item="x"))
                producer.send(session, Message(unique, "x"))
        assert proxy.cuts == 1
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "last"))
    assert [m["body"] for m in drain(server.url, unique, unique, 2)] == ["first", "last"]
    assert undecided(server.url, unique) == []
    with Session(engine) as session:
        assert session.scalars(sa.select(Order)).all() == []


def undecided(url: str, group: str) -> list[str]:
    import json
    import urllib.request

    with urllib.request.urlopen(f"{url}/v1/admin/transactions?producer_group={group}") as answer:
        return [t["id"] for t in json.load(answer)["transactions"]]


def test_a_half_whose_answer_is_lost(engine: sa.Engine, server: ServerProcess, unique: str) -> None:
    """The server has it, the producer does not know: nothing is committed, and the half comes to nothing."""
    Base.metadata.create_all(engine)
    subscribe(server.url, unique, unique)
    parts = urlsplit(server.url)
    with Proxy(parts.hostname or "", parts.port or 0) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        with TransactionProducer(
            url, group=unique, engine=engine, half_timeout=0.5, check_after=0.5, answer_checks=False
        ) as producer:
            with Session(engine) as session, session.begin():
                producer.send(session, Message(unique, "first"))
            assert [m["body"] for m in drain(server.url, unique, unique, 1)] == ["first"]
            proxy.drop_answers = True
            with pytest.raises(TransactionRefused) as refused:
                with Session(engine) as session, session.begin():
                    session.add(Order(item="x"))
                    producer.send(session, Message(unique, "x"))
            assert refused.value.retryable
            assert len(eventually(lambda: undecided(server.url, unique))) == 1
        with TransactionProducer(server.url, group=unique, engine=engine):  # answers the check
            eventually(lambda: not undecided(server.url, unique), 20)
    assert drain(server.url, unique, unique, 0, 0.5) == []
    with Session(engine) as session:
        assert session.scalars(sa.select(Order)).all() == []


CHILD = """
import os, signal, sys
import sqlalchemy as sa
from sqlalchemy.orm import Session
from notify.client import Message, TransactionProducer
from tests.support.shop import make_engine
from tests.support.shop import Order

url, group, dsn, point = sys.argv[1:]
engine = make_engine(dsn)

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

class Dying(TransactionProducer):
    def store_half(self, *arguments):
        item = super().store_half(*arguments)
        if point == "after half":
            die()
        return item

    def outcome_soon(self, *arguments):
        if point == "before outcome":
            die()
        super().outcome_soon(*arguments)

producer = Dying(url, group=group, engine=engine, check_after=0.5)
if point == "after local commit":
    commit = engine.dialect.do_commit
    engine.dialect.do_commit = lambda connection: (commit(connection), die())
with Session(engine) as session, session.begin():
    session.add(Order(item=point))
    producer.send(session, Message(group, point))
"""


@pytest.mark.parametrize("point", ["after half", "after local commit", "before outcome"])
def test_a_producer_killed_at_its_worst_moments(
    point: str, engine: sa.Engine, engine_url: str, server: ServerProcess, unique: str
) -> None:
    Base.metadata.create_all(engine)
    subscribe(server.url, unique, unique)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, server.url, unique, engine_url, point],
        cwd=os.getcwd(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert len(undecided(server.url, unique)) == 1
    another = make_engine(engine_url)
    with TransactionProducer(server.url, group=unique, engine=another):  # another instance answers
        eventually(lambda: not undecided(server.url, unique), 20)
        found = drain(server.url, unique, unique, int(point != "after half"))
    another.dispose()
    with Session(engine) as session:
        orders = session.scalars(sa.select(Order.item)).all()
    assert orders == ([] if point == "after half" else [point])
    assert [m["body"] for m in found] == orders
