"""Guarantees: a table that cannot keep what Notify promises is named, on every database; one that can is not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import create_async_engine

from notify.client import create_tables
from notify.client.tables.definitions import CHECKS, EVERYTHING, PURGES, SENDS, half_message, notify_inbox
from notify.errors import HiddenRows, UnsafeTable
from notify.movers.outbox import MOVES, READS
from notify.runtime.guarantees import DELETE, INSERT, SELECT, UPDATE, Need, faults, verify, verify_once
from notify.storage.sql import schema
from notify.storage.sql.engines import open_engine
from tests.support.databases import DATABASES, empty_database
from tests.support.shop import make_engine
from tests.support.spoiled import MYSQLS, a_view, key_of, made_again, partitioned, spoil, without_key

EVERY = (*EVERYTHING, *MOVES, *READS)
HALF, INBOX = half_message.name, notify_inbox.name


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def found(engine: sa.Engine, needs: tuple[Need, ...] = EVERYTHING, where: str | None = None) -> list[str]:
    with engine.connect() as connection:
        return [str(fault) for fault in faults(connection, needs, where)]


def test_tables_as_notify_makes_them_have_no_fault(engine: sa.Engine) -> None:
    storage = open_engine(engine.url.render_as_string(hide_password=False))
    schema.upgrade(storage, "main")
    assert found(engine, EVERY) == found(storage, schema.NEEDS) == []
    storage.dispose()
    with engine.connect() as connection:
        assert verify(connection, EVERY) and verify(connection, schema.NEEDS)


def test_missing_tables_are_no_fault_but_not_verified(engine_url: str) -> None:
    engine = make_engine(engine_url)
    with engine.connect() as connection:
        assert faults(connection, EVERY) == [] and not verify(connection, EVERY)
    engine.dispose()


# --- keys, kinds, names -------------------------------------------------------------------------------------------

_NAMES = f"ALTER TABLE {INBOX} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci"
_NEWER = f"ALTER TABLE {INBOX} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_ai_ci"
_FOREIGN = [
    f"DROP TABLE {INBOX}",
    "CREATE FOREIGN DATA WRAPPER elsewhere",
    "CREATE SERVER elsewhere FOREIGN DATA WRAPPER elsewhere",
    f"CREATE FOREIGN TABLE {INBOX} (consumer_group varchar(127)) SERVER elsewhere",
]
_ONLY = [*partitioned("postgresql", HALF, "HASH (transaction_id)", ()), *without_key("postgresql", HALF)]
_PARTIAL = f"CREATE UNIQUE INDEX k ON {INBOX} {key_of(INBOX)} WHERE replay = 0"
_INSENSITIVE = "CREATE COLLATION insensitive (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
FAULTS: list[tuple[tuple[str, ...], str, list[str], str]] = [
    *(((kind,), "by time", partitioned(kind, HALF), "also has created_at): a check") for kind in DATABASES),
    *(((kind,), "inbox by time", partitioned(kind, INBOX), "also has created_at): a message") for kind in DATABASES),
    *(((kind,), "no key", without_key(kind, INBOX), "(it has none)") for kind in DATABASES),
    (DATABASES, "view", a_view(INBOX), "is a view, not a table"),
    (
        DATABASES,
        "too strict",
        [f"CREATE UNIQUE INDEX once ON {INBOX} (message_id)"],
        "unique index once over (message_id)",
    ),
    (("postgresql",), "by state", partitioned("postgresql", HALF, "LIST (state)", ("state",)), "also has state)"),
    (
        ("postgresql",),
        "half a partition",
        [*_ONLY, f"CREATE UNIQUE INDEX k ON ONLY {HALF} {key_of(HALF)}"],
        "k is not valid",
    ),
    (
        ("postgresql",),
        "unlogged",
        [f"ALTER TABLE {HALF} SET UNLOGGED"],
        "empties it: ALTER TABLE public.half_message SET LOGGED",
    ),
    (
        ("postgresql",),
        "unlogged partition",
        [*partitioned("postgresql", HALF, "HASH (transaction_id)", ()), f"ALTER TABLE {HALF}_all SET UNLOGGED"],
        "has a partition, half_message_all, whose rows do not last",
    ),
    (("postgresql",), "foreign", _FOREIGN, "is a foreign table"),
    (
        ("postgresql",),
        "rule",
        [f"CREATE RULE r AS ON INSERT TO {INBOX} DO INSTEAD NOTHING"],
        "DROP RULE r ON public.notify_inbox",
    ),
    (("postgresql",), "children", [f"CREATE TABLE child () INHERITS ({HALF})"], "has child tables"),
    (
        ("postgresql",),
        "deferrable",
        [
            *without_key("postgresql", INBOX),
            f"ALTER TABLE {INBOX} ADD PRIMARY KEY {key_of(INBOX)} DEFERRABLE INITIALLY DEFERRED",
        ],
        "notify_inbox_pkey is DEFERRABLE",
    ),
    *(
        ((kind,), "partial", [*without_key(kind, INBOX), _PARTIAL], "k covers only the rows of its WHERE")
        for kind in ("postgresql", "sqlite")
    ),
    (
        ("postgresql",),
        "expression",
        [
            *without_key("postgresql", INBOX),
            f"CREATE UNIQUE INDEX k ON {INBOX} (lower(consumer_group), message_id, replay)",
        ],
        "k is over an expression, message_id, replay",
    ),
    (
        ("postgresql",),
        "insensitive",
        [_INSENSITIVE, f"ALTER TABLE {INBOX} ALTER consumer_group TYPE varchar(127) COLLATE insensitive"],
        "insensitive treats different names",
    ),
    (
        ("postgresql",),
        "nulls",
        [f"CREATE UNIQUE INDEX k ON {HALF} (tag) NULLS NOT DISTINCT"],
        "unique index k over (tag)",
    ),
    (
        ("postgresql",),
        "exclusion",
        [f"ALTER TABLE {INBOX} ADD CONSTRAINT k EXCLUDE (message_id WITH =)"],
        "unique index k",
    ),
    (MYSQLS, "MyISAM", [f"ALTER TABLE {HALF} ENGINE=MyISAM"], "has the engine MyISAM, which has no transactions"),
    (MYSQLS, "MEMORY", [f"ALTER TABLE {INBOX} ENGINE=MEMORY"], "has the engine MEMORY"),
    (("mariadb",), "Aria", [f"ALTER TABLE {INBOX} ENGINE=Aria"], "has the engine Aria"),
    (MYSQLS, "collation", [_NAMES], "utf8mb4_unicode_ci treats different names as equal"),
    (("mysql",), "newer collation", [_NEWER], "VARCHAR(127) CHARACTER SET ascii COLLATE ascii_bin again"),
    (
        MYSQLS,
        "prefix",
        [f"ALTER TABLE {INBOX} DROP PRIMARY KEY, ADD UNIQUE k (consumer_group(10), message_id, replay)"],
        "k covers only the first 10 characters of consumer_group",
    ),
    (
        ("mysql",),
        "expression",
        [f"ALTER TABLE {INBOX} DROP PRIMARY KEY, ADD UNIQUE k ((lower(consumer_group)), message_id, replay)"],
        "k is over an expression, message_id, replay",
    ),
    *(
        (
            ("postgresql",),
            f"{what} in {table.name}",
            [
                f"CREATE COLLATION other (provider = icu, locale = '{locale}')",
                f"ALTER TABLE {table.name} ALTER {column} TYPE varchar(64) COLLATE other",
            ],
            f"sorts ids in another order than that of their times, such as aa after z, so that ranges of times lack "
            f"rows: give it the type {table.c[column].type.compile(postgresql.dialect())}",
        )
        for what, locale in (("Danish", "da-DK"), ("numeric", "en-u-kn"))
        for table, column in ((half_message, "transaction_id"), (notify_inbox, "message_id"))
    ),
    (
        MYSQLS,
        "Danish",
        [f"ALTER TABLE {INBOX} MODIFY message_id VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_danish_ci"],
        "give it the type VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin",
    ),
    (("sqlite",), "NOCASE", made_again(INBOX, key_of(INBOX), "COLLATE NOCASE"), "NOCASE treats different names"),
    *(
        (
            ("sqlite",),
            clause,
            made_again(INBOX, key_of(INBOX), behind=f"ON CONFLICT {clause}"),
            f"clause ON CONFLICT {clause}",
        )
        for clause in ("REPLACE", "IGNORE")
    ),
    (
        ("sqlite",),
        "virtual",
        [f"DROP TABLE {INBOX}", f"CREATE VIRTUAL TABLE {INBOX} USING fts5(message_id)"],
        "is a virtual table",
    ),
]


@pytest.mark.parametrize(
    ("database", "statements", "says"),
    [
        pytest.param(kind, statements, says, id=f"{kind}-{what}")
        for kinds, what, statements, says in FAULTS
        for kind in kinds
    ],
)
def test_a_table_that_breaks_a_promise_is_named(
    engine: sa.Engine, database: str, statements: list[str], says: str
) -> None:
    spoil(engine, statements)
    sentences = found(engine)
    assert len(sentences) == 1 and says in sentences[0], sentences
    with engine.connect() as connection, pytest.raises(UnsafeTable) as raised:
        verify(connection, EVERYTHING)
    assert str(raised.value) == sentences[0]


SOUND: list[tuple[tuple[str, ...], str, list[str]]] = [
    *(((kind,), "by hash", partitioned(kind, HALF, "HASH (transaction_id)", ())) for kind in ("postgresql", *MYSQLS)),
    (DATABASES, "wider index too", [f"CREATE UNIQUE INDEX k ON {HALF} {key_of(HALF, 'created_at')}"]),
    (DATABASES, "columns more", [f"ALTER TABLE {INBOX} ADD COLUMN tenant VARCHAR(10)"]),
    (DATABASES, "unique where a tombstone has NULL", [f"CREATE UNIQUE INDEX k ON {HALF} (producer_group, tag)"]),
    (
        ("postgresql",),
        "ids of another collation",
        [f'ALTER TABLE {HALF} ALTER transaction_id TYPE varchar(36) COLLATE "en-x-icu"'],
    ),
    (MYSQLS, "ids of another collation", [f"ALTER TABLE {HALF} CONVERT TO CHARACTER SET utf8mb4"]),
    (("mariadb",), "versioned", [f"ALTER TABLE {INBOX} ADD SYSTEM VERSIONING"]),
    (
        ("postgresql",),
        "a unique constraint instead of the primary key",
        [*without_key("postgresql", INBOX), f"ALTER TABLE {INBOX} ADD UNIQUE {key_of(INBOX)}"],
    ),
    (
        ("postgresql",),
        "a trigger",
        [
            "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
            f"CREATE TRIGGER t BEFORE INSERT ON {HALF} FOR EACH ROW EXECUTE FUNCTION f()",
        ],
    ),
]


@pytest.mark.parametrize(
    ("database", "statements"),
    [pytest.param(kind, statements, id=f"{kind}-{what}") for kinds, what, statements in SOUND for kind in kinds],
)
def test_a_table_that_keeps_its_promises_is_not_refused(
    engine: sa.Engine, database: str, statements: list[str]
) -> None:
    spoil(engine, statements)
    assert found(engine) == []


@pytest.mark.parametrize("database", DATABASES)
def test_an_outbox_may_be_partitioned_by_time(engine: sa.Engine, database: str) -> None:
    spoil(engine, partitioned(database, HALF))
    assert found(engine, SENDS["outbox"]) == found(engine, MOVES) == found(engine, READS) == []
    assert len(found(engine, SENDS["half"])) == 1
    spoil(engine, [f"DROP TABLE {HALF}"])
    create_tables(engine)
    spoil(engine, without_key(database, HALF))
    assert "restored twice" in found(engine, MOVES)[0] and found(engine, READS) == []


@pytest.mark.parametrize("database", ["sqlite"])
def test_a_journal_that_undoes_nothing_is_named(engine: sa.Engine, database: str) -> None:
    engine.dispose()
    plain = sa.create_engine(engine.url, isolation_level="AUTOCOMMIT")
    with plain.connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = OFF")
        assert {"journal mode OFF" in str(fault) for fault in faults(connection, EVERYTHING)} == {True}
    plain.dispose()


# --- where they are -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["postgresql", *MYSQLS])
def test_the_table_of_the_schema_in_question_is_verified(
    database: str, engine: sa.Engine, database_urls: Mapping[str, str], tmp_path: Path
) -> None:
    """Named, by the connection's own rule, or by its schema_translate_map."""
    if database == "postgresql":
        spoil(engine, ["CREATE SCHEMA other", f"CREATE TABLE other.{INBOX} (LIKE {INBOX})"])
        other = "other"
        assert "other.notify_inbox" in found(engine, where=other)[0]
        with engine.connect() as connection:
            connection.exec_driver_sql("SET LOCAL search_path = other, public")
            (fault,) = faults(connection, EVERYTHING)
            assert "other.notify_inbox" in fault.what
    else:
        with empty_database(database, database_urls, tmp_path) as url:
            other = str(sa.make_url(url).database)
            spoil(
                engine, [f"CREATE TABLE {other}.{INBOX} LIKE {INBOX}", f"ALTER TABLE {other}.{INBOX} DROP PRIMARY KEY"]
            )
            assert f"{other}.notify_inbox" in found(engine, where=other)[0]
            mapped = engine.execution_options(schema_translate_map={None: other})
            assert f"{other}.notify_inbox" in found(mapped)[0]
    assert found(engine) == []


@pytest.mark.parametrize("database", ["sqlite"])
def test_an_attached_file_is_a_schema(engine: sa.Engine, database: str, tmp_path: Path) -> None:
    with engine.connect() as connection:
        connection.commit()
        driver = connection.connection.dbapi_connection
        assert driver is not None
        cursor = driver.cursor()
        cursor.execute(f"ATTACH '{tmp_path}/other.db' AS other")
        cursor.execute(f"CREATE TABLE other.{INBOX} AS SELECT * FROM {INBOX}")
        assert "other.notify_inbox" in str(faults(connection, EVERYTHING, "other")[0])
        assert faults(connection, EVERYTHING) == []


DRIVERS = [
    ("sqlite", "sqlite+aiosqlite"),
    ("postgresql", "postgresql+psycopg"),
    ("postgresql", "postgresql+asyncpg"),
    ("mysql", "mysql+aiomysql"),
    ("mysql", "mysql+asyncmy"),
    ("mariadb", "mariadb+aiomysql"),
]


@pytest.mark.parametrize(("database", "driver"), DRIVERS)
def test_drivers_for_asyncio_read_the_catalogue(engine: sa.Engine, database: str, driver: str) -> None:
    pytest.importorskip(driver.partition("+")[2])
    spoil(engine, without_key(database, INBOX))

    async def read(where: str | None) -> list[str]:
        again = create_async_engine(engine.url.set(drivername=driver))
        async with again.connect() as connection:
            sentences = [str(fault) for fault in await connection.run_sync(faults, EVERYTHING, where)]
        await again.dispose()
        return sentences

    named = {"sqlite": "main", "postgresql": "public"}.get(database, str(engine.url.database))
    for where in (None, named):
        (sentence,) = asyncio.run(read(where))
        assert "has no key over (consumer_group, message_id, replay) that holds (it has none)" in sentence


# --- once ---------------------------------------------------------------------------------------------------------


def test_tables_are_verified_once_a_pool(engine: sa.Engine) -> None:
    asked = 0

    @sa.event.listens_for(engine, "after_cursor_execute")
    def count(*_: object) -> None:
        nonlocal asked
        asked += 1

    def use() -> int:
        before = asked
        with engine.connect() as connection:
            verify_once(connection, CHECKS)
        return asked - before

    assert use() > 0 and use() == 0
    engine.dispose()
    assert use() > 0 and use() == 0
    with engine.connect() as connection:
        engine.pool._invalidate(connection.connection)  # as after an error that says that the database is gone
        connection.invalidate()
    assert use() > 0 and use() == 0


@pytest.mark.parametrize("database", ["sqlite"])
def test_a_table_that_is_missing_or_wrong_is_looked_at_again(engine: sa.Engine, database: str) -> None:
    spoil(engine, [f"DROP TABLE {HALF}"])
    with engine.connect() as connection:
        verify_once(connection, CHECKS)
    spoil(engine, made_again_without_drop(HALF))
    for _ in range(2):
        with engine.connect() as connection, pytest.raises(UnsafeTable):
            verify_once(connection, CHECKS)


def made_again_without_drop(name: str) -> list[str]:
    return made_again(name, "")[1:]


# --- row level security -------------------------------------------------------------------------------------------

ROLE = "notify_reader"
ALL_ROWS = "USING (true)"
POLICIES: list[tuple[str, list[str], set[str]]] = [
    ("none", [], {SELECT, INSERT, UPDATE, DELETE}),
    ("all", [f"CREATE POLICY p ON {HALF} {ALL_ROWS}"], set()),
    ("all of this role", [f"CREATE POLICY p ON {HALF} TO {ROLE} {ALL_ROWS}"], set()),
    ("all of a role that it has", [f"CREATE POLICY p ON {HALF} TO {ROLE}s {ALL_ROWS}"], set()),
    ("all of another role", [f"CREATE POLICY p ON {HALF} TO pg_monitor {ALL_ROWS}"], {SELECT, INSERT, UPDATE, DELETE}),
    ("a tenant's", [f"CREATE POLICY p ON {HALF} USING (topic = 't')"], {SELECT, INSERT, UPDATE, DELETE}),
    ("to read", [f"CREATE POLICY p ON {HALF} FOR SELECT {ALL_ROWS}"], {INSERT, UPDATE, DELETE}),
    ("to insert", [f"CREATE POLICY p ON {HALF} FOR INSERT WITH CHECK (true)"], {SELECT, UPDATE, DELETE}),
    (
        "to change",
        [f"CREATE POLICY p ON {HALF} FOR UPDATE USING (true) WITH CHECK (topic = 't')"],
        {SELECT, INSERT, UPDATE, DELETE},
    ),
    ("one of two", [f"CREATE POLICY p ON {HALF} {ALL_ROWS}", f"CREATE POLICY q ON {HALF} USING (topic = 't')"], set()),
    (
        "restricted",
        [f"CREATE POLICY p ON {HALF} {ALL_ROWS}", f"CREATE POLICY q ON {HALF} AS RESTRICTIVE USING (topic = 't')"],
        {SELECT, INSERT, UPDATE, DELETE},
    ),
    (
        "others are restricted",
        [
            f"CREATE POLICY p ON {HALF} {ALL_ROWS}",
            f"CREATE POLICY q ON {HALF} AS RESTRICTIVE TO pg_monitor USING (topic = 't')",
        ],
        set(),
    ),
]


@pytest.fixture
def secured(database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[sa.Engine]:
    """A PostgreSQL whose half_message has row level security, with a role that may do everything with it."""
    with empty_database("postgresql", database_urls, tmp_path) as url:
        engine = make_engine(url)
        create_tables(engine)
        role = "DO $$ BEGIN CREATE ROLE {}; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$"
        spoil(
            engine,
            [
                role.format(f"{ROLE}s"),
                role.format(ROLE),
                f"GRANT {ROLE}s TO {ROLE}",
                f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {ROLE}",
                f"ALTER TABLE {HALF} ENABLE ROW LEVEL SECURITY",
            ],
        )
        yield engine
        engine.dispose()


def as_role(engine: sa.Engine, needs: tuple[Need, ...], role: str = ROLE) -> list[str]:
    with engine.connect() as connection:
        connection.exec_driver_sql(f"SET LOCAL ROLE {role}")
        return [str(fault) for fault in faults(connection, needs)]


@pytest.mark.parametrize(("policies", "hidden"), [each[1:] for each in POLICIES], ids=[each[0] for each in POLICIES])
def test_a_policy_that_may_hide_rows_is_named(secured: sa.Engine, policies: list[str], hidden: set[str]) -> None:
    spoil(secured, policies)
    assert found(secured) == []  # a superuser sees all
    faulty = {
        command
        for command in (SELECT, INSERT, UPDATE, DELETE)
        if as_role(secured, (Need(half_message, sees=(command,)),))
    }
    assert faulty == hidden
    assert as_role(secured, SENDS["half"]) == []  # a producer need not see what it wrote


def test_the_remedy_for_hidden_rows_is_one(secured: sa.Engine) -> None:
    (sentence,) = as_role(secured, PURGES)
    assert sentence.startswith(
        f"row level security may hide rows of the table public.half_message from SELECT by the role {ROLE}"
    )
    policy, bypass = sentence.rpartition(": ")[2].split(", or ")
    spoil(secured, [policy])
    assert as_role(secured, EVERY) == []
    spoil(secured, [f"DROP POLICY notify ON {HALF}", f"CREATE POLICY q ON {HALF} AS RESTRICTIVE USING (topic = 't')"])
    assert as_role(secured, PURGES)[0].endswith(bypass)
    with secured.connect() as connection:
        connection.exec_driver_sql(f"SET LOCAL ROLE {ROLE}")
        with pytest.raises(HiddenRows):
            verify(connection, PURGES)


def test_an_owner_s_rows_are_hidden_if_that_is_forced(secured: sa.Engine) -> None:
    spoil(secured, [f"ALTER TABLE {HALF} OWNER TO {ROLE}"])
    assert as_role(secured, EVERY) == []
    spoil(secured, [f"ALTER TABLE {HALF} FORCE ROW LEVEL SECURITY"])
    assert as_role(secured, EVERY) != []
