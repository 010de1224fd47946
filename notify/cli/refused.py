"""`notify refused`: the list of transactions that their target refuses (notify/movers/refused.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC
from typing import Any

import sqlalchemy as sa
import typer
from sqlalchemy.engine import Connection

from notify.admin_api.actor import signed
from notify.cli.api import AS_JSON, DRY_RUN, REASON, WIDE, fields, show, show_rows
from notify.cli.database import SCHEMA, opened
from notify.cli.kafka import refused as over_kafka
from notify.client.tables.definitions import notify_refused
from notify.errors import InvalidRequest
from notify.kafka.records import SCHEME
from notify.movers import refused
from notify.movers.outbox import LOCAL, MOVES, present
from notify.runtime.databases import has_table, within_schema
from notify.runtime.guarantees import verify

group = typer.Typer(no_args_is_help=True)

DSN = typer.Option(
    ...,
    "--dsn",
    envvar="NOTIFY_DSN",
    help="The database's SQLAlchemy URL; kafka://host:port,… for delayed messages that their topics refused when they "
    "were due. [env: NOTIFY_DSN]",
)
LEFT_BY = "producer"
"""The mover of refused rows of mode auto: their senders mark them, but do not list them."""
IDS = typer.Option([], "--id", help="Only these transactions (repeatable).")
ALL = typer.Option(False, "--all", help="All transactions that wait for a decision.")


@group.command("list")
def list_refused(
    dsn: str = DSN,
    schema: str | None = SCHEMA,
    state: str | None = typer.Option(None, help="Only this state: WAITING, RETRY (Kafka: SENT) or DROPPED."),
    after: str = typer.Option("", help="Only transactions with ids above this one."),
    max: int = typer.Option(100, min=1, max=10_000, help="Show at most this many."),
    wide: bool = WIDE,
    as_json: bool = AS_JSON,
) -> None:
    """List refused transactions with the target's reasons. Exit code 1 if any waits for a decision."""
    if dsn.startswith(SCHEME):
        waiting, rows = over_kafka.listed(dsn, state, after, max)
        columns = fields("offset", "topic", "state", "code", "detail")
        show_rows({"waiting": waiting, "refused": rows}, as_json, "refused", columns, wide)
        raise typer.Exit(1 if waiting else 0)
    if state is not None and state not in refused.STATES:
        raise InvalidRequest(f"--state {state}: it is one of {', '.join(refused.STATES)}")
    with _database(dsn, schema) as engine:
        with engine.begin() as connection:
            if has_table(connection, LOCAL.table.name):
                refused.adopt(connection, LEFT_BY, LOCAL)
            waiting = refused.count(connection)
            rows = refused.listed(connection, state=state, after=after, limit=max)
    dated_rows = [row | {"refused_at": row["refused_at"].replace(tzinfo=UTC).isoformat()} for row in rows]
    columns = fields("transaction_id", "topic", "state", "code", "detail")
    show_rows({"waiting": waiting, "refused": dated_rows}, as_json, "refused", columns, wide)
    raise typer.Exit(1 if waiting else 0)


@group.command("retry")
def retry_refused(
    dsn: str = DSN,
    schema: str | None = SCHEMA,
    id: list[str] = IDS,
    all: bool = ALL,
    reason: str = REASON,
    dry_run: bool = DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Let the relay or bridge send transactions again. They come after later messages of their keys."""
    _decide(dsn, schema, id, all, reason, dry_run, as_json, refused.retry)


@group.command("drop")
def drop_refused(
    dsn: str = DSN,
    schema: str | None = SCHEMA,
    id: list[str] = IDS,
    all: bool = ALL,
    reason: str = REASON,
    dry_run: bool = DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Drop transactions: they are never sent, and their rows may be purged. The list keeps the reason."""
    _decide(dsn, schema, id, all, reason, dry_run, as_json, refused.drop)


def _decide(
    dsn: str,
    schema: str | None,
    ids: Sequence[str],
    all: bool,
    reason: str,
    dry_run: bool,
    as_json: bool,
    decide: Callable[[Connection, Sequence[str], str], list[str]],
) -> None:
    if bool(ids) == all:
        raise InvalidRequest("name transactions with --id, or choose --all that wait")
    if dsn.startswith(SCHEME):
        answer = over_kafka.decide(dsn, ids, signed(reason), send=decide is refused.retry, dry_run=dry_run)
        show(answer, as_json)
        has_failed = any(message["status"] != 200 for message in answer["messages"])
        raise typer.Exit(1 if answer["not_on_the_list"] or has_failed else 0)
    done: list[str] = []
    with _database(dsn, schema) as engine:
        chosen = list(ids) or _all_waiting(engine)
        for begin in range(0, len(chosen), refused.MOST_AT_ONCE):
            with engine.connect() as connection:
                done += decide(connection, chosen[begin : begin + refused.MOST_AT_ONCE], signed(reason))
                if not dry_run:
                    connection.commit()
    missing = sorted(set(ids) - set(done))
    result: dict[str, Any] = {"dry_run": dry_run, "transactions": done, "not_on_the_list": missing}
    show(result, as_json)
    raise typer.Exit(1 if missing else 0)


def _all_waiting(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return refused.all_waiting(connection)


@contextlib.contextmanager
def _database(dsn: str, schema: str | None) -> Iterator[sa.Engine]:
    """An engine whose database has the list. Raises InvalidRequest if the list is missing and cannot be created, or if
    the database has no outbox either."""
    with opened(dsn) as opened_engine:
        engine = within_schema(opened_engine, schema)
        if not present(engine) and not has_table(engine, notify_refused.name):
            raise InvalidRequest(
                "the database has neither half_message nor server_half_message: name one that a relay or bridge reads"
            )
        if not refused.ensure(engine):
            raise InvalidRequest(
                "the database has no table notify_refused, and this user may not create it: "
                "run `notify doctor --dsn … --create-tables` with a user that may"
            )
        with engine.connect() as connection:
            verify(connection, MOVES)
        yield engine
