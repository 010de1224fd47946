"""mode=outbox: works with the server down, moved by the relay, once, in order, on each database; and the purge."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.bench.server import ServerProcess
from notify.binlog_bridge.relay import Relay
from notify.check.question import read_source
from notify.client import Message, TransactionProducer
from notify.client.purge import counts, purge, purge_by_force
from notify.errors import Unavailable
from tests.integration.shop import Base, Order, drain, eventually, subscribe


def move(engine: sa.Engine, url: str) -> tuple[int, int]:
    done = asyncio.run(Relay(engine, url).run(once=True))
    return done.sent, done.refused


def test_outbox_waits_for_the_relay(engine: sa.Engine, server: ServerProcess, unique: str) -> None:
    Base.metadata.create_all(engine)
    subscribe(server.url, unique, unique)
    # The producer's server is away: an outbox does not need it.
    producer = TransactionProducer("http://127.0.0.1:9", group=unique, engine=engine, mode="outbox")
    for n in range(30):
        with Session(engine) as session, session.begin():
            session.add(Order(item=str(n)))
            for part in range(2):
                message = Message(unique, {"n": n, "part": part}, key=str(n), tag="x", headers={"h": "v"})
                producer.send(session, message)
            if n % 3 == 2:
                session.rollback()
    producer.close()
    with pytest.raises(Unavailable):
        asyncio.run(Relay(engine, "http://127.0.0.1:9").run(once=True))
    assert counts(engine)["waiting_for_relay"] == 40
    assert move(engine, server.url) == (20, 0)
    assert move(engine, server.url) == (0, 0)
    found = drain(server.url, unique, unique, 40)
    bodies = [json.loads(m["body"]) for m in found]
    assert bodies == [{"n": n, "part": p} for n in range(30) if n % 3 != 2 for p in range(2)]
    assert found[0]["tag"] == "x" and found[0]["key"] == "0" and found[0]["headers"]["h"] == "v"


def test_a_crash_between_sending_and_marking_doubles_nothing(
    engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    with TransactionProducer(server.url, group=unique, engine=engine, mode="outbox") as producer:
        for n in range(5):
            with Session(engine) as session, session.begin():
                producer.send(session, Message(unique, str(n)))
    assert move(engine, server.url) == (5, 0)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE half_message SET relayed = 0"))
    assert move(engine, server.url) == (5, 0)
    assert [m["body"] for m in drain(server.url, unique, unique, 5)] == [str(n) for n in range(5)]


def test_what_the_server_refuses_stays_visible(engine: sa.Engine, server: ServerProcess, unique: str) -> None:
    with TransactionProducer(server.url, group=unique, engine=engine, mode="outbox") as producer:
        with Session(engine) as session, session.begin():
            producer.send(session, Message("-not a topic", "x"))
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "good"))
    assert move(engine, server.url) == (1, 1)
    assert counts(engine)["refused_by_server"] == 1


def test_purge_asks_first(engine: sa.Engine, server: ServerProcess, unique: str) -> None:
    class LostOutcomes(TransactionProducer):
        def outcome_soon(self, *_: Any) -> None:
            return

    lost = LostOutcomes(server.url, group=unique, engine=engine, answer_checks=False)
    with Session(engine) as session, session.begin():
        lost.send(session, Message(unique, "open"))
    lost.close()
    with TransactionProducer(server.url, group=unique, engine=engine, answer_checks=False) as producer:
        for n in range(3):
            with Session(engine) as session, session.begin():
                producer.send(session, Message(unique, str(n)))
    time.sleep(0.05)
    result = eventually(lambda: _purged(engine, server.url), 10)
    assert (result.rows, result.kept) == (3, 1)
    assert counts(engine)["done"] == 1
    assert purge_by_force(engine, older_than=0).rows == 1
    with engine.connect() as connection:
        assert read_source(connection)[1] > 0


def _purged(engine: sa.Engine, url: str) -> Any:
    result = asyncio.run(purge(engine, url, older_than=0))
    return result if result.rows else None


def cli(*words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "notify.cli.main", *words], capture_output=True, text=True, timeout=60, env=os.environ
    )
    return done.returncode, json.loads(done.stdout) if done.stdout.startswith("{") else {"text": done.stderr}


def test_commands(engine: sa.Engine, engine_url: str, server: ServerProcess, unique: str) -> None:
    """The commands of an operator, each with --json, and their exit codes."""
    url = ("--url", server.url, "--json")
    assert cli("topic", "create", unique, "--queues", "2", "--reason", "test", *url)[0] == 0
    assert unique in [t["name"] for t in cli("topic", "list", *url)[1]["topics"]]
    with TransactionProducer(server.url, group=unique, engine=engine, mode="outbox") as producer:
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "x"))
    assert cli("relay", "--dsn", engine_url, "--once", *url) == (0, {"sent": 1, "refused": 0})
    code, found = cli("doctor", "--dsn", engine_url, "--url", server.url, "--json")
    assert found["done"] == 1 and found["source"], found
    item = TransactionProducer(server.url, group=unique)
    item.close()
    assert cli("topic", "create", unique, "--queues", "1", "--reason", "test", *url)[0] == 2  # cannot shrink
    code, answer = cli("group", "show", "nobody", *url)
    assert code == 2 and "nobody" in answer["text"]
    assert cli("transaction", "show", "nonsense", *url)[0] == 2
    assert cli("topic", "list", "--url", "http://127.0.0.1:9")[0] == 2
    assert cli("nonsense")[0] == 2
    assert cli("serve", "--host", "0.0.0.0")[0] == 2


def test_admin_resolves_a_stuck_transaction(server: ServerProcess, unique: str) -> None:
    async def stuck() -> str:
        from notify.client import AsyncTransactionProducer

        async with AsyncTransactionProducer(server.url, group=unique) as producer:
            return (await producer.prepare([Message(unique, "stuck")])).id

    subscribe(server.url, unique, unique)
    name = asyncio.run(stuck())
    url = ("--url", server.url, "--json")
    listed = cli("transaction", "list", "--producer-group", unique, *url)[1]["transactions"]
    assert [t["id"] for t in listed] == [name]
    assert cli("transaction", "commit", name, "--reason", "seen in the database", "--dry-run", *url)[1]["dry_run"]
    assert cli("transaction", "commit", name, "--reason", "seen", *url)[1]["result"]["state"] == "COMMITTED"
    assert cli("transaction", "rollback", name, "--reason", "no", *url)[0] == 2
    assert [m["body"] for m in drain(server.url, unique, unique, 1)] == ["stuck"]
    timeline = cli("message", "show", name + ".0", *url)[1]
    assert [e["event"] for e in timeline["timeline"]][:2] == ["half stored", "COMMITTED"] or timeline["timeline"]
    assert timeline["groups"][0]["state"] == "settled"
