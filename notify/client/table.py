"""The tables beside the service's own: half_message, notify_source, notify_inbox and notify_refused."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.databases import BODY, ID, INSTANT, KEY, NAME, TEXT

metadata = sa.MetaData()
MAKE_TABLES = "call notify.client.create_tables(engine) once, or make the tables with the Alembic helper"
"""The remedy for a database that lacks them, as a part of a sentence."""


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
    sa.Column("body", BODY),
    sa.Column("delay", sa.Float),
    sa.Column("deliver_at", INSTANT),
    sa.Column("ttl", sa.Float),
    sa.Column("relayed", sa.SmallInteger, nullable=False),
    sa.Column("created_at", INSTANT, nullable=False),
    sa.Column("digest", sa.BigInteger),
    mysql_engine="InnoDB",
    sqlite_with_rowid=False,
)
is_waiting = half_message.c.relayed == sa.literal_column("0")
"""Not relayed yet. Written out, not bound: so that SQLite and PostgreSQL see that the index serves it."""
sa.Index(
    "half_message_waiting",
    half_message.c.relayed,
    half_message.c.created_at,
    sqlite_where=is_waiting,
    postgresql_where=is_waiting,
)
"""One row a message. mode half: no body, the server has it, unless the producer keeps messages; mode outbox: the whole
message, `relayed` 0 until the relay has sent it. A tombstone is message 0 with state ROLLED_BACK. Times are UTC by the
database's clock. `digest` (notify/digest.py) is that of the body; NULL in a row of an older SDK, and a table of
an older version lacks it."""
notify_source = sa.Table(
    "notify_source",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("purged_before", sa.BigInteger, nullable=False),  # milliseconds since 1970, as are the next two
    sa.Column("rows_from", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("inbox_from", sa.BigInteger, nullable=False, server_default="0"),
    mysql_engine="InnoDB",
)
"""`purged_before`: up to ids of that time rows were purged by force, so a half whose commit does not stand cannot be
answered for any more. `rows_from` and `inbox_from`: older rows of half_message and notify_inbox may have been purged,
so an audit can say nothing of what lies before."""
notify_inbox = sa.Table(
    "notify_inbox",
    metadata,
    sa.Column("consumer_group", NAME, primary_key=True),
    sa.Column("message_id", sa.String(64), primary_key=True),
    sa.Column("replay", sa.Integer, primary_key=True, autoincrement=False, server_default="0"),
    sa.Column("created_at", INSTANT, nullable=False),
    sa.Index("notify_inbox_created_at", "created_at"),
    mysql_engine="InnoDB",
)
"""One row for each effect. `replay` is 0 but for resets and redrives that were to repeat effects; an SDK that does not
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
    mysql_engine="InnoDB",
)
"""One row a transaction that no target takes, with the target's last answer (`status`, `code`, `detail`) and what a
person decided (`state`, `reason`): see notify/refused.py."""


def columns_of(connection: Connection, table: sa.Table) -> set[str]:
    """The names of a table's columns, where the connection's statements find it: its schema_translate_map counts."""
    schemas = connection.get_execution_options().get("schema_translate_map") or {}
    return {column["name"] for column in sa.inspect(connection).get_columns(table.name, schema=schemas.get(None))}


def has_digest(connection: Connection) -> bool:
    """Whether half_message keeps the digests of bodies; one that an older version made does not."""
    return half_message.c.digest.name in columns_of(connection, half_message)


def has_replay(connection: Connection) -> bool:
    """Whether notify_inbox keeps replays apart; one that an older version made does not."""
    return notify_inbox.c.replay.name in columns_of(connection, notify_inbox)
