"""The binlog reader on MySQL 8's streams with UUID GTIDs, made by hand."""

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from notify.binlog_bridge.batching import PART_BYTES
from notify.binlog_bridge.binlog import decoder, rights
from notify.binlog_bridge.binlog.log import Stall
from notify.binlog_bridge.binlog.position import Position
from notify.binlog_bridge.binlog.reader import Assembly, Quiet
from notify.binlog_bridge.binlog.stream import refusal
from notify.binlog_bridge.errors import Damaged, Purged, SameServerId, Unfit, Unreadable
from notify.binlog_bridge.rows import Returned
from notify.binlog_bridge.scope import Scope
from notify.errors import Unavailable
from notify.protocol import ids
from notify.protocol.wire import BridgedTransaction
from tests.support.binlog import (
    AT,
    COLUMNS,
    DATETIME2,
    DOUBLE,
    SERVER,
    VARCHAR,
    XID,
    event,
    gtid,
    gtids_of,
    lenenc,
    mapped,
    query,
    read,
    row,
    rows,
    values,
)


def test_a_transaction() -> None:
    name = ids.to_text(ids.new_id())
    later = datetime(2027, 1, 1, 12, 30, tzinfo=UTC)
    first = row(values(name, key="kö".encode(), tag=b"x", headers=b'{"h":"v"}', delay=1.5, deliver_at=later, ttl=60.0))
    second = row(values(name, message_no=1, body=bytes(range(256)) * 2))
    (batch,) = read([gtid(10), query(b"BEGIN"), mapped(), rows(first, second), XID])
    (t,) = batch.transactions
    assert (t.id, t.producer_group, len(t.messages)) == (name, "g", 2)
    m = t.messages[0]
    assert (m.topic, m.body, m.key, m.tag, m.headers) == ("t", b"body", "kö", "x", {"h": "v"})
    assert (m.delay, m.deliver_at, m.ttl) == (1.5, later, 60.0)
    assert t.messages[1].body == bytes(range(256)) * 2
    assert gtids_of(batch) == f"{SERVER}:1-10"
    packets: list[bytes | None] = [gtid(10), query(b"BEGIN"), mapped(), rows(first), XID, None]
    ((_, newest_us),) = Assembly("shop", Position(f"{SERVER}:1-9"), mariadb=False).batches(packets)
    assert newest_us == int(AT.timestamp() * 1e6)


def test_a_row_that_is_much_older_than_its_event_has_come_back() -> None:
    """From a dump. A bridge that is behind reads old events, whose rows are as old."""
    event_at = datetime.fromtimestamp(int.from_bytes(XID[1:5], "little"), UTC)
    week = timedelta(days=7)
    kinds = []
    for created in (event_at, event_at - week, event_at - week - timedelta(microseconds=1), event_at - 100 * week):
        image = row(values(ids.to_text(ids.new_id()), created_at=created))
        (batch,) = read([gtid(10), query(b"BEGIN"), mapped(), rows(image), XID])
        kinds.append(type(batch.transactions[0]))
    assert kinds == [BridgedTransaction, BridgedTransaction, Returned, Returned]


def test_nothing_is_taken_that_did_not_commit_or_is_not_ours() -> None:
    a, b, c, d = (ids.to_text(ids.new_id()) for _ in range(4))
    batches = read(
        [
            gtid(10), query(b"BEGIN"), mapped(), rows(row(values(a))), query(b"ROLLBACK"),
            gtid(11), query(b"BEGIN"), mapped(table=b"orders"), rows(row(values(b))), XID,
            gtid(12), query(b"ALTER TABLE half_message ADD x INT"),
            gtid(13), query(b"BEGIN"), mapped(), rows(row(values(c, relayed=1))), XID,
            gtid(14), query(b"BEGIN"), mapped(), rows(row(values(d))), XID,
        ]
    )  # fmt: skip
    assert [t.id for batch in batches for t in batch.transactions] == [d]
    assert gtids_of(batches[-1]) == f"{SERVER}:1-14"


def test_the_servers_table_is_taken_when_it_becomes_committed() -> None:
    columns = [*COLUMNS, ("decided_at", DATETIME2, b"\x06")]
    ready = mapped(columns, table=b"server_half_message")
    name, other, born = (ids.to_text(ids.new_id()) for _ in range(3))

    def image(name: str, state: bytes, decided: datetime | None = None) -> bytes:
        return row(values(name, state=state, decided_at=decided), columns)

    changed = image(name, b"PREPARED") + image(name, b"COMMITTED", AT)
    again = image(name, b"COMMITTED", AT) + image(name, b"COMMITTED", AT)
    rolled = image(other, b"PREPARED") + image(other, b"ROLLED_BACK", AT)
    (batch,) = read(
        [
            gtid(10), query(b"BEGIN"), ready, rows(changed, again, rolled, kind=31, count=len(columns)), XID,
            gtid(11), query(b"BEGIN"), ready,
            rows(image(born, b"COMMITTED", AT), image(other, b"PREPARED"), count=len(columns)), XID,
        ]
    )  # fmt: skip
    assert [t.id for t in batch.transactions] == [name, born]


def test_parts_of_documents_are_marked_for_all_documents_of_the_table() -> None:
    """MySQL marks those, too, that the row after the change leaves out: here 8 of 9."""
    documents = [(f"document{n}", 245, b"\x04") for n in range(9)]
    columns = [*COLUMNS, ("decided_at", DATETIME2, b"\x06"), *documents]
    kept = columns[: len(COLUMNS) + 2]  # with one document
    name = ids.to_text(ids.new_id())
    before = row(values(name, state=b"PREPARED"), columns)
    after = b"\x01\x01\x00" + row(values(name, decided_at=AT), kept)  # one option, then nine marks
    bitmaps = b"\xff" * ((len(columns) + 7) // 8) + ((1 << len(kept)) - 1).to_bytes((len(columns) + 7) // 8, "little")
    changed = event(39, struct.pack("<IHHH", 77, 0, 0, 2) + lenenc(len(columns)) + bitmaps + before + after)
    (batch,) = read([gtid(10), query(b"BEGIN"), mapped(columns, table=b"server_half_message"), changed, XID])
    assert [(t.id, t.messages[0].body) for t in batch.transactions] == [(name, b"body")]


def test_columns_are_found_by_name_wherever_they_are() -> None:
    name = ids.to_text(ids.new_id())
    extra = [("new", VARCHAR, struct.pack("<H", 300)), *reversed(COLUMNS), ("last", DOUBLE, b"\x08")]
    packed = row(values(name, new=b"n" * 290, last=1.0), extra)
    (batch,) = read([gtid(10), query(b"BEGIN"), mapped(extra), rows(packed, count=len(extra)), XID])
    assert batch.transactions[0].messages[0].body == b"body"


def test_a_large_transaction_goes_in_parts_that_the_last_one_commits() -> None:
    names = [ids.to_text(ids.new_id()) for _ in range(12)]
    packets: list[bytes | None] = [gtid(10), query(b"BEGIN"), mapped()]
    packets += [rows(row(values(n, body=bytes(PART_BYTES // 3)))) for n in names]
    batches = read([*packets, XID])
    assert [b.prepare for b in batches] == [True] * (len(batches) - 1) + [False] and len(batches) > 3
    assert all(b.position == "" for b in batches[:-1])
    prepared = [t.id for b in batches[:-1] for t in b.transactions]
    assert batches[-1].commit == prepared
    assert prepared + [t.id for t in batches[-1].transactions] == names


@pytest.mark.parametrize(
    ("packets", "match"),
    [
        ([gtid(10), query(b"BEGIN"), mapped(names=False)], "binlog_row_metadata"),
        ([gtid(10), query(b"BEGIN"), mapped(), rows(row(values("x")), present=b"\xff\x7f\x01")], "binlog_row_image"),
        ([gtid(10), query(b"BEGIN"), mapped(COLUMNS[1:])], "no column transaction_id"),
        ([gtid(10), query(b"BEGIN"), query(b"INSERT INTO half_message VALUES (1)")], "binlog_format"),
        ([event(34, bytes(40))], "gtid_mode"),
    ],
    ids=[
        "no names",
        "minimal image",
        "older schema",
        "statement",
        "anonymous",
    ],
)
def test_a_truncated_event_stops_the_reader(packets: list[bytes | None], match: str) -> None:
    with pytest.raises(Unreadable, match=match):
        read(packets)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Could not find first log file name in binary log index file", Purged),
        ("Cannot replicate because the master purged required binary logs.", Purged),
        ("Error: connecting slave requested to start from GTID 0-1-5, which is not in the master's binlog", Purged),
        ("A slave with the same server_uuid/server_id as this slave has connected to the master", SameServerId),
        ("binlog truncated in the middle of event; consider out of disk space on master; the first event …", Damaged),
        ("bogus data in log event; the first event 'bin.000001' at 4", Damaged),
        ("memory allocation failed reading log event", Damaged),
        ("a text of a later version", Purged),
    ],
)
def test_refusals_of_a_source(text: str, kind: type[Exception]) -> None:
    error = refusal(b"\xff" + struct.pack("<H", 1236) + b"#HY000" + text.encode())
    assert type(error) is kind and text[:60] in str(error)
    assert isinstance(refusal(b"\xff" + struct.pack("<H", 1045) + b"#28000no"), Unfit)  # until somebody acts
    assert isinstance(refusal(b"\xff" + struct.pack("<H", 1040) + b"#08004too many connections"), Unavailable)


def test_sizes_of_every_type() -> None:
    types = bytes((1, 2, 9, 3, 8, 4, 5, 246, 16, 17, 18, 19, 252, 245, 15, 254, 254, 13))
    meta = bytes((4, 8, 20, 6, 3, 1, 3, 0, 6, 2, 4)) + struct.pack("<H", 20) + bytes((247, 1, 0xFE, 36))
    shapes = decoder.column_shapes(types, meta)
    assert [s[1] for s in shapes] == [1, 2, 3, 4, 8, 4, 8, 10, 2, 6, 5, 6, -2, -4, -1, 1, -1, 1]
    with pytest.raises(Unreadable, match="type 20"):
        decoder.column_shapes(b"\x14", b"\1")


class Lost:
    """A connection whose session ends with the first statement; SQLAlchemy refuses the second one."""

    def __init__(self) -> None:
        self._is_lost = False

    def exec_driver_sql(self, statement: str) -> Any:
        if self._is_lost:
            raise sa.exc.PendingRollbackError("Can't reconnect until invalid transaction is rolled back")
        self._is_lost = True
        error = Exception(2013, "Lost connection to MySQL server during query")
        raise sa.exc.OperationalError(statement, None, error, connection_invalidated=True)


def test_a_lost_connection_is_no_answer_about_rights() -> None:
    with pytest.raises(sa.exc.OperationalError):  # the bridge asks again, as after any loss
        rights._table_findings(Lost())  # type: ignore[arg-type]


VIEW = (
    b"CREATE ALGORITHM=UNDEFINED DEFINER=`root`@`localhost` SQL SECURITY DEFINER VIEW `half_message` AS SELECT * FROM x"
)


@pytest.mark.parametrize(
    ("scope", "statements", "stops"),
    [
        (Scope("shop"), [VIEW], True),
        (Scope("shop"), [b"create or replace view SHOP.half_message (a, b) as select 1"], True),
        (Scope("shop"), [b"CREATE VIEW report.half_message AS SELECT * FROM shop.half_message"], False),
        (Scope("shop"), [b"CREATE VIEW half_messages AS SELECT * FROM half_message"], False),
        (Scope("shop"), [b"CREATE TABLE copy AS SELECT 1 /* VIEW half_message AS */"], False),
        (Scope("shop"), [b"RENAME TABLE half_message TO old, _half_message_gho TO half_message"], False),
        (Scope(patterns="shop*"), [VIEW], False),
        (Scope(patterns="shop*"), [b"ALTER TABLE `shop`.`half_message` RENAME x", VIEW], True),
        (Scope(patterns="shop*"), [b"DROP TABLE `half_message` /* generated by server */", VIEW], True),
    ],
)
def test_a_view_in_the_place_of_a_table_stops_it(scope: Scope, statements: list[bytes], stops: bool) -> None:
    """Among several schemas a view without a table before it is a report's."""
    packets = [packet for n, text in enumerate(statements) for packet in (gtid(10 + n), query(text))]
    batches = Assembly(scope, Position(f"{SERVER}:1-9"), mariadb=False).batches([*packets, None])
    if stops:
        with pytest.raises(Unreadable, match=r"a view was put in the place of .*\.half_message: .*--backfill"):
            list(batches)
    else:
        assert gtids_of(list(batches)[-1][0]) == f"{SERVER}:1-{9 + len(statements)}"


@pytest.mark.parametrize(
    ("looks", "has_stalled"),
    [
        ([(1, b"a", 3), (2, b"a", 5), (2, b"a", 6), (2, b"a", 7)], True),
        ([(2, b"", 0), (1, b"", 0)], True),
        ([(1, b"a", 3), (2, b"b", 1), (2, b"b", 3), (2, b"b", 5)], False),
        ([(1, b"a", 3), (2, b"a", 3), (2, b"", 0), (2, b"b", 2), (2, b"b", 6)], False),
        ([(1, b"a", 3), (1, b"a", 5), (1, b"a", 7), (1, b"a", 9)], False),
        ([(None, b"a", 3), (2, b"a", 5), (None, b"a", 7), (3, b"a", 9)], False),
    ],
)
def test_heartbeats_from_a_place_that_the_log_has_left_are_no_life(
    looks: list[tuple[int | None, bytes, int]], has_stalled: bool
) -> None:
    stall = Stall()
    answers = [stall.has_stalled(end and (1, end), Quiet(place, heartbeats)) for end, place, heartbeats in looks]
    assert answers == [*[False] * (len(looks) - 1), has_stalled]
