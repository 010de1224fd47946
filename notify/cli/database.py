"""`notify relay`, `check`, `purge`, `doctor`: the commands that read a service's database."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
import typer

from notify.check.listener import CheckUnavailable
from notify.check.question import read_source
from notify.cli import of_database
from notify.cli.api import AS_JSON, URL, call
from notify.cli.kafka.line import Line
from notify.cli.printed import say, say_json
from notify.client import TransactionProducer
from notify.client.making_tables import create_tables, new_source
from notify.client.purge import Purged, counts, purge, purge_by_force
from notify.ending import heeding_signals, run_until_told
from notify.errors import InvalidRequest, NotifyError, Unavailable
from notify.kafka.records import SCHEME
from notify.outbox import LOCAL, SERVER
from notify.pooler import REMEDY, TRANSACTION, pool_mode
from notify.relay.relay import Relay
from notify.sinks.sink import running_beside
from notify.storage.sql.engines import visitor_engine
from notify.told.form import transactions as counted
from notify.urls import without_secrets

DSN = typer.Option(..., "--dsn", envvar="NOTIFY_DSN", help="The database's SQLAlchemy URL. [env: NOTIFY_DSN]")


@contextlib.contextmanager
def opened(dsn: str) -> Iterator[sa.Engine]:
    """An engine, which is disposed of at the end. Raises the errors of `visitor_engine`."""
    engine = visitor_engine(dsn)
    try:
        yield engine
    finally:
        engine.dispose()


def register(app: typer.Typer) -> None:
    app.command()(relay)
    app.command()(check)
    app.command("purge")(purge_rows)
    app.command()(doctor)


def relay(
    dsn: str = DSN,
    url: str = URL,
    interval: float = typer.Option(0.2, min=0.01, max=60, help="Seconds between polls of an empty outbox."),
    once: bool = typer.Option(False, "--once", help="Stop when the outbox is empty."),
    as_json: bool = AS_JSON,
) -> None:
    """Move outbox messages (mode=outbox) from a database to the server."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    with opened(dsn) as engine, running_beside(url):
        mover = Relay(engine, url)
        try:
            run_until_told(lambda: mover.run(interval=interval, once=once))
        except NotifyError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if of_database.error_for(error) is not None:
                raise
            say("".join(traceback.format_exception(error)), err=True)
            raise NotifyError(f"the relay ended, and nobody stopped it: {error!r}") from error
    done = dataclasses.asdict(mover.total)
    say_json(done) if as_json else say(f"{counted(done['sent'])} sent, {done['refused']} refused")
    raise typer.Exit(1 if done["refused"] else 0)


def check(
    dsn: str = DSN,
    group: str = typer.Option(..., envvar="NOTIFY_GROUP", help="The producer group to answer for."),
    url: str = URL,
) -> None:
    """Answer checks from a database's half_message table while its application is down."""
    stop = threading.Event()
    with heeding_signals(stop.set), opened(dsn) as engine:
        _check_ready(engine)
        with TransactionProducer(url, group=group, engine=engine) as producer:
            say(f"answers checks of group {group} ({producer.instance}) at {url}, until Ctrl-C", err=True)
            stop.wait()


def purge_rows(
    dsn: str = DSN,
    url: str = URL,
    older_than: float = typer.Option(86_400.0, min=0, help="Only rows older than this, in seconds."),
    force: bool = typer.Option(
        False, "--force", help="Do not ask the server; checks can no longer decide older halves."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Delete old half_message rows whose transactions are decided on the server, or that a bridge has moved there."""
    with opened(dsn) as engine:
        if force:
            result = purge_by_force(engine, older_than=older_than)
        else:
            result = asyncio.run(_purge(engine, url, older_than))
    done = dataclasses.asdict(result)
    say_json(done) if as_json else say(f"{done['rows']} rows deleted, {counted(done['kept'])} kept")


async def _purge(engine: sa.Engine, url: str, older_than: float) -> Purged:
    moved = 0
    if engine.dialect.name in ("mysql", "mariadb"):
        from notify.binlog_bridge.purge import purge_moved

        moved = await purge_moved(engine, url, older_than=older_than)
    if url.startswith(SCHEME):
        return Purged(rows=moved)
    result = await purge(engine, url, older_than=older_than)
    result.rows += moved
    return result


def doctor(
    dsn: str | None = typer.Option(None, "--dsn", envvar="NOTIFY_DSN", help="Also check this database."),
    url: str = URL,
    create: bool = typer.Option(False, "--create-tables", help="Make missing tables in the database."),
    bridge: bool = typer.Option(False, "--bridge", help="Also check whether its binlog can be bridged without gaps."),
    fresh_source: bool = typer.Option(False, "--new-source", help="Give a cloned database a new source id."),
    kafka: str = typer.Option("", "--kafka", help="Check this Kafka cluster (kafka://…) instead of a server."),
    role: str = typer.Option(
        "", "--as", help="With --kafka: also check the rights of bridge:SOURCE, consumer:GROUP, server or audit."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Check the server or Kafka, and a database; each finding says what to do. Exit code 1 if there are findings."""
    if role and not kafka:
        raise InvalidRequest("--as goes with --kafka: name the cluster")
    for flag, is_given in (("--create-tables", create), ("--bridge", bridge), ("--new-source", fresh_source)):
        if is_given and dsn is None:
            raise InvalidRequest(f"{flag} goes with --dsn: name the database")
    lines = _kafka_lines(kafka, role) if kafka else []
    bad = [f"{line.check}: {line.text}" for line in lines if line.level in ("warn", "fail")]
    findings = bad if kafka else _server_findings(url)
    facts: dict[str, Any] = (
        {"kafka": [dataclasses.asdict(line) for line in lines]} if kafka else {"server": without_secrets(url)}
    )
    if dsn is not None:
        with opened(dsn) as engine:
            if create:
                create_tables(engine)
            if fresh_source:
                with engine.begin() as connection:
                    facts["new_source"] = new_source(connection)
            findings = findings + (_database_findings(engine, facts) if not bridge else _bridge_findings(engine))
    result = {"ok": not findings, "findings": findings} | facts
    if as_json:
        say_json(result)
    else:
        for text in [*map(str, lines), *findings[len(bad) :]] or ["nothing is wrong"]:
            say(text)
    raise typer.Exit(1 if findings else 0)


def _kafka_lines(url: str, role: str) -> list[Line]:
    try:
        from notify.cli.kafka.checkup import checkup
    except ImportError as error:
        raise InvalidRequest(f"--kafka needs the extra kafka: pip install 'notify-tx[kafka]' ({error})") from None
    return checkup(url, role)


def _server_findings(url: str) -> list[str]:
    try:
        overview = call(url, "GET", "overview")
        if overview.get("missing"):
            return _silent_workers(overview)
        parked = call(url, "GET", "transactions", query="?state=PARKED&max=1000")["transactions"]
        query = f"?state=PREPARED&older_than={DOUBT_SECONDS:g}&max=1000"
        in_doubt = call(url, "GET", "transactions", query=query)["transactions"]
    except NotifyError as error:
        address = without_secrets(url)
        if error.status in (401, 403):
            return [f"the server at {address} refuses: {error}. Set NOTIFY_TOKEN to a token with the right `view`."]
        return [
            f"the server at {address} does not answer ({error}): start it with `notify serve`, or name another with "
            "--url"
        ]
    # Parked and old transactions have separate findings below.
    alarms = [alarm for alarm in overview["alarms"] if alarm["name"] not in ("parked", "in_doubt")]
    findings = list(map(_alarm, alarms))
    if parked:
        findings.append(
            f"{transactions(len(parked))} parked: see `notify transaction list --state PARKED`, then commit, "
            "roll back or resume each"
        )
    offline = _offline(url, {t["producer_group"] for t in in_doubt if not t["producer_online"]})
    for group in sorted(offline):
        count = sum(t["producer_group"] == group for t in in_doubt)
        findings.append(
            f"producer group {group}: {transactions(count)} in doubt, and none of its producers answers checks: "
            "start one (an AsyncTransactionProducer made before its event loop runs answers after `await "
            "producer.start()`), "
            + (
                f"or run `notify check --dsn … --group {group}` to answer from the database"
                if any(t["source"] for t in in_doubt if t["producer_group"] == group)
                else "with a check listener, or decide with `notify transaction`: no database has the answer"
            )
        )
    old = [t for t in in_doubt if t["age"] > OLD_SECONDS and t["producer_group"] not in offline]
    if old:
        findings.append(
            f"{transactions(len(old))} undecided after more than {OLD_SECONDS / 60:g} minutes, although producers "
            "answer: see the answers with `notify transaction show`"
        )
    return findings + _bridges_and_members(url)


def _silent_workers(overview: dict[str, Any]) -> list[str]:
    """The findings if workers do not answer. Nothing else is checked, because each answer would lack their data."""
    findings = [
        f"{name} does not answer, and its data was not checked: its parent restarts a worker that "
        "has died, or hangs for `worker_timeout_seconds`; find out why it hangs or "
        "dies in the server's output, then run this again"
        for name in overview["missing"]
    ]
    return findings + list(map(_alarm, overview["alarms"]))


def _alarm(alarm: dict[str, Any]) -> str:
    """The finding for an alarm: what is wrong, and what to do."""
    return f"{alarm['text']}. {alarm['meaning']}"


def transactions(number: int) -> str:
    """A number of transactions, with its verb."""
    return "1 transaction is" if number == 1 else f"{number} transactions are"


def _offline(url: str, groups: set[str]) -> set[str]:
    """The groups without an online producer on any server; a server knows only the producers that poll it."""
    if not groups:
        return groups
    for member in call(url, "GET", "nodes")["members"]:
        with contextlib.suppress(NotifyError):  # no producer polls a server that is away
            rows = call(member["url"], "GET", "transactions", query="?max=1000")["transactions"]
            groups = groups - {t["producer_group"] for t in rows if t["producer_online"]}
    return groups


DOUBT_SECONDS, OLD_SECONDS = 10.0, 600.0
"""The first check comes 5 s after the half by default, so after DOUBT_SECONDS an online producer has answered it."""
SILENT_SECONDS, LAG_SECONDS, CLOCK_SECONDS = 30.0, 60.0, 1.0


def _bridges_and_members(url: str) -> list[str]:
    """Findings about bridges that are silent, lag or had messages refused, and about servers whose clock is wrong."""
    findings = []
    try:
        bridges = call(url, "GET", "bridges")["bridges"]
    except NotifyError:
        bridges = []  # no server has queues
    for bridge in bridges:
        name = f"the bridge of source {bridge['source']}"
        silent_seconds, lag_seconds, refused = bridge["silent_seconds"], bridge["lag_seconds"], bridge["refused"]
        if silent_seconds > SILENT_SECONDS:
            findings.append(
                f"{name} has been silent for {silent_seconds:.0f} s: start it; its output says why it stops"
            )
        elif lag_seconds > LAG_SECONDS:
            findings.append(f"{name} is {lag_seconds:.0f} s behind: look whether it or the queue server lacks CPU")
        if refused:
            findings.append(f"{name} has refused transactions ({refused}): see them with `notify refused list --dsn …`")
    for member in call(url, "GET", "nodes")["members"]:
        offset = member["detail"].get("clock_offset_seconds", 0.0)
        if abs(offset) > CLOCK_SECONDS:
            findings.append(
                f"the clock of server {member['url']} differs from its database's by {offset:+.1f} s: run NTP on both"
            )
    return findings


_DURABILITY = {
    "postgresql": ("SHOW synchronous_commit", "off", "synchronous_commit is off: set it to on"),
    "mysql": (
        "SELECT @@innodb_flush_log_at_trx_commit",
        None,
        "innodb_flush_log_at_trx_commit is not 1: set it to 1",
    ),
}


def _bridge_findings(engine: sa.Engine) -> list[str]:
    """Findings that prevent `notify bridge` from reading the binlog, or could make it miss transactions later."""
    if engine.dialect.name not in ("mysql", "mariadb"):
        return [f"{engine.dialect.name} has no binlog: use `notify relay`"]
    from notify.binlog_bridge import source
    from notify.binlog_bridge.pump import default_server_id

    try:
        with engine.connect() as connection:
            return [str(finding) for finding in source.findings(connection, default_server_id(""))]
    except sa.exc.SQLAlchemyError as error:
        return [_away(error)]


def _away(error: sa.exc.SQLAlchemyError) -> str:
    return f"the database does not answer: {str(error).splitlines()[0]}. Start it, or correct --dsn."


def _not_ready(error: Exception) -> str:
    detail = str(error).splitlines()[0]
    return f"the database is not ready: {detail}. `notify doctor --dsn … --create-tables` makes the tables."


def _check_ready(engine: sa.Engine) -> None:
    """Raises Unavailable if the database cannot answer checks."""
    try:
        engine.connect().close()
    except sa.exc.SQLAlchemyError as error:
        raise Unavailable(_away(error)) from None
    try:
        with engine.connect() as connection:
            read_source(connection)
    except (sa.exc.SQLAlchemyError, CheckUnavailable) as error:
        raise Unavailable(_not_ready(error)) from None


def _database_findings(engine: sa.Engine, facts: dict[str, Any]) -> list[str]:
    """Findings about lost durability or missing tables; `facts` gets the source id and the counts of the tables."""
    findings = []
    try:
        engine.connect().close()
    except sa.exc.SQLAlchemyError as error:
        return [_away(error)]
    try:
        tables = set(sa.inspect(engine).get_table_names())
        # A database of `notify serve --storage` needs no tables of a service.
        is_of_a_service = LOCAL.table.name in tables or SERVER.table.name not in tables
        with engine.connect() as connection:
            if is_of_a_service:
                facts["source"] = read_source(connection)[0]
            query = _DURABILITY.get("mysql" if engine.dialect.name == "mariadb" else engine.dialect.name)
            if query is not None:
                value = str(connection.exec_driver_sql(query[0]).scalar())
                if value == query[1] or (query[1] is None and value != "1"):
                    findings.append(f"{query[2]}, or a crash of the database may lose commits whose messages were sent")
        if mode := pool_mode(engine):
            facts["pooler"] = mode
        if mode == TRANSACTION:
            findings.append(
                f"{REMEDY}. That holds for `notify relay` and for servers; services may use it, with the driver's "
                "prepared statements off (psycopg: prepare_threshold=None)"
            )
        if not is_of_a_service:
            return findings
        facts |= counts(engine)
    except (sa.exc.SQLAlchemyError, CheckUnavailable) as error:
        return [_not_ready(error)]
    if facts["refused_by_server"]:
        findings.append(
            f"no target takes {facts['refused_by_server']} outbox rows: see them with `notify refused list --dsn …`"
        )
    return findings
