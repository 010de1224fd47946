"""Guarantees: what Notify needs of its tables, verified from a database's catalogue before anything rests on it.

A key must exclude a second row: by it a check excludes a late commit, and an inbox a second effect. Rows must last,
and end with their transaction. And a reader must see all rows: an empty answer proves nothing until it is known that
this role may see every row. One statement reads a schema's tables, and `verify` raises UnsafeTable for
the first fault. Missing tables are not a fault here: each caller says itself how to make them.
"""

from __future__ import annotations

import itertools
import json
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Connection

from notify.errors import HiddenRows, UnsafeTable
from notify.runtime.databases import ALL_ROWS, IDS, without_server_cursors
from notify.runtime.schemas import named_by, text_of

Command = Literal["SELECT", "INSERT", "UPDATE", "DELETE"]
SELECT: Command = "SELECT"
INSERT: Command = "INSERT"
UPDATE: Command = "UPDATE"
DELETE: Command = "DELETE"


class Need(NamedTuple):
    """The need that a caller has of a table.

    `excludes`: what happens without a key that excludes a second row; "": nothing, if no row can be there twice.
    `sees`: the commands that must reach every row. `keeps`: whether the caller's own rows must last, so that the kind
    of the table matters, and its key; an audit only reads. `times`: whether rows are moved in the order of their times,
    and deliver at them. `ranges`: whether rows are found by ranges of their ids.
    """

    table: sa.Table
    excludes: str = ""
    sees: tuple[Command, ...] = ()
    keeps: bool = True
    times: bool = False
    ranges: bool = False


class Fault(NamedTuple):
    """A fault of a table: what is wrong and what it leads to, and what to do. `hides`: rows may be there, unseen."""

    what: str
    remedy: str
    hides: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def verify(connection: Connection, needs: Sequence[Need], schema: str | None = None) -> bool:
    """Raises UnsafeTable for the first fault, or HiddenRows. False if a table is missing, and so was not verified.

    `schema`: where the tables are; None: where the connection finds them (notify/runtime/schemas.py).
    """
    tables = _read(connection, needs, named_by(connection, schema))
    for need in needs:
        for fault in _faults_of(connection, need, tables.get(need.table.name)):
            raise HiddenRows(str(fault)) if fault.hides else UnsafeTable(str(fault))
    return all(need.table.name in tables for need in needs)


def faults(connection: Connection, needs: Sequence[Need], schema: str | None = None) -> list[Fault]:
    """All faults of these tables."""
    tables = _read(connection, needs, named_by(connection, schema))
    found = [fault for need in needs for fault in _faults_of(connection, need, tables.get(need.table.name))]
    return list(dict.fromkeys(found))


def pool_of(connection: Connection) -> tuple[Any, float]:
    """A connection's pool, and when its connections were last found broken: if one of them changes, the next connection
    may lead to another server, or to another state of it."""
    pool = connection.engine.pool
    return pool, getattr(pool, "_invalidate_time", 0.0)


_verified: weakref.WeakKeyDictionary[Any, tuple[float, set[tuple[tuple[Need, ...], str]]]]
_verified = weakref.WeakKeyDictionary()
"""By pool: when its connections were last found broken, and what was verified in which schema since then."""


def verify_once(connection: Connection, needs: tuple[Need, ...], schema: str | None = None) -> None:
    """`verify`, once for each pool of connections, so that it costs a transaction nothing; again when the engine
    is disposed of, or the database has ended the connections."""
    pool, invalidated = pool_of(connection)
    since, done = _verified.get(pool, (-1.0, set()))
    if since != invalidated:
        _verified[pool] = (invalidated, done := set())
    key = (needs, named_by(connection, schema))
    if key not in done and verify(connection, needs, key[1]):
        done.add(key)


# --- what a database has ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Index:
    """A unique index. `columns`: None for an expression. `flaw`: why it does not exclude every second row, or ""."""

    name: str
    columns: list[str | None] = field(default_factory=list)
    flaw: str = ""
    with_nulls: bool = False
    """Whether two NULL are the same value."""


@dataclass(slots=True)
class _Column:
    name: str
    nullable: bool
    flaw: str = ""
    """Why names that differ may compare as the same one; "" if they do not."""
    is_zoned: bool = False
    """Whether the database converts its times from and to the session's time zone."""
    collation: str = ""
    """Its collation, in SQL; "": the database's."""


@dataclass(slots=True)
class _Policy:
    """A policy of row level security that holds for this role."""

    name: str
    command: str
    permissive: bool
    using: str | None
    check: str | None


@dataclass(slots=True)
class _Table:
    """A table as the catalogue describes it. `flaw`: why its rows may not last or not end with their transaction."""

    schema: str
    name: str
    kind: str = "table"
    flaw: str = ""
    mends: str = ""
    """The remedy for `flaw`."""
    columns: dict[str, _Column] = field(default_factory=dict)
    indexes: list[_Index] = field(default_factory=list)
    is_partitioned: bool = False
    secured: bool = False
    """Whether row level security holds for this role."""
    role: str = ""
    policies: list[_Policy] = field(default_factory=list)

    @property
    def shown(self) -> str:
        return f"{self.schema}.{self.name}" if self.schema else self.name


def _read(connection: Connection, needs: Sequence[Need], schema: str) -> dict[str, _Table]:
    """The tables that are there, by name. Other kinds of databases cannot be verified: nothing supports them."""
    read = _READERS.get(connection.dialect.name)
    if read is None or not needs:
        return {}
    with without_server_cursors(connection):
        return read(connection, [need.table.name for need in needs], schema)


def _refuse_bytes(text: object) -> None:
    """Raises UnsafeTable if a text comes as bytes, which are equal to no id, state or name."""
    if isinstance(text, bytes | bytearray):
        raise UnsafeTable(
            "the driver gives texts as bytes, in which no id and no state can be recognised: leave out use_unicode=0 "
            "(MySQL, MariaDB), text_factory (SQLite) or a loader of your own"
        )


def _asked(found: sa.TextClause, named: sa.TextClause, names: Sequence[str], schema: str) -> tuple[sa.TextClause, Any]:
    """The statement for a named schema, or for the one that the database finds, with its parameters."""
    return (named, {"names": list(names), "schema": schema}) if schema else (found, {"names": list(names)})


# --- PostgreSQL ---------------------------------------------------------------------------------------------------

_POSTGRESQL = """
SELECT n.nspname, c.relname, current_user, c.relkind, c.relpersistence,
  c.relkind = 'r' AND EXISTS (SELECT 1 FROM pg_catalog.pg_inherits h WHERE h.inhparent = c.oid),
  (SELECT min(r.rulename) FROM pg_catalog.pg_rewrite r WHERE r.ev_class = c.oid AND r.rulename <> '_RETURN'),
  (SELECT min(p.relname) FROM pg_catalog.pg_partition_tree(c.oid) t JOIN pg_catalog.pg_class p ON p.oid = t.relid
     WHERE c.relkind = 'p' AND (p.relpersistence <> 'p' OR p.relkind = 'f')),
  pg_catalog.row_security_active(c.oid),
  (SELECT CAST(json_agg(json_build_array(a.attname, a.attnotnull, CASE WHEN t.typname = 'citext' THEN 'citext'
       WHEN to_jsonb(o) ->> 'collisdeterministic' = 'false' THEN o.collname END, t.typname,
       CASE WHEN o.collname <> 'default' THEN CAST(CAST(o.oid AS regcollation) AS text) END)) AS text)
     FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
     LEFT JOIN pg_catalog.pg_collation o ON o.oid = a.attcollation
     WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
  (SELECT CAST(json_agg(json_build_array(x.relname, i.indimmediate, i.indisvalid AND i.indisready,
       i.indpred IS NOT NULL, to_jsonb(i) ->> 'indnullsnotdistinct' = 'true',
       (SELECT json_agg(a.attname ORDER BY k.no) FROM unnest(CAST(i.indkey AS int2[])) WITH ORDINALITY k(att, no)
          LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.att AND k.att > 0
          WHERE k.no <= i.indnkeyatts))) AS text)
     FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid
     WHERE i.indrelid = c.oid AND (i.indisunique OR i.indisexclusion)),
  (SELECT CAST(json_agg(json_build_array(p.polname, p.polcmd, p.polpermissive,
       pg_catalog.pg_get_expr(p.polqual, p.polrelid), pg_catalog.pg_get_expr(p.polwithcheck, p.polrelid))) AS text)
     FROM pg_catalog.pg_policy p WHERE p.polrelid = c.oid AND (0 = ANY (p.polroles)
       OR EXISTS (SELECT 1 FROM unnest(p.polroles) r WHERE r <> 0 AND pg_catalog.pg_has_role(r, 'USAGE'))))
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relname IN :names AND c.relkind IN ('r', 'p', 'v', 'm', 'f') AND """

_NAMES: sa.BindParameter[Sequence[str]] = sa.bindparam("names", expanding=True)
_POSTGRESQL_NAMED = sa.text(_POSTGRESQL + "n.nspname = :schema").bindparams(_NAMES)
_POSTGRESQL_FOUND = sa.text(
    _POSTGRESQL + "c.oid = pg_catalog.to_regclass(pg_catalog.quote_ident(c.relname))"
).bindparams(_NAMES)
_KINDS = {"r": "table", "p": "table", "v": "view", "m": "materialized view", "f": "foreign table"}
_COMMANDS = {"*": "ALL", "r": SELECT, "a": INSERT, "w": UPDATE, "d": DELETE}


def _read_postgresql(connection: Connection, names: Sequence[str], schema: str) -> dict[str, _Table]:
    found = {}
    for row in connection.execute(*_asked(_POSTGRESQL_FOUND, _POSTGRESQL_NAMED, names, schema)):
        where, name, role, kind, persistence, has_children, rule, volatile, secured, columns, indexes, policies = row
        _refuse_bytes(where)
        table = found[str(name)] = _Table(str(where), str(name), _KINDS[text_of(kind)], role=str(role))
        table.is_partitioned = text_of(kind) == "p"
        table.secured = bool(secured)
        alter = f"ALTER TABLE {table.shown}"
        if text_of(persistence) == "t":
            table.flaw, table.mends = "is a temporary table, which only this session sees", f"DROP TABLE {table.shown}"
        elif text_of(persistence) == "u":
            table.flaw, table.mends = "is UNLOGGED: a crash of the database empties it", f"{alter} SET LOGGED"
        elif volatile is not None:
            table.flaw = f"has a partition, {volatile}, whose rows do not last (UNLOGGED, or a foreign table)"
            table.mends = f"ALTER TABLE {volatile} SET LOGGED, or a partition of this database instead"
        elif has_children:
            table.flaw = "has child tables (INHERITS), whose rows its key does not cover"
            table.mends = "move their rows into the table itself, and drop them"
        elif rule is not None:
            table.flaw = f"has the rule {rule}, which may replace its inserts by other statements"
            table.mends = f"DROP RULE {rule} ON {table.shown}"
        for column_name, is_not_null, folding, kind_of_column, collation in json.loads(columns or "[]"):
            flaw = f"{folding} treats different names as equal" if folding else ""
            is_zoned = kind_of_column == "timestamptz"
            table.columns[column_name] = _Column(column_name, not is_not_null, flaw, is_zoned, collation or "")
        for index_name, immediate, valid, partial, with_nulls, of in json.loads(indexes or "[]"):
            index = _Index(index_name, of or [None], with_nulls=bool(with_nulls))
            if not immediate:
                index.flaw = "is DEFERRABLE, so that a second row is noticed only at the commit"
            elif not valid:
                index.flaw = "is not valid: building it failed, or a partition lacks it"
            elif partial:
                index.flaw = "covers only the rows of its WHERE"
            table.indexes.append(index)
        for policy_name, command, permissive, using, check in json.loads(policies or "[]"):
            table.policies.append(_Policy(policy_name, _COMMANDS[command], permissive, using, check))
    return found


# --- MySQL and MariaDB --------------------------------------------------------------------------------------------

_MYSQL = """
SELECT 'table', t.TABLE_SCHEMA, t.TABLE_NAME, t.TABLE_TYPE, t.ENGINE, e.TRANSACTIONS, CAST('' IS NULL AS SIGNED),
  t.CREATE_OPTIONS
FROM information_schema.TABLES t LEFT JOIN information_schema.ENGINES e ON e.ENGINE = t.ENGINE
WHERE t.TABLE_SCHEMA = {schema} AND t.TABLE_NAME IN :names
UNION ALL SELECT 'column', TABLE_SCHEMA, TABLE_NAME, COLUMN_NAME, COLLATION_NAME, IS_NULLABLE,
  CAST(ORDINAL_POSITION AS SIGNED), DATA_TYPE
FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = {schema} AND TABLE_NAME IN :names
UNION ALL SELECT 'index', TABLE_SCHEMA, TABLE_NAME, INDEX_NAME, COLUMN_NAME, SUB_PART,
  CAST(SEQ_IN_INDEX AS SIGNED), NULL
FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = {schema} AND TABLE_NAME IN :names AND NON_UNIQUE = 0
ORDER BY 1, 3, 4, 7 LIMIT {rows}
"""
_MYSQL_NAMED = sa.text(_MYSQL.format(schema=":schema", rows=ALL_ROWS)).bindparams(_NAMES)
_MYSQL_FOUND = sa.text(_MYSQL.format(schema="DATABASE()", rows=ALL_ROWS)).bindparams(_NAMES)
_MYSQL_KINDS = {"BASE TABLE": "table", "SYSTEM VERSIONED": "table", "TEMPORARY": "temporary table"}


def _read_mysql(connection: Connection, names: Sequence[str], schema: str) -> dict[str, _Table]:
    asked = _asked(_MYSQL_FOUND, _MYSQL_NAMED, names, schema)
    rows = []
    for row in connection.execute(*asked):
        _refuse_bytes(row[0])  # a literal: some drivers give texts of information_schema as bytes
        rows.append(tuple(_decoded(value) for value in row))
    found: dict[str, _Table] = {}
    for what, where, name, kind, engine, has_transactions, is_empty_null, options in rows:
        if what == "table":
            if is_empty_null:
                raise UnsafeTable(
                    "the session takes '' for NULL, so that rows without a shard are refused, or not found when they "
                    "are looked for: leave EMPTY_STRING_IS_NULL out of its sql_mode"
                )
            table = found[name] = _Table(where, name, _MYSQL_KINDS.get(kind, str(kind).lower()))
            table.is_partitioned = "partitioned" in str(options or "").lower()
            if engine is not None and has_transactions != "YES":
                table.flaw = f"has the engine {engine}, which has no transactions: a rollback would keep its rows"
                table.mends = f"ALTER TABLE {table.shown} ENGINE=InnoDB"
    for what, _, name, of, value, detail, _, kind in rows:
        if name not in found or what == "table":
            continue
        table = found[name]
        if what == "column":
            flaw = (
                ""
                if value is None or value.endswith("_bin") or value == "binary"
                else (f"the collation {value} treats different names as equal")
            )
            table.columns[of] = _Column(of, detail == "YES", flaw, str(kind).lower() == "timestamp", value or "")
            continue
        if not table.indexes or table.indexes[-1].name != of:
            table.indexes.append(_Index(of))
        index = table.indexes[-1]
        index.columns.append(value)
        if detail is not None:
            index.flaw = f"covers only the first {detail} characters of {value}"
    return found


def _decoded(value: Any) -> Any:
    """A value of information_schema; some drivers give its texts as bytes."""
    return value.decode() if isinstance(value, bytes | bytearray) else value


# --- SQLite -------------------------------------------------------------------------------------------------------

_SQLITE = """
SELECT 'table', m.name, m.type, m.sql, NULL, NULL FROM {schema}.sqlite_master m
WHERE m.name IN :names AND m.type IN ('table', 'view')
UNION ALL SELECT 'column', m.name, c.name, c."notnull", c.pk, c.cid
FROM {schema}.sqlite_master m, pragma_table_info(m.name, :schema) c WHERE m.name IN :names
UNION ALL SELECT 'index' || i.partial, m.name, i.name, x.name, x.coll, x.seqno
FROM {schema}.sqlite_master m, pragma_index_list(m.name, :schema) i, pragma_index_xinfo(i.name, :schema) x
WHERE m.name IN :names AND i."unique" AND x.key
ORDER BY 1, 2, 3, 6
"""
_RESOLVES = re.compile(r"ON\s+CONFLICT\s+(REPLACE|IGNORE|ROLLBACK|FAIL)", re.IGNORECASE)


def _read_sqlite(connection: Connection, names: Sequence[str], schema: str) -> dict[str, _Table]:
    schema = schema or "main"
    attached = {row[1] for row in connection.exec_driver_sql("PRAGMA database_list")}
    for name in attached:
        _refuse_bytes(name)
    if schema not in attached:
        return {}  # no file is attached under this name, so that it has no tables
    quoted = connection.dialect.identifier_preparer.quote(schema)
    query = sa.text(_SQLITE.format(schema=quoted)).bindparams(_NAMES)
    rows = connection.execute(query, {"names": list(names), "schema": schema}).all()
    mode = str(connection.exec_driver_sql(f"PRAGMA {quoted}.journal_mode").scalar() or "").upper()
    found: dict[str, _Table] = {}
    for what, name, kind, sql, *_ in rows:
        if what == "table":
            table = found[name] = _Table("" if schema == "main" else schema, name, kind)
            resolves = _RESOLVES.search(sql or "")
            if str(sql).upper().startswith("CREATE VIRTUAL"):
                table.kind = "virtual table"
            elif mode == "OFF":
                table.flaw = "is in a file with the journal mode OFF, in which a rollback undoes nothing"
                table.mends = "PRAGMA journal_mode = WAL"
            elif resolves is not None:
                table.flaw = f"has the clause {resolves.group(0).upper()}, so a second row raises no error"
                table.mends = "rename the table, have create_tables recreate it, and copy its rows"
    keys: dict[str, dict[int, str]] = {name: {} for name in found}
    for what, name, of, value, collation, _ in rows:
        if name not in found or what == "table":
            continue
        table = found[name]
        if what == "column":
            table.columns[of] = _Column(of, not value)
            if collation:  # the place in the primary key
                keys[name][int(collation)] = of
            continue
        if not table.indexes or table.indexes[-1].name != of:
            table.indexes.append(_Index(of, flaw="covers only the rows of its WHERE" if what == "index1" else ""))
        table.indexes[-1].columns.append(value)
        if collation not in (None, "BINARY") and value in table.columns:
            table.columns[value].flaw = f"the collation {collation} treats different names as equal"
    for name, key in keys.items():
        if len(key) == 1:  # an INTEGER PRIMARY KEY has no index
            found[name].indexes.append(_Index("PRIMARY KEY", list(key.values())))
    return found


_Reader = Callable[[Connection, Sequence[str], str], dict[str, _Table]]
_READERS: dict[str, _Reader] = {
    "postgresql": _read_postgresql,
    "mysql": _read_mysql,
    "mariadb": _read_mysql,
    "sqlite": _read_sqlite,
}


# --- judging ------------------------------------------------------------------------------------------------------


def _faults_of(connection: Connection, need: Need, table: _Table | None) -> Iterator[Fault]:
    if table is None:
        return
    if table.kind != "table":
        yield Fault(
            f"{table.shown} is a {table.kind}, not a table, so that rows may be missing from it, or written elsewhere",
            f"remove it, or name the schema of Notify's own table {table.name}",
        )
        return
    if need.keeps:
        if table.flaw:
            yield Fault(f"the table {table.shown} {table.flaw}", table.mends)
        yield from _key_faults(connection, need, table)
    if need.times:
        yield from _time_faults(connection, need, table)
    if need.ranges:
        yield from _order_faults(connection, need, table)
    if table.secured:
        yield from _hidden(need, table)


def _key_faults(connection: Connection, need: Need, table: _Table) -> Iterator[Fault]:
    """Faults of the primary key. A column that a table of an older version lacks is left out of it."""
    key = [column.name for column in need.table.primary_key.columns if column.name in table.columns]
    same = [index for index in table.indexes if set(index.columns) == set(key)]
    wider = [index for index in table.indexes if set(index.columns) > set(key) and not index.flaw]
    if all(index.flaw for index in same) and (need.excludes or not wider):
        yield Fault(
            f"the table {table.shown} has no key over ({', '.join(key)}) that holds{_instead(key, same, table)}: "
            f"{need.excludes or 'rows that are restored twice would be sent twice'}",
            _mended_key(key, table),
        )
    if not need.excludes:
        return
    for index in table.indexes:
        if set(index.columns) >= set(key) or not _takes_for_same(index, table):
            continue
        yield Fault(
            f"the table {table.shown} has the unique index {index.name} over ({_listed(index)}), which treats rows "
            "that differ as equal",
            "drop it, or make it not unique",
        )
    for name in _named_by(need.table):
        column = table.columns.get(name)
        if column is not None and column.flaw:
            yield Fault(
                f"in the column {name} of the table {table.shown} {column.flaw}",
                f"give it the type {_type_of(connection, need.table.c[name])} again",
            )


def _time_faults(connection: Connection, need: Need, table: _Table) -> Iterator[Fault]:
    """A fault if the session's time zone, or its summer time, changes the order of rows and the times in them."""
    for column in need.table.columns:
        there = table.columns.get(column.name)
        if there is not None and there.is_zoned and isinstance(column.type, sa.DateTime):
            yield Fault(
                f"the column {column.name} of the table {table.shown} has a time zone, so that times in UTC are taken "
                "for those of each session's zone: rows overtake each other, and delays end at other times",
                f"give it the type {_type_of(connection, column)} again, with its times in UTC",
            )


def _order_faults(connection: Connection, need: Need, table: _Table) -> Iterator[Fault]:
    """A fault if the ids by which rows are found sort in another order than their times."""
    for column in need.table.primary_key.columns:
        there = table.columns.get(column.name)
        if _is_id(column) and there is not None and not sorts_by_bytes(connection, there.collation):
            yield Fault(
                f"the collation of the column {column.name} of the table {table.shown} sorts ids in another order than "
                "that of their times, such as aa after z, so that ranges of times lack rows",
                f"give it the type {_type_of(connection, column)}",
            )


def _is_id(column: sa.Column[Any]) -> bool:
    return any(column.type is kind for kind in IDS)


_PAIRS = [f"{number:02x}" for number in range(256)]


def sorts_by_bytes(connection: Connection, collation: str) -> bool:
    """Whether a collation (as SQL; "": the database's) has the digits of ids in the order of their bytes: no two of
    them are a letter of its language, digits are not compared as numbers, and letters follow them."""
    if connection.dialect.name == "sqlite" or collation.endswith(("_bin", '"C"', '"POSIX"')):
        return True
    collate = f" COLLATE {collation}" * bool(collation)
    of = f"_{collation.partition('_')[0]}" if collation and connection.dialect.name in ("mysql", "mariadb") else ""
    ordered = " AND ".join(f"{of}'{a}' < {of}'{b}'{collate}" for a, b in itertools.pairwise(_PAIRS))
    return bool(connection.scalar(sa.text(f"SELECT CASE WHEN {ordered} THEN 1 ELSE 0 END")))


def _takes_for_same(index: _Index, table: _Table) -> bool:
    """Whether two rows of Notify's can have the same values in an index: it knows no columns that may be NULL, in
    which rows differ for an index."""
    if index.with_nulls:
        return True
    return all(
        name is not None and name in table.columns and not table.columns[name].nullable for name in index.columns
    )


def _named_by(table: sa.Table) -> Iterator[str]:
    """The columns with names by which rows are found. Ids have no capital letters, so that no collation takes two of
    them for one."""
    whole = [index for index in table.indexes if index.dialect_options["postgresql"]["where"] is None]
    indexed = {column.name for index in whole for column in index.columns}
    for column in table.columns:
        of_mysql = column.type.dialect_impl(mysql.dialect())
        if not str(getattr(of_mysql, "collation", None) or "").endswith("_bin") or _is_id(column):
            continue
        if column.primary_key or column.name in indexed:
            yield column.name


def _instead(key: list[str], same: list[_Index], table: _Table) -> str:
    """The key that the table has instead, in brackets."""
    if same:
        return f" ({same[0].name} {same[0].flaw})"
    for index in table.indexes:
        more = [name or "an expression" for name in index.columns if name not in key]
        if more and set(key) <= set(index.columns):
            return f" ({index.name} also has {', '.join(more)})"
    return f" ({table.indexes[0].name} is over {_listed(table.indexes[0])})" if table.indexes else " (it has none)"


def _mended_key(key: list[str], table: _Table) -> str:
    remedy = f"make ({', '.join(key)}) its primary key again"
    if table.is_partitioned:
        remedy += (
            f", with partitions by hash of {key[0]} or with none, and purge old rows instead of dropping partitions"
        )
    return remedy


def _listed(index: _Index) -> str:
    return ", ".join(name or "an expression" for name in index.columns)


def _type_of(connection: Connection, column: sa.Column[Any]) -> str:
    return str(column.type.compile(connection.dialect))


def _hidden(need: Need, table: _Table) -> Iterator[Fault]:
    """A fault if row level security may hide rows from a command. A policy is understood only if it is `true`."""
    for command in need.sees:
        policies = [policy for policy in table.policies if policy.command in ("ALL", command)]
        allows = any(policy.permissive and _is_true(policy, command) for policy in policies)
        narrower = [policy.name for policy in policies if not policy.permissive and not _is_true(policy, command)]
        if allows and not narrower:
            continue
        why = "no policy of this role is USING (true)"
        remedy = (
            f"CREATE POLICY notify ON {table.shown} TO {table.role} USING (true), or ALTER ROLE {table.role} BYPASSRLS"
        )
        if narrower:
            why = f"the restrictive policy {narrower[0]} holds for this role"
            remedy = f"leave this role out of {narrower[0]}, or ALTER ROLE {table.role} BYPASSRLS"
        yield Fault(
            f"row level security may hide rows of the table {table.shown} from {command} by the role {table.role}, "
            f"since {why}, so that none seen does not mean that there are none",
            remedy,
            hides=True,
        )
        return


def _is_true(policy: _Policy, command: Command) -> bool:
    """Whether a policy lets a command reach every row."""
    check = policy.check if policy.check is not None else policy.using
    asked = {INSERT: (check,), UPDATE: (policy.using, check)}.get(command, (policy.using,))
    return all(expression == "true" for expression in asked)
