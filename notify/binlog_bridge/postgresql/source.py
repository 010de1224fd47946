"""Checks a PostgreSQL: its settings, role, tables and publications. Each finding names the remedy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.binlog_bridge.postgresql import slot as slots
from notify.binlog_bridge.postgresql.position import GAP, MOMENT
from notify.binlog_bridge.postgresql.rights import POOLED
from notify.binlog_bridge.postgresql.slot import PREFIX, SERVER_SUFFIX, Slot
from notify.binlog_bridge.scope import Scope
from notify.errors import Unavailable
from notify.movers.outbox import LOCAL, MOVES, SERVER
from notify.protocol.limits import OLD_SLOT_TRANSACTIONS, digits
from notify.runtime.databases import quoted
from notify.runtime.guarantees import faults
from notify.runtime.pooler import is_pooled
from notify.storage.sql import checkup
from notify.storage.sql.checkup import Finding

OLDEST = 14_00_00
"""The oldest version that decodes binary values and messages."""
KEPT_BYTES = 1 << 30
"""A smaller bound of the retained log leaves an operator little time to start a bridge again."""


@dataclass(frozen=True, slots=True)
class Table:
    """One of Notify's tables in the bridge's scope."""

    schema: str
    name: str
    shown: str
    """Its name within its schema, quoted."""
    kind: str
    """pg_class.relkind: `r` a table, `p` a partitioned one, `v` a view, `f` a foreign one."""
    persistence: str
    """pg_class.relpersistence: `p` permanent, `u` unlogged."""
    identity: str
    """pg_class.relreplident: `f` for FULL."""
    is_simple: bool
    """Whether neither rules nor other tables (INHERITS, partitions) may take its rows."""

    @property
    def is_server(self) -> bool:
        return self.name == SERVER.table.name


_TABLES = sa.text(
    "SELECT n.nspname, c.relname, c.relkind::text, c.relpersistence::text, c.relreplident::text, "
    "NOT (c.relhassubclass OR c.relhasrules) "
    "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.relname IN (:local, :server) AND c.relkind IN ('r', 'p', 'v', 'f') AND NOT c.relispartition "
    "AND n.nspname NOT LIKE 'pg\\_%' ORDER BY 1, 2"
)


def tables(connection: Connection, scope: Scope) -> list[Table]:
    """Notify's tables in the bridge's schemas."""
    rows = connection.execute(_TABLES, {"local": LOCAL.table.name, "server": SERVER.table.name})
    return [
        Table(schema, name, f"{quoted(connection, schema)}.{name}", kind, persistence, identity, bool(is_simple))
        for *texts, is_simple in rows
        for schema, name, kind, persistence, identity in [map(str, texts)]
        if scope.has(schema)
    ]


def slot_of(connection: Connection, name: str, scope: Scope) -> Slot:
    """A source's slot, with the publications that its tables need. `name`: the source's."""
    slot = slots.slot_name(name)
    needed = {SERVER_SUFFIX if table.is_server else "" for table in tables(connection, scope)}
    return Slot(slot, [slot + suffix for suffix in sorted(needed or {""})])


# --- what the bridge makes itself ---------------------------------------------------------------------------------


def prepare(connection: Connection, slot: Slot, scope: Scope) -> list[Finding]:
    """Make publications that are missing, and whole rows in the log of the server's table; what this role may not make
    is a finding. The connection's transaction is committed."""
    found = [table for table in tables(connection, scope) if table.kind in "rp"]
    findings = []
    present = {str(row[0]) for row in connection.exec_driver_sql("SELECT pubname FROM pg_publication")}
    for name in slot.publications:
        of_server = name.endswith(SERVER_SUFFIX)
        listed = [table.shown for table in found if table.is_server == of_server]
        if name in present or not listed:
            continue
        # Only what a bridge reads: a table without a key that publishes its updates could not be updated any more.
        what = f"FOR TABLE {', '.join(listed)} WITH (publish = 'insert', publish_via_partition_root = true)"
        if of_server:
            what = what.replace("'insert'", "'insert, update'")
        elif scope.is_many and _is_superuser(connection):
            what = "FOR ALL TABLES WITH (publish = 'insert', publish_via_partition_root = true)"
        findings += _made(connection, f'CREATE PUBLICATION "{name}" {what}', f"there is no publication {name}")
    for table in found:
        if table.is_server and table.identity != "f":
            findings += _made(
                connection,
                f"ALTER TABLE {table.shown} REPLICA IDENTITY FULL",
                f"the replica identity of {table.shown} is not FULL: long bodies would be missing in the log",
            )
    return findings


def _made(connection: Connection, statement: str, lacking: str) -> list[Finding]:
    connection.commit()
    try:
        connection.exec_driver_sql("SET LOCAL lock_timeout = '2s'")
        connection.exec_driver_sql(statement)
        connection.commit()
    except sa.exc.DBAPIError as error:
        connection.rollback()
        if error.connection_invalidated:
            raise
        state = getattr(error.orig, "sqlstate", "")
        if state == "42710":  # another bridge made it meanwhile
            return []
        if state == "55P03":
            raise Unavailable(
                f"{lacking}, and making it waits for a lock that another session holds: {statement}"
            ) from error
        return [
            Finding(f"{lacking}, and this role may not make it ({_first_line(error)})", f"as their owner: {statement}")
        ]
    return []


def _first_line(error: sa.exc.DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0]


def _is_superuser(connection: Connection) -> bool:
    return str(connection.exec_driver_sql("SHOW is_superuser").scalar()) == "on"


# --- findings -----------------------------------------------------------------------------------------------------


def findings(connection: Connection, slot: Slot, scope: Scope, *, accept_unbounded_wal: bool = False) -> list[Finding]:
    """Findings about a source, those that stop a bridge first; not those about what `prepare` makes."""
    if is_pooled(connection):
        return [Finding("this is a pooler's connection", POOLED)]
    found = [
        *_version_findings(connection),
        *_setting_findings(connection, accept_unbounded_wal=accept_unbounded_wal),
        *_role_findings(connection),
        *_slot_findings(connection, slot),
        *checkup.findings(connection),
    ]
    ours = tables(connection, scope)
    if not ours:
        where = f"schemas {scope.patterns}" if scope.is_many else f"schema {scope.schema}"
        found.append(
            Finding(
                f"there is neither {LOCAL.table.name} nor {SERVER.table.name} in {where}",
                "run create_tables in the service (outbox), or `notify storage upgrade` (server)",
            )
        )
    found += table_findings(connection, ours)
    return sorted(found, key=lambda f: not f.stops)


def table_findings(connection: Connection, ours: Sequence[Table]) -> list[Finding]:
    """Findings about tables whose rows the log lacks, or has under another name."""
    found = [finding for table in ours for finding in _table_findings(table)]
    for schema in dict.fromkeys(table.schema for table in ours):
        found += [Finding(fault.what, fault.remedy) for fault in faults(connection, MOVES, schema)]
    return found


def _version_findings(connection: Connection) -> list[Finding]:
    if _server_version(connection) < OLDEST:
        return [Finding("a bridge reads PostgreSQL 14 and later", "upgrade the server, or run `notify relay`")]
    if connection.exec_driver_sql("SELECT pg_is_in_recovery()").scalar():
        return [Finding("this is a standby, whose log a bridge reads once it is promoted", "name the primary, too")]
    return []


def _server_version(connection: Connection) -> int:
    return int(connection.exec_driver_sql("SELECT current_setting('server_version_num')::int").scalar() or 0)


def _setting(connection: Connection, name: str) -> str:
    return str(
        connection.execute(sa.text("SELECT setting FROM pg_settings WHERE name = :name"), {"name": name}).scalar()
    )


def _setting_findings(connection: Connection, *, accept_unbounded_wal: bool) -> list[Finding]:
    found = []
    if (level := _setting(connection, "wal_level")) != "logical":
        found.append(
            Finding(
                f"wal_level is {level}: rows cannot be read from the log",
                "ALTER SYSTEM SET wal_level = 'logical', and restart PostgreSQL",
            )
        )
    most_mb = int(_setting(connection, "max_slot_wal_keep_size"))
    if most_mb < 0:
        found.append(
            Finding(
                "max_slot_wal_keep_size is unlimited: while this bridge is down, its slot keeps the log until the disk "
                "is full, and the database stops",
                "ALTER SYSTEM SET max_slot_wal_keep_size = '50GB' (what the disk can spare), SELECT pg_reload_conf(); "
                "or start the bridge with --accept-unbounded-wal",
                stops=not accept_unbounded_wal,
            )
        )
    elif most_mb << 20 < KEPT_BYTES:
        found.append(
            Finding(
                f"max_slot_wal_keep_size is {most_mb} MB: a bridge that is down for longer than it takes to write that "
                "much has to start with --backfill",
                "ALTER SYSTEM SET max_slot_wal_keep_size to what the disk can spare",
                stops=False,
            )
        )
    if connection.exec_driver_sql("SHOW server_encoding").scalar() == "SQL_ASCII":
        found.append(
            Finding(
                "the database has the encoding SQL_ASCII, so that nobody knows which letters its bytes are",
                "restore a dump of it into a database with the encoding UTF8",
            )
        )
    if "*" in _setting(connection, "synchronous_standby_names"):
        found.append(
            Finding(
                "synchronous_standby_names has a *, so that commits may wait for this bridge as for a standby",
                "name the standbys there",
                stops=False,
            )
        )
    return found


def _role_findings(connection: Connection) -> list[Finding]:
    row = connection.exec_driver_sql(
        "SELECT rolreplication OR rolsuper OR EXISTS (SELECT 1 FROM pg_roles r WHERE r.rolname = 'rds_replication' "
        "AND pg_has_role(current_user, r.oid, 'MEMBER')), quote_ident(current_user) "
        "FROM pg_roles WHERE rolname = current_user"
    ).one()
    if row[0]:
        return []
    return [
        Finding(
            f"role {row[1]} may not read the log",
            f"ALTER ROLE {row[1]} REPLICATION (on RDS: GRANT rds_replication TO {row[1]})",
        )
    ]


def _slot_findings(connection: Connection, slot: Slot) -> list[Finding]:
    """Findings about the bridge's own slot, or the lack of room for it."""
    used = int(connection.exec_driver_sql("SELECT count(*) FROM pg_replication_slots").scalar() or 0)
    most = int(_setting(connection, "max_replication_slots"))
    state = next(iter(slots.states(connection, slot.name)), None)
    if state is None:
        where = sa.text("SELECT database FROM pg_replication_slots WHERE slot_name = :name")
        other = connection.execute(where, {"name": slot.name}).first()
        if other is not None:
            return [
                Finding(
                    f"slot {slot.name} is of {'database ' + str(other[0]) if other[0] else 'a standby'}",
                    "give this source another name: --dsn NAME=URL",
                )
            ]
        if used < most:
            return []
        return [
            Finding(
                f"all {most} replication slots are used",
                "raise max_replication_slots, and restart PostgreSQL; or drop unused slots: `notify doctor "
                "--dsn … --bridge` names those without a reader",
            )
        ]
    if state.plugin != "pgoutput":
        return [
            Finding(
                f"slot {slot.name} is another program's (its plugin is {state.plugin})",
                "give this source another name: --dsn NAME=URL",
            )
        ]
    found = []
    if state.age > OLD_SLOT_TRANSACTIONS:
        found.append(
            Finding(
                f"slot {slot.name} keeps rows of the catalogue that are {state.age:,} transactions old",
                "start its bridge; or drop the slot with `notify bridge --drop-slot`",
                stops=False,
            )
        )
    return found


def slots_without_a_bridge(connection: Connection) -> list[Finding]:
    """Findings about slots of bridges that nobody reads now: each keeps the log, until it is read or dropped."""
    return [
        Finding(
            f"slot {state.name} has no bridge, and keeps {state.retained >> 20:,} MB of the log"
            + (f" (it is lost: {state.why})" if state.is_lost else ""),
            "start its bridge; if it is given up, `notify bridge --drop-slot --dsn NAME=URL`",
            stops=False,
        )
        for state in slots.states(connection)
        if state.name.startswith(PREFIX) and not state.is_active
    ]


def _table_findings(table: Table) -> list[Finding]:
    if table.kind not in "rp":
        return [
            Finding(
                f"{table.shown} is not a table: the log has the rows of tables only",
                "bridge the database that has the table, or run `notify relay`",
            )
        ]
    if table.persistence != "p":
        return [Finding(f"{table.shown} is UNLOGGED: the log lacks its rows", f"ALTER TABLE {table.shown} SET LOGGED")]
    return []


# The entry as JSON: row filters and lists of columns are there from PostgreSQL 15 on. A row of the catalogue that is
# changed is replaced by one with another xmin; a table that is made again has another oid, and needs an entry unless
# all tables are published. Numbers of transactions are counted through from the first one; those of a table's system
# columns are its own.
_PUBLISHED = (
    "SELECT p.pubname, concat_ws(' ', p.oid, p.xmin), t.schemaname, t.tablename, "
    "coalesce(CASE WHEN r.prrelid IS NULL THEN s.version ELSE concat_ws(' ', r.prrelid, r.xmin) END, ''), "
    "now.until, now.until + age(now.latest) - coalesce(age(r.xmin), s.age, 2147483647), "
    "now.until + age(now.latest) - coalesce((SELECT age(a.xmin) FROM pg_attribute a "
    "WHERE a.attrelid = c.oid AND a.attnum = -1), 0), "
    "p.pubinsert, p.pubupdate, p.pubviaroot, to_jsonb(r) "
    "FROM (SELECT CAST(CAST(s AS text) AS bigint) AS until, CAST(s AS xid) AS latest "
    "FROM pg_snapshot_xmax(pg_current_snapshot()) s) now, "
    "pg_publication_tables t JOIN pg_publication p ON p.pubname = t.pubname "
    "JOIN pg_namespace n ON n.nspname = t.schemaname "
    "JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename "
    "LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid "
    "LEFT JOIN LATERAL ({schemas}) s ON true WHERE p.pubname = ANY(:names)"
)
_BY_SCHEMA = (
    "SELECT concat_ws(' ', x.oid, x.xmin) AS version, age(x.xmin) AS age FROM pg_publication_namespace x "
    "WHERE x.pnpubid = p.oid AND x.pnnspid = n.oid"
)
_BY_SCHEMA_SINCE, _NONE_BY_SCHEMA = 15_00_00, "SELECT CAST(NULL AS text) AS version, CAST(NULL AS int) AS age"
"""Publications of whole schemas (FOR TABLES IN SCHEMA), and what stands for their entries before."""


@dataclass(frozen=True, slots=True)
class Published:
    """The versions of a slot's publications, and of the tables in them, at one moment. A slot gives a row out as it was
    published when it was written, and nobody tells a reader of rows that were not."""

    publications: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)
    until: int = 0
    """The first transaction of which nothing is seen here."""
    made: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The transactions that made a table, and put it into its publications last."""
    ours: Sequence[Table] = ()
    """All of Notify's tables, and views in their place."""
    has_gap: bool = False
    """Whether rows were passed over that are not in the log."""

    def changed_since(self, earlier: Published) -> list[str]:
        """The publications and tables of an earlier moment that were changed, or removed and added again."""
        pairs = ((self.publications, earlier.publications), (self.tables, earlier.tables))
        return [name for now, before in pairs for name, version in now.items() if before.get(name, version) != version]

    def gone_since(self, earlier: Published) -> list[Finding]:
        """Findings about tables of an earlier moment that are not there any more: their services may write to where
        they are now."""
        there = {table.shown for table in self.ours}
        return [
            Finding(f"{table.shown} is gone (renamed, moved to another schema, or dropped)", "put it back")
            for table in earlier.ours
            if table.shown not in there
        ]

    def digest(self, *, is_many: bool) -> str:
        """A text that is another one after a change; "": nothing is published. `is_many`: schemas come and go, so that
        their tables do not count; instead it names the moment, see `put_back_since`."""
        if self.has_gap:
            return GAP
        if not self.publications:
            return ""
        versions = sorted(self.publications.items()), [] if is_many else sorted(self.tables.items())
        digest = hashlib.blake2b(repr(versions).encode(), digest_size=8).hexdigest()
        return f"{digest}{MOMENT}{self.until}" if is_many else digest

    def put_back_since(self, digest: str) -> list[str]:
        """The tables that were there at the moment of a digest, and published, and were put into a publication later:
        so they had been taken out."""
        until = digits(digest.partition(MOMENT)[2])
        if until is None:
            return []
        return [name for name, (table, entry) in self.made.items() if table < until <= entry]


def published(connection: Connection, slot: Slot, scope: Scope) -> tuple[Published, list[Finding]]:
    """The publications as they are now, and findings about tables whose rows, or some of whose rows, the slot does not
    give out."""
    entries_of: dict[tuple[str, str], list[list[Any]]] = {}
    publications: dict[str, str] = {}
    versions: dict[str, list[str]] = {}
    made: dict[str, tuple[int, int]] = {}
    until = 0
    has_schemas = _server_version(connection) >= _BY_SCHEMA_SINCE
    query = sa.text(_PUBLISHED.format(schemas=_BY_SCHEMA if has_schemas else _NONE_BY_SCHEMA))
    for publication, version, schema, name, of_table, seen, entry, table_made, *rest in connection.execute(
        query, {"names": list(slot.publications)}
    ):
        until = int(seen)
        made[f"{schema}.{name}"] = int(table_made), max(int(entry), made.get(f"{schema}.{name}", (0, 0))[1])
        entries_of.setdefault((str(schema), str(name)), []).append(rest)
        publications[str(publication)] = str(version)
        versions.setdefault(f"{schema}.{name}", []).append(f"{publication} {of_table}")
    found = []
    all_ours = tables(connection, scope)
    found_here = [table for table in all_ours if table.kind in "rp" and table.persistence == "p"]
    for table in found_here:
        publication = slot.name + (SERVER_SUFFIX if table.is_server else "")
        entries = entries_of.get((table.schema, table.name), [])
        if not any(_is_whole(table, *entry) for entry in entries):
            what = "only a part of its rows, columns or changes" if entries else "nothing"
            found.append(
                Finding(
                    f"the publication {publication} has {what} of {table.shown}",
                    f'DROP PUBLICATION IF EXISTS "{publication}", and start this bridge with --backfill: it makes it',
                )
            )
        if table.is_server and table.identity != "f":
            found.append(
                Finding(
                    f"the replica identity of {table.shown} is not FULL: long bodies would be missing in the log",
                    f"ALTER TABLE {table.shown} REPLICA IDENTITY FULL",
                )
            )
    ours = {f"{table.schema}.{table.name}" for table in found_here}
    listed = ours & versions.keys()
    now = Published(
        publications,
        {name: " ".join(sorted(versions[name])) for name in listed},
        until,
        {name: made[name] for name in listed},
        all_ours,
    )
    return now, found


def _is_whole(table: Table, inserts: bool, updates: bool, via_root: bool, entry: dict[str, Any] | None) -> bool:
    """Whether a publication gives out all that a bridge needs of a table."""
    return (
        inserts
        and (updates or not table.is_server)
        and (via_root or table.kind != "p")
        and not (entry and (entry.get("prqual") or entry.get("prattrs")))
    )
