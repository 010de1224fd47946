"""A relay alone sends what a killed producer in mode auto left behind, by the rules of its producers."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa

from notify.check.sources import Sources
from notify.client import create_tables
from notify.client.producer.left_behind import LeftBehind
from notify.client.producer.left_sender import LOOK_SECONDS, LeftSender
from notify.client.producer.transactions import TransactionClient
from notify.client.tables import left_rows
from notify.client.tables.database_calls import DatabaseCalls
from notify.client.tables.definitions import (
    LEFT_BEHIND_INDEX,
    LEFT_KEY_INDEX,
    SENDS,
    half_message,
    notify_source,
    with_left_behind_index,
)
from notify.client.tables.half_rows import HalfRows
from notify.client.tables.schemas import Places
from notify.errors import InvalidRequest, Unavailable
from notify.movers.left_behind import LeftBehindMover
from notify.movers.relay import relay as relays
from notify.movers.relay.relay import Relay
from notify.protocol import ids
from notify.protocol.wire import PackedMessage
from notify.runtime.databases import LEFT_BEHIND, REFUSED, RELAYED, within_schema
from notify.runtime.schemas import found_in
from notify.storage.sql import schema as server_schema
from notify.testing.process import ServerProcess
from tests.support.background import in_background
from tests.support.clock import eventually
from tests.support.commands import Command, cli
from tests.support.http import ask
from tests.support.left_behind import auto, delivered, leave_and_die, of_key, rows, send


def states(engine: sa.Engine) -> set[int]:
    return {relayed for relayed, _ in rows(engine)}


def shown(server: ServerProcess) -> list[Any]:
    """The groups with something left behind, as the server shows them."""
    return list(ask(server.url, "GET", "/v1/admin/left-behind")[1]["left_behind"])


def schema_of(engine: sa.Engine) -> str:
    with engine.connect() as connection:
        return found_in(connection, "half_message")


def test_a_relay_sends_what_a_killed_producer_left(away: ServerProcess, engine: sa.Engine, unique: str) -> None:
    leave_and_die(away.url, unique, engine.url, of_key("k", "a", "b", "c"))
    assert rows(engine) == [(LEFT_BEHIND, "")] * 3
    with pytest.raises(Unavailable):
        asyncio.run(Relay(engine, away.url).run(once=True))
    assert rows(engine) == [(LEFT_BEHIND, "")] * 3
    away.start()
    total = asyncio.run(Relay(engine, away.url).run(once=True))
    assert (total.sent, total.refused) == (3, 0)
    assert states(engine) == {RELAYED} and all(shard for _, shard in rows(engine))
    assert delivered(away.url, unique) == ["a", "b", "c"]
    assert asyncio.run(Relay(engine, away.url).run(once=True)).sent == 0


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_relay_that_runs_notices_rows_and_a_server_that_comes_back(
    away: ServerProcess, engine: sa.Engine, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "LOOK_SECONDS", 0.2)
    relay = Relay(engine, away.url)
    with in_background(relay.run(interval=0.05)) as relaying:
        leave_and_die(away.url, unique, engine.url, of_key("k", "a", "b"))
        leave_and_die(away.url, f"{unique}-2", engine.url, of_key("k", "c"))
        away.start()
        relaying.until(lambda: states(engine) == {RELAYED}, "the rows to be sent")
        relaying.until(lambda: not shown(away), "the report that nothing waits")
    assert relay.total.sent == 3
    assert delivered(away.url, unique) == ["a", "b"] and delivered(away.url, f"{unique}-2") == ["c"]


@pytest.mark.parametrize("database", ["sqlite"])
def test_a_half_that_the_server_stored_late_and_the_row_that_a_relay_sends_are_one_message(
    away: ServerProcess, engine: sa.Engine, unique: str
) -> None:
    leave_and_die(away.url, unique, engine.url, of_key("k", "late", "after"))
    with engine.connect() as connection:
        columns = half_message.c
        name, headers = connection.execute(
            sa.select(columns.transaction_id, columns.headers).order_by(columns.transaction_id)
        ).first() or ("", "")
        source = connection.scalar(sa.select(notify_source.c.id))
    away.start()
    message = {"topic": unique, "body": "late", "key": "k", "headers": json.loads(headers or "{}")}
    half = {"id": name, "messages": [message]}
    request = {"producer_group": unique, "source": source, "transactions": [half]}
    status, answer = ask(away.url, "POST", "/v1/transactions", request)
    assert (status, answer["items"][0]["state"]) == (200, "PREPARED")
    asyncio.run(Relay(engine, away.url).run(once=True))
    halves = f"/v1/admin/transactions?state=PREPARED&producer_group={unique}"
    assert delivered(away.url, unique) == ["late", "after"]
    assert ask(away.url, "GET", halves)[1]["transactions"] == []


@pytest.mark.long
def test_relays_producers_and_notify_check_send_the_same_rows_once(
    away: ServerProcess, engine: sa.Engine, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "LOOK_SECONDS", 0.2)
    bodies = [str(number) for number in range(300)]
    leave_and_die(away.url, unique, engine.url, of_key("k", *bodies))
    dsn = engine.url.render_as_string(hide_password=False)
    with (
        auto(away, engine, unique) as producer,
        closing(Command("check", "--dsn", dsn, "--group", unique, "--url", away.url).start()),
        in_background(Relay(engine, away.url).run(interval=0.05)) as relaying,
        in_background(Relay(engine, away.url).run(interval=0.05)),
    ):
        producer.outgoing.start()
        away.start()
        relaying.until(lambda: states(engine) == {RELAYED}, "the rows")
    assert delivered(away.url, unique) == bodies


@pytest.mark.long
@pytest.mark.parametrize("database", ["sqlite"])
def test_a_relay_that_is_killed_while_it_sends_doubles_nothing(
    away: ServerProcess, engine: sa.Engine, unique: str
) -> None:
    bodies = [str(number) for number in range(1000)]
    leave_and_die(away.url, unique, engine.url, of_key("k", *bodies))
    away.start()
    dsn = engine.url.render_as_string(hide_password=False)
    relay = Command("relay", "--dsn", dsn, "--url", away.url)
    with closing(relay.start()):
        eventually(lambda: RELAYED in states(engine), "the first rows to be sent")
        relay.kill()
        relay.start()
        eventually(lambda: states(engine) == {RELAYED}, "all rows to be sent")
    assert delivered(away.url, unique) == bodies


@pytest.mark.parametrize("database", ["sqlite"])
def test_one_group_whose_rows_the_server_refuses_holds_up_no_other(
    away: ServerProcess, engine: sa.Engine, unique: str
) -> None:
    """For good: its topic is unknown. For now: the topic's backlog is full."""
    away._environment = {"NOTIFY_CREATE_TOPICS": "false"}
    leave_and_die(away.url, f"{unique}-a", engine.url, of_key("k", "unknown"))
    leave_and_die(away.url, f"{unique}-b", engine.url, of_key("k", *"123"))
    leave_and_die(away.url, f"{unique}-c", engine.url, of_key("k", "x"))
    away.start()
    for topic in (f"{unique}-b", f"{unique}-c"):
        backlog = 1 if topic.endswith("b") else 0
        assert ask(away.url, "PUT", f"/v1/admin/topics/{topic}", {"backlog": backlog, "reason": "a test"})[0] == 200
        assert ask(away.url, "PUT", f"/v1/groups/slow/subscriptions/{topic}", {"start": "earliest"})[0] == 200
    mover = LeftBehindMover(away.url)
    with pytest.raises(Exception, match="backlog"):
        asyncio.run(mover.send(engine, [schema_of(engine)]))
    assert delivered(away.url, f"{unique}-c") == ["x"]
    assert {REFUSED, LEFT_BEHIND, RELAYED} == states(engine) and mover.refused == 1
    assert ask(away.url, "PUT", f"/v1/admin/topics/{unique}-b", {"backlog": 0, "reason": "a test"})[0] == 200
    asyncio.run(mover.send(engine, [schema_of(engine)]))
    assert delivered(away.url, f"{unique}-b") == ["1", "2", "3"]
    assert mover.sent == 4


@pytest.mark.parametrize("database", ["sqlite"])
def test_a_target_that_is_not_the_server_of_the_group_gets_nothing(
    away: ServerProcess, server: ServerProcess, engine: sa.Engine, unique: str
) -> None:
    """A relay that copies to another cluster would send halves there, and mark the rows as sent."""
    away._environment = {"NOTIFY_SHARD": "shop"}
    away.start()
    with auto(away, engine, unique) as producer:
        producer.outgoing.start()
        send(producer, unique, "a", key="k")
    eventually(lambda: delivered(away.url, unique) == ["a"], "the message")
    leave_and_die("http://127.0.0.1:9", unique, engine.url, of_key("k", "b"))
    with pytest.raises(InvalidRequest, match=r"not the server of this group.*--transactions-url"):
        asyncio.run(LeftBehindMover(server.url).send(engine, [schema_of(engine)]))
    with pytest.raises(InvalidRequest, match="--transactions-url"):
        asyncio.run(Relay(engine, server.url).run(once=True))
    assert [relayed for relayed, _ in rows(engine)].count(LEFT_BEHIND) == 1 and delivered(server.url, unique) == []
    asyncio.run(LeftBehindMover(server.url, away.url).send(engine, [schema_of(engine)]))
    assert delivered(away.url, unique) == ["a", "b"]


@pytest.mark.parametrize("database", ["postgresql"])
def test_a_schema_without_a_source_id_holds_up_no_other(
    away: ServerProcess, engine: sa.Engine, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    leave_and_die(away.url, unique, engine.url, of_key("k", "a"))
    away.start()
    broken = ["broken_1", "broken_2"]
    for schema in broken:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
        create_tables(within_schema(engine, schema))
        with engine.begin() as connection:
            connection.exec_driver_sql(f"DELETE FROM {schema}.notify_source")
            connection.exec_driver_sql(f"INSERT INTO {schema}.half_message SELECT * FROM half_message")
    mover = LeftBehindMover(away.url)
    for _ in range(2):
        asyncio.run(mover.try_to_send(engine, [*broken, schema_of(engine)]))
    assert delivered(away.url, unique) == ["a"] and states(engine) == {RELAYED}
    assert caplog.text.count("broken_1, broken_2 is not sent: the table notify_source is empty") == 1
    with pytest.raises(Unavailable, match="notify_source is empty"):
        asyncio.run(mover.send(engine, broken[:1]))


@pytest.mark.parametrize("database", ["sqlite"])
def test_movers_send_messages_left_behind_only_to_servers(
    away: ServerProcess, engine: sa.Engine, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    leave_and_die(away.url, unique, engine.url, of_key("k", "a"))
    away.start()
    schema = schema_of(engine)
    to_kafka = LeftBehindMover("kafka://127.0.0.1:9")
    for _ in range(2):
        asyncio.run(to_kafka.send(engine, [schema]))
    assert rows(engine) == [(LEFT_BEHIND, "")]
    assert caplog.text.count("Kafka knows no ids") == 1 and "--transactions-url" in caplog.text
    server_schema.upgrade(engine, "main")
    asyncio.run(LeftBehindMover(away.url).send(engine, [schema]))
    assert rows(engine) == [(LEFT_BEHIND, "")]
    assert "the table of servers" in caplog.text
    asyncio.run(LeftBehindMover("kafka://127.0.0.1:9", away.url).send(engine, [schema]))
    assert states(engine) == {RELAYED} and delivered(away.url, unique) == ["a"]


@pytest.mark.parametrize("database", ["postgresql"])
def test_an_index_that_is_invalid_or_in_another_schema_does_not_count(engine: sa.Engine) -> None:
    schema = schema_of(engine)
    with engine.connect() as connection:
        assert with_left_behind_index(connection, [schema]) == [schema]
        assert with_left_behind_index(connection, ["elsewhere"]) == []
        connection.exec_driver_sql(
            f"UPDATE pg_index SET indisvalid = false WHERE indexrelid = '{LEFT_BEHIND_INDEX}'::regclass"
        )
        assert with_left_behind_index(connection, [schema]) == []
        create_tables(connection)  # it does not fail at the index that is there
        connection.rollback()


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_without_the_index_no_mover_reads_the_whole_table(
    away: ServerProcess, engine: sa.Engine, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP INDEX {LEFT_BEHIND_INDEX}")
    leave_and_die(away.url, unique, engine.url, of_key("k", "a"))
    away.start()
    for _ in range(2):
        assert asyncio.run(Relay(engine, away.url).run(once=True)).sent == 0
    assert rows(engine) == [(LEFT_BEHIND, "")] and LEFT_BEHIND_INDEX in caplog.text
    dsn = engine.url.render_as_string(hide_password=False)
    code, shown = cli("doctor", "--dsn", dsn, "--url", away.url, "--json")
    assert code == 1 and any(LEFT_BEHIND_INDEX in finding for finding in shown["findings"])
    caplog.clear()
    with auto(away, engine, unique) as producer:
        producer.outgoing.start()
        eventually(lambda: LEFT_BEHIND_INDEX in caplog.text, "the producer's warning")
        eventually(lambda: states(engine) == {RELAYED}, "the producer to send it all the same")
    create_tables(engine)
    code, shown = cli("doctor", "--dsn", dsn, "--url", away.url, "--json")
    assert not any(LEFT_BEHIND_INDEX in finding for finding in shown["findings"])
    caplog.set_level(logging.WARNING)
    leave_and_die("http://127.0.0.1:9", unique, engine.url, of_key("k", "b"))
    assert asyncio.run(Relay(engine, away.url).run(once=True)).sent == 1
    assert delivered(away.url, unique) == ["a", "b"]


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_commit_reads_nothing_that_waits_with_other_keys(engine: sa.Engine, unique: str, count: int) -> None:
    """Not even where a table of an older version got the index later."""
    is_sqlite = engine.dialect.name == "sqlite"
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP INDEX {LEFT_KEY_INDEX}")
    create_tables(engine)
    plans: list[str] = []

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("INSERT"):
            another = cursor.connection.cursor()
            asked = f"EXPLAIN {'QUERY PLAN' if is_sqlite else ''} {statement}"
            another.execute(asked, parameters[0] if isinstance(parameters, list) else parameters)
            plans.append("\n".join(str(line) for line in another.fetchall()))
            another.close()

    sa.event.listen(engine, "before_cursor_execute", explain)
    messages = [PackedMessage(topic=unique, body=b"", key=str(number)) for number in range(count)]
    with engine.begin() as connection:
        place = Places(Sources(None), SENDS["auto"]).of(connection)
        assert HalfRows(unique, "auto").insert(connection, ids.to_text(ids.new_id()), "main", messages, place)
    assert len(plans) == 1 and LEFT_KEY_INDEX in plans[0] and LEFT_BEHIND_INDEX not in plans[0]


@pytest.mark.parametrize("database", ["postgresql"])
def test_rows_are_found_by_their_ids_where_statistics_are_of_before_an_outage(
    away: ServerProcess, engine: sa.Engine, unique: str
) -> None:
    """By these the index of what is left behind is empty. With it each page would read all that waits."""
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE half_message SET (autovacuum_enabled = false)")
        connection.exec_driver_sql("ANALYZE half_message")
    leave_and_die(away.url, unique, engine.url, of_key("k", "a"))
    columns = ", ".join(column.name for column in half_message.c if column.name != "transaction_id")
    copies = f"SELECT md5(number::text), {columns} FROM half_message, generate_series(1, 3000) number"
    with engine.begin() as connection:
        connection.exec_driver_sql(f"INSERT INTO half_message (transaction_id, {columns}) {copies}")
    names = [place.id for place in asyncio.run(DatabaseCalls(engine).call(left_rows.look, unique, schema="")).places]
    plans: list[str] = []

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "half_message" in statement:
            with cursor.connection.cursor() as another:
                plans.append("\n".join(line for (line,) in another.execute(f"EXPLAIN {statement}", parameters)))

    sa.event.listen(engine, "before_cursor_execute", explain)
    with engine.begin() as connection:
        left_rows.read(connection, names[:100])
        left_rows.name_shards(connection, dict.fromkeys(names[:100], "main"))
        left_rows.unname_shards(connection, names[:100])
        left_rows.note(connection, names[:50], names[50:100])
    assert len(plans) == 7 and not [plan for plan in plans if LEFT_BEHIND_INDEX in plan]


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_of_two_senders_one_leaves_the_rows_to_the_other(away: ServerProcess, engine: sa.Engine, unique: str) -> None:
    leave_and_die(away.url, unique, engine.url, [(str(number), None) for number in range(250)])
    away.start()

    async def work() -> None:
        class Overtaken(LeftSender):
            async def _store_halves(self, *given: Any) -> dict[str, str]:
                stored = await super()._store_halves(*given)
                assert await fast.step() == 0.0
                return stored

        class NoOutcomes:
            async def send_again(self) -> bool:
                return True

        def client() -> TransactionClient:
            return TransactionClient(away.url, unique, instance="test")

        def sender(kind: type[LeftSender]) -> LeftSender:
            schemas = [schema_of(engine)]
            return kind(unique, LeftBehind(), DatabaseCalls(engine), lambda: schemas, NoOutcomes(), client)

        fast, slow = sender(LeftSender), sender(Overtaken)
        try:
            assert await slow.step() > 0
            assert (fast.sent, slow.sent) == (250, 0)
            assert await slow.step() == LOOK_SECONDS
        finally:
            await slow.close()
            await fast.close()

    asyncio.run(work())
    assert sorted(delivered(away.url, unique), key=int) == [str(number) for number in range(250)]
