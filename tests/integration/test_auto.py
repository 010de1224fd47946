"""Mode auto: the half first, and a row with the whole message where the server does not store the half in time."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from notify.check.listener import CheckUnavailable, HalfMessage, Outcome
from notify.check.local import LocalTransactionCheck
from notify.client import AsyncTransactionProducer, Message, TransactionProducer, use_explicit_begin
from notify.client.producer import blocking
from notify.client.producer.left_behind import LeftBehind
from notify.client.tables.definitions import half_message
from notify.client.tables.half_rows import TOGETHER
from notify.client.tables.left_rows import counted
from notify.errors import InvalidRequest, TransactionRefused
from notify.protocol import ids
from notify.protocol.wire import PackedMessage
from notify.runtime.databases import LEFT_BEHIND, REFUSED, RELAYED
from notify.testing import InMemoryServer
from notify.testing.ports import free_port
from notify.testing.process import ServerProcess
from tests.support.background import repeated
from tests.support.clock import PATIENCE_SECONDS, eventually, eventually_async
from tests.support.commands import Command, cli
from tests.support.http import ask
from tests.support.left_behind import BOUND, auto, delivered, rows, send
from tests.support.proxy import Proxy


@pytest.fixture
def up(away: ServerProcess) -> ServerProcess:
    return away.start()


def test_commits_without_a_server_and_sends_once_it_is_there(
    away: ServerProcess, engine: sa.Engine, unique: str
) -> None:
    with auto(away, engine, unique) as producer:
        send(producer, unique, *"abc", key="k")
        send(producer, unique, "x")
        with pytest.raises(RuntimeError), Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "rolled back", key="k"))
            raise RuntimeError
        assert rows(engine) == [(LEFT_BEHIND, "")] * 4
        with engine.connect() as connection:
            (waiting,) = counted(connection)
            assert (waiting.group, waiting.transactions) == (unique, 4)
        assert len(producer.flush(0.01)) == 4
        away.start()
        assert producer.flush(PATIENCE_SECONDS) == []
        assert [body for body in delivered(away.url, unique) if body != "x"] == ["a", "b", "c"]
        assert sorted(delivered(away.url, unique)) == ["a", "b", "c", "x"]
        assert {relayed for relayed, _ in rows(engine)} == {RELAYED}
        assert all(shard for _, shard in rows(engine))
        left_behind = producer._plan.left_behind
        assert left_behind is not None
        eventually(lambda: not left_behind.is_away, "the circuit to close")
        send(producer, unique, "d", key="k")
        assert producer.flush(PATIENCE_SECONDS) == []
        assert [body for body in delivered(away.url, unique) if body != "x"] == ["a", "b", "c", "d"]


def test_a_server_that_dies_and_comes_back_loses_doubles_and_reorders_nothing(
    up: ServerProcess, engine: sa.Engine, unique: str
) -> None:
    threads, stopping = 3, threading.Event()
    sent: list[list[str]] = [[] for _ in range(threads)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        while not stopping.is_set():
            body = f"{number}.{len(sent[number])}"
            try:
                send(producer, unique, body, key=str(number))
            except BaseException as error:
                failures.append(error)
                return
            sent[number].append(body)

    with auto(up, engine, unique) as producer:
        working = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for thread in working:
            thread.start()
        for _ in range(3):
            before = [len(bodies) for bodies in sent]
            eventually(lambda: all(len(s) > b + 5 for s, b in zip(sent, before, strict=True)), "commits")  # noqa: B023
            up.kill()
            before = [len(bodies) for bodies in sent]
            eventually(lambda: all(len(s) > b + 5 for s, b in zip(sent, before, strict=True)), "commits")  # noqa: B023
            up.start()
        stopping.set()
        for thread in working:
            thread.join()
        assert failures == []
        assert producer.flush(PATIENCE_SECONDS) == []
    stored = delivered(up.url, unique)
    for number in range(threads):
        assert [body for body in stored if body.startswith(f"{number}.")] == sent[number]


def halves(engine: sa.Engine) -> int:
    """How many transactions were committed with a half."""
    with engine.connect() as connection:
        query = sa.select(sa.func.count()).select_from(half_message).where(half_message.c.body.is_(None))
        return int(connection.scalar(query) or 0)


@pytest.mark.parametrize("database", ["postgresql"])
def test_a_key_in_use_all_the_time_returns_to_halves(away: ServerProcess, engine: sa.Engine, unique: str) -> None:
    """Its commits wait a moment for the rows before them; otherwise there would always be one that waits."""
    with (
        auto(away, engine, unique, half_timeout=10.0) as producer,
        repeated(lambda: send(producer, unique, "later", key="k"), threads=3, pause_seconds=0.001, passing=()),
    ):
        eventually(lambda: len(rows(engine)) > 50, "rows that are left behind")
        away.start()
        eventually(lambda: halves(engine) > 0, "a commit with a half")


@pytest.mark.parametrize("database", ["postgresql"])
def test_a_key_in_use_all_the_time_returns_to_halves_on_an_event_loop(
    away: ServerProcess, engine: sa.Engine, unique: str
) -> None:
    async def work() -> None:
        theirs, is_over = create_async_engine(engine.url), asyncio.Event()

        async def commit(producer: AsyncTransactionProducer) -> None:
            while not is_over.is_set():
                async with AsyncSession(theirs) as session, session.begin():
                    await producer.send(session, Message(unique, "later", key="k"))

        async with AsyncTransactionProducer(
            away.url, group=unique, engine=theirs, mode="auto", half_timeout=10.0
        ) as producer:
            committing = [asyncio.create_task(commit(producer)) for _ in range(3)]
            await eventually_async(lambda: len(rows(engine)) > 50, "rows that are left behind")
            await asyncio.to_thread(away.start)
            await eventually_async(lambda: halves(engine) > 0, "a commit with a half")
            is_over.set()
            await asyncio.gather(*committing)
        await theirs.dispose()

    asyncio.run(work())


@pytest.mark.parametrize("database", ["postgresql"])
def test_flush_waits_for_what_was_left_before_it_and_not_for_more(
    away: ServerProcess, engine: sa.Engine, unique: str
) -> None:
    """Commits with a key that waits are left behind, too, so that something waits as long as a service commits."""
    with auto(away, engine, unique) as producer:
        send(producer, unique, "first", key="k")
        away.start()
        with repeated(lambda: send(producer, unique, "later", key="k"), threads=3, pause_seconds=0.001, passing=()):
            assert producer.flush(PATIENCE_SECONDS) == []
            assert delivered(away.url, unique)[0] == "first"


@pytest.mark.parametrize("database", ["sqlite"])
def test_a_half_that_is_stored_late_and_its_row_are_one_message(
    up: ServerProcess, engine: sa.Engine, unique: str
) -> None:
    with auto(up, engine, unique) as producer:
        send(producer, unique, "before", key="k")
        assert producer.flush(PATIENCE_SECONDS) == []
        assert up.process is not None
        os.kill(up.process.pid, signal.SIGSTOP)
        try:
            send(producer, unique, "late", "after", key="k")
            assert [relayed for relayed, _ in rows(engine)] == [RELAYED, LEFT_BEHIND, LEFT_BEHIND]
        finally:
            os.kill(up.process.pid, signal.SIGCONT)
        assert producer.flush(PATIENCE_SECONDS) == []
        assert delivered(up.url, unique) == ["before", "late", "after"]


@pytest.mark.parametrize("database", ["sqlite"])
def test_a_permanent_refusal_fails_the_commit(away: ServerProcess, engine: sa.Engine, unique: str) -> None:
    away._environment = {"NOTIFY_CREATE_TOPICS": "false"}
    away.start()
    with auto(away, engine, unique, half_timeout=PATIENCE_SECONDS) as producer:
        with pytest.raises(TransactionRefused) as refused:
            send(producer, unique, "nowhere")
        assert refused.value.code == "unknown_topic"
        assert rows(engine) == []
    with pytest.raises(InvalidRequest, match="engine"):
        TransactionProducer(away.url, group=unique, mode="auto")


def test_the_next_process_of_the_group_sends_what_one_left(away: ServerProcess, engine: sa.Engine, unique: str) -> None:
    with auto(away, engine, unique) as producer:
        send(producer, unique, "a", "b", key="k")
    assert rows(engine) == [(LEFT_BEHIND, "")] * 2
    away.start()
    with auto(away, engine, unique) as producer:
        producer.outgoing.start()
        eventually(lambda: rows(engine)[-1][0] == RELAYED, "the rows to be sent")
        send(producer, unique, "c", key="k")
        assert producer.flush(PATIENCE_SECONDS) == []
    assert delivered(away.url, unique) == ["a", "b", "c"]


@pytest.mark.long
def test_several_processes_send_the_same_rows_once(away: ServerProcess, engine: sa.Engine, unique: str) -> None:
    with auto(away, engine, unique) as first, auto(away, engine, unique) as second:
        for number in range(60):
            send((first, second)[number % 2], unique, str(number), key="k")
        away.start()
        assert first.flush(PATIENCE_SECONDS) == second.flush(PATIENCE_SECONDS) == []
    assert delivered(away.url, unique) == [str(number) for number in range(60)]


@pytest.mark.long
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_commit_follows_rows_that_another_process_left(up: ServerProcess, engine: sa.Engine, unique: str) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with auto(up, engine, unique) as producer:
        send(producer, unique, "0", key="k")
        assert producer.flush(PATIENCE_SECONDS) == []
        with TransactionProducer(nowhere, group=unique, engine=engine, mode="auto", half_timeout=BOUND) as alone:
            send(alone, unique, "1", "2", key="k")
        send(producer, unique, "other", key="another")
        send(producer, unique, "3", "4", key="k")
        assert producer.flush(PATIENCE_SECONDS) == []
        eventually(lambda: {relayed for relayed, _ in rows(engine)} == {RELAYED}, "all rows to be sent")
    assert [body for body in delivered(up.url, unique) if body != "other"] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_the_last_of_many_keys_follows_rows_that_another_process_left(
    up: ServerProcess, engine: sa.Engine, unique: str
) -> None:
    """One statement inserts TOGETHER rows at most, but asks for the keys of all."""
    nowhere = f"http://127.0.0.1:{free_port()}"
    with auto(up, engine, unique) as producer:
        send(producer, unique, "0", key="k")
        assert producer.flush(PATIENCE_SECONDS) == []
        with TransactionProducer(nowhere, group=unique, engine=engine, mode="auto", half_timeout=BOUND) as alone:
            send(alone, unique, "1", key="k")
        with Session(engine) as session, session.begin():
            for number in range(TOGETHER):
                producer.send(session, Message(unique, "other", key=f"another {number}"))
            producer.send(session, Message(unique, "2", key="k"))
        eventually(lambda: {relayed for relayed, _ in rows(engine)} == {RELAYED}, "all rows to be sent")
        assert producer.flush(PATIENCE_SECONDS) == []
    assert [body for body in delivered(up.url, unique) if body != "other"] == ["0", "1", "2"]


@pytest.mark.long
def test_another_process_sends_no_row_before_an_outcome_that_was_lost(
    up: ServerProcess, engine: sa.Engine, unique: str
) -> None:
    """The server dies after it has stored the half of "1"; who sends what "1"'s process left knows of no outcome."""

    def kill(connection: sa.Connection) -> None:
        if threading.current_thread() is threading.main_thread():
            up.kill()

    with auto(up, engine, unique, half_timeout=PATIENCE_SECONDS) as first:
        left_behind = first._plan.left_behind
        assert left_behind is not None
        send(first, unique, "0", key="k")
        assert first.flush(PATIENCE_SECONDS) == []
        sa.event.listen(engine, "commit", kill)
        send(first, unique, "1", key="k")
        sa.event.remove(engine, "commit", kill)
        eventually(lambda: left_behind.is_away, "the lost outcome to open the circuit")
        send(first, unique, "2", "3", key="k")
        assert len(first.flush(0.01)) == 3
    assert [relayed for relayed, _ in rows(engine)] == [RELAYED, RELAYED, LEFT_BEHIND, LEFT_BEHIND]
    up.start()
    with auto(up, engine, unique) as second:
        second.outgoing.start()
        eventually(lambda: rows(engine)[-1][0] == RELAYED, "the rows to be sent")
    assert delivered(up.url, unique) == ["0", "1", "2", "3"]


@contextmanager
def behind_a_proxy(
    up: ServerProcess, engine: sa.Engine, topic: str
) -> Iterator[tuple[Proxy, TransactionProducer, LeftBehind]]:
    """A producer whose thread has sent three messages alone, and the proxy between it and its server."""
    with Proxy("127.0.0.1", up._port) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        with TransactionProducer(
            url, group=topic, engine=engine, mode="auto", half_timeout=PATIENCE_SECONDS
        ) as producer:
            left_behind = producer._plan.left_behind
            assert left_behind is not None
            for body in "012":
                send(producer, topic, body, key="k")
                assert producer.flush(PATIENCE_SECONDS) == []
            yield proxy, producer, left_behind


def test_an_outcome_that_a_thread_has_lost_opens_the_circuit(
    up: ServerProcess, unique: str, sqlite_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that is alone sends its outcomes itself: the loop, which sends them again, may be too late."""
    monkeypatch.setattr(blocking, "OPEN_SECONDS", PATIENCE_SECONDS)
    with behind_a_proxy(up, sqlite_engine, unique) as (proxy, producer, left_behind):
        assert left_behind.times_away == 0
        proxy.cut_at(b"transactions/outcomes", answer=False)
        send(producer, unique, "3", key="k")
        eventually(lambda: proxy.has_cut and left_behind.times_away > 0, "the circuit to open")
        send(producer, unique, "4", key="k")
        assert producer.flush(PATIENCE_SECONDS) == []
    assert delivered(up.url, unique) == list("01234")


def test_a_half_of_the_next_server_does_not_overtake_an_outcome_that_a_thread_has_lost(
    up: ServerProcess, unique: str, sqlite_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop stores the half of "4", because another thread holds the connection for halves."""
    monkeypatch.setattr(blocking, "OPEN_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(blocking, "LOOK_SECONDS", PATIENCE_SECONDS)
    left: list[list[str]] = []
    with behind_a_proxy(up, sqlite_engine, unique) as (proxy, producer, left_behind):
        proxy.cut_at(b"transactions/outcomes", answer=False)
        send(producer, unique, "3", key="k")
        eventually(lambda: proxy.has_cut, "the connection of the outcome to be cut")
        sa.event.listen(sqlite_engine, "commit", lambda connection: left.append(left_behind.ids()))
        sender = producer.outgoing._blocking
        assert sender is not None
        with sender._taking_half:
            send(producer, unique, "4", key="k")
        assert producer.flush(PATIENCE_SECONDS) == []
    assert len(left[0]) == 1, "it is left behind, because an earlier outcome of its key was lost"
    assert delivered(up.url, unique) == list("01234")


def test_a_half_is_not_tried_again_so_that_its_commit_does_not_wait(
    up: ServerProcess, unique: str, async_engine: AsyncEngine
) -> None:
    """Nor is an outcome that goes along: meanwhile a later half could reach the next server, and overtake it."""

    async def work() -> None:
        with Proxy("127.0.0.1", up._port) as proxy:
            url = f"http://127.0.0.1:{proxy.port}"
            producer = AsyncTransactionProducer(
                url, group=unique, engine=async_engine, mode="auto", half_timeout=PATIENCE_SECONDS
            )
            async with producer:
                running, left_behind = producer.outgoing.start(), producer._plan.left_behind
                assert left_behind is not None
                client, (first, second) = running.client, (ids.to_text(ids.new_id()) for _ in range(2))
                stored = await client.half_soon(first, [PackedMessage(topic=unique, body=b"1")])
                left_behind.on_change = None  # nothing asks the server whether it is back
                proxy.close()
                outcome = running.send_outcome(first, stored.shard, "COMMIT")
                half = client.half_soon(second, [PackedMessage(topic=unique, body=b"2")])
                without_rows = asyncio.create_task(client.prepare([PackedMessage(topic=unique, body=b"3")], None))
                answers = await asyncio.gather(half, outcome, return_exceptions=True)
                assert ["no server at" in str(answer) for answer in answers] == [True, True], answers
                assert left_behind.is_away and not without_rows.done()
                proxy.reopen()
                assert (await without_rows).shard
                assert await running.send_again()

    asyncio.run(work())


@pytest.mark.long
def test_notify_check_sends_what_a_group_without_a_process_left(
    away: ServerProcess, engine: sa.Engine, unique: str
) -> None:
    with auto(away, engine, unique) as producer:
        send(producer, unique, "a", "b", key="k")
    with auto(away, engine, f"{unique}-2") as producer:
        send(producer, unique, "another group's", key="k")
    away.start()
    dsn = engine.url.render_as_string(hide_password=False)
    with closing(Command("check", "--dsn", dsn, "--group", unique, "--url", away.url).start()):
        eventually(lambda: sorted(r for r, _ in rows(engine)) == [RELAYED, RELAYED, LEFT_BEHIND], "the group's rows")
    assert delivered(away.url, unique) == ["a", "b"]


@pytest.mark.parametrize("database", ["sqlite"])
def test_the_server_shows_what_waits(up: ServerProcess, engine: sa.Engine, unique: str) -> None:
    """The topic takes nothing for now, so that its rows wait although the server is there."""
    assert ask(up.url, "PUT", f"/v1/admin/topics/{unique}", {"backlog": 1, "reason": "a test"})[0] == 200
    assert ask(up.url, "PUT", f"/v1/groups/slow/subscriptions/{unique}", {"start": "earliest"})[0] == 200
    with auto(up, engine, unique, half_timeout=PATIENCE_SECONDS) as producer:
        send(producer, unique, "a", "b", "c")
        (shown,) = eventually(lambda: ask(up.url, "GET", "/v1/admin/left-behind")[1]["left_behind"], "the report")
        assert (shown["producer_group"], shown["transactions"] > 0, shown["seconds"] < 60) == (unique, True, True)
        with engine.connect() as connection:
            assert shown["source"] == connection.scalar(sa.text("SELECT id FROM notify_source"))
        assert ask(up.url, "PUT", f"/v1/admin/topics/{unique}", {"backlog": 0, "reason": "a test"})[0] == 200
        assert producer.flush(PATIENCE_SECONDS) == []
        eventually(lambda: not ask(up.url, "GET", "/v1/admin/left-behind")[1]["left_behind"], "nothing to wait")
    assert sorted(delivered(up.url, unique)) == ["a", "b", "c"]


def test_doctor_names_each_group_whose_rows_wait(memory: InMemoryServer, engine: sa.Engine, unique: str) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    for group in (unique, f"{unique}-2"):
        with TransactionProducer(nowhere, group=group, engine=engine, mode="auto", half_timeout=BOUND) as producer:
            send(producer, unique, "a", "b")
    with engine.begin() as connection:
        of_group = half_message.c.producer_group == unique
        connection.execute(half_message.update().where(of_group).values(created_at=datetime(2026, 11, 1)))
    dsn = engine.url.render_as_string(hide_password=False)
    code, shown = cli("doctor", "--dsn", dsn, "--url", memory.url, "--json")
    (finding,) = [each for each in shown["findings"] if f"group {unique}:" in each]
    assert code == 1 and "2 transactions are left behind since 2026-11-01T00:00:00Z" in finding
    assert f"`notify check --dsn … --group {unique}`, `notify relay` or a bridge" in finding
    assert (shown["left_behind"], shown["left_behind_since"]) == (4, "2026-11-01T00:00:00Z")


def test_a_check_does_not_overtake_rows_that_wait(away: ServerProcess, engine: sa.Engine, unique: str) -> None:
    with auto(away, engine, unique) as producer:
        send(producer, unique, "a")
    with engine.connect() as connection:
        name = connection.scalar(sa.select(half_message.c.transaction_id))
        source = connection.scalar(sa.text("SELECT id FROM notify_source"))

    def check(shard: str) -> Outcome:
        half = HalfMessage(id=name, shard=shard, source=source, producer_group=unique, attempt=1, messages=[])
        return LocalTransactionCheck(engine).check(half)

    with pytest.raises(CheckUnavailable, match="waits"):
        check("one")
    with engine.begin() as connection:
        connection.execute(half_message.update().values(shards="one"))
    with pytest.raises(CheckUnavailable, match="waits"):
        check("one")
    assert check("another") is Outcome.ROLLBACK
    with engine.begin() as connection:
        connection.execute(half_message.update().values(relayed=RELAYED))
    assert (check("one"), check("another")) == (Outcome.COMMIT, Outcome.ROLLBACK)


@pytest.mark.parametrize("database", ["sqlite"])
def test_a_row_that_the_server_refuses_later_holds_up_no_other(
    away: ServerProcess, engine: sa.Engine, unique: str
) -> None:
    away._environment = {"NOTIFY_CREATE_TOPICS": "false"}
    with auto(away, engine, unique) as producer:
        send(producer, unique, "nowhere")
        away.start()
        eventually(lambda: rows(engine) == [(REFUSED, "")], "the refusal")
        assert producer.flush(PATIENCE_SECONDS) == []


@pytest.mark.long
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_an_async_producer_sends_later_what_it_left_behind(away: ServerProcess, engine: sa.Engine, unique: str) -> None:
    driver = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}[engine.dialect.name]

    async def work() -> None:
        an_engine = create_async_engine(engine.url.set(drivername=driver))
        if engine.dialect.name == "sqlite":
            use_explicit_begin(an_engine)
        producer = AsyncTransactionProducer(away.url, group=unique, engine=an_engine, mode="auto", half_timeout=BOUND)
        async with producer:
            async with AsyncSession(an_engine) as session:
                for body in "ab":
                    async with session.begin():
                        await producer.send(session, Message(unique, body, key="k"))
            assert await asyncio.to_thread(rows, engine) == [(LEFT_BEHIND, "")] * 2  # the sender needs the loop
            await asyncio.to_thread(away.start)
            assert await producer.flush(PATIENCE_SECONDS) == []
            async with AsyncSession(an_engine) as session, session.begin():
                await producer.send(session, Message(unique, "c", key="k"))
            assert await producer.flush(PATIENCE_SECONDS) == []
        await an_engine.dispose()

    asyncio.run(work())
    assert delivered(away.url, unique) == ["a", "b", "c"]


@pytest.mark.parametrize("database", ["postgresql"])
def test_an_application_that_blocks_its_loop_leaves_nothing_behind(
    up: ServerProcess, engine: sa.Engine, unique: str
) -> None:
    """The server had answered in time: only the loop was late to read it."""
    seconds = 3.0

    def has_half() -> bool:
        return len(ask(up.url, "GET", "/v1/admin/transactions?state=PREPARED")[1]["transactions"]) == 1

    async def work(proxy: Proxy) -> None:
        theirs, url = create_async_engine(engine.url), f"http://127.0.0.1:{proxy.port}"

        async def commit() -> None:
            async with AsyncSession(theirs) as session, session.begin():
                await producer.send(session, Message(unique, "x"))

        async with AsyncTransactionProducer(
            url, group=unique, engine=theirs, mode="auto", half_timeout=seconds
        ) as producer:
            await commit()
            assert await producer.flush(PATIENCE_SECONDS) == []
            proxy.may_answer.clear()
            committing = asyncio.create_task(commit())
            await asyncio.to_thread(eventually, has_half, "the half to be stored")
            threading.Timer(0.1, proxy.may_answer.set).start()
            time.sleep(1.2 * seconds)  # noqa: ASYNC251 (what an application must not do, and does)
            await committing
        await theirs.dispose()

    with Proxy("127.0.0.1", up._port) as proxy:
        asyncio.run(work(proxy))
    assert halves(engine) == 2
