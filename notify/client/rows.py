"""Rows of half_message that commit with the local transaction: what a check looks for, or what a relay moves."""

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
"""`half`: the server has the messages, a row only says that the transaction committed; `outbox`: rows carry them."""
MODES: tuple[Mode, ...] = ("half", "outbox")

_INSERT = half_message.insert().values(created_at=database_now())


class HalfRows:
    """Inserts the rows of one producer group's transactions."""

    def __init__(self, group: str, mode: Mode, *, keep_messages: bool = False) -> None:
        """`keep_messages`: rows carry the messages in mode `half`, too."""
        self._group = group
        self._mode = mode
        self._with_bodies = keep_messages or mode == "outbox"
        self._mark: SQLCompiler | None = None
        """The statement that inserts rows without bodies, once it is compiled."""
        self._with_digest: bool | None = None
        """Whether the table has the column; None before the first transaction."""

    def insert(
        self, connection: Connection, transaction_id: str, shard: str | None, messages: list[PackedMessage]
    ) -> None:
        """Insert a transaction's rows. `shard`: the one that has its half."""
        fixed: dict[str, Any] = {
            "transaction_id": transaction_id,
            "producer_group": self._group,
            "mode": self._mode,
            "state": "COMMITTED",
            "shards": shard or "",
        }
        if not self._with_bodies:
            rows = [
                fixed | {"message_no": number, "topic": m.topic, "key": m.key, "tag": m.tag, "relayed": RELAYED}
                for number, m in enumerate(messages)
            ]
            self._add_digests(connection, rows, messages)
            self._insert_marks(connection, rows)
            return
        rows = [
            fixed
            | {
                "message_no": number,
                "topic": m.topic,
                "key": m.key,
                "tag": m.tag,
                "headers": encode_headers(m.headers),
                "body": m.body,
                "delay": m.delay,
                "deliver_at": naive_utc(m.deliver_at),
                "ttl": m.ttl,
                "relayed": UNSENT if self._mode == "outbox" else RELAYED,
            }
            for number, m in enumerate(messages)
        ]
        self._add_digests(connection, rows, messages)
        connection.execute(_INSERT, rows)

    def _add_digests(self, connection: Connection, rows: list[dict[str, Any]], messages: list[PackedMessage]) -> None:
        if self._with_digest is None:
            self._with_digest = has_digest(connection)
        if self._with_digest:
            for row, message in zip(rows, messages, strict=True):
                row["digest"] = body_digest(message.body or b"")

    def _insert_marks(self, connection: Connection, rows: list[dict[str, Any]]) -> None:
        """Rows without bodies: the server has those. Text and numbers only, so that no type has to be converted,
        and the statement, compiled once, goes to the driver as it is: half the CPU time of `execute`."""
        if connection.get_execution_options().get("schema_translate_map"):
            connection.execute(_INSERT, rows)
            return
        if self._mark is None:
            self._mark = _INSERT.compile(dialect=connection.dialect, column_keys=list(rows[0]))
        order = self._mark.positiontup
        given: list[Any] = rows if order is None else [tuple([row[name] for name in order]) for row in rows]
        connection.exec_driver_sql(self._mark.string, given[0] if len(given) == 1 else given)


def encode_headers(headers: dict[str, str] | None) -> str | None:
    """Headers as the column holds them."""
    return msgspec.json.encode(headers).decode() if headers else None


def naive_utc(moment: datetime | None) -> datetime | None:
    """An instant as the column holds it: UTC without a zone. Raises InvalidRequest if it names no zone."""
    if moment is None:
        return None
    if moment.tzinfo is None:
        raise InvalidRequest("deliver_at needs its time zone, for example datetime.now(UTC)")
    return moment.astimezone(UTC).replace(tzinfo=None)
