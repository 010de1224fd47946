"""HalfRows: inserts the rows of half_message that commit with the local transaction, for checks and for relays."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from sqlalchemy.engine import Connection
from sqlalchemy.sql.compiler import SQLCompiler

from notify.client.table import half_message, has_digest
from notify.databases import RELAYED, UNSENT, database_now
from notify.digest import body_digest
from notify.errors import InvalidRequest
from notify.wire import PackedMessage

Mode = Literal["half", "outbox"]
"""`half`: the server has the messages, and a row only says that the transaction committed; `outbox`: the rows contain
the messages."""
MODES: tuple[Mode, ...] = ("half", "outbox")

_INSERT = half_message.insert().values(created_at=database_now())


class HalfRows:
    """Inserts the rows of one producer group's transactions."""

    def __init__(self, group: str, mode: Mode, *, keep_messages: bool = False) -> None:
        """`keep_messages`: rows contain the messages in mode `half` too."""
        self._group = group
        self._mode = mode
        self._with_bodies = keep_messages or mode == "outbox"
        self._mark: SQLCompiler | None = None
        """The compiled statement that inserts rows without bodies; None before its first use."""
        self._with_digest: bool | None = None
        """Whether the table has the column digest; None before the first transaction."""

    def insert(
        self, connection: Connection, transaction_id: str, shard: str | None, messages: list[PackedMessage]
    ) -> None:
        """Insert a transaction's rows. `shard`: the shard that has its half."""
        fixed: dict[str, Any] = {
            "transaction_id": transaction_id,
            "producer_group": self._group,
            "mode": self._mode,
            "state": "COMMITTED",
            "shards": shard or "",
            "relayed": UNSENT if self._mode == "outbox" else RELAYED,
        }
        rows = [
            fixed | {"message_no": number, "topic": message.topic, "key": message.key, "tag": message.tag}
            for number, message in enumerate(messages)
        ]
        if self._with_bodies:
            for row, message in zip(rows, messages, strict=True):
                row |= _body_columns(message)
        self._add_digests(connection, rows, messages)
        if self._with_bodies:
            connection.execute(_INSERT, rows)
        else:
            self._insert_marks(connection, rows)

    def _add_digests(self, connection: Connection, rows: list[dict[str, Any]], messages: list[PackedMessage]) -> None:
        if self._with_digest is None:
            self._with_digest = has_digest(connection)
        if self._with_digest:
            for row, message in zip(rows, messages, strict=True):
                row["digest"] = body_digest(message.body or b"")

    def _insert_marks(self, connection: Connection, rows: list[dict[str, Any]]) -> None:
        """Insert rows without bodies. They have only text and numbers, so that no value needs a conversion. The
        statement is compiled once and passed to the driver directly, which takes half the CPU time of `execute`."""
        if connection.get_execution_options().get("schema_translate_map"):
            connection.execute(_INSERT, rows)
            return
        if self._mark is None:
            self._mark = _INSERT.compile(dialect=connection.dialect, column_keys=list(rows[0]))
        order = self._mark.positiontup
        parameters: list[Any] = rows if order is None else [tuple([row[name] for name in order]) for row in rows]
        connection.exec_driver_sql(self._mark.string, parameters[0] if len(parameters) == 1 else parameters)


def _body_columns(message: PackedMessage) -> dict[str, Any]:
    """The columns that only rows with bodies have."""
    return {
        "headers": encode_headers(message.headers),
        "body": message.body,
        "delay": message.delay,
        "deliver_at": naive_utc(message.deliver_at),
        "ttl": message.ttl,
    }


def encode_headers(headers: dict[str, str] | None) -> str | None:
    """Headers in the column's format: JSON, or None without headers."""
    return msgspec.json.encode(headers).decode() if headers else None


def naive_utc(moment: datetime | None) -> datetime | None:
    """An instant in the column's format: UTC without a time zone. Raises InvalidRequest if `moment` has no zone."""
    if moment is None:
        return None
    if moment.tzinfo is None:
        raise InvalidRequest("deliver_at needs its time zone, for example datetime.now(UTC)")
    return moment.astimezone(UTC).replace(tzinfo=None)
