"""Checks beside schemas that are none of the producer's: backups, views for reports, and tenants that are locked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from notify.check import CheckUnavailable, HalfMessage, LocalTransactionCheck, Outcome, sources
from notify.client.tables.definitions import half_message
from notify.runtime.databases import database_now, within_schema
from tests.support.clock import PATIENCE_SECONDS
from tests.support.shop import make_engine
from tests.support.tenants import Tenants, tenants
from tests.support.transactions import new_id

__all__ = ["tenants"]

INSERTED = "transaction_id, message_no, producer_group, mode, state, shards, topic, relayed, created_at"


def half(tenants: Tenants, schema: str) -> HalfMessage:
    """A half of a schema, whose transaction has no row."""
    return HalfMessage(new_id(), "g", "main", tenants.source(schema), 1, ())


def committed(tenants: Tenants, schema: str) -> HalfMessage:
    """A half whose transaction has committed."""
    stored = half(tenants, schema)
    row = {
        "transaction_id": stored.id, "message_no": 0, "producer_group": "g", "mode": "half", "state": "COMMITTED",
        "shards": "main", "topic": "t", "relayed": 1, "created_at": database_now(),
    }  # fmt: skip
    with within_schema(tenants.engine, schema).begin() as connection:
        connection.execute(half_message.insert().values(row))
    return stored


def beside(tenants: Tenants, schema: str, how: str, name: str = "a") -> str:
    """A schema that comes first in the order of names, with tables or views of another one's rows."""
    made = tenants.make(name, tables=False)
    for table in ("half_message", "notify_source"):
        rows = f"SELECT * FROM {tenants.quoted(schema)}.{table}"
        tenants.run(f"CREATE {how} {tenants.quoted(made)}.{table} AS {rows}")
    return made


@contextlib.contextmanager
def user_with(tenants: Tenants, schema: str, *rights: str) -> Iterator[sa.Engine]:
    """An engine of a user who has these rights only, some of them in `schema`."""
    name = f"few{new_id()[-8:]}"
    kind, account, made = "USER", f"{name}@'127.0.0.1'", "IDENTIFIED BY 'few'"
    if tenants.is_postgresql:
        kind, account, made = "ROLE", name, "LOGIN PASSWORD 'few'"
    tenants.run(f"CREATE {kind} {account} {made}", *(f"GRANT {right} TO {account}" for right in rights))
    url = sa.make_url(tenants.url).set(username=name, password="few")
    url = url if tenants.is_postgresql else url.set(database=schema)
    engine = make_engine(url.render_as_string(hide_password=False))
    try:
        yield engine
    finally:
        engine.dispose()
        tenants.run(*([f"DROP OWNED BY {name}"] if tenants.is_postgresql else []), f"DROP {kind} {account}")


def rights_to(tenants: Tenants, schema: str, rights: str = "ALL") -> list[str]:
    if not tenants.is_postgresql:
        return [f"{rights} ON {tenants.quoted(schema)}.*"]
    return [f"USAGE ON SCHEMA {schema}", f"{rights} ON ALL TABLES IN SCHEMA {schema}"]


@pytest.mark.long
def test_views_of_another_schema_do_not_mislead_a_check(tenants: Tenants) -> None:
    one = tenants.make("t1")
    sold, dead = committed(tenants, one), half(tenants, one)
    beside(tenants, one, "VIEW")
    check = LocalTransactionCheck(tenants.engine)
    assert (check.check(sold), check.check(dead)) == (Outcome.COMMIT, Outcome.ROLLBACK)


def test_a_backup_that_this_user_may_only_read(tenants: Tenants) -> None:
    one = tenants.make("t1")
    sold, dead = committed(tenants, one), half(tenants, one)
    backup = beside(tenants, one, "TABLE")
    tenants.run(
        f"ALTER TABLE {tenants.quoted(backup)}.half_message ADD PRIMARY KEY (transaction_id, message_no)",
        f"ALTER TABLE {tenants.quoted(backup)}.notify_source ADD PRIMARY KEY (id)",
    )
    with user_with(tenants, one, *rights_to(tenants, one), *rights_to(tenants, backup, "SELECT")) as engine:
        check = LocalTransactionCheck(engine)
        assert (check.check(sold), check.check(dead)) == (Outcome.COMMIT, Outcome.ROLLBACK)


@pytest.mark.long
def test_a_user_who_may_only_insert_says_what_is_missing(tenants: Tenants, caplog: pytest.LogCaptureFixture) -> None:
    """The only line of the log had the level INFO."""
    one = tenants.make("t1")
    dead = half(tenants, one)
    table, source = (f"{tenants.quoted(one)}.{name}" for name in ("half_message", "notify_source"))
    more = [f"USAGE ON SCHEMA {one}"] if tenants.is_postgresql else []
    with user_with(tenants, one, *more, f"INSERT ON {table}", f"SELECT ON {source}") as engine:
        check = LocalTransactionCheck(engine)
        for _ in range(2):
            with pytest.raises(CheckUnavailable, match="may not ask"):
                check.check(dead)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "grant SELECT and INSERT on half_message" in said


@pytest.mark.long
def test_a_backup_without_a_key(tenants: Tenants) -> None:
    """A transaction may commit late there, for all that its check knows; but what is committed is."""
    one = tenants.make("t1")
    sold, dead = committed(tenants, one), half(tenants, one)
    beside(tenants, one, "TABLE")
    check = LocalTransactionCheck(tenants.engine)
    assert check.check(sold) is Outcome.COMMIT
    with pytest.raises(CheckUnavailable, match="no key over"):
        check.check(dead)


@pytest.mark.long
@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_locked_tenant_holds_up_no_commit_of_others(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch, is_known: bool, commits: bool
) -> None:
    """A migration has locked its tables. A rollback has to wait, since an older SDK may have written its row there."""
    monkeypatch.setattr(sources, "FRESH_SECONDS", 0.0)
    one, locked = tenants.make("t1"), tenants.make("t2")
    sold, dead, theirs = committed(tenants, one), half(tenants, one), committed(tenants, locked)
    engine = make_engine(tenants.url)
    if commits:
        engine = engine.execution_options(isolation_level="AUTOCOMMIT")
    check = LocalTransactionCheck(engine)
    if is_known:
        assert check.check(committed(tenants, locked)) is Outcome.COMMIT
    tables = [f"{tenants.quoted(locked)}.{table}" for table in ("half_message", "notify_source")]
    locking = f"LOCK TABLE {', '.join(tables)} IN ACCESS EXCLUSIVE MODE"
    with tenants.engine.connect() as other:
        other.exec_driver_sql(locking if tenants.is_postgresql else f"LOCK TABLES {' WRITE, '.join(tables)} WRITE")
        began = time.monotonic()
        assert check.check(sold) is Outcome.COMMIT
        for doubtful in (dead, theirs):
            with pytest.raises(CheckUnavailable, match=r"locked at the moment|did not answer"):
                check.check(doubtful)
        assert time.monotonic() - began < PATIENCE_SECONDS
        other.invalidate()
    assert [check.check(each) for each in (theirs, dead)] == [Outcome.COMMIT, Outcome.ROLLBACK]
    engine.dispose()


@pytest.mark.long
@pytest.mark.parametrize("reads", ["SELECT", f"SELECT ({INSERTED})"])
def test_a_user_with_rights_to_columns(tenants: Tenants, reads: str) -> None:
    """A user who may only read and insert rows could not tell on MySQL that a transaction did not commit: it stayed in
    doubt for ever, and no line of the log said why."""
    one = tenants.make("t1")
    sold, dead = committed(tenants, one), half(tenants, one)
    table, source = (f"{tenants.quoted(one)}.{name}" for name in ("half_message", "notify_source"))
    more = [f"USAGE ON SCHEMA {one}"] if tenants.is_postgresql else []
    with user_with(tenants, one, *more, f"{reads}, INSERT ({INSERTED}) ON {table}", f"SELECT ON {source}") as engine:
        check = LocalTransactionCheck(engine)
        assert (check.check(sold), check.check(dead)) == (Outcome.COMMIT, Outcome.ROLLBACK)
