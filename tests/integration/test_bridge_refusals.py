"""A message that no queue takes goes to the source's list of refused messages, and the bridge continues."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.refusals import Refusals
from notify.client import create_tables
from notify.client.tables.definitions import half_message, notify_refused
from notify.movers.refused import retry
from notify.movers.sinks.queue_server import QueueSink
from notify.protocol import ids
from notify.protocol.limits import LIMITS
from notify.protocol.wire import Bridged, Item, PackedBridgeBatch
from notify.testing.binlog_server import BinlogServer
from notify.testing.process import ServerProcess
from tests.support.background import in_background
from tests.support.bridges import binlog_reader, grant, move, move_until, numbers, outbox, poison
from tests.support.groups import subscribe
from tests.support.http import admin


@pytest.fixture
def url(binlog_url: str) -> str:
    return binlog_url


@pytest.fixture
def engine(url: str, server: ServerProcess, unique: str) -> Iterator[sa.Engine]:
    """A source with one message, to whose topic a group is subscribed."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(1))
    engine = sa.create_engine(url)
    yield engine
    engine.dispose()


class Killed(Exception):
    """Stands for the death of a process."""


def listed_codes(engine: sa.Engine) -> dict[str, str]:
    """The codes of the list of refused messages, by transaction id."""
    if not sa.inspect(engine).has_table(notify_refused.name):
        return {}
    with engine.connect() as connection:
        return {r.transaction_id: r.code for r in connection.execute(sa.select(notify_refused))}


@pytest.mark.long
@pytest.mark.parametrize("fill", [False, True], ids=["binlog", "backfill"])
def test_a_bridge_that_dies_before_it_has_noted_a_refusal_meets_it_again(
    url: str,
    engine: sa.Engine,
    server: ServerProcess,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
    fill: bool,
) -> None:
    """The position never moves past a refusal that is in the bridge's log only, and purge would take its row."""
    bad = poison(engine)
    outbox(url, unique, range(1, 3))

    def dies(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as planted:
        planted.setattr(Refusals, "note", dies)
        with pytest.raises(Killed):
            move(url, server, fill=fill)
    move(url, server, fill=fill)
    assert listed_codes(engine) == {bad: "invalid_name"}
    assert numbers(server, unique, 3) == [0, 1, 2]


@pytest.mark.long
def test_a_source_that_takes_no_note_holds_its_bridge_up(
    url: str,
    engine: sa.Engine,
    binlog_server: BinlogServer,
    server: ServerProcess,
    unique: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A user without the rights is told which ones; what is behind the refusal waits, and comes once it has them."""
    bad = poison(engine)
    outbox(url, unique, range(1, 2))
    with binlog_reader(binlog_server, url, unique, {"*": "SELECT"}) as poor:
        move_until(poor, server, lambda: "needs UPDATE" in caplog.text)
        grant(binlog_server, url, unique, {"*": "UPDATE, INSERT, DELETE"})
        move(poor, server)
    assert listed_codes(engine) == {bad: "invalid_name"}
    assert numbers(server, unique, 2) == [0, 1]


@pytest.mark.long
def test_an_id_that_another_transaction_has_is_noted_too(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    """The queue learns of it only beside what it has stored, and still stores nothing before it is noted."""
    outbox(url, unique, range(1, 2))
    move(url, server)
    with engine.begin() as connection:
        rows = [dict(row) for row in connection.execute(sa.select(half_message)).mappings()]
        connection.execute(half_message.delete())
        again = rows[0] | {"body": b'{"n": 9}'}
        connection.execute(half_message.insert().values(again))
    outbox(url, unique, range(2, 3))
    bridge = move(url, server)
    assert bridge.totals.refused == 1
    assert listed_codes(engine) == {again["transaction_id"]: "id_in_use"}
    assert numbers(server, unique, 3) == [0, 1, 2]


@pytest.mark.long
def test_a_message_that_no_queue_takes_is_listed_and_sent_when_somebody_says_so(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    rows = half_message.c
    with engine.begin() as connection:
        row = dict(connection.execute(sa.select(half_message)).mappings().one())
        bad = row | {"transaction_id": ids.to_text(ids.new_id()), "topic": "no such topic", "body": b'{"n": 7}'}
        connection.execute(half_message.insert().values(bad))
        large = ids.to_text(ids.new_id())
        part = b"x" * (LIMITS.message_bytes - 1)
        for number in range(LIMITS.request_bytes // len(part) + 1):
            connection.execute(
                half_message.insert().values(row | {"transaction_id": large, "message_no": number, "body": part})
            )
    outbox(url, unique, range(1, 3))
    bridge = move(url, server)
    assert bridge.totals.refused == 2 and bridge.totals.stored == 3
    with engine.begin() as connection:
        listed = {r.transaction_id: r for r in connection.execute(sa.select(notify_refused))}
        assert {name: r.code for name, r in listed.items()} == {
            bad["transaction_id"]: "invalid_name",
            large: "request_too_large",
        }
        assert {r.mover for r in listed.values()} == {f"bridge-{bridge.name}"}
        marked = connection.scalars(sa.select(rows.transaction_id).where(rows.relayed == 2, rows.message_no == 0))
        assert set(marked) == set(listed)
        # The row is corrected in the table, and tried again.
        connection.execute(
            half_message.update().where(rows.transaction_id == bad["transaction_id"]).values(topic=unique)
        )
        assert retry(connection, [bad["transaction_id"]], "its topic is right now") == [bad["transaction_id"]]

    def listed_now() -> int:
        with engine.connect() as connection:
            return int(connection.scalar(sa.select(sa.func.count()).select_from(notify_refused)) or 0)

    def is_shown() -> bool:
        """The queue server shows the one that is left."""
        waiting = {row["source"]: row["waiting"] for row in admin(server.url, "GET", "refused")["sources"]}
        return waiting.get(bridge.name) == 1

    with in_background(Bridge([url], server.url).run()) as bridging:
        bridging.until(lambda: listed_now() == 1, "the message to be sent, and leave the list")
        bridging.until(is_shown, "the bridge to tell the server")
    assert sorted(numbers(server, unique, 4)) == [0, 1, 2, 7]
    with engine.connect() as connection:
        (left,) = connection.execute(sa.select(notify_refused)).all()
        assert left.transaction_id == large


UNREADABLE = {
    "a header that is no text": "headers = '{\"a\": 1}'",
    "headers that are no JSON": "headers = '{no json'",
    "headers that are a list": "headers = '[1]'",
    "a time that is none": "deliver_at = '2026-02-31 00:00:00'",
}


@pytest.mark.long
@pytest.mark.parametrize("fill", [False, True], ids=["binlog", "backfill"])
def test_a_row_that_is_no_message_goes_to_the_list(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str, fill: bool
) -> None:
    """The server refuses the whole batch for it: the bridge ended, and so did each one that was started after it."""
    bad = {}
    for name, fields in UNREADABLE.items():
        with engine.begin() as connection:
            connection.exec_driver_sql("SET SESSION sql_mode = 'ALLOW_INVALID_DATES'")
            columns = [c.name for c in half_message.columns if c.name != "transaction_id"]
            connection.exec_driver_sql("CREATE TEMPORARY TABLE copied SELECT * FROM half_message LIMIT 1")
            bad[ids.to_text(ids.new_id())] = name
            connection.exec_driver_sql(f"UPDATE copied SET transaction_id = '{list(bad)[-1]}', topic = '{unique}'")
            connection.exec_driver_sql(f"UPDATE copied SET {fields}")
            quoted = ", ".join(f"`{c}`" for c in ["transaction_id", *columns])
            connection.exec_driver_sql(f"INSERT INTO half_message ({quoted}) SELECT {quoted} FROM copied")
            connection.exec_driver_sql("DROP TEMPORARY TABLE copied")
            connection.exec_driver_sql("SET SESSION sql_mode = DEFAULT")
    outbox(url, unique, range(1, 3))
    bridge = move(url, server, fill=fill)
    assert listed_codes(engine) == dict.fromkeys(bad, "unreadable")
    assert bridge.totals.stored + bridge.totals.known >= 3
    assert numbers(server, unique, 3) == [0, 1, 2]


@pytest.mark.long
@pytest.mark.parametrize("fill", [False, True], ids=["binlog", "backfill"])
@pytest.mark.parametrize("kind", ["VARCHAR(300) CHARACTER SET utf8mb4", "VARCHAR(127) CHARACTER SET latin1"])
def test_names_that_the_list_cannot_hold_are_listed_as_their_letters_are_written(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str, kind: str, fill: bool
) -> None:
    """The list's own columns are ASCII, and as long as a name may be; columns that somebody altered are not."""
    with engine.begin() as connection:
        for column in ("topic", "producer_group"):
            connection.exec_driver_sql(f"ALTER TABLE half_message MODIFY {column} {kind} NOT NULL")
    bad = [poison(engine, topic="gr\u00fc\u00dfe"), poison(engine, producer_group="l\u00e4den")]
    if "300" in kind:
        bad.append(poison(engine, topic="\u20ac" * 300))
    outbox(url, unique, range(1, 3))
    move(url, server, fill=fill)
    assert listed_codes(engine).keys() == set(bad)
    assert numbers(server, unique, 3) == [0, 1, 2]


@pytest.mark.long
def test_a_source_without_a_list_holds_its_bridge_up(
    url: str,
    engine: sa.Engine,
    binlog_server: BinlogServer,
    server: ServerProcess,
    unique: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A refused transaction that stands on no list is shown to nobody."""
    bad = poison(engine)
    outbox(url, unique, range(1, 2))
    binlog_server.execute(f"DROP TABLE {sa.make_url(url).database}.notify_refused")
    with binlog_reader(binlog_server, url, unique, {"*": "SELECT, INSERT, UPDATE, DELETE"}) as poor:
        bridge = Bridge([poor], server.url)
        with in_background(bridge.run()) as bridging:
            bridging.until(
                lambda: "no table notify_refused" in caplog.text or bridge.totals.refused, "the refusal to be met"
            )
            assert bridge.totals.stored == 0
            create_tables(engine)
            bridging.until(lambda: bridge.totals.stored == 2, "the bridge to continue")
    assert listed_codes(engine) == {bad: "invalid_name"}
    assert numbers(server, unique, 2) == [0, 1]


@pytest.mark.long
def test_a_batch_refused_for_now_is_sent_again(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with a full disk named each transaction as refused: the bridge listed them all, and continued."""
    outbox(url, unique, range(1, 2))
    append, said = QueueSink.append, []

    async def full(sink: QueueSink, source: str, batch: PackedBridgeBatch) -> Bridged:
        if not batch.transactions or said:
            return await append(sink, source, batch)
        said.append(source)
        items = [Item(t.id, 507, code="disk_full", detail="the disk is full") for t in batch.transactions]
        return Bridged(batch.expected_position, batch.epoch, refused=items)

    monkeypatch.setattr(QueueSink, "append", full)
    bridge = move(url, server)
    assert said and bridge.totals.refused == 0
    assert listed_codes(engine) == {}
    assert numbers(server, unique, 2) == [0, 1]
