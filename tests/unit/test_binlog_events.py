"""Every type of event has a treatment; MySQL 8.4's events beside rows, in streams made by hand."""

from __future__ import annotations

import contextlib
import struct

import pytest

from notify.binlog_bridge.batching import PART_BYTES, OpenTransaction
from notify.binlog_bridge.binlog import events
from notify.binlog_bridge.binlog.events import EVENT_TYPES, Treatment
from notify.binlog_bridge.binlog.position import Position
from notify.binlog_bridge.binlog.reader import Assembly, savepoint_name
from notify.binlog_bridge.errors import Damaged, Purged, Unreadable
from notify.protocol import ids
from notify.protocol.wire import BridgedTransaction, PackedBridgeBatch, PackedMessage
from tests.support.binlog import SERVER, XID, event, gtid, gtids_of, mapped, query, read, row, rows, summed, values

MYSQL = [
    "UNKNOWN",
    "START_V3",
    "QUERY",
    "STOP",
    "ROTATE",
    "INTVAR",
    "LOAD",
    "SLAVE",
    "CREATE_FILE",
    "APPEND_BLOCK",
    "EXEC_LOAD",
    "DELETE_FILE",
    "NEW_LOAD",
    "RAND",
    "USER_VAR",
    "FORMAT_DESCRIPTION",
    "XID",
    "BEGIN_LOAD_QUERY",
    "EXECUTE_LOAD_QUERY",
    "TABLE_MAP",
    "PRE_GA_WRITE_ROWS",
    "PRE_GA_UPDATE_ROWS",
    "PRE_GA_DELETE_ROWS",
    "WRITE_ROWS_V1",
    "UPDATE_ROWS_V1",
    "DELETE_ROWS_V1",
    "INCIDENT",
    "HEARTBEAT",
    "IGNORABLE",
    "ROWS_QUERY",
    "WRITE_ROWS",
    "UPDATE_ROWS",
    "DELETE_ROWS",
    "GTID",
    "ANONYMOUS_GTID",
    "PREVIOUS_GTIDS",
    "TRANSACTION_CONTEXT",
    "VIEW_CHANGE",
    "XA_PREPARE",
    "PARTIAL_UPDATE_ROWS",
    "TRANSACTION_PAYLOAD",
    "HEARTBEAT_V2",
    "GTID_TAGGED",
]
"""Log_event_type of MySQL 9.7 (libs/mysql/binlog/event/binlog_event.h), from 0 on."""
MARIADB = [
    "ANNOTATE_ROWS",
    "BINLOG_CHECKPOINT",
    "GTID",
    "GTID_LIST",
    "START_ENCRYPTION",
    "QUERY_COMPRESSED",
    "WRITE_ROWS_COMPRESSED_V1",
    "UPDATE_ROWS_COMPRESSED_V1",
    "DELETE_ROWS_COMPRESSED_V1",
    "WRITE_ROWS_COMPRESSED",
    "UPDATE_ROWS_COMPRESSED",
    "DELETE_ROWS_COMPRESSED",
    "PARTIAL_ROW_DATA",
]
"""Log_event_type of MariaDB 12.3 (sql/log_event.h), from 160 on."""


def _plain(name: str) -> str:
    return name.replace("_LOG_EVENT", "").replace("_EVENT", "")


def test_every_type_of_event_has_its_treatment() -> None:
    wanted = dict(enumerate(MYSQL)) | dict(enumerate(MARIADB, 160))
    assert {number: _plain(known.name) for number, known in EVENT_TYPES.items()} == wanted
    assert all(known.why for known in EVENT_TYPES.values())


def test_the_types_that_mysql_replication_knows_are_among_them() -> None:
    from pymysqlreplication.constants import BINLOG

    for name, number in vars(BINLOG).items():
        if name.endswith(("_EVENT", "_EVENT_V1", "_EVENT_V2", "_EVENT_V3")) and not name.startswith("INTVAR_"):
            assert number in EVENT_TYPES, name


def treated(kind: int, body: bytes, flags: int = 0) -> str:
    """The reader's treatment of an event between a transaction's beginning and its end."""
    packet = bytearray(event(kind, body))
    packet[18:20] = flags.to_bytes(2, "little")
    try:
        batches = read([gtid(10), query(b"BEGIN"), bytes(packet), XID])
    except Unreadable:
        return "refused"
    assert [gtids_of(b) for b in batches] == [f"{SERVER}:1-10"]
    return "harmless"


@pytest.mark.parametrize("kind", [n for n, known in EVENT_TYPES.items() if known.treatment is not Treatment.HANDLED])
def test_the_reader_does_what_the_table_says(kind: int) -> None:
    assert treated(kind, bytes(64)) == EVENT_TYPES[kind].treatment.value


def test_an_unknown_type_stops_it_unless_the_source_lets_it_be_ignored() -> None:
    assert treated(99, bytes(64)) == "refused"
    assert treated(99, bytes(64), events.MAY_BE_IGNORED) == "harmless"


@pytest.mark.parametrize(
    ("database", "text", "is_ours"),
    [
        (b"shop", b"UPDATE half_message SET tag = 'x'", True),
        (b"shop", b"UPDATE `HALF_MESSAGE` SET tag = 'x'", True),
        (b"", b"UPDATE shop.half_message SET tag = 'x'", True),
        (b"other", b"UPDATE other.half_message, Shop.t SET tag = 'x'", True),
        (b"other", b"UPDATE half_message SET tag = 'x'", False),
        (b"shop", b"UPDATE orders SET tag = 'x'", False),
    ],
)
def test_a_statement_that_may_have_written_to_a_table_of_ours_stops_it(
    database: bytes, text: bytes, is_ours: bool
) -> None:
    """One in another database's outbox stopped the bridges of all databases of the server."""
    said = event(2, struct.pack("<IIBHH", 1, 0, len(database), 0, 0) + database + b"\0" + text)
    with pytest.raises(Unreadable, match="STATEMENT") if is_ours else contextlib.nullcontext():
        read([gtid(10), query(b"BEGIN"), said, XID])


def test_load_data_as_a_statement_into_a_table_of_ours_stops_it() -> None:
    body = struct.pack("<IIBHH", 1, 0, 4, 0, 0) + bytes(13) + b"shop\0LOAD DATA LOCAL INFILE 'x' INTO TABLE %s"
    assert treated(events.EXECUTE_LOAD, body % b"orders") == "harmless"
    assert treated(events.EXECUTE_LOAD, body % b"half_message") == "refused"


@pytest.mark.parametrize(
    ("table", "kind", "first", "treatment"),
    [
        (b"half_message", 23, True, "refused"),
        (b"half_message", 166, True, "refused"),
        (b"half_message", 25, True, "harmless"),
        (b"half_message", 23, False, "harmless"),
        (b"orders", 23, True, "harmless"),
    ],
)
def test_rows_of_ours_that_are_logged_in_parts_stop_it(table: bytes, kind: int, first: bool, treatment: str) -> None:
    """MariaDB 12.3 cuts a long row event: sequence number, number of parts, flags, size, and the event."""
    cut = rows(row(values("x")))[1:]
    part = struct.pack("<IIB", 1, 2, first) + (struct.pack("<Q", len(cut)) if first else b"") + cut[:4] + bytes((kind,))
    packets = [gtid(10), query(b"BEGIN"), mapped(table=table), event(events.FRAGMENT, part + cut[5:60]), XID]
    with pytest.raises(Unreadable, match="in parts") if treatment == "refused" else contextlib.nullcontext():
        assert len(read(packets)) == 1


def xa_prepare(*, one_phase: bool) -> bytes:
    return event(events.XA_PREPARE, bytes((one_phase,)) + struct.pack("<III", 1, 1, 0) + b"x")


def test_xa_of_mysql() -> None:
    """The rows come with the PREPARE; a later transaction says whether they are committed."""
    name = ids.to_text(ids.new_id())
    start, end, own_rows = query(b"XA START X'78',X'',1"), query(b"XA END X'78',X'',1"), rows(row(values(name)))
    (batch,) = read([gtid(10), start, mapped(), own_rows, end, xa_prepare(one_phase=True)])
    assert [t.id for t in batch.transactions] == [name] and gtids_of(batch) == f"{SERVER}:1-10"
    (batch,) = read(
        [
            gtid(10), start, mapped(table=b"orders"), own_rows, end, xa_prepare(one_phase=False),
            gtid(11), query(b"XA COMMIT X'78',X'',1"), gtid(12), query(b"XA ROLLBACK X'79',X'',1"),
        ]
    )  # fmt: skip
    assert batch.transactions == [] and gtids_of(batch) == f"{SERVER}:1-12"
    with pytest.raises(Unreadable, match="XA"):
        read([gtid(10), start, mapped(), own_rows, end, xa_prepare(one_phase=False)])


def test_rows_outside_of_a_transaction_stop_it() -> None:
    """Such rows stop the reader: it would note a position behind them before it has them."""
    with pytest.raises(Unreadable, match="outside of a transaction"):
        read([gtid(10), mapped(), rows(row(values("x")))])


def test_rows_of_a_table_that_is_made_from_a_select_are_taken_with_its_commit() -> None:
    name = ids.to_text(ids.new_id())
    made = query(b"CREATE TABLE `half_message` (`transaction_id` CHAR(36)) START TRANSACTION")
    (batch,) = read([gtid(10), made, None, mapped(), rows(row(values(name))), XID])
    assert [t.id for t in batch.transactions] == [name]


def test_a_whole_rollback_takes_back_the_parts_that_went_before_it() -> None:
    names = [ids.to_text(ids.new_id()) for _ in range(12)]
    packets: list[bytes | None] = [gtid(10), query(b"BEGIN"), mapped()]
    packets += [rows(row(values(n, body=bytes(PART_BYTES // 3)))) for n in names]
    *parts, last = read([*packets, query(b"ROLLBACK"), gtid(11), query(b"BEGIN"), mapped(), XID])
    assert last.rollback == [t.id for b in parts for t in b.transactions] and len(last.rollback) > 3
    assert last.commit == [] and last.transactions == [] and gtids_of(last) == f"{SERVER}:1-11"


def test_savepoints() -> None:
    def sent(name: str, count: int = 1) -> BridgedTransaction:
        return BridgedTransaction(
            id=name, producer_group="g", messages=[PackedMessage(topic="t") for _ in range(count)]
        )

    open_one = OpenTransaction()
    open_one.pending = [sent("a"), sent("b")]
    open_one.savepoint(b"one")
    open_one.pending[-1].messages.append(PackedMessage(topic="t"))
    open_one.pending.append(sent("c"))
    open_one.savepoint(b"two")
    open_one.roll_back_to(b"one")
    assert [(t.id, len(t.messages)) for t in open_one.pending] == [("a", 1), ("b", 1)]
    open_one.pending += [sent("d"), sent("e")]
    assert [t.id for t in open_one.split()] == ["a", "b", "d"]
    open_one.roll_back_to(b"one")  # `one` stays, and `two` was rolled back
    assert (open_one.prepared, open_one.rolled_back, open_one.pending) == (["a", "b"], ["d"], [])
    open_one.pending = [sent("f")]
    open_one.roll_back_to(b"never logged")
    assert (open_one.prepared, open_one.rolled_back, open_one.pending) == ([], ["d", "a", "b"], [])
    half = OpenTransaction()
    half.pending = [sent("a")]
    half.savepoint(b"s")
    half.pending[-1].messages.append(PackedMessage(topic="t"))
    half.pending.append(sent("b"))
    half.split()
    with pytest.raises(Unreadable, match="rolled back in part"):
        half.roll_back_to(b"s")


def written_in_turns(*names: str) -> OpenTransaction:
    """A transaction of the source with a message of each of these transactions, in this order."""
    open_one = OpenTransaction()
    for name in names:
        messages = [PackedMessage(topic="t", body=name.encode())]
        open_one.pending.append(BridgedTransaction(id=name[0], producer_group="g", messages=messages))
    return open_one


def test_messages_of_two_transactions_that_are_written_in_turns_stay_whole() -> None:
    open_one = written_in_turns("a0", "b0")
    open_one.savepoint(b"s")
    open_one.pending += written_in_turns("a-undone", "c-undone").pending
    open_one.roll_back_to(b"s")
    open_one.pending += written_in_turns("a1", "b1").pending
    assert {t.id: [m.body for m in t.messages] for t in open_one.whole()} == {"a": [b"a0", b"a1"], "b": [b"b0", b"b1"]}
    parted = written_in_turns("a0", "b0", "a1", "b1", "c0")
    assert [(t.id, len(t.messages)) for t in parted.split()] == [("a", 2), ("b", 2)]


def test_messages_on_both_sides_of_a_part_stop_it() -> None:
    parted = written_in_turns("a0", "b0", "c0")
    parted.split()
    parted.pending += written_in_turns("a1").pending
    for ends in (parted.whole, parted.split, written_in_turns("a0", "b0", "a1").split):
        with pytest.raises(Unreadable, match="transaction a were written apart"):
            ends()
    halved = written_in_turns("a0", "b0")
    halved.savepoint(b"s")
    halved.pending += written_in_turns("a1", "c0").pending
    halved.split()
    with pytest.raises(Unreadable, match="transaction a was rolled back in part"):
        halved.roll_back_to(b"s")


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        (b"SAVEPOINT `a``B c`", b"a`b c"),
        (b"ROLLBACK TO `x`", b"x"),
        (b"rollback work to savepoint X", b"x"),
        (b"ROLLBACK TO SAVEPOINT sp_1", b"sp_1"),
    ],
)
def test_names_of_savepoints(statement: bytes, name: bytes) -> None:
    assert savepoint_name(statement) == name


# --- files ----------------------------------------------------------------------------------------------------


def file_begins(name: bytes, created: int = 1_700_000_000, checksum: int = 0, server: int = 1) -> list[bytes | None]:
    described = event(15, struct.pack("<H50sIB", 4, b"8.4.3", 0, 19) + bytes(40) + bytes((checksum,)) + bytes(4))
    described = described[:1] + struct.pack("<I", created) + described[5:6] + struct.pack("<I", server) + described[10:]
    return [event(4, struct.pack("<Q", 4) + name), described]


def previous(last: int) -> bytes:
    """PREVIOUS_GTIDS: the transactions 1 to `last` of the one server."""
    return event(35, struct.pack("<Q", 1) + SERVER.bytes + struct.pack("<Qqq", 1, 1, last + 1))


def previous_with_a_tag(last: int) -> bytes:
    """PREVIOUS_GTIDS of MySQL 8.3 and later: also a transaction of the one server with a tag."""
    count = struct.pack("<Q", 1 << 56 | 2 << 8 | 1)
    plain = SERVER.bytes + b"\0" + struct.pack("<Qqq", 1, 1, last + 1)
    return event(35, count + plain + SERVER.bytes + b"\x08blue" + struct.pack("<Qqq", 1, 1, 2))


def test_each_file_says_whether_its_events_have_checksums() -> None:
    """The reader takes it from each file. It asked once: after a change, BEGIN lost its end, and rows were passed."""
    a, b = (ids.to_text(ids.new_id()) for _ in range(2))
    plain = [gtid(10), query(b"BEGIN"), mapped(), rows(row(values(a))), XID]
    with_sums = [gtid(11), query(b"BEGIN"), mapped(), rows(row(values(b))), XID]
    batches = read(
        [*file_begins(b"bin.000001"), *plain, *file_begins(b"bin.000002", checksum=1), *map(summed, with_sums)]
    )
    assert [t.id for batch in batches for t in batch.transactions] == [a, b]
    position = Position.of(batches[-1].position)
    assert position is not None and (position.file, position.created) == ("bin.000002", 1_700_000_000)
    damaged = bytearray(summed(with_sums[3]))
    damaged[-40] ^= 1
    with pytest.raises(Damaged):
        read([*file_begins(b"bin.000002", checksum=1), summed(gtid(11)), summed(query(b"BEGIN")), summed(mapped()),
              bytes(damaged)])  # fmt: skip


def test_a_transaction_that_a_crash_cut_off_holds_nothing_up() -> None:
    """It ends with its file. What was committed before it waited until the next transaction of the source."""
    a, b = (ids.to_text(ids.new_id()) for _ in range(2))
    whole = [gtid(10), query(b"BEGIN"), mapped(), rows(row(values(a))), XID]
    (batch,) = read([*whole, gtid(11), query(b"BEGIN"), mapped(), rows(row(values(b))), *file_begins(b"bin.000002")])
    assert [t.id for t in batch.transactions] == [a] and gtids_of(batch) == f"{SERVER}:1-10"


def test_the_name_of_a_file_with_and_without_a_checksum() -> None:
    for first in (file_begins(b"bin.000007")[0], summed(file_begins(b"bin.000007")[0] or b"")):
        (batch,) = read([first, gtid(10), query(b"BEGIN"), XID])
        position = Position.of(batch.position)
        assert position is not None and position.file == "bin.000007"


def go_on(position: Position, packets: list[bytes | None]) -> list[PackedBridgeBatch]:
    return [batch for batch, _ in Assembly("shop", position, mariadb=False).batches([*packets, None])]


AT = Position(f"{SERVER}:1-9", "bin.000004", 1234, 1_700_000_000, 1)


@pytest.mark.parametrize(
    ("packets", "why"),
    [
        (file_begins(b"bin.000004", 1_700_000_001), "has replaced bin.000004"),
        (file_begins(b"bin.000002"), "this bridge read them in bin.000004"),
        ([*file_begins(b"bin.000006", 1_700_000_009), previous(8)], "begins after"),
    ],
    ids=["the file is another one", "an older file", "a later file without the position"],
)
def test_another_history_stops_it(packets: list[bytes | None], why: str) -> None:
    with pytest.raises(Purged, match=why):
        go_on(AT, packets)


def test_another_history_stops_it_behind_a_backfill_too() -> None:
    """A snapshot does not say when its file began. Nothing was compared before the next transaction was moved."""
    behind = Position(f"{SERVER}:1-9", "bin.000004", 1234, server=1)
    with pytest.raises(Purged, match=r"this bridge read them in bin\.000004"):
        go_on(behind, file_begins(b"bin.000002"))
    with pytest.raises(Purged, match="begins after"):
        go_on(behind, [*file_begins(b"bin.000006"), previous(8)])
    for same in (file_begins(b"bin.000004"), [*file_begins(b"bin.000006"), previous(9)]):
        (batch,) = go_on(behind, [*same, gtid(10), query(b"BEGIN"), XID])
        assert gtids_of(batch) == f"{SERVER}:1-10"


@pytest.mark.parametrize(
    "packets",
    [
        file_begins(b"bin.000004"),
        [*file_begins(b"bin.000006", 1_700_000_009), previous(9)],
        file_begins(b"other.000001", 1_700_000_009, server=2),
        [*file_begins(b"bin.000006", 1_700_000_009), previous_with_a_tag(9)],
    ],
    ids=["the same file", "a later file from the position on", "another server", "a list with tags"],
)
def test_the_same_history_goes_on(packets: list[bytes | None]) -> None:
    (batch,) = go_on(AT, [*packets, gtid(10), query(b"BEGIN"), XID])
    assert gtids_of(batch) == f"{SERVER}:1-10"


def test_a_position_of_an_older_bridge_is_understood() -> None:
    known = Position.of('{"gtids": "0-1-2", "file": "bin.1", "offset": 7}')
    assert known == Position("0-1-2", "bin.1", 7)
    assert Position.of(AT.text) == AT
