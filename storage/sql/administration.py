"""The administrative tables: actions, settings by revision, credentials, schedules.

They are in the registry's database, which its servers share, or, without a registry, in an SQLite file.
Times are microseconds since 1970.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Connection, Engine

from notify.runtime.databases import INNODB, TEXT

metadata = sa.MetaData()

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
"""SQLite increments only columns of the type INTEGER."""
_UTF8 = {"charset": "utf8mb4", "collation": "utf8mb4_bin"}
_PERSON = sa.String(255).with_variant(mysql.VARCHAR(255, **_UTF8), "mysql", "mariadb")
"""A name in any script, such as an identity provider's subject, whatever the database's own character set is."""
_NAME = sa.String(127).with_variant(mysql.VARCHAR(127, **_UTF8), "mysql", "mariadb")
_WHAT = sa.String(64).with_variant(mysql.VARCHAR(64, **_UTF8), "mysql", "mariadb")

server_action = sa.Table(
    "server_action",
    metadata,
    sa.Column("id", _NUMBER, primary_key=True, autoincrement=True),
    sa.Column("at_us", sa.BigInteger, nullable=False),
    sa.Column("who", _PERSON, nullable=False),
    sa.Column("what", _WHAT, nullable=False),
    sa.Column("target", _PERSON, nullable=False),
    sa.Column("reason", TEXT, nullable=False),
    sa.Column("result", TEXT, nullable=False),
    **INNODB,
)
"""Administrative changes: when, who, what, and why."""

server_revision = sa.Table(
    "server_revision",
    metadata,
    sa.Column("number", _NUMBER, primary_key=True, autoincrement=False),
    sa.Column("at_us", sa.BigInteger, nullable=False),
    sa.Column("who", _PERSON, nullable=False),
    sa.Column("reason", TEXT, nullable=False),
    sa.Column("settings", TEXT, nullable=False),  # JSON: every setting that differs from how the servers were started
    **INNODB,
)
"""Complete settings by revision; the newest revision is valid."""

server_credential = sa.Table(
    "server_credential",
    metadata,
    sa.Column("id", sa.String(16), primary_key=True),
    sa.Column("name", sa.String(127), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),  # token, certificate, subject
    sa.Column("proof", _PERSON, nullable=False),  # SHA-256 of the token; the certificate's or subject's name
    sa.Column("rights", TEXT, nullable=False),  # JSON: a list of texts
    sa.Column("requests", sa.Float(53), nullable=False),
    sa.Column("polls", sa.Integer, nullable=False),
    sa.Column("created_us", sa.BigInteger, nullable=False),
    sa.Column("expires_us", sa.BigInteger, nullable=False),
    sa.Column("revoked_us", sa.BigInteger, nullable=False),
    sa.Column("used_us", sa.BigInteger, nullable=False),
    **INNODB,
)
"""Credentials of principals. Only the hash of a token is kept."""

server_audit = sa.Table(
    "server_audit",
    metadata,
    sa.Column("id", _NUMBER, primary_key=True, autoincrement=True),
    sa.Column("at_us", sa.BigInteger, nullable=False),
    sa.Column("verdict", sa.String(16), nullable=False),
    sa.Column("found", TEXT, nullable=False),  # JSON: counts, totals, reasons, span
    sa.Column("report", TEXT, nullable=False),  # a page, "" for none
    **INNODB,
)
"""Results of audits."""

server_change = sa.Table(
    "server_change",
    metadata,
    sa.Column("name", sa.String(16), primary_key=True),
    sa.Column("version", sa.BigInteger, nullable=False),
    **INNODB,
)
"""How often settings, credentials and schedules have changed: servers look here every second."""

server_schedule = sa.Table(
    "server_schedule",
    metadata,
    sa.Column("name", _NAME, primary_key=True),
    sa.Column("secret", sa.String(32), nullable=False),  # from which the ids of its messages are made
    sa.Column("place", _NAME, nullable=False),  # the shard whose log it writes to; "" for a storage that servers share
    sa.Column("declaration", TEXT, nullable=False),  # JSON: the message, and when it is sent
    sa.Column("paused", sa.Integer, nullable=False),
    sa.Column("done_us", sa.BigInteger, nullable=False),  # every instant up to this one was sent, or is skipped
    sa.Column("sent", sa.BigInteger, nullable=False),
    sa.Column("missed", sa.BigInteger, nullable=False),
    sa.Column("last_instant_us", sa.BigInteger, nullable=False),
    sa.Column("last_sent_us", sa.BigInteger, nullable=False),
    sa.Column("changed_us", sa.BigInteger, nullable=False),
    sa.Column("who", _PERSON, nullable=False),
    **INNODB,
)
"""Schedules of recurring messages."""


@contextlib.contextmanager
def changing(engine: Engine, name: str) -> Iterator[Connection]:
    """A transaction that counts as a change of `name`. If two servers make one, one waits, and sees the other's."""
    columns = server_change.c
    # The row to lock is made in its own transaction: if several transactions insert and then update it, InnoDB
    # reports a deadlock.
    with contextlib.suppress(sa.exc.IntegrityError), engine.begin() as connection:
        if connection.scalar(sa.select(columns.version).where(columns.name == name)) is None:
            connection.execute(server_change.insert().values(name=name, version=0))
    with engine.begin() as connection:
        connection.execute(server_change.update().where(columns.name == name).values(version=columns.version + 1))
        yield connection
