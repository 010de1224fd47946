"""Notify's tables in a binlog: recognises them, and reads their rows."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from notify.binlog_bridge.binlog import decoder
from notify.binlog_bridge.binlog.decoder import Column, TableMap
from notify.binlog_bridge.binlog.events import PARTIAL_UPDATE, ROWS, UPDATES, WITH_EXTRA
from notify.binlog_bridge.errors import Unreadable
from notify.binlog_bridge.rows import COLUMNS, FAMILIES, MOST_TABLES, Returned, headers_of
from notify.binlog_bridge.scope import Scope
from notify.movers.outbox import LOCAL, SERVER
from notify.protocol.wire import BridgedTransaction, PackedMessage

OURS = (LOCAL.table.name, SERVER.table.name)
MOST_READERS = 64
_FIRST_FRAGMENT = 1
_READ = """
def add(data, at, end, transactions, known_from):
    last = transactions[-1] if transactions else None
    written = None
    while at < end:
{rows}
        if {is_skipped}:
            continue
{refusal}
        written = v13
        name = v0.decode("ascii")
        if last is None or last.id != name:
            kind = BridgedTransaction if v13 is None or v13 >= known_from else Returned
            last = kind(id=name, producer_group=v2.decode("ascii", "backslashreplace"), messages=[])
            transactions.append(last)
        last.messages.append(
            PackedMessage(
                topic=v3.decode("ascii", "backslashreplace"),
                body=v7 or b"",
                key=v4.decode() if v4 is not None else None,
                tag=v5.decode() if v5 is not None else None,
                headers=headers(v6) if v6 else None,
                delay=double(v8) if v8 is not None else None,
                deliver_at=moment(v9, {deliver_fraction}) if v9 is not None else None,
                ttl=double(v10) if v10 is not None else None,
            )
        )
    return written
"""
"""A function that adds an event's rows to `transactions`, and returns when the last message was written. Times are
compared as bytes, which have the order of the times: a row before `known_from` has come back. It is compiled
for each table map and set of logged columns, with lines that read exactly these, so that messages are made without an
intermediate row.
It shows names that are not ASCII as bytes: no target takes such a name, and the row is listed as refused."""


def _moment(value: bytes, fraction: int) -> datetime | str:
    """A row's time, or a text if the calendar has no such time: every target refuses that."""
    try:
        return decoder.moment(value, fraction)
    except ValueError:
        return f"no time: {value.hex()}"


_NAMES = {
    "BridgedTransaction": BridgedTransaction,
    "Returned": Returned,
    "PackedMessage": PackedMessage,
    "headers": headers_of,
    "double": decoder.double,
    "moment": _moment,
    "length_encoded": decoder.length_encoded,
    "Unreadable": Unreadable,
}
AddRows = Callable[[bytes, int, int, list[BridgedTransaction], bytes], bytes | None]


class TableRows:
    """Reads the rows of one table map."""

    def __init__(self, table: TableMap) -> None:
        self.name = f"{table.schema}.{table.table}"
        self._table = table
        self._bitmap = (len(table.columns) + 7) // 8
        self._is_server = table.table == SERVER.table.name
        self._written = "decided_at" if self._is_server else "created_at"
        self._wanted = (*COLUMNS, self._written)
        decoder.check_columns(table, self._wanted)
        _check_families(table, self._written)
        _check_texts(table)
        _check_history(table)
        self._time_fraction = decoder.column(table, self._written).fraction
        self._known_from = 0.0, b""
        """The time that was last given to `add`, and its bytes."""
        self._readers: dict[tuple[bool, bytes], AddRows] = {}
        """Functions by two keys: whether the event may have parts of JSON values, and its bitmaps of logged columns."""

    def add(self, kind: int, packet: bytes, end: int, transactions: list[BridgedTransaction], known_from: float) -> int:
        """Add an event's rows to the transactions that they belong to. `known_from`: transactions whose row was written
        before this time, in seconds since 1970, become `Returned`.

        Returns the time of the last message's row in microseconds, by the source's clock; 0 if there is no message.
        Raises Unreadable.
        """
        at = 28
        if kind in WITH_EXTRA:
            at += int.from_bytes(packet[28:30], "little")
        count = packet[at]
        if count < 251:
            at += 1
        else:
            count, at = decoder.length_encoded(packet, at)
        if count != len(self._table.columns):
            raise Unreadable(
                f"a row event of {self.name} has {count} columns where its table map has {len(self._table.columns)}"
            )
        begin = at + self._bitmap * (1 + (kind in UPDATES))
        logged = kind == PARTIAL_UPDATE, packet[at:begin]
        add = self._readers.get(logged)
        if add is None:
            if len(self._readers) > MOST_READERS:
                self._readers.clear()
            add = self._readers[logged] = self._reader(*logged)
        if known_from != self._known_from[0]:
            self._known_from = known_from, decoder.packed(known_from)
        written = add(packet, begin, end, transactions, self._known_from[1])
        if written is None:
            return 0
        try:
            return int(decoder.moment(written, self._time_fraction).timestamp() * 1_000_000)
        except ValueError:  # the calendar has no such date
            return 0

    def _reader(self, partial_json: bool, bitmaps: bytes) -> AddRows:
        """A function that adds the rows of events with these columns. Raises Unreadable if it would have to guess.

        A session may leave columns out (binlog_row_image). An inserted row then has the columns' defaults, which are
        NULL in our nullable columns; an updated row has the values from before.
        """
        images = [self._logged(bitmaps[at : at + self._bitmap]) for at in range(0, len(bitmaps), self._bitmap)]
        is_update, after = len(images) == 2, images[-1]
        names = {column.name for column in after}
        # A server's table has a message when its transaction becomes COMMITTED, an outbox when the row is inserted.
        if is_update and not (self._is_server and "state" in names):
            return _nothing
        missing = {name for name in self._wanted if name not in names}
        variables = {name: f"v{n}" for n, name in enumerate(self._wanted)}
        rows = [f"{variables[name]} = None" for name in missing]
        if is_update:
            earlier = {column.name for column in images[0]}
            missing = (missing - earlier) | ({"state"} - earlier)
            was = {name: variables[name] for name in earlier - names if name in variables} | {"state": "was"}
            rows += decoder.row_lines(images[0], was)
        else:
            ours = (SERVER if self._is_server else LOCAL).table.c
            missing -= {c.name for c in self._table.columns if c.nullable and c.name in ours and ours[c.name].nullable}
        documents = decoder.documents_in(self._table) if partial_json else None
        rows += decoder.row_lines(after, variables, documents=documents)
        refusal = (
            f"{self.name} was logged without {', '.join(sorted(missing))}: set binlog_row_image = FULL on the source, "
            "and in the session that wrote (it may have its own), then start this bridge with --backfill"
        )
        if missing and not is_update:
            raise Unreadable(refusal)
        if not self._is_server:
            is_skipped = "v11 is None or any(v11)"
        elif is_update:
            is_skipped = "v12 != b'COMMITTED'" + ("" if "state" in missing else " or was == b'COMMITTED'")
        else:
            is_skipped = "v12 != b'COMMITTED'"
        functions = dict(_NAMES) | {"missing": refusal}
        source = _READ.format(
            rows="\n".join(" " * 8 + line for line in rows),
            is_skipped=is_skipped,
            refusal=" " * 8 + "raise Unreadable(missing)" if missing else "",
            deliver_fraction=decoder.column(self._table, "deliver_at").fraction,
        )
        exec(source, functions)
        add: AddRows = functions["add"]  # type: ignore[assignment]
        return add

    def _logged(self, bitmap: bytes) -> list[Column]:
        bits = int.from_bytes(bitmap, "little")  # with or without bits after the last column
        return [column for n, column in enumerate(self._table.columns) if bits >> n & 1]


def _nothing(data: bytes, at: int, end: int, transactions: list[BridgedTransaction], known_from: bytes) -> bytes | None:
    """Add the rows of an event that cannot have a message."""
    return None


def _check_families(table: TableMap, written: str) -> None:
    """Raises Unreadable if the type of a column was altered so that its bytes would be misread."""
    for name in (*COLUMNS, written):
        family = decoder.family(decoder.column(table, name))
        if family != FAMILIES[name]:
            raise Unreadable(
                f"column {table.schema}.{table.table}.{name} has another type than Notify gives it ({family}, not "
                f"{FAMILIES[name]}): alter it back, then start this bridge with --backfill"
            )


_ANY_LETTERS = ("key", "headers")
"""The columns of texts that may have characters other than ASCII."""


def _check_texts(table: TableMap) -> None:
    """Raises Unreadable if a text's bytes would be read as other letters than it has: the present character set says
    nothing about that with which a row was logged."""
    for column in table.columns:
        if column.name not in FAMILIES or FAMILIES[column.name] != "text" or column.name == "body":
            continue
        if decoder.is_wide(column.collation) or (
            column.name in _ANY_LETTERS and not decoder.is_read_as_utf8(column.collation)
        ):
            raise Unreadable(
                f"{table.schema}.{table.table}.{column.name} was logged in a character set whose bytes are not those "
                f"of UTF-8 (that of the collation with the number {column.collation}): ALTER TABLE {table.table} "
                "CONVERT TO CHARACTER SET utf8mb4, then start this bridge with --backfill"
            )


_HISTORY = {"row_start", "row_end"}


def _check_history(table: TableMap) -> None:
    """Raises Unreadable if MariaDB keeps the rows that are changed: it logs each of them as one more insert."""
    if {column.name for column in table.columns} >= _HISTORY:
        raise Unreadable(
            f"{table.schema}.{table.table} keeps the history of its rows (SYSTEM VERSIONING), and each change of a row "
            f"inserts the old one again: ALTER TABLE {table.table} DROP SYSTEM VERSIONING, then start this bridge with "
            "--backfill"
        )


class Tables:
    """Notify's tables in a bridge's schemas, by the numbers that the binlog currently uses for them."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._by_number: dict[int, TableRows | None] = {}
        self._by_definition: dict[bytes, TableRows] = {}

    def of(self, packet: bytes) -> TableRows | None:
        """The table of an event's rows; None if it is not one of Notify's tables."""
        return self._by_number.get(int.from_bytes(packet[20:26], "little"))

    def of_fragment(self, packet: bytes) -> TableRows | None:
        """The table whose inserted or changed rows are logged in parts, by the first part; None for any other event.

        The first part has a flag, the size of the event, and then the event from its header on.
        """
        if not packet[28] & _FIRST_FRAGMENT or packet[41] not in ROWS:
            return None
        return self._by_number.get(int.from_bytes(packet[56:62], "little"))

    def clear(self) -> None:
        """Forget the table numbers, which are not valid any more."""
        self._by_number.clear()

    def map(self, body: bytes) -> None:
        """Read the body of a table map event, which says which table a number means from now on."""
        number = int.from_bytes(body[:6], "little")
        key = body[6:]
        rows = self._by_definition.get(key)
        if rows is None:
            schema, name = decoder.names_of(body)
            if name not in OURS or not self._scope.has(schema):
                self._by_number[number] = None
                return
            if len(self._by_definition) >= MOST_TABLES:
                self._by_definition.clear()
            rows = self._by_definition[key] = TableRows(decoder.table_map(body))
        self._by_number[number] = rows
