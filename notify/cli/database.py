"""`notify relay`, `check`, `purge`: the commands that work on a service's database."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import traceback
from collections.abc import Iterator, Sequence

import sqlalchemy as sa
import typer

from notify.admin_api.description import transactions as counted
from notify.check.listener import CheckUnavailable
from notify.check.sources import ALL, Sources
from notify.cli.api import AS_JSON, URL
from notify.cli.error_texts import error_of_database
from notify.cli.printed import log_to_stderr, say, say_json
from notify.client.producer.options import ProducerPlan
from notify.client.producer.outgoing import ThreadOutgoing
from notify.client.tables.definitions import half_message
from notify.client.tables.purge import Purged, purge, purge_by_force
from notify.errors import InvalidRequest, NotFound, NotifyError, Unavailable, UnsafeTable
from notify.movers.relay.relay import Relay
from notify.movers.sinks.sink import is_server, running_beside
from notify.runtime.alive import during
from notify.runtime.databases import is_lost, reason_of, within_schema
from notify.runtime.schemas import with_table
from notify.runtime.signals import heeding_signals, run_until_signal
from notify.storage.sql.engines import visitor_engine

DSN = typer.Option(..., "--dsn", envvar="NOTIFY_DSN", help="The database's SQLAlchemy URL. [env: NOTIFY_DSN]")
SCHEMA = typer.Option(
    None,
    "--schema",
    envvar="NOTIFY_SCHEMA",
    help="The schema with the tables (MySQL: the database); default: where the connection finds them. "
    "[env: NOTIFY_SCHEMA]",
)
SCHEMAS = typer.Option(
    None,
    "--schemas",
    envvar="NOTIFY_SCHEMAS",
    help="Patterns of schemas, separated by commas (`t_*,shop`), instead of one schema; schemas created later are "
    "included. [env: NOTIFY_SCHEMAS]",
)


TRANSACTIONS_URL = typer.Option(
    "",
    "--transactions-url",
    envvar="NOTIFY_TRANSACTIONS_URL",
    help="The server of producers in mode=auto, which gets the messages that they have left behind; default: --url. If "
    "--url is Kafka, there is no default, and they are not sent. [env: NOTIFY_TRANSACTIONS_URL]",
)


@contextlib.contextmanager
def opened(dsn: str) -> Iterator[sa.Engine]:
    """An engine, which is disposed of at the end. Raises the errors of `visitor_engine`."""
    engine = visitor_engine(dsn)
    try:
        yield engine
    finally:
        engine.dispose()


def relay(
    dsn: str = DSN,
    url: str = URL,
    transactions_url: str = TRANSACTIONS_URL,
    schema: str | None = SCHEMA,
    schemas: str | None = SCHEMAS,
    interval: float = typer.Option(
        0.2,
        min=0.01,
        max=86_400,
        help="Seconds between polls of an empty outbox where no commit wakes the relay. Above 300 the relay closes its "
        "sessions between polls, so that a database can pause.",
    ),
    once: bool = typer.Option(False, "--once", help="Stop once all is moved that waited at the start."),
    as_json: bool = AS_JSON,
) -> None:
    """Move outbox messages (mode=outbox) from a database to the server, and send what producers in mode=auto have left
    behind there."""
    log_to_stderr()
    with opened(dsn) as engine, running_beside(url):
        mover = Relay(engine, url, schema=schema, schemas=schemas, transactions_url=transactions_url)
        try:
            run_until_signal(lambda: during(mover.run(interval=interval, once=once), mover.progress))
        except NotifyError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if error_of_database(error) is not None:
                raise
            say("".join(traceback.format_exception(error)), err=True)
            raise NotifyError(f"the relay ended without being stopped: {error!r}") from error
    done = dataclasses.asdict(mover.total)
    say_json(done) if as_json else say(f"{counted(done['sent'])} sent, {done['refused']} refused")
    raise typer.Exit(1 if done["refused"] else 0)


def check(
    dsn: str = DSN,
    group: str = typer.Option(..., envvar="NOTIFY_GROUP", help="The producer group to answer for."),
    url: str = URL,
    schema: str | None = SCHEMA,
    schemas: str | None = SCHEMAS,
) -> None:
    """Stand in for a producer group while its application is down: answer its checks from a database's half_message
    tables, and send what it has left behind there (mode=auto).

    It answers for all schemas that have the tables, or for those that --schema or --schemas name; later ones are found.
    """
    one_way(schema, schemas)
    stop = threading.Event()
    log_to_stderr()
    with heeding_signals(stop.set), opened(dsn) as engine:
        sources = Sources(schema, schemas or ALL)
        _check_ready(engine, sources)
        plan = ProducerPlan(url=url, group=group, engine=engine, mode="auto")
        plan.sources = sources
        with contextlib.closing(ThreadOutgoing(plan)) as answering:
            answering.start()
            say(
                f"answers checks of group {group} ({plan.instance}) at {url}, and sends what it left behind, "
                "until Ctrl-C",
                err=True,
            )
            stop.wait()


def one_way(schema: str | None, schemas: str | None) -> None:
    """Raises InvalidRequest if both a schema and patterns of schemas are given."""
    if schema and schemas:
        raise InvalidRequest("give --schema for one schema, or --schemas for those that match a pattern, not both")


def purge_rows(
    dsn: str = DSN,
    url: str = URL,
    schema: str | None = SCHEMA,
    schemas: str | None = SCHEMAS,
    older_than: float = typer.Option(86_400.0, min=0, help="Only rows older than this, in seconds."),
    force: bool = typer.Option(
        False, "--force", help="Do not ask the server; checks can no longer decide older halves."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Delete old half_message rows whose transactions are decided on the server, or that a bridge has moved there."""
    one_way(schema, schemas)
    result = Purged()
    left: list[str] = []
    with opened(dsn) as engine:
        for place in _places(engine, schema, schemas):
            try:
                if force:
                    done = purge_by_force(engine, older_than=older_than, schema=place)
                else:
                    done = asyncio.run(_purge(engine, url, older_than, place))
            except (sa.exc.DBAPIError, UnsafeTable) as error:  # what is wrong in one schema holds up no other
                if not schemas or is_lost(error):
                    raise
                left.append(f"{place}: {reason_of(error)}")
                continue
            result.looked_at += done.looked_at
            result.rows += done.rows
            result.kept += done.kept
    told = dataclasses.asdict(result)
    say_json(told) if as_json else say(f"{told['rows']} rows deleted, {counted(told['kept'])} kept")
    for each in left:
        say(f"nothing is purged in the schema {each}", err=True)
    if left:
        raise typer.Exit(1)


def _places(engine: sa.Engine, schema: str | None, schemas: str | None) -> Sequence[str | None]:
    """The schemas to purge. Raises NotFound if the patterns match none."""
    if not schemas:
        return [schema]
    with engine.connect() as connection:
        found = with_table(connection, half_message.name, schemas)
    if not found:
        raise NotFound(f"no schema that matches {schemas} has a table {half_message.name}: nothing is purged")
    return found


async def _purge(engine: sa.Engine, url: str, older_than: float, schema: str | None) -> Purged:
    moved = 0
    if engine.dialect.name in ("mysql", "mariadb", "postgresql"):
        from notify.binlog_bridge.purge import purge_moved

        moved = await purge_moved(within_schema(engine, schema), url, older_than=older_than)
    if not is_server(url):
        return Purged(rows=moved)
    result = await purge(engine, url, older_than=older_than, schema=schema)
    result.rows += moved
    return result


_GALERA_CUT_OFF = (1047, 1205)
"""The errors of a Galera node that is cut off from the majority; the second one if wsrep_sync_wait is set."""


def away(error: sa.exc.SQLAlchemyError) -> str:
    """The finding about a database that does not answer, with its remedy."""
    detail = str(error).splitlines()[0]
    arguments = error.orig.args if isinstance(error, sa.exc.DBAPIError) and error.orig is not None else ()
    if arguments and arguments[0] in _GALERA_CUT_OFF:
        return (
            f"the database refuses statements: {detail}. A node of Galera does so while it is cut off from the others: "
            "reconnect it; if the others will not come back, SET GLOBAL wsrep_provider_options = 'pc.bootstrap=YES' "
            "on the node with the newest state."
        )
    return f"the database does not answer: {detail}. Start it, or correct --dsn."


def not_ready(error: Exception) -> str:
    """The finding about a database whose tables cannot be used, with its remedy."""
    detail = str(error).splitlines()[0]
    return f"the database is not ready: {detail}. `notify doctor --dsn … --create-tables` makes the tables."


def _check_ready(engine: sa.Engine, sources: Sources) -> None:
    """Raises Unavailable if the database cannot answer checks, UnsafeTable if its answers would be wrong."""
    try:
        engine.connect().close()
    except sa.exc.SQLAlchemyError as error:
        raise Unavailable(away(error)) from None
    try:
        with engine.connect() as connection:
            sources.look(connection)
            sources.verify_all(connection)
    except sa.exc.SQLAlchemyError as error:
        raise Unavailable(not_ready(error)) from None
    if not sources.ids:
        raise Unavailable(not_ready(CheckUnavailable("no schema here has the tables half_message and notify_source")))
