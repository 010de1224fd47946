"""Replay and inboxes: a reset or redrive repeats no effect unless told so; then it repeats each."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Consumer, Inbox, ReceivedMessage, create_tables
from notify.client.tables.definitions import has_replay, notify_inbox
from notify.errors import InvalidRequest
from notify.runtime.databases import database_now
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import Caller, die, lag, publish, redrive, running, subscribe
from tests.support.http import admin
from tests.support.shop import Order, items, make_engine


def consume(url: str, engine: sa.Engine) -> int:
    """Run the group `g` until no message of `t` is left; return how many it handled."""
    consumer = Consumer(url, group="g", inbox=Inbox(engine))

    @consumer.subscribe("t")
    def handle(message: ReceivedMessage, session: Session) -> None:
        session.add(Order(item=message.text))

    with running(consumer):
        eventually(lambda: lag(url, "g") == 0, "everything to be settled")
    return consumer.handled


def reset(url: str, **fields: Any) -> Any:
    return admin(url, "POST", "groups/g/reset", {"topic": "t", "to": "earliest", **fields})["result"]


def test_a_reset_repeats_effects_only_when_told_so(shop_engine: sa.Engine, notify_server: InMemoryServer) -> None:
    url = notify_server.url
    subscribe(url, "g", "t")
    publish(url, "t", ["a", "b"])
    assert consume(url, shop_engine) == 2

    preview = reset(url, dry_run=True)
    assert preview["replay"] == 0 and "skip messages" in preview["effects"]
    assert reset(url) == preview
    assert consume(url, shop_engine) == 2 and sorted(items(shop_engine)) == ["a", "b"]

    preview = reset(url, dry_run=True, replay_effects=True)
    assert preview["replay"] == 1 and "take effect again" in preview["effects"]
    assert reset(url, replay_effects=True) == preview
    assert consume(url, shop_engine) == 2 and sorted(items(shop_engine)) == ["a", "a", "b", "b"]

    # The replay's number stays: later messages, and a reset without `replay_effects`, repeat nothing.
    publish(url, "t", ["c"])
    assert consume(url, shop_engine) == 1
    reset(url)
    assert consume(url, shop_engine) == 3 and sorted(items(shop_engine)) == ["a", "a", "b", "b", "c"]
    with shop_engine.connect() as connection:
        replays = connection.execute(sa.select(notify_inbox.c.replay, sa.func.count()).group_by(notify_inbox.c.replay))
        assert sorted(map(tuple, replays)) == [(0, 2), (1, 3)]


@pytest.mark.long
def test_a_replays_number_survives_a_restart(shop_engine: sa.Engine, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data").start()
    try:
        subscribe(server.url, "g", "t")
        publish(server.url, "t", ["a"])
        assert consume(server.url, shop_engine) == 1
        assert reset(server.url, replay_effects=True)["replay"] == 1
        server.kill()
        server.start()
        received = Caller(server.url, "g", "plain").receive("t")
        assert [m["replay"] for m in received] == [1]
        assert reset(server.url)["replay"] == 1
        assert consume(server.url, shop_engine) == 1 and sorted(items(shop_engine)) == ["a", "a"]
        assert reset(server.url, replay_effects=True)["replay"] == 2
    finally:
        server.stop()


def took_effect_and_died(url: str, engine: sa.Engine, body: str) -> str:
    """Make a dead letter of group `g` whose effect was committed and whose ack was lost; return its id."""
    publish(url, "t", [body])
    caller = Caller(url, "g", "i")
    message = caller.receive("t")[0]
    received = ReceivedMessage(
        message["id"], "t", 0, message["offset"], body.encode(), None, None, {}, 1, "", message.get("replay", 0)
    )
    assert Inbox(engine).run("g", received, lambda m, session: session.add(Order(item=m.text)))
    assert caller.settle([message], "retry", delay=0) == [200]
    die(caller, "t", 1, "acks were lost")
    return str(message["id"])


@pytest.mark.long
def test_a_redrive_repeats_effects_only_when_told_so(shop_engine: sa.Engine, notify_server: InMemoryServer) -> None:
    """A redriven message has a new id; the inbox knows it by its first id."""
    url = notify_server.url
    subscribe(url, "g", "t")
    first = took_effect_and_died(url, shop_engine, "a")
    preview = admin(url, "POST", "groups/g/dead-letters/redrive", {"dry_run": True})["result"]
    assert preview["ids"] == [first] and "skip messages" in preview["effects"]
    (item,) = redrive(url, "g")["items"]
    assert consume(url, shop_engine) == 1 and sorted(items(shop_engine)) == ["a"]
    with shop_engine.connect() as connection:  # an audit counts the new id's effect, too
        assert set(connection.scalars(sa.select(notify_inbox.c.message_id))) == {first, item["as"]}

    took_effect_and_died(url, shop_engine, "b")
    preview = admin(url, "POST", "groups/g/dead-letters/redrive", {"dry_run": True, "replay_effects": True})["result"]
    assert "take effect again" in preview["effects"]
    redrive(url, "g", replay_effects=True)
    assert consume(url, shop_engine) == 1 and sorted(items(shop_engine)) == ["a", "b", "b"]
    # A later reset with `replay_effects` has a number of its own, and repeats all effects.
    assert reset(url, replay_effects=True)["replay"] == 2
    consume(url, shop_engine)
    assert sorted(items(shop_engine)) == ["a", "a", "b", "b", "b"]


@pytest.mark.long
def test_a_letter_that_died_in_a_replay_belongs_to_it(shop_engine: sa.Engine, notify_server: InMemoryServer) -> None:
    url = notify_server.url
    subscribe(url, "g", "t")
    reset(url, replay_effects=True)
    took_effect_and_died(url, shop_engine, "a")
    reset(url, replay_effects=True, to="latest")
    redrive(url, "g")
    assert consume(url, shop_engine) == 1 and sorted(items(shop_engine)) == ["a"], "its effect stands under replay 1"


def test_all_letters_as_a_job_and_the_command(notify_server: InMemoryServer, sqlite_engine: sa.Engine) -> None:
    url = notify_server.url
    subscribe(url, "g", "t")
    took_effect_and_died(url, sqlite_engine, "a")
    common = ("--replay-effects", "--reason", "again", "--url", url, "--json")
    assert cli("dead-letter", "redrive", "g", "--all", *common)[0] == 0
    assert consume(url, sqlite_engine) == 1 and sorted(items(sqlite_engine)) == ["a", "a"]
    code, answer = cli("group", "reset", "g", "--topic", "t", "--to", "earliest", "--dry-run", *common)
    assert code == 0 and "take effect again" in answer["result"]["effects"]


@pytest.mark.parametrize(
    ("headers", "replay"),
    [({}, 3), ({"notify-replay": "7"}, 7), ({"notify-replay": "x"}, 3), ({"notify-replay": "9" * 40}, 3)],
)
def test_a_producers_own_header_does_no_harm(shop_engine: sa.Engine, headers: Mapping[str, str], replay: int) -> None:
    """A `notify-` header of a producer that is no valid number or id is ignored, and fails no message."""
    headers = {**headers, "notify-first-id": "y" * 500}
    message = ReceivedMessage("01a1fc5e-3817-71f6-bdb9-9ebd1a8e445d.0", "t", 0, 0, b"x", None, None, headers, 1, "", 3)
    assert Inbox(shop_engine).run("g", message, lambda m, session: session.add(Order(item=m.text)))
    with shop_engine.connect() as connection:
        rows = connection.execute(sa.select(notify_inbox.c.message_id, notify_inbox.c.replay)).all()
    assert [tuple(row) for row in rows] == [(message.id, replay)]


# --- tables of an older version -----------------------------------------------------------------------------------


def make_older_inbox(engine: sa.Engine) -> None:
    """Replace notify_inbox with one that has no column `replay`, and three rows."""
    create_tables(engine)
    columns = [column._copy() for column in notify_inbox.columns if column.name != "replay"]
    older = sa.Table(notify_inbox.name, sa.MetaData(), *columns)
    with engine.begin() as connection:
        notify_inbox.drop(connection)
        older.create(connection)
        rows = [{"consumer_group": "g", "message_id": f"01a1fc5e-3817-71f6-bdb9-9ebd1a8e445d.{n}"} for n in range(3)]
        connection.execute(older.insert().values(created_at=database_now()), rows)


def test_an_older_table_is_refused_until_it_is_changed(engine_url: str) -> None:
    engine = make_engine(engine_url)
    make_older_inbox(engine)
    with pytest.raises(InvalidRequest, match="create_tables"):
        Inbox(engine).check()
    create_tables(engine)
    Inbox(engine).check()
    engine.dispose()


def test_processes_that_change_the_table_at_once_lose_nothing(engine_url: str) -> None:
    """Processes that upgrade the table at once keep a replay's row that is written in between."""
    setup = make_engine(engine_url)
    make_older_inbox(setup)
    setup.dispose()
    gate, failures = threading.Barrier(4), []

    def change() -> None:
        engine = make_engine(engine_url)
        try:
            gate.wait()
            create_tables(engine)
            message = ReceivedMessage(
                "01a1fc5e-3817-71f6-bdb9-9ebd1a8e445d.0", "t", 0, 0, b"", None, None, {}, 1, "", 5
            )
            Inbox(engine).run(threading.current_thread().name, message, lambda m, session: None)
        except BaseException as error:
            failures.append(error)
        finally:
            engine.dispose()

    threads = [threading.Thread(target=change, name=f"g{number}") for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    engine = make_engine(engine_url)
    with engine.connect() as connection:
        assert has_replay(connection)
        replays = connection.execute(sa.select(notify_inbox.c.replay, sa.func.count()).group_by(notify_inbox.c.replay))
        assert sorted(map(tuple, replays)) == [(0, 3), (5, 4)]
        key = sa.inspect(connection).get_pk_constraint("notify_inbox")["constrained_columns"]
        assert key == ["consumer_group", "message_id", "replay"]
    engine.dispose()
