"""Creates Notify's tables in a service's database, adds columns of newer versions, and creates the source id."""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.check.question import several_sources
from notify.client.tables.definitions import (
    LEFT_BEHIND_INDEX,
    LEFT_KEY_INDEX,
    MAKES,
    columns_of,
    half_message,
    has_replay,
    has_source_id,
    metadata,
    notify_inbox,
    notify_source,
    with_left_behind_index,
)
from notify.errors import InvalidRequest
from notify.runtime.databases import ALL_ROWS, WAKE_CHANNEL, at_level, has_table, whole, without_server_cursors
from notify.runtime.guarantees import verify
from notify.runtime.schemas import found_in, named_by, naming, qualified, text_of


def create_tables(engine: Engine | Connection, schema: str | None = None) -> str:
    """Create the tables that are missing in a schema, and give it a source id. Returns the source id.

    `schema`: the schema (on MySQL and MariaDB the database), which exists; None: that of the `schema_translate_map`,
    or where the connection finds the tables, or else where it creates tables. With an AsyncEngine, write
    `await connection.run_sync(create_tables)` in `async with engine.begin() as connection`. Raises InvalidRequest for
    an AsyncEngine, and for a schema that does not exist.
    """
    if hasattr(engine, "sync_engine") or (isinstance(engine, Engine) and engine.dialect.is_async):
        raise InvalidRequest(
            "create_tables runs on a sync Engine or Connection; with an AsyncEngine write: async with engine.begin() "
            "as connection: await connection.run_sync(create_tables)"
        )
    if isinstance(engine, Connection):
        return _create(engine, schema)
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            # A transaction with one snapshot does not see the tables that another process has made meanwhile.
            at_level(connection, "READ COMMITTED")
        with connection.begin():
            return _create(connection, schema)


def _create(connection: Connection, schema: str | None) -> str:
    # Every statement names the schema, so that all tables are in one.
    with without_server_cursors(connection), naming(connection, _where_to_create(connection, schema)):
        _make_missing(connection)
        _add_columns(connection)
        for index in half_message.indexes:
            if index.name in (LEFT_BEHIND_INDEX, LEFT_KEY_INDEX):
                _add_index(connection, index)
        _add_replay(connection)
        if connection.dialect.name == "postgresql":
            _wake_relays(connection)
        return ensure_source(connection)


_WITH_NAME = sa.text(f"SELECT schema_name FROM information_schema.schemata WHERE schema_name = :name LIMIT {ALL_ROWS}")


def _has_schema(connection: Connection, name: str) -> bool:
    """Whether the database has a schema. SQLAlchemy lists all of them on MySQL, which a session may cut short."""
    if connection.dialect.name not in ("mysql", "mariadb"):
        return sa.inspect(connection).has_schema(name)
    return name in map(text_of, connection.scalars(_WITH_NAME, {"name": name}))


def _where_to_create(connection: Connection, schema: str | None) -> str:
    if named := named_by(connection, schema):
        # Quotes protect a name from a dialect that would look for it in capitals, or with dots as two.
        if not _has_schema(connection, named):
            kind = "database" if connection.dialect.name in ("mysql", "mariadb") else "schema"
            remedy = "create it first, then Notify's tables in it"
            if kind == "database" and _has_schema(connection, named.lower()):
                remedy = f"the server has {named.lower()!r}: write the name so"
            raise InvalidRequest(f"there is no {kind} {named!r} here: {remedy}")
        return named
    found = found_in(connection, half_message.name)
    if not found and connection.dialect.name == "postgresql":
        found = str(connection.execute(sa.text("SELECT current_schema()")).scalar() or "")
    if not found:
        raise InvalidRequest(
            "the connection has no current schema or database to create tables in: name one with schema=, or in the URL"
        )
    return found


def _make_missing(connection: Connection) -> None:
    """Create the missing tables. Several processes may try at the same time: one that fails looks again.

    Each further look must find fewer missing tables, so that the loop ends.
    """
    still_missing = _missing(connection)
    while still_missing:
        try:
            with _savepoint(connection):
                # Without `checkfirst`: MySQL refuses its question while another session makes the tables.
                missing_tables = [metadata.tables[name] for name in still_missing]
                metadata.create_all(connection, missing_tables, checkfirst=False)
            return
        except sa.exc.DBAPIError:
            missing = _missing(connection)
            if len(missing) >= len(still_missing):
                raise
            still_missing = missing


def _missing(connection: Connection) -> set[str]:
    return {name for name in metadata.tables if not has_table(connection, name)}


def _savepoint(connection: Connection) -> contextlib.AbstractContextManager[object]:
    """A savepoint on PostgreSQL, whose transaction must survive a failed DDL statement; MySQL and MariaDB commit with
    each DDL statement."""
    return connection.begin_nested() if connection.dialect.name == "postgresql" else contextlib.nullcontext()


def _add_columns(connection: Connection) -> None:
    """Add the columns that an older version did not create. Several processes may try at the same time."""
    for table in (notify_source, half_message):
        existing = columns_of(connection, table)
        for column in table.columns:
            if column.name not in existing:
                _add_column(connection, column)


def _add_column(connection: Connection, column: sa.Column[Any]) -> None:
    ddl = sa.schema.CreateColumn(column).compile(dialect=connection.dialect)
    try:
        with _savepoint(connection):
            connection.execute(sa.text(f"ALTER TABLE {_here(connection, column.table.name)} ADD COLUMN {ddl}"))
    except sa.exc.DBAPIError:
        # Another process may have added the column meanwhile; anything else is an error.
        if column.name not in columns_of(connection, column.table):
            raise


def _add_index(connection: Connection, index: sa.Index) -> None:
    """Create an index for what producers leave behind, which an older version did not create; several processes may
    try at the same time."""
    if _has_index(connection, index):
        return
    try:
        with _savepoint(connection):
            connection.execute(sa.schema.CreateIndex(index))
    except sa.exc.DBAPIError:
        if not _has_index(connection, index):
            raise


def _has_index(connection: Connection, index: sa.Index) -> bool:
    return bool(with_left_behind_index(connection, [named_by(connection)], valid=False, index=str(index.name)))


def _here(connection: Connection, table: str) -> str:
    """A table's name for a statement as text, in the schema that the connection's other statements name."""
    return qualified(connection, table, named_by(connection))


_KEY = "PRIMARY KEY (consumer_group, message_id, replay)"


def _add_replay(connection: Connection) -> None:
    """Add the column replay to notify_inbox and its primary key; rows are kept. Several processes may try at once."""
    if has_replay(connection):
        return
    if connection.dialect.name == "sqlite":
        _rebuild_inbox(connection)
        return
    if connection.dialect.name == "postgresql":
        place = named_by(connection) or None
        name = sa.inspect(connection).get_pk_constraint(notify_inbox.name, schema=place)["name"]
        drop = "DROP CONSTRAINT " + connection.dialect.identifier_preparer.quote(str(name))
    else:
        drop = "DROP PRIMARY KEY"
    table = _here(connection, notify_inbox.name)
    ddl = f"ALTER TABLE {table} ADD COLUMN replay INTEGER DEFAULT 0 NOT NULL, {drop}, ADD {_KEY}"
    try:
        with _savepoint(connection):
            connection.execute(sa.text(ddl))
    except sa.exc.DBAPIError:
        # Another process may have changed the table meanwhile; anything else is an error.
        if not has_replay(connection):
            raise


def _rebuild_inbox(connection: Connection) -> None:
    """Rebuild notify_inbox, in one transaction, because SQLite cannot change a primary key otherwise."""
    # A write takes SQLite's lock: once it returns, no other process is changing the table.
    connection.execute(notify_source.update().values(purged_before=notify_source.c.purged_before))
    columns = connection.execute(sa.text(f"PRAGMA {_here(connection, 'table_info')}({notify_inbox.name})")).all()
    if any(column[1] == "replay" for column in columns):
        return
    before = f"{notify_inbox.name}_before_replay"
    inbox, old = _here(connection, notify_inbox.name), _here(connection, before)
    connection.execute(sa.text(f"ALTER TABLE {inbox} RENAME TO {before}"))
    connection.execute(sa.text(f"DROP INDEX IF EXISTS {_here(connection, 'notify_inbox_created_at')}"))
    notify_inbox.create(connection)
    copied = "consumer_group, message_id, created_at"
    connection.execute(sa.text(f"INSERT INTO {inbox} ({copied}) SELECT {copied} FROM {old}"))
    connection.execute(sa.text(f"DROP TABLE {old}"))


_WAKE_BODY = f"""
BEGIN
    IF pg_catalog.pg_try_advisory_xact_lock(TG_RELID::int4, 74003) THEN
        PERFORM pg_catalog.pg_notify(
            '{WAKE_CHANNEL}', CASE TG_TABLE_NAME WHEN 'half_message' THEN TG_TABLE_SCHEMA ELSE '' END
        );
    END IF;
    RETURN NULL;
END """
"""The notification names the schema, so that a relay of other schemas sleeps on. A partition of the table may be in
another schema than the table: then it names none, which wakes every relay of the database."""
_WAKE_FUNCTION = (
    "CREATE OR REPLACE FUNCTION {schema}.half_message_wake() RETURNS trigger LANGUAGE plpgsql AS $${body}$$"
)
_WAKE_TRIGGER = """
CREATE TRIGGER half_message_wake AFTER INSERT ON {schema}.half_message
FOR EACH ROW WHEN (NEW.relayed = 0) EXECUTE FUNCTION {schema}.half_message_wake()
"""
_HAS_WAKE_TRIGGER = sa.text(
    "SELECT p.prosrc, pg_catalog.quote_ident(n.nspname) FROM pg_catalog.pg_trigger t "
    "JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace "
    "WHERE t.tgname = 'half_message_wake' AND t.tgrelid = pg_catalog.to_regclass(:name)"
)
"""The body of the trigger's function, and the function's schema."""


def _wake_relays(connection: Connection) -> None:
    """Create the trigger with which an outbox row wakes the relay when its transaction commits.

    PostgreSQL commits transactions that call pg_notify one after the other. Therefore only one of several concurrent
    transactions of a table notifies: the one that gets the advisory lock. If it wakes the relay before the others have
    committed, the relay sees that they are open, and looks again until they have ended.

    The trigger is created only if it is missing, because creating it waits for every open transaction that has inserted
    rows, and blocks new ones. The function of an older version is replaced, which waits for nobody.
    """
    quote = connection.dialect.identifier_preparer.quote_identifier
    schema = quote(found_in(connection, half_message.name))
    place = {"name": f"{schema}.{quote(half_message.name)}"}
    there = connection.execute(_HAS_WAKE_TRIGGER, place).first()
    if there is not None and there[0] == _WAKE_BODY:
        return
    try:
        with connection.begin_nested():
            function_schema = schema if there is None else str(there[1])
            connection.exec_driver_sql(_WAKE_FUNCTION.format(schema=function_schema, body=_WAKE_BODY))
            if there is None:
                connection.exec_driver_sql(_WAKE_TRIGGER.format(schema=schema))
    except (sa.exc.ProgrammingError, sa.exc.InternalError):
        # Another process may have created the trigger or replaced its function meanwhile; anything else is an error.
        # A user who does not own the function of an older version leaves it: relays then look more often.
        if connection.execute(_HAS_WAKE_TRIGGER, place).first() is None:
            raise


def drop_tables(connection: Connection, schema: str | None = None) -> None:
    """Undo `create_tables`. Undecided halves of this schema can then only be resolved by an operator."""
    place = found_in(connection, half_message.name, schema)
    with naming(connection, place):
        there = metadata.tables.keys() - _missing(connection)
        metadata.drop_all(connection, [metadata.tables[name] for name in there], checkfirst=False)
        if connection.dialect.name == "postgresql" and place:
            connection.execute(sa.text(f"DROP FUNCTION IF EXISTS {_here(connection, 'half_message_wake')}()"))


_UNNAMED = "00000000-0000-0000-0000-000000000000"
"""The temporary id of a source that is being created; no committed row has it."""


def ensure_source(connection: Connection) -> str:
    """The schema's source id. Creates it if there is none; several processes at the same time create only one. Raises
    InvalidRequest if there are several."""
    sources = sorted(map(text_of, connection.scalars(whole(sa.select(notify_source.c.id)))))
    if len(sources) > 1:
        raise InvalidRequest(several_sources(sources))
    if sources:
        return sources[0]
    verify(connection, MAKES)  # otherwise a source id that this role may not see would get a second one
    # Every process inserts this row first, and so waits until the transaction of a faster process has ended.
    is_mysql = connection.dialect.name in ("mysql", "mariadb")
    ignore = "ON DUPLICATE KEY UPDATE purged_before = 0" if is_mysql else "ON CONFLICT DO NOTHING"
    table = _here(connection, notify_source.name)
    insert = sa.text(f"INSERT INTO {table} (id, purged_before) VALUES (:id, 0) {ignore}")
    connection.execute(insert, {"id": _UNNAMED})
    # A locking read sees rows that were committed meanwhile, even in REPEATABLE READ on MySQL and MariaDB.
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
    """Give a copied database, or schema, a new source id."""
    verify(connection, MAKES)
    fresh = str(uuid.uuid4())
    connection.execute(notify_source.update().where(has_source_id).values(id=fresh))
    return fresh
