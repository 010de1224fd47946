"""Messages and errors of a real PostgreSQL 15 are read without a server (tests/support/record_wal.py recorded them)."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import psycopg
import pytest

from notify.binlog_bridge.errors import Purged, Unfit, Unreadable
from notify.binlog_bridge.postgresql import messages
from notify.binlog_bridge.postgresql.messages import BEGIN, INSERT, RELATION
from notify.binlog_bridge.postgresql.position import Position, lsn_of, lsn_text
from notify.binlog_bridge.postgresql.reader import Assembly
from notify.binlog_bridge.postgresql.replication import ending, refusal
from notify.binlog_bridge.postgresql.stream import Kept
from notify.binlog_bridge.rows import Returned
from notify.binlog_bridge.scope import Scope
from notify.errors import InvalidRequest
from notify.protocol.wire import BridgedTransaction, PackedBridgeBatch
from tests.support.record_wal import FILE, LONG, NAMES

RECORDED = [bytes.fromhex(line) for line in FILE.read_text().split()]


def batches(recorded: list[bytes | Kept | None], scope: str = "public", **options: float) -> list[PackedBridgeBatch]:
    assembly = Assembly(Scope(scope), Position(1), **options)
    return [batch for batch, _ in assembly.batches([*recorded, None])]


def test_every_committed_message_is_read_once_in_commit_order() -> None:
    (batch,) = batches([*RECORDED])
    by_id = [(t.id, len(t.messages)) for t in batch.transactions]
    # NAMES[2] was rolled back to a savepoint, NAMES[4] was sent already; NAMES[6] and [7] were committed by an update.
    names = (NAMES[0], NAMES[1], NAMES[3], NAMES[5], NAMES[6], NAMES[7])
    assert by_id == list(zip(names, (2, 1, 1, 1, 2, 2), strict=True))
    first, second = batch.transactions[0].messages
    at = datetime(2026, 2, 3, 4, 5, 6, 789, tzinfo=UTC)
    assert (first.key, first.tag, first.headers, first.body) == ("schlüssel ☃", "tag", {"h": "ü"}, b"body")
    assert (first.delay, first.deliver_at, first.ttl) == (1.5, at, 86_400.25)
    assert (second.key, second.headers, second.body) == (None, None, LONG)
    # An update's row has not the long body, which it does not change: the row before the update has it.
    assert [m.body for m in batch.transactions[-1].messages] == [b"short", LONG]


def test_the_recording_has_every_kind_of_message() -> None:
    kinds = Counter(chr(message[0]) for message in RECORDED)
    assert set(kinds) == set("BCRIU")
    assert len({messages.relation(m).table for m in RECORDED if m[0] == RELATION}) == 2


def test_a_position_is_the_end_of_a_commit_or_what_the_source_says_between_commits() -> None:
    commits = [messages.commit_end(m) for m in RECORDED if m[0] == ord("C")]
    (batch,) = batches([*RECORDED])
    position = Position.of(batch.position)
    assert position is not None and position.lsn == max(commits) == commits[-1]
    # Within a transaction the source's progress is that of others.
    inside = RECORDED.index(next(m for m in RECORDED if m[0] == INSERT))
    (first,) = batches([*RECORDED[:inside], Kept(commits[-1] + 999, 0), *RECORDED[inside:]])
    assert first.position == batch.position
    quiet = batches([*RECORDED, None, Kept(commits[-1] + 999, 0)])
    assert [lsn_of(str(p.shown)) for p in map(Position.of, (b.position for b in quiet)) if p] == [
        commits[-1],
        commits[-1] + 999,
    ]


def test_tables_of_other_schemas_are_not_read() -> None:
    (batch,) = batches([*RECORDED], scope="other")
    assert not batch.transactions and batch.position


def test_a_row_that_is_much_older_than_its_commit_came_back() -> None:
    (batch,) = batches([*RECORDED], known_seconds=60.0)
    kinds: set[type[BridgedTransaction]] = {type(t) for t in batch.transactions}
    assert kinds == {Returned}


@pytest.mark.parametrize(("column", "what"), [(b"ttl", "has no column ttl"), (b"relayed", "has no column relayed")])
def test_a_missing_column_stops_it(column: bytes, what: str) -> None:
    changed = [m.replace(column, column[::-1]) if m[0] == RELATION else m for m in RECORDED]
    with pytest.raises(Unreadable, match=f"{what}.*--backfill"):
        batches([*changed])


def test_another_type_of_a_column_stops_it() -> None:
    relation = next(m for m in RECORDED if m[0] == RELATION)
    at = relation.index(b"topic\0") + 6
    changed = relation[:at] + (1700).to_bytes(4) + relation[at + 4 :]
    with pytest.raises(Unreadable, match=r"topic has another type .*1700"):
        batches([changed])


def test_a_message_that_was_not_asked_for_stops_it() -> None:
    with pytest.raises(Unreadable, match="'S'"):
        batches([b"S" + bytes(8)])
    begin = next(m for m in RECORDED if m[0] == BEGIN)
    text = next(m for m in RECORDED if m[0] == INSERT).replace(b"b\0\0\0\x24", b"t\0\0\0\x24", 1)
    relation = next(m for m in RECORDED if m[0] == RELATION)
    with pytest.raises(Unreadable, match="not binary"):
        batches([begin, relation, text])


def test_places_in_the_log_are_written_as_postgresql_writes_them() -> None:
    assert lsn_of("16/B374D848") == 0x16_B374D848 and lsn_text(0x16_B374D848) == "16/B374D848"
    position = Position(lsn_of("1/2"), "7", 3, 4)
    assert Position.of(position.text) == position
    assert Position.of('{"gtids": "0-1-2", "file": "", "offset": 0}') is None
    assert Position.of('["half_message", []]') is None
    with pytest.raises(InvalidRequest, match="another name"):
        Position.of('{"lsn": "nonsense"}')
    assert not Position(5, "one").reaches(Position(4, "other")) and Position(5, "one").reaches(Position(5, "one"))


def test_a_reader_has_caught_up_only_once_its_last_batch_was_taken() -> None:
    """`notify bridge --once` ended before the last batch, where it looked between the source's word and the batch."""
    assembly = Assembly(Scope("public"), Position(1))
    end = max(messages.commit_end(m) for m in RECORDED if m[0] == ord("C"))
    reading = assembly.batches([*RECORDED, Kept(end + 1, 7), None])
    next(reading)
    assert assembly.caught_up_us == 0
    assert next(reading, None) is None and assembly.caught_up_us == 7


# --- errors of a PostgreSQL are understood in its own language (`lc_messages`), as far as no SQLSTATE comes with them


@pytest.mark.parametrize(
    "text",
    [
        'publication "notify_shop" does not exist',
        "Publikation »notify_shop« existiert nicht",
        "la publication « notify_shop » n'existe pas",
        'パブリケーション"notify_shop"は存在しません',
    ],
)
def test_a_missing_publication(text: str) -> None:
    """Taken for a damaged file, it was tried five times, and the remedy was not said."""
    found = ending(psycopg.errors.UndefinedObject(text))
    assert isinstance(found, Unfit) and "publication was dropped" in str(found) and "--backfill" in str(found)


@pytest.mark.parametrize("kind", [psycopg.errors.UndefinedObject, psycopg.errors.ObjectNotInPrerequisiteState])
@pytest.mark.parametrize(
    "text",
    [
        'replication slot "notify_shop" does not exist',
        "Replikations-Slot »notify_shop« existiert nicht",
        "le slot de réplication « notify_shop » n'existe pas",
    ],
)
def test_a_missing_slot(text: str, kind: type[psycopg.Error]) -> None:
    assert isinstance(refusal(kind(text)), Purged)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("FATAL:  kein pg_hba.conf-Eintrag für Replikationsverbindung von Host »::1«", "a line for its database"),
        ("ВАЖНО:  в pg_hba.conf нет записи, разрешающей подключение для репликации", "a line for its database"),
        (
            "FATAL:  Anzahl angeforderter Standby-Verbindungen überschreitet max_wal_senders (aktuell 0)",
            "raise max_replic",
        ),
    ],
)
def test_a_refused_connection(text: str, remedy: str) -> None:
    """Such an error has a text only. It was tried again for ever."""
    found = refusal(psycopg.OperationalError(text))
    assert isinstance(found, Unfit) and remedy in str(found)
