"""The server's own tables in a database: halves and outcomes, the registry, and the key map.

`server_half_message` has the columns of the local table `half_message`, under another name so that both may share a
database, and further columns for checks, which count in the row of message 0. It has one row a message. Times are
in UTC; `next_check_us` is in microseconds since 1970.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from notify.runtime.databases import BODY, DROPPED, ID, INNODB, INSTANT, KEY, NAME, RELAYED, TEXT

metadata = sa.MetaData()

_ASCII = {"charset": "ascii", "collation": "ascii_bin"}
_WORD = sa.String(16).with_variant(mysql.VARCHAR(16, **_ASCII), "mysql", "mariadb")
_LABEL = sa.String(255).with_variant(mysql.VARCHAR(255, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb")

server_half_message = sa.Table(
    "server_half_message",
    metadata,
    sa.Column("transaction_id", ID, primary_key=True),
    sa.Column("message_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("producer_group", NAME, nullable=False),
    sa.Column("mode", _WORD, nullable=False),
    sa.Column("state", _WORD, nullable=False),
    sa.Column("shards", sa.String(1024), nullable=False),
    sa.Column("topic", NAME, nullable=False),
    sa.Column("key", KEY),
    sa.Column("tag", NAME),
    sa.Column("headers", TEXT),
    sa.Column("body", BODY),
    sa.Column("delay", sa.Float(53)),
    sa.Column("deliver_at", INSTANT),
    sa.Column("ttl", sa.Float(53)),
    sa.Column("relayed", sa.SmallInteger, nullable=False),
    sa.Column("created_at", INSTANT, nullable=False),
    sa.Column("source", _LABEL, nullable=False),
    sa.Column("instance", _LABEL, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("token", sa.BigInteger, nullable=False),  # of the check that is under way; 0: no check is
    sa.Column("next_check_us", sa.BigInteger),  # in message 0, while the transaction is undecided
    sa.Column("decided_at", INSTANT),
    sqlite_with_rowid=False,
    **INNODB,
)
_is_open = server_half_message.c.next_check_us.is_not(sa.null())
sa.Index(
    "server_half_message_checks",
    server_half_message.c.producer_group,
    server_half_message.c.next_check_us,
    sqlite_where=_is_open,
    postgresql_where=_is_open,
)
is_waiting = sa.and_(
    server_half_message.c.relayed == sa.literal_column("0"),
    server_half_message.c.state == sa.literal_column("'COMMITTED'"),
)
"""Committed and not relayed yet. As text, so that SQLite and PostgreSQL use the partial index for it."""
is_settled = server_half_message.c.relayed.in_((RELAYED, DROPPED))
"""Relayed, or dropped by a person. A refused transaction waits for a person: see notify/movers/refused.py."""


def _relays_look(*_: Any, dialect: Any, **__: Any) -> bool:
    return dialect.name in ("sqlite", "postgresql")


sa.Index(
    "server_half_message_waiting",
    server_half_message.c.decided_at,
    sqlite_where=is_waiting,
    postgresql_where=is_waiting,
).ddl_if(callable_=_relays_look)
"""Not for MySQL and MariaDB, where a bridge reads the binlog and the index would only cost."""

server_shard = sa.Table(
    "server_shard",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),  # always 1: the table has one row
    sa.Column("name", NAME, nullable=False),
    sa.Column("source", ID, nullable=False),
    **INNODB,
)
"""The name of this database's shard; a server that gives it another name is refused."""

server_member = sa.Table(
    "server_member",
    metadata,
    sa.Column("name", _LABEL, primary_key=True),
    sa.Column("kind", _WORD, nullable=False),  # server, bridge, relay, consumer
    sa.Column("url", sa.String(255), nullable=False),
    sa.Column("roles", sa.String(64), nullable=False),
    sa.Column("shards", sa.String(1024), nullable=False),
    sa.Column("room", NAME, nullable=False),
    sa.Column("load", sa.Float(53), nullable=False),
    sa.Column("detail", TEXT, nullable=False),
    sa.Column("started_at", INSTANT, nullable=False),
    sa.Column("seen_at", INSTANT, nullable=False),
    **INNODB,
)
"""The registry: members and their heartbeats. `detail` is JSON."""

server_key_map = sa.Table(
    "server_key_map",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("shards", TEXT, nullable=False),  # JSON: names in order; a key's hash picks one
    sa.Column("made_at", INSTANT, nullable=False),
    **INNODB,
)
"""The key map by version; the newest version is valid."""

server_key_map_change = sa.Table(
    "server_key_map_change",
    metadata,
    sa.Column("of_version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("previous", TEXT, nullable=False),  # JSON: the shards of the previous version
    sa.Column("followed_at", INSTANT),
    sa.Column("settled_at", INSTANT),
    sa.Column("drained_at", INSTANT),
    **INNODB,
)
"""The last recorded step of a change to a version: see storage/sql/key_map.py."""
