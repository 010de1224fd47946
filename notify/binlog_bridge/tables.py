"""Notify's tables in a binlog: recognises them, and reads their rows."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import msgspec

from notify.binlog_bridge import decoder
from notify.binlog_bridge.decoder import TableMap, Unreadable
from notify.binlog_bridge.events import UPDATES, WITH_EXTRA
from notify.outbox import LOCAL, SERVER
from notify.wire import BridgedTransaction, PackedMessage

OURS = (LOCAL.table.name, SERVER.table.name)
MOST_READERS = 64
COLUMNS = (
    "transaction_id",
    "message_no",
    "producer_group",
    "topic",
    "key",
    "tag",
    "headers",
    "body",
    "delay",
    "deliver_at",
    "ttl",
    "relayed",
    "state",
)
"""The columns that a bridge reads."""
_FAMILIES = dict.fromkeys(COLUMNS, "text") | {
    "message_no": "integer",
    "relayed": "integer",
    "delay": "float",
    "ttl": "float",
    "deliver_at": "datetime",
    "created_at": "datetime",
    "decided_at": "datetime",
}
"""The required kind of values of each column."""
_READ = """
def add(data, at, end, is_update, transactions):
    last = transactions[-1] if transactions else None
    written = None
    while at < end:
        was0 = None
        if is_update:
{before}
{row}
        if {is_skipped}:
            continue
        written = v13
        name = v0.decode("ascii")
        if last is None or last.id != name:
            last = BridgedTransaction(id=name, producer_group=v2.decode("ascii", "backslashreplace"), messages=[])
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
"""A function that adds an event's rows to `transactions`, and returns when the last message was written. It is compiled
for each table map, with lines that read exactly its columns, so that messages are made without an intermediate row.
Of names that are not ASCII it shows the bytes: no target takes such a name, and the row is listed as refused."""


def _headers(text: bytes) -> object:
    """A row's headers, or the text itself if it is not JSON: every target refuses that, and the row is listed."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError):
        return text.decode("utf-8", "replace")


def _moment(value: bytes, fraction: int) -> datetime | str:
    """A row's time, or a text if the calendar has no such time: every target refuses that."""
    try:
        return decoder.moment(value, fraction)
    except ValueError:
        return f"no time: {value.hex()}"


_NAMES = {
    "BridgedTransaction": BridgedTransaction,
    "PackedMessage": PackedMessage,
    "headers": _headers,
    "double": decoder.double,
    "moment": _moment,
}
AddRows = Callable[[bytes, int, int, bool, list[BridgedTransaction]], bytes | None]


class TableRows:
    """Reads the rows of one table map."""

    def __init__(self, table: TableMap) -> None:
        self.name = f"{table.schema}.{table.table}"
        self._count = len(table.columns)
        self._bitmap = (self._count + 7) // 8
        exact = ((1 << self._count) - 1).to_bytes(self._bitmap, "little")
        self._all_present = (exact, b"\xff" * self._bitmap)
        """The bitmap of a row with all columns: MariaDB clears the bits after the last column, MySQL sets them."""
        is_server = table.table == SERVER.table.name
        # A server's table has a message when its transaction becomes COMMITTED, an outbox when the row is inserted.
        is_skipped = (
            "v12 != b'COMMITTED' or was0 == b'COMMITTED'" if is_server else "is_update or v11 is None or any(v11)"
        )
        written = "decided_at" if is_server else "created_at"
        row = decoder.row_lines(table, (*COLUMNS, written), "v", 8)
        _check_families(table, written)
        self._time_fraction = decoder.column(table, written).fraction
        names = dict(_NAMES)
        source = _READ.format(
            before="\n".join(decoder.row_lines(table, ("state",), "was", 12)),
            row="\n".join(row),
            is_skipped=is_skipped,
            deliver_fraction=decoder.column(table, "deliver_at").fraction,
        )
        exec(source, names)
        self._add: AddRows = names["add"]  # type: ignore[assignment]

    def add(self, kind: int, packet: bytes, end: int, transactions: list[BridgedTransaction]) -> int:
        """Add an event's rows to the transactions that they belong to.

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
        if count != self._count:
            raise Unreadable(f"a row event of {self.name} has {count} columns where its table map has {self._count}")
        is_update = kind in UPDATES
        for _ in range(1 + is_update):
            if packet[at : at + self._bitmap] not in self._all_present:
                raise Unreadable(
                    f"{self.name} is logged with minimal images: set binlog_row_image = FULL on the source"
                )
            at += self._bitmap
        written = self._add(packet, at, end, is_update, transactions)
        if written is None:
            return 0
        try:
            return int(decoder.moment(written, self._time_fraction).timestamp() * 1_000_000)
        except ValueError:  # the calendar has no such date
            return 0


def _check_families(table: TableMap, written: str) -> None:
    """Raises Unreadable if the type of a column was altered so that its bytes would be misread."""
    for name in (*COLUMNS, written):
        family = decoder.family(decoder.column(table, name))
        if family != _FAMILIES[name]:
            raise Unreadable(
                f"column {table.schema}.{table.table}.{name} has another type than Notify gives it ({family}, not "
                f"{_FAMILIES[name]}): alter it back, then start this bridge with --backfill"
            )


class Tables:
    """Notify's tables in one schema, by the numbers that the binlog currently uses for them."""

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._by_number: dict[int, TableRows | None] = {}
        self._by_definition: dict[bytes, TableRows] = {}

    def of(self, packet: bytes) -> TableRows | None:
        """The table of an event's rows; None if it is not one of Notify's tables."""
        return self._by_number.get(int.from_bytes(packet[20:26], "little"))

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
            if schema != self._schema or name not in OURS:
                self._by_number[number] = None
                return
            if len(self._by_definition) > MOST_READERS:
                self._by_definition.clear()
            rows = self._by_definition[key] = TableRows(decoder.table_map(body))
        self._by_number[number] = rows
