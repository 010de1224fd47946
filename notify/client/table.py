"""The tables beside the service's own (half_message, notify_source, notify_inbox, notify_refused): making, marking and
purging them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify import ids
from notify.databases import BODY, DROPPED, ID, INSTANT, KEY, NAME, RELAYED, TEXT, UNSENT, WAKE_CHANNEL, database_now
from notify.errors import InvalidRequest

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


def create_tables(engine: Engine | Connection) -> str:
    """Make the tables where they are missing, and give the database its source id. Returns the source id.

    For an AsyncEngine: `await connection.run_sync(create_tables)` in `async with engine.begin() as connection`. Raises
    InvalidRequest if it is given one.
    """
    if hasattr(engine, "sync_engine"):
        raise InvalidRequest(
            "create_tables runs on a sync Engine or Connection; with an AsyncEngine write: async with engine.begin() "
            "as connection: await connection.run_sync(create_tables)"
        )
    if isinstance(engine, Connection):
        return _create(engine)
    with engine.begin() as connection:
        return _create(connection)


def _create(connection: Connection) -> str:
    _make_missing(connection)
    _add_columns(connection)
    _add_replay(connection)
    if connection.dialect.name == "postgresql":
        _wake_relays(connection)
    return ensure_source(connection)


def _make_missing(connection: Connection) -> None:
    """Make the tables that are missing. Several processes may try at once: a slower one looks again.

    Each further look has a table less to make, so that it ends.
    """
    before = _missing(connection)
    while before:
        try:
            with _savepoint(connection):
                metadata.create_all(connection)
            return
        except sa.exc.DBAPIError:
            missing = _missing(connection)
            if len(missing) >= len(before):
                raise
            before = missing


def _missing(connection: Connection) -> set[str]:
    return metadata.tables.keys() - set(sa.inspect(connection).get_table_names())


def _savepoint(connection: Connection) -> contextlib.AbstractContextManager[object]:
    """PostgreSQL's transaction must outlive a failed change of a table; MySQL and MariaDB commit with each."""
    return connection.begin_nested() if connection.dialect.name == "postgresql" else contextlib.nullcontext()


def _add_columns(connection: Connection) -> None:
    """Columns that an older version did not make. Several processes may try at once."""
    for table in (notify_source, half_message):
        existing = _columns(connection, table)
        for column in table.columns:
            if column.name not in existing:
                _add_column(connection, column)


def _columns(connection: Connection, table: sa.Table) -> set[str]:
    """The names of a table's columns, where the connection's statements find it: its schema_translate_map counts."""
    schemas = connection.get_execution_options().get("schema_translate_map") or {}
    return {column["name"] for column in sa.inspect(connection).get_columns(table.name, schema=schemas.get(None))}


def _add_column(connection: Connection, column: sa.Column[Any]) -> None:
    ddl = sa.schema.CreateColumn(column).compile(dialect=connection.dialect)
    try:
        with _savepoint(connection):
            connection.exec_driver_sql(f"ALTER TABLE {column.table.name} ADD COLUMN {ddl}")
    except sa.exc.DBAPIError:
        # Another process has added it meanwhile; anything else is an error still.
        if column.name not in _columns(connection, column.table):
            raise


def has_digest(connection: Connection) -> bool:
    """Whether half_message keeps the digests of bodies; one that an older version made does not."""
    return half_message.c.digest.name in _columns(connection, half_message)


def has_replay(connection: Connection) -> bool:
    """Whether notify_inbox keeps replays apart; one that an older version made does not."""
    return notify_inbox.c.replay.name in _columns(connection, notify_inbox)


_KEY = "PRIMARY KEY (consumer_group, message_id, replay)"


def _add_replay(connection: Connection) -> None:
    """Let notify_inbox keep replays apart, and every row that is there. Several processes may try at once."""
    if has_replay(connection):
        return
    if connection.dialect.name == "sqlite":
        _rebuild_inbox(connection)
        return
    if connection.dialect.name == "postgresql":
        name = sa.inspect(connection).get_pk_constraint(notify_inbox.name)["name"]
        drop = "DROP CONSTRAINT " + connection.dialect.identifier_preparer.quote(str(name))
    else:
        drop = "DROP PRIMARY KEY"
    ddl = f"ALTER TABLE {notify_inbox.name} ADD COLUMN replay INTEGER DEFAULT 0 NOT NULL, {drop}, ADD {_KEY}"
    try:
        with _savepoint(connection):
            connection.exec_driver_sql(ddl)
    except sa.exc.DBAPIError:
        # Another process has changed it meanwhile; anything else is an error still.
        if not has_replay(connection):
            raise


def _rebuild_inbox(connection: Connection) -> None:
    """SQLite changes a primary key only by making the table anew: in one transaction, under its one lock."""
    # A write takes the lock: what another process does meanwhile is over when it returns.
    connection.execute(notify_source.update().values(purged_before=notify_source.c.purged_before))
    columns = connection.exec_driver_sql(f"PRAGMA table_info({notify_inbox.name})").all()
    if any(column[1] == "replay" for column in columns):
        return
    old = f"{notify_inbox.name}_before_replay"
    connection.exec_driver_sql(f"ALTER TABLE {notify_inbox.name} RENAME TO {old}")
    connection.exec_driver_sql("DROP INDEX IF EXISTS notify_inbox_created_at")
    notify_inbox.create(connection)
    kept = "consumer_group, message_id, created_at"
    connection.exec_driver_sql(f"INSERT INTO {notify_inbox.name} ({kept}) SELECT {kept} FROM {old}")
    connection.exec_driver_sql(f"DROP TABLE {old}")


_WAKE_FUNCTION = f"""
CREATE OR REPLACE FUNCTION half_message_wake() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF pg_try_advisory_xact_lock(74003, 0) THEN PERFORM pg_notify('{WAKE_CHANNEL}', ''); END IF;
    RETURN NULL;
END $$
"""
_WAKE_TRIGGER = """
CREATE TRIGGER half_message_wake AFTER INSERT ON half_message
FOR EACH ROW WHEN (NEW.relayed = 0) EXECUTE FUNCTION half_message_wake()
"""
_HAS_WAKE_TRIGGER = (
    "SELECT count(*) FROM pg_trigger WHERE tgname = 'half_message_wake' AND tgrelid = 'half_message'::regclass"
)


def _wake_relays(connection: Connection) -> None:
    """Have an outbox row wake the relay as its transaction commits.

    PostgreSQL commits transactions that notify one after the other, so of those under way at once only one does: the
    lock says whether another will. A relay that it woke too early for the others finds them at its next look.

    Only where it is missing: making it waits for every transaction that has inserted, and holds up those that would.
    """
    if connection.exec_driver_sql(_HAS_WAKE_TRIGGER).scalar():
        return
    try:
        with connection.begin_nested():
            connection.exec_driver_sql(_WAKE_FUNCTION)
            connection.exec_driver_sql(_WAKE_TRIGGER)
    except sa.exc.ProgrammingError:
        # Another process has made it meanwhile; anything else is an error still.
        if not connection.exec_driver_sql(_HAS_WAKE_TRIGGER).scalar():
            raise


def drop_tables(connection: Connection) -> None:
    """Undo `create_tables`. Undecided halves of this database can then only be resolved by an operator."""
    metadata.drop_all(connection)
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("DROP FUNCTION IF EXISTS half_message_wake()")


_UNNAMED = "00000000-0000-0000-0000-000000000000"
"""The id of a source that is being made; no committed row has it."""


def ensure_source(connection: Connection) -> str:
    """The database's source id; one is made if there is none, and only one by several processes at once."""
    source = connection.execute(sa.select(notify_source.c.id)).scalar_one_or_none()
    if source is not None:
        return str(source)
    # Every process inserts this row first, and waits until the transaction of a quicker one has ended.
    is_mysql = connection.dialect.name in ("mysql", "mariadb")
    ignore = "ON DUPLICATE KEY UPDATE purged_before = 0" if is_mysql else "ON CONFLICT DO NOTHING"
    insert = sa.text(f"INSERT INTO {notify_source.name} (id, purged_before) VALUES (:id, 0) {ignore}")
    connection.execute(insert, {"id": _UNNAMED})
    # A locking read sees what was committed meanwhile, also in REPEATABLE READ on MySQL and MariaDB.
    others = sa.select(notify_source.c.id).where(notify_source.c.id != _UNNAMED).with_for_update()
    source = connection.execute(others).scalar_one_or_none()
    unnamed = notify_source.c.id == _UNNAMED
    if source is not None:
        connection.execute(notify_source.delete().where(unnamed))
        return str(source)
    source = str(uuid.uuid4())
    connection.execute(notify_source.update().where(unnamed).values(id=source))
    return source


def new_source(connection: Connection) -> str:
    """Give a cloned database a source id of its own."""
    fresh = str(uuid.uuid4())
    connection.execute(notify_source.update().values(id=fresh))
    return fresh


CLOCK_SKEW = timedelta(minutes=10)
"""How far a producer's clock may run ahead of its database's: rows of one that runs further are purged later."""


def instant_before(connection: Connection, seconds: float) -> datetime:
    """So many seconds ago by the database's clock: UTC, naive as the columns are."""
    now: Any = connection.execute(sa.select(database_now())).scalar_one()
    moment: datetime = datetime.fromisoformat(now[:26]) if isinstance(now, str) else now
    return moment - timedelta(seconds=seconds)


class OldTransaction(NamedTuple):
    """A transaction that a purge may take: what its first row says of where its half is.

    `is_waiting`: it is in the outbox, and no relay has marked it as sent; a bridge marks nothing.
    """

    producer_group: str
    id: str
    shards: str
    is_waiting: bool


def oldest_transactions(
    connection: Connection, before_seconds: float, limit: int, after: str = "", *, waiting: bool = False
) -> Sequence[OldTransaction]:
    """Transactions whose rows are older than so many seconds by the database's clock, with ids above `after`.

    `waiting`: also those that are in the outbox and not marked as sent.

    Ids rise with time, so the primary key finds the oldest: an index of times would cost every commit a write.
    """
    cutoff = instant_before(connection, before_seconds)
    last_ms = max(0, round((cutoff + CLOCK_SKEW).replace(tzinfo=UTC).timestamp() * 1000))
    t = half_message.c
    states = (UNSENT, RELAYED, DROPPED) if waiting else (RELAYED, DROPPED)
    rows = connection.execute(
        sa.select(t.producer_group, t.transaction_id, t.shards, t.relayed)
        .where(t.transaction_id > after, t.transaction_id < ids.to_text(last_ms.to_bytes(6) + bytes(10)))
        .where(t.created_at < cutoff, t.message_no == 0, t.relayed.in_(states))
        .order_by(t.transaction_id)
        .limit(limit)
    )
    return [OldTransaction(str(row[0]), str(row[1]), str(row[2]), row[3] == 0) for row in rows]


def note_purged(connection: Connection, column: sa.Column[Any], before_seconds: float) -> None:
    """Say that rows older than so many seconds may be gone; in the transaction that deletes them."""
    before_ms = round(instant_before(connection, before_seconds).replace(tzinfo=UTC).timestamp() * 1000)
    connection.execute(notify_source.update().where(column < before_ms).values({column: before_ms}))


def delete_transactions(connection: Connection, transaction_ids: Sequence[str]) -> int:
    """Delete the rows of transactions; how many rows there were."""
    if not transaction_ids:
        return 0
    result = connection.execute(half_message.delete().where(half_message.c.transaction_id.in_(transaction_ids)))
    return int(result.rowcount)
