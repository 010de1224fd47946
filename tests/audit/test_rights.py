"""Rights that hide rows where no table shows it: from a query of --effects, and from whoever asks what was purged."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client import create_tables
from notify.client.tables.definitions import half_message, notify_source
from notify.errors import HiddenRows
from notify.protocol import ids
from notify.spark.audit import Audit
from notify.spark.inputs.databases import Database
from notify.spark.inputs.effects import BusinessEffects
from notify.spark.repair.planning import plan_of
from tests.audit.audited import PLAN
from tests.audit.trade import WITH_INBOX, Trade
from tests.support.databases import empty_database
from tests.support.spoiled import spoil

LISTED = (
    "CREATE FUNCTION listed() RETURNS SETOF text LANGUAGE plpgsql SECURITY DEFINER AS "
    "$$ BEGIN RETURN QUERY SELECT message_id FROM ledger; END $$"
)
"""A function that reads with its owner's rights, as views do."""


@pytest.mark.long
def test_policies_that_a_plan_does_not_show_hide_effects(database_urls: dict[str, str], tmp_path: Path) -> None:
    """A policy that allows nothing, and those of the owner of a view or function; a view whose owner sees all hides
    nothing."""
    with empty_database("postgresql", database_urls, tmp_path) as url:
        engine = sa.create_engine(url)
        create_tables(engine)
        role, owner = (f"{name}_{engine.url.database}" for name in ("few", "owner"))
        spoil(
            engine,
            [
                "CREATE TABLE ledger (message_id text, tenant text)",
                "CREATE TABLE denied (message_id text)",
                "INSERT INTO ledger VALUES ('a', '1')",
                "INSERT INTO denied VALUES ('a')",
                f"CREATE ROLE {role} LOGIN PASSWORD 'few'",
                f"CREATE ROLE {owner}",
                f"GRANT USAGE, CREATE ON SCHEMA public TO {owner}",
                f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}, {owner}",
                "ALTER TABLE ledger ENABLE ROW LEVEL SECURITY",
                "ALTER TABLE denied ENABLE ROW LEVEL SECURITY",
                f"CREATE POLICY every ON ledger FOR SELECT TO {role} USING (true)",
                f"CREATE POLICY own ON ledger FOR SELECT TO {owner} USING (tenant = '2')",
                "CREATE VIEW shown AS SELECT message_id FROM denied",
                "CREATE VIEW filtered AS SELECT message_id FROM ledger",
                f"ALTER VIEW filtered OWNER TO {owner}",
                LISTED,
                f"ALTER FUNCTION listed() OWNER TO {owner}",
                f"GRANT SELECT ON shown, filtered TO {role}",
            ],
        )
        few = engine.url.set(username=role, password="few").render_as_string(hide_password=False)
        hiding = {
            "SELECT message_id FROM denied": (f"public.denied from SELECT by the role {role}", 0),
            "SELECT l.message_id FROM ledger l LEFT JOIN denied USING (message_id)": ("public.denied", 1),
            "SELECT message_id FROM filtered": (f"the role {owner}, with whose rights", 0),
            "SELECT l AS message_id FROM listed() l": (f"the role {owner}, with whose rights", 0),
            "SELECT message_id FROM shown": ("", 1),
            "SELECT message_id FROM ledger": ("", 1),
        }
        try:
            with contextlib.closing(Database(few, "shop")) as database:
                for query, (told, seen) in hiding.items():
                    why = BusinessEffects(database, query).hidden
                    assert (len(why), len(database.rows(query))) == (bool(told), seen), (query, why)
                    assert all(told in each for each in why)
        finally:
            spoil(engine, [f"DROP OWNED BY {role}, {owner}", f"DROP ROLE {role}, {owner}"])
            engine.dispose()


@pytest.mark.parametrize("kind", ["mysql", pytest.param("mariadb", marks=pytest.mark.long)])
def test_a_user_who_may_not_see_the_marks_of_purges(kind: str, database_urls: dict[str, str], tmp_path: Path) -> None:
    """MySQL lists only the tables that a user has a right to."""
    with empty_database(kind, database_urls, tmp_path) as url:
        engine = sa.create_engine(url)
        create_tables(engine)
        name = engine.url.database
        user = f"few_{name}"
        granted = [f"GRANT SELECT ON {name}.{table} TO {user}" for table in ("half_message", "notify_inbox")]
        spoil(engine, [f"CREATE USER {user} IDENTIFIED BY 'few'", *granted])
        few = engine.url.set(username=user, password="few").render_as_string(hide_password=False)
        try:
            with contextlib.closing(Database(few, "shop")) as database:
                assert database.is_unmarked and database.purged()[1] > 0
            spoil(engine, [f"GRANT SELECT ON {name}.notify_source TO {user}"])
            with contextlib.closing(Database(few, "shop")) as database:
                assert not database.is_unmarked and database.purged() == (0, 0)
        finally:
            spoil(engine, [f"DROP USER {user}"])
            engine.dispose()


@pytest.mark.parametrize("kind", ["postgresql", "mysql", pytest.param("mariadb", marks=pytest.mark.long)])
def test_columns_that_a_user_may_not_read_are_named(kind: str, database_urls: dict[str, str], tmp_path: Path) -> None:
    """An audit ended halfway, with what the database said: permission denied, or SHOW command denied."""
    with empty_database(kind, database_urls, tmp_path) as url:
        engine = sa.create_engine(url)
        create_tables(engine)
        user = f"few_{engine.url.database}"
        rows = half_message.insert().values(
            transaction_id=ids.to_text(ids.new_id()), message_no=0, producer_group="shop", mode="outbox", relayed=1,
            state="COMMITTED", shards="main", topic="orders", body=b"secret", created_at=sa.func.now(),
        )  # fmt: skip
        with engine.begin() as connection:
            connection.execute(rows)
        quote = engine.dialect.identifier_preparer.quote

        def grant(table: sa.Table, *but: str) -> str:
            columns = ", ".join(quote(column.name) for column in table.c if column.name not in but)
            return f"GRANT SELECT ({columns}) ON {table.name} TO {user}"

        made = "CREATE ROLE {} LOGIN PASSWORD 'few'" if kind == "postgresql" else "CREATE USER {} IDENTIFIED BY 'few'"
        spoil(engine, [made.format(user), grant(half_message, "digest", "shards", "body"), grant(notify_source)])
        spoil(engine, [f"GRANT SELECT ON notify_inbox TO {user}"])
        few = engine.url.set(username=user, password="few").render_as_string(hide_password=False)
        try:
            with contextlib.closing(Database(few, "shop")) as database:
                (why,) = database.hidden
                assert "may not read digest, shards of the table half_message" in why and "GRANT SELECT ON" in why, why
                with pytest.raises(HiddenRows, match="digest"):
                    database.check_seen()
            spoil(engine, [grant(half_message, "body", "headers")])
            with contextlib.closing(Database(few, "shop")) as database:
                assert (database.hidden, database.has_digests) == ([], True), "bodies are personal data"
                (row,) = database.rows_of([rows.compile().params["transaction_id"]])
                assert (row["body"], row["topic"]) == (None, "orders")
        finally:
            is_role = kind == "postgresql"
            spoil(engine, [f"DROP OWNED BY {user}", f"DROP ROLE {user}"] if is_role else [f"DROP USER {user}"])
            engine.dispose()


@pytest.mark.long
def test_an_inbox_whose_marks_of_purges_are_gone_proves_nothing_and_nothing_is_sent_again(
    spark: Any, trade: Trade, tmp_path: Path
) -> None:
    """A plan would send what was purged after it took effect."""
    older = f"DELETE FROM notify_inbox WHERE message_id < '{trade.name(200)}'"
    trade.execute(WITH_INBOX, older, "DROP TABLE notify_source")
    with trade.inputs() as inputs:
        result = Audit(spark, PLAN, inputs, tmp_path / "scratch").run()
        plan = plan_of(result, inputs, force=True)
    assert (result.verdict, not any(result.counts.values()), plan.items) == ("INCONCLUSIVE", True, [])
    (reason,) = result.reasons
    assert "database points: nothing says which rows of its inbox were purged" in reason
