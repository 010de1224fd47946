"""Notify's tables in PostgreSQL's log: recognises them, and reads their rows."""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from notify.binlog_bridge.errors import Unreadable
from notify.binlog_bridge.postgresql import messages
from notify.binlog_bridge.postgresql.messages import EPOCH_US, UNCHANGED, Absent, Relation, Value
from notify.binlog_bridge.rows import COLUMNS, FAMILIES, MOST_TABLES, headers_of
from notify.binlog_bridge.scope import Scope
from notify.movers.outbox import LOCAL, SERVER
from notify.protocol.wire import PackedMessage

OURS = (LOCAL.table.name, SERVER.table.name)
_TYPES = {
    "text": {18: "char", 19: "name", 25: "text", 1042: "character", 1043: "varchar"},
    "bytes": {17: "bytea"},
    "integer": {20: "bigint", 21: "smallint", 23: "integer"},
    "float": {700: "real", 701: "double precision"},
    "datetime": {1114: "timestamp", 1184: "timestamptz"},
}
"""The types of each family of values, by their numbers in pg_type, which are the same in every database."""
_FAMILIES = FAMILIES | {"body": "bytes"}
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_REMEDY = "then start this bridge with --backfill"


class Row(NamedTuple):
    """A row that has a message."""

    transaction_id: str
    producer_group: str
    message_no: int
    written_us: int
    """When it was written, in microseconds since 1970 by the source's clock."""
    message: PackedMessage


class TableRows:
    """Reads the rows of one relation."""

    def __init__(self, relation: Relation) -> None:
        """Raises Unreadable if a column is missing, or has a type that would be misread."""
        self.name = f"{relation.schema}.{relation.table}"
        self.is_server = relation.table == SERVER.table.name
        written = "decided_at" if self.is_server else "created_at"
        places = {column.name: n for n, column in enumerate(relation.columns)}
        missing = [name for name in (*COLUMNS, written) if name not in places]
        if missing:
            raise Unreadable(
                f"{self.name} has no column {', '.join(missing)}: it is not one that Notify made, or a column was "
                f"dropped; put it right, {_REMEDY}"
            )
        for name in (*COLUMNS, written):
            self._check_type(name, relation.columns[places[name]].type_oid)
        self._places = [places[name] for name in (*COLUMNS, written)]
        self._state = places["state"]
        self._double = _doubles(relation.columns[places["delay"]].type_oid)
        self._ttl = _doubles(relation.columns[places["ttl"]].type_oid)

    def _check_type(self, name: str, type_oid: int) -> None:
        wanted = _TYPES[_FAMILIES[name]]
        if type_oid not in wanted:
            raise Unreadable(
                f"column {self.name}.{name} has another type than Notify gives it (number {type_oid} in pg_type, not "
                f"{' or '.join(wanted.values())}): alter it back, {_REMEDY}"
            )

    def inserted(self, data: bytes) -> Row | None:
        """The message of an INSERT; None if the row has none that is to be moved."""
        values = messages.inserted(data)
        return self._row(values) if self._is_committed(values) else None

    def updated(self, data: bytes) -> Row | None:
        """The message of an UPDATE: of a row of the server's table that became COMMITTED by it.

        Raises Unreadable if the log has not the whole row.
        """
        if not self.is_server:
            return None
        before, values = messages.updated(data)
        if not self._is_committed(values):
            return None
        if before is None:
            raise Unreadable(
                f"{self.name} was changed while its replica identity was not FULL: the log has not the whole row; "
                f"ALTER TABLE {self.name} REPLICA IDENTITY FULL, {_REMEDY}"
            )
        if self._is_committed(before):
            return None
        return self._row([old if new is UNCHANGED else new for old, new in zip(before, values, strict=True)])

    def _is_committed(self, values: list[Value]) -> bool:
        """Whether the row has a message; of an outbox whether it waits for a mover, too."""
        if self.is_server:
            return values[self._state] == b"COMMITTED"
        relayed = values[self._places[11]]
        return isinstance(relayed, bytes) and not any(relayed)

    def _row(self, values: list[Value]) -> Row:
        v: list[Any] = [values[place] for place in self._places]
        if any(isinstance(value, Absent) for value in v):
            raise Unreadable(f"a row of {self.name} is not whole in the log, or not binary: {_REMEDY}")
        message = PackedMessage(
            topic=v[3].decode(),
            body=v[7] or b"",
            key=v[4].decode() if v[4] is not None else None,
            tag=v[5].decode() if v[5] is not None else None,
            headers=headers_of(v[6]) if v[6] else None,  # type: ignore[arg-type]
            delay=self._double(v[8])[0] if v[8] is not None else None,
            deliver_at=_moment(v[9]) if v[9] is not None else None,  # type: ignore[arg-type]
            ttl=self._ttl(v[10])[0] if v[10] is not None else None,
        )
        written_us = int.from_bytes(v[13], signed=True) + EPOCH_US if v[13] is not None else 0
        return Row(v[0].decode(), v[2].decode(), int.from_bytes(v[1], signed=True), written_us, message)


def _doubles(type_oid: int) -> Callable[[bytes], tuple[Any, ...]]:
    return struct.Struct(">f" if type_oid == 700 else ">d").unpack


def _moment(value: bytes) -> datetime | str:
    """A row's time, or a text if the calendar has no such time (infinity): every target refuses that."""
    try:
        return _EPOCH + timedelta(microseconds=int.from_bytes(value, signed=True))
    except OverflowError:
        return f"no time: {value.hex()}"


class Tables:
    """Notify's tables in a bridge's schemas, by the numbers that the log uses for them."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._by_number: dict[int, TableRows] = {}

    def define(self, data: bytes) -> None:
        """Read a RELATION, which says what the rows of a number are from now on."""
        relation = messages.relation(data)
        self._by_number.pop(relation.oid, None)
        if relation.table not in OURS or not self._scope.has(relation.schema):
            return
        if len(self._by_number) >= MOST_TABLES:
            raise Unreadable(f"this source has more than {MOST_TABLES} tables: divide it by --schemas among bridges")
        self._by_number[relation.oid] = TableRows(relation)

    def of(self, data: bytes) -> TableRows | None:
        """The table of a row; None if it is not one of Notify's tables."""
        return self._by_number.get(messages.relation_of(data))
