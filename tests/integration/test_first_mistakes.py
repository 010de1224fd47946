"""Mistakes of the first hour are one sentence each, which says what to do."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from notify.check import CheckMessageListener
from notify.client import (
    AsyncConsumer,
    AsyncTransactionProducer,
    Consumer,
    Inbox,
    Message,
    Reader,
    TransactionProducer,
    create_tables,
    use_explicit_begin,
)
from notify.errors import BindingRefused, InvalidRequest, Unavailable
from notify.testing import InMemoryServer
from tests.support.answering import answering
from tests.support.commands import cli
from tests.support.servers import make_storage


def test_an_object_that_is_not_a_session_is_named(memory: InMemoryServer, unique: str, tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    use_explicit_begin(engine)
    create_tables(engine)
    with TransactionProducer(memory.url, group=unique, engine=engine) as producer, engine.connect() as connection:
        for given, said in (
            (connection, r"not a Connection; write `with producer.transaction\(connection\)"),
            (engine, "this is a Engine"),
            (None, "this is a NoneType"),
        ):
            with pytest.raises(BindingRefused, match=said):
                producer.send(given, Message(unique, "x"))  # type: ignore[arg-type]
    engine.dispose()


def test_forgotten_tables_are_named_by_the_commit(memory: InMemoryServer, unique: str, tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/empty.db")
    use_explicit_begin(engine)
    with TransactionProducer(memory.url, group=unique, engine=engine, answer_checks=False) as producer:
        with Session(engine) as session, pytest.raises(BindingRefused, match=r"create_tables\(engine\) once"):
            producer.send(session, Message(unique, "x"))
            session.commit()
    engine.dispose()


@pytest.mark.long
def test_a_server_that_is_not_notify_is_asked_about() -> None:
    with (
        answering(lambda request: request.send_error(404)) as other,
        TransactionProducer(other.url, group="g") as producer,
        pytest.raises(Unavailable, match=f"{other.url}/v1/messages was answered with 404 .*not by a Notify server"),
    ):
        producer.publish(Message("t", "x"))


def test_doctor_tells_a_database_that_is_away_from_one_without_tables(memory: InMemoryServer, tmp_path: Path) -> None:
    def finding(dsn: str) -> str:
        # The findings begin with those of other tests on the shared server. The database's one finding comes last.
        return str(cli("doctor", "--url", memory.url, "--dsn", dsn, "--json")[1]["findings"][-1])

    away = finding("postgresql+psycopg://nobody@127.0.0.1:9/x")
    assert "does not answer" in away and "--create-tables" not in away
    assert "--create-tables" in finding(f"sqlite:///{tmp_path}/empty.db")


def test_doctor_knows_the_database_of_servers(memory: InMemoryServer, tmp_path: Path) -> None:
    """It was called not ready, and should get the tables of a service."""
    dsn = f"sqlite:///{tmp_path}/servers.db"
    make_storage(dsn)
    told = str(cli("doctor", "--url", memory.url, "--dsn", dsn, "--json")[1])
    assert "not ready" not in told and "--create-tables" not in told
    assert cli("doctor", "--url", memory.url, "--dsn", dsn, "--create-tables", "--json")[1]["waiting_for_relay"] == 0


def test_an_object_that_is_not_a_message_is_named(memory: InMemoryServer) -> None:
    with TransactionProducer(memory.url, group="g") as producer:
        with pytest.raises(InvalidRequest, match=r"a dict, not a message: write Message\(topic, body\)"):
            producer.publish({"item": "book"})  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=r"write prepare\(\[message\]\)"):
            producer.prepare(Message("t", "x"))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="from 0 to 3,456,000"):
            producer.publish(Message("t", "x", delay=60 * 86_400))


@pytest.mark.parametrize("kind", [TransactionProducer, AsyncTransactionProducer])
def test_a_url_instead_of_an_engine_is_refused_with_the_remedy(kind: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"the engine is a str: give what .*create_.*engine\(url\) returns"):
        kind("http://127.0.0.1:9", group="g", engine="sqlite:///shop.db")


@pytest.mark.parametrize("mode", ["half", "auto"])
def test_an_engine_with_one_connection_for_all_is_refused(mode: Any) -> None:
    """Its background work rolled back transactions of the service: some messages were lost, and some were ghosts."""
    for engine, said in (
        (sa.create_engine("sqlite://", poolclass=sa.StaticPool), "StaticPool.*the same connection"),
        (sa.create_engine("sqlite://"), "SingletonThreadPool.*a database of its own"),
        (create_async_engine("sqlite+aiosqlite://"), "StaticPool"),
    ):
        kind: Any = AsyncTransactionProducer if hasattr(engine, "sync_engine") else TransactionProducer
        with pytest.raises(InvalidRequest, match=said):
            kind("http://127.0.0.1:9", group="g", engine=engine, mode=mode)
        if mode == "half":
            kind("http://127.0.0.1:9", group="g", engine=engine, answer_checks=False)


def test_an_inbox_that_a_consumer_cannot_use_is_refused_when_it_is_made(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    of_async = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    for kind, inbox, said in (
        (Consumer, engine, r"inbox is a Engine: write inbox=Inbox\(engine\)"),
        (AsyncConsumer, Inbox(engine), "needs an Inbox of an AsyncEngine"),
        (Consumer, Inbox(of_async), "use AsyncConsumer"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            kind("http://127.0.0.1:9", group="g", inbox=inbox)  # type: ignore[operator]
    with pytest.raises(InvalidRequest, match="the engine is a str"):
        Inbox("sqlite:///shop.db")


def test_subscribe_without_a_topic_says_what_to_write() -> None:
    with pytest.raises(InvalidRequest, match=r'write @consumer.subscribe\("topic"\)'):
        Consumer("http://127.0.0.1:9", group="g").subscribe(print)  # type: ignore[arg-type]


def test_an_address_or_a_group_that_was_not_set_is_said_to_be_none() -> None:
    """As of `os.environ.get("NOTIFY_URL")`; it was a TypeError about bytes."""
    unset: Any = None
    with pytest.raises(InvalidRequest, match="the address of the server is None"), Reader(unset) as reader:
        next(reader.read("t"))
    with pytest.raises(InvalidRequest, match="the address of the server is None"):
        TransactionProducer(unset, group="g").publish(Message("t", "x"))
    for kind in (TransactionProducer, Consumer):
        with pytest.raises(InvalidRequest, match="group is None: it should be text"):
            kind("http://127.0.0.1:9", group=unset)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"half_timeout": "3"}, "half_timeout is a number of seconds, not str"),
        ({"half_timeout": None}, "half_timeout is a number of seconds, not NoneType"),
        ({"half_timeout": -1}, "from 0.01 to 3,600"),
        ({"token": b"x"}, "a token is text, not bytes"),
        ({"token": lambda: b"x"}, "a token is text, not bytes"),
        ({"token": lambda: 1 / 0}, "the function that gives the token raised ZeroDivisionError"),
        ({"chooser": lambda candidates, room: None}, "the chooser returned None, which is none of http"),
        ({"chooser": lambda candidates: candidates[0]}, "the chooser raised TypeError"),
    ],
)
def test_an_option_that_cannot_be_is_named(memory: InMemoryServer, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        with TransactionProducer(memory.url, group="g", **options) as producer:
            producer.publish(Message("t", "x"))


def test_a_key_without_text_is_refused(memory: InMemoryServer) -> None:
    """Its messages went out with a key such as `<coroutine object …>`, and no order."""

    async def later() -> str:
        return "a"

    with TransactionProducer(memory.url, group="g") as producer:
        for key in (later, lambda: object(), lambda: later, producer):
            with pytest.raises(InvalidRequest, match="give text, a number, or a plain function"):
                producer.publish(Message("t", "x", key=key))  # type: ignore[arg-type]


def test_a_factory_that_returns_no_session_is_refused(memory: InMemoryServer, tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    of_async = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")

    def bare(session: Session) -> None:
        """As where `transactional` is written without its sessionmaker."""

    with TransactionProducer(memory.url, group="g", engine=engine, answer_checks=False) as producer:
        for factory, said in (
            (bare, r"write @producer.transactional\(sessionmaker\(engine\)\)"),
            (engine, "takes a session factory, not a Engine"),
            (lambda: None, "made a NoneType, which is not a session"),
            (lambda: AsyncSession(of_async), "made a AsyncSession: use AsyncTransactionProducer"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                producer.transactional(factory)(lambda session: None)()
        with pytest.raises(BindingRefused, match="this is a Engine"), producer.transaction(engine):  # type: ignore[arg-type]
            pass

    async def in_a_loop() -> None:
        async def nothing(session: AsyncSession) -> None:
            """It is not called."""

        async with AsyncTransactionProducer(memory.url, group="g", engine=of_async, answer_checks=False) as producer:
            with pytest.raises(InvalidRequest, match="made a Session: use TransactionProducer"):
                await producer.transactional(lambda: Session(engine))(nothing)()
            with pytest.raises(BindingRefused, match="this is a Engine"):
                async with producer.transaction(engine):
                    pass

    asyncio.run(in_a_loop())
    engine.dispose()


def test_an_object_that_cannot_check_is_refused_as_a_listener() -> None:
    class Answers(CheckMessageListener):
        topics = ("t",)

    with TransactionProducer("http://127.0.0.1:9", group="g", answer_checks=False) as producer:
        for given, said in ((None, "a NoneType"), (Answers, "the class Answers")):
            with pytest.raises(InvalidRequest, match=f"this is {said}: give an object of a class"):
                producer.add_check_listener(given)  # type: ignore[arg-type]


def test_checks_are_not_answered_from_a_database_that_cannot(memory: InMemoryServer, tmp_path: Path) -> None:
    """It said that it answers, and kept trying in silence."""
    for dsn, said in (
        (f"sqlite:///{tmp_path}/empty.db", "--create-tables"),
        ("postgresql+psycopg://nobody@127.0.0.1:9/x", "the database does not answer"),
    ):
        code, shown = cli("check", "--dsn", dsn, "--group", "g", "--url", memory.url)
        assert code == 2 and said in shown["text"]


@pytest.mark.parametrize(
    ("dsn", "said"),
    [
        ("shop.db", "not a database URL, such as postgresql://"),
        ("oracle://user:password@host/x", "oracle is not served; PostgreSQL, MySQL, MariaDB, SQLite are"),
        ("mysql://user:password@127.0.0.1:9/x?bogus=1", "the driver refuses an option of the URL: .*'bogus'"),
    ],
)
def test_a_dsn_that_cannot_be_is_refused_with_a_sentence(memory: InMemoryServer, dsn: str, said: str) -> None:
    """An option that PyMySQL does not know ended the command with a traceback."""
    code, shown = cli("doctor", "--dsn", dsn, "--url", memory.url)
    assert code == 2 and re.search(said, shown["text"])


def test_a_server_that_is_away_is_asked_about() -> None:
    code, shown = cli("topic", "list", "--url", "http://127.0.0.1:9")
    assert code == 2 and "is it started, and is this its address?" in shown["text"]


def test_a_server_without_tls_says_how_it_is_reached(memory: InMemoryServer) -> None:
    code, shown = cli("topic", "list", "--url", memory.url.replace("http:", "https:"))
    assert code == 2 and "it speaks no TLS: write http://" in shown["text"]
