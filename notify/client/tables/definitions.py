"""Notify's tables in a service's database: half_message, notify_source, notify_inbox and notify_refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.runtime.databases import BODY, ID, INNODB, INSTANT, KEY, LEFT_BEHIND, MESSAGE_ID, NAME, TEXT
from notify.runtime.guarantees import DELETE, INSERT, SELECT, UPDATE, Need
from notify.runtime.schemas import SQLITE, named_by, qualified, text_of

metadata = sa.MetaData()
PARTIAL = ("postgresql", "sqlite")
"""The databases with partial indexes."""
LEFT_BEHIND_INDEX = "half_message_left_behind"
LEFT_KEY_INDEX = "half_message_left_key"
_MAKE_INDEX = (
    "run create_tables, or `notify doctor --dsn … --create-tables`, after DROP INDEX if an invalid one is there"
)
WITHOUT_INDEX = (
    f"half_message has no valid index {LEFT_BEHIND_INDEX}, so that each look for what producers in mode auto left "
    f"behind would read the whole table: {_MAKE_INDEX}"
)
WITHOUT_KEY_INDEX = (
    f"half_message has no valid index {LEFT_KEY_INDEX}, so that each commit with a key in mode auto reads all that is "
    f"left behind: {_MAKE_INDEX}"
)


def _has_partial_indexes(*given: Any, dialect: sa.Dialect, **more: Any) -> bool:
    """Whether `create_all` makes an index with a condition on a database of this dialect."""
    return dialect.name in PARTIAL


MAKE_TABLES = "call notify.client.create_tables(engine) once, or make the tables with the Alembic helper"
"""The part of an error text that says how to create Notify's tables."""


half_message = sa.Table(
    "half_message",
    metadata,
    sa.Column("transaction_id", ID, primary_key=True),
    sa.Column("message_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("producer_group", NAME, nullable=False),
    sa.Column("mode", sa.String(8), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("shards", sa.String(1024), nullable=False),
    sa.Column("topic", NAME, nullable=False),
    sa.Column("key", KEY),
    sa.Column("tag", NAME),
    sa.Column("headers", TEXT),
    sa.Column("body", BODY, quote=True),  # reserved where MariaDB's sql_mode is ORACLE
    sa.Column("delay", sa.Float(53)),
    sa.Column("deliver_at", INSTANT),
    sa.Column("ttl", sa.Float(53)),
    sa.Column("relayed", sa.SmallInteger, nullable=False),
    sa.Column("created_at", INSTANT, nullable=False),
    sa.Column("digest", sa.BigInteger),
    **INNODB,
    sqlite_with_rowid=False,
)
is_waiting = half_message.c.relayed == sa.literal_column("0")
"""The condition "not relayed yet", with a literal 0 instead of a parameter, so that SQLite and PostgreSQL use the
partial index for it."""
sa.Index(
    "half_message_waiting",
    half_message.c.relayed,
    half_message.c.created_at,
    sqlite_where=is_waiting,
    postgresql_where=is_waiting,
)
is_left_behind = half_message.c.relayed == sa.literal_column(str(LEFT_BEHIND))
"""The condition "left behind by a producer in mode auto", written like `is_waiting`."""
# On MySQL and MariaDB, which have no partial indexes, half_message_waiting serves both.
sa.Index(
    LEFT_BEHIND_INDEX,
    half_message.c.producer_group,
    half_message.c.created_at,
    sqlite_where=is_left_behind,
    postgresql_where=is_left_behind,
).ddl_if(callable_=_has_partial_indexes)
# With the other one, a commit with a key that nothing waits for would read all that waits. Its columns are in this
# order, since PostgreSQL would take the other one for the other order.
sa.Index(
    LEFT_KEY_INDEX,
    half_message.c.producer_group,
    half_message.c.key,
    sqlite_where=is_left_behind,
    postgresql_where=is_left_behind,
).ddl_if(callable_=_has_partial_indexes)
"""One row for each message. In mode half a row has no body, because the server has it, unless the producer keeps
messages. In mode outbox a row has the whole message, and `relayed` is 0 until the relay has sent it. In mode auto a row
whose half the server did not store has the whole message too, and `relayed` is 4 until a producer of the group, a relay
or a bridge has stored its half and `shards` names the shard; then it is like any other row of mode half. A tombstone is
message 0 with state ROLLED_BACK. Times are UTC by the database's clock. `digest` (notify/protocol/digest.py) is the
digest of the body; it is NULL in a row of an older SDK, and missing in a table of an older version."""
notify_source = sa.Table(
    "notify_source",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("purged_before", sa.BigInteger, nullable=False),  # milliseconds since 1970, like the next two
    sa.Column("rows_from", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("inbox_from", sa.BigInteger, nullable=False, server_default="0"),
    **INNODB,
)
"""`purged_before`: rows with ids up to this time were purged by force, so that a check for a half without a row cannot
be answered any more. `rows_from` and `inbox_from`: older rows of half_message and notify_inbox may have been purged, so
that an audit cannot judge what lies before."""
has_source_id = notify_source.c.id > sa.literal_column("''")
"""The condition that holds for every row, by its key: with `sql_safe_updates` MySQL and MariaDB refuse to change rows
without one."""
notify_inbox = sa.Table(
    "notify_inbox",
    metadata,
    sa.Column("consumer_group", NAME, primary_key=True),
    sa.Column("message_id", MESSAGE_ID, primary_key=True),
    sa.Column("replay", sa.Integer, primary_key=True, autoincrement=False, server_default="0"),
    sa.Column("created_at", INSTANT, nullable=False),
    sa.Index("notify_inbox_created_at", "created_at"),
    **INNODB,
)
"""One row for each effect. `replay` is 0, except after resets and redrives that repeat effects; an SDK that does not
know the column leaves it at 0."""
notify_refused = sa.Table(
    "notify_refused",
    metadata,
    sa.Column("transaction_id", ID, primary_key=True),
    sa.Column("producer_group", NAME, nullable=False),
    sa.Column("topic", NAME, nullable=False),
    sa.Column("messages", sa.Integer, nullable=False),
    sa.Column("mover", sa.String(255), nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("code", sa.String(64), nullable=False),
    sa.Column("detail", TEXT, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("reason", TEXT, nullable=False),
    sa.Column("refused_at", INSTANT, nullable=False),
    **INNODB,
)
"""One row for each transaction that its target refuses, with the target's last answer (`status`, `code`, `detail`) and
the decision of an operator (`state`, `reason`): see notify/movers/refused.py."""


def left_behind_with(columns: Any, group: Any, keys: Any) -> sa.ColumnElement[bool]:
    """The condition that a row of a producer group with one of these keys is left behind. `columns`: of half_message in
    a schema, or of an alias of it."""
    is_left = columns.relayed == sa.literal_column(str(LEFT_BEHIND))
    return sa.and_(is_left, columns.producer_group == group, columns.key.in_(keys))


def columns_of(connection: Connection, table: sa.Table, schema: str | None = None) -> set[str]:
    """The names of a table's columns, in a schema, or in the one that the connection's schema_translate_map gives."""
    named = named_by(connection, schema) or None
    return {column["name"] for column in sa.inspect(connection).get_columns(table.name, schema=named)}


def with_left_behind_index(
    connection: Connection, schemas: Iterable[str], *, valid: bool = True, index: str = LEFT_BEHIND_INDEX
) -> list[str]:
    """Those of these schemas in which a look for what producers left behind reads an index, and not the whole table:
    a table that an older version made, or a migration of one's own, may lack it, or a CREATE INDEX CONCURRENTLY may
    have failed. `valid`: whether an index that PostgreSQL cannot use does not count; `index`: the one that counts."""
    schemas = list(schemas)
    if connection.dialect.name not in PARTIAL:
        return schemas  # half_message_waiting serves both
    if connection.dialect.name == "sqlite":
        query = f"SELECT 1 FROM {{}} WHERE type = 'index' AND name = '{index}'"
        there = {
            schema
            for schema in schemas
            if connection.scalar(sa.text(query.format(qualified(connection, "sqlite_master", schema or SQLITE))))
        }
    else:
        named = sa.text(
            "SELECT n.nspname FROM pg_catalog.pg_index i"
            " JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid JOIN pg_catalog.pg_class t ON t.oid = i.indrelid"
            " JOIN pg_catalog.pg_namespace n ON n.oid = t.relnamespace"
            " WHERE t.relname = :table AND c.relname = :index AND (i.indisvalid OR NOT :valid)"
            " AND n.nspname = ANY(:schemas)"
        )
        names = {"table": half_message.name, "index": index, "schemas": schemas, "valid": valid}
        there = {text_of(schema) for schema in connection.scalars(named, names)}
    return [schema for schema in schemas if schema in there]


def has_replay(connection: Connection) -> bool:
    """Whether notify_inbox has the column replay; a table of an older version lacks it."""
    return notify_inbox.c.replay.name in columns_of(connection, notify_inbox)


WITHOUT_ROWS_MS = 221_845_392_000_000
"""The value of `rows_from` (the year 9000) in a schema whose producers write no rows: its audits compare nothing."""
_LATE = "a check could not exclude a commit that comes late, and its messages would be lost"
_TWICE = "a message that is delivered again would take effect again"
_SOURCE = Need(notify_source, sees=(SELECT,))
SENDS = {
    "half": (Need(half_message, _LATE), _SOURCE),
    "outbox": (Need(half_message, times=True), _SOURCE),
    "auto": (Need(half_message, _LATE, (SELECT, UPDATE), times=True), _SOURCE),
}
"""A producer's needs, by its mode. Only in mode auto does it read its rows: the role that checks or moves them does."""
CHECKS = (Need(half_message, _LATE, (SELECT, INSERT)), _SOURCE)
CLAIMS = (Need(notify_inbox, _TWICE, (SELECT, INSERT)), _SOURCE)
PURGES = (Need(half_message, sees=(SELECT, DELETE)), Need(notify_source, sees=(SELECT, UPDATE)))
PURGES_INBOX = (Need(notify_inbox, sees=(SELECT, DELETE)), Need(notify_source, sees=(SELECT, UPDATE)))
MAKES = (Need(notify_source, sees=(SELECT, INSERT, UPDATE, DELETE), keeps=False),)
LISTS_REFUSED = Need(notify_refused, "a refused message could be listed twice", (SELECT, INSERT, UPDATE, DELETE))
EVERYTHING = (
    Need(half_message, _LATE, (SELECT, INSERT, UPDATE, DELETE), times=True, ranges=True),
    Need(notify_source, sees=(SELECT, UPDATE)),
    Need(notify_inbox, _TWICE, (SELECT, INSERT, DELETE), ranges=True),
    LISTS_REFUSED,
)
"""The needs of all of them together."""
