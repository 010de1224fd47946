"""`notify relay`, `check`, `doctor`: the commands that look into a business database."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
import typer

from notify.check.listener import CheckUnavailable
from notify.check.question import read_source
from notify.cli.api import AS_JSON, URL, call
from notify.cli.printed import say, say_json
from notify.client import TransactionProducer, use_explicit_begin
from notify.client.purge import counts, purge, purge_by_force
from notify.client.table import create_tables, new_source
from notify.errors import InvalidRequest, NotifyError
from notify.relay.relay import Relay
from notify.sinks.sink import delays_released

DSN = typer.Option(..., "--dsn", envvar="NOTIFY_DSN", help="SQLAlchemy URL of the database. [env: NOTIFY_DSN]")


@contextlib.contextmanager
def opened(dsn: str) -> Iterator[sa.Engine]:
    """An engine by URL, disposed of at the end. Raises InvalidRequest for no URL, or one whose driver is missing."""
    try:
        engine = sa.create_engine(dsn)
    except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ModuleNotFoundError) as error:
        raise InvalidRequest(f"--dsn: {error}") from None
    if engine.dialect.name == "sqlite":
        use_explicit_begin(engine)
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
    interval: float = typer.Option(0.2, min=0.01, max=60, help="Seconds between looks at an empty outbox."),
    once: bool = typer.Option(False, "--once", help="Stop when the outbox is empty."),
    as_json: bool = AS_JSON,
) -> None:
    """Move outbox messages (mode=outbox) from a database to the server."""

    async def run(mover: Relay) -> None:
        task = asyncio.ensure_future(mover.run(interval=interval, once=once))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            return

    with opened(dsn) as engine, delays_released(url):
        mover = Relay(engine, url)
        asyncio.run(run(mover))
    done = dataclasses.asdict(mover.total)
    say_json(done) if as_json else say(f"{done['sent']} transactions sent, {done['refused']} refused")
    raise typer.Exit(1 if done["refused"] else 0)


def check(
    dsn: str = DSN,
    group: str = typer.Option(..., envvar="NOTIFY_GROUP", help="The producer group to answer for."),
    url: str = URL,
) -> None:
    """Answer checks from a database's half_message table while its application is down."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with opened(dsn) as engine, TransactionProducer(url, group=group, engine=engine):
        stop.wait()


def purge_rows(
    dsn: str = DSN,
    url: str = URL,
    older_than: float = typer.Option(86_400.0, min=0, help="Seconds."),
    force: bool = typer.Option(False, "--force", help="Do not ask the server: older halves become undecidable."),
    as_json: bool = AS_JSON,
) -> None:
    """Delete old half_message rows whose transactions are final on the server."""
    with opened(dsn) as engine:
        if force:
            result = purge_by_force(engine, older_than=older_than)
        else:
            result = asyncio.run(purge(engine, url, older_than=older_than))
    done = dataclasses.asdict(result)
    say_json(done) if as_json else say(f"{done['rows']} rows deleted, {done['kept']} transactions kept")


def doctor(
    dsn: str | None = typer.Option(None, "--dsn", envvar="NOTIFY_DSN", help="Also look into this database."),
    url: str = URL,
    create: bool = typer.Option(False, "--create-tables", help="Make missing tables in the database."),
    bridge: bool = typer.Option(False, "--bridge", help="Also whether its binlog can be bridged without gaps."),
    fresh_source: bool = typer.Option(False, "--new-source", help="Give a cloned database a source of its own."),
    as_json: bool = AS_JSON,
) -> None:
    """Look for what is wrong, with the remedy. Exit code 1 if anything is."""
    findings = _server_findings(url)
    facts: dict[str, Any] = {"server": url}
    if dsn is not None:
        with opened(dsn) as engine:
            if create:
                create_tables(engine)
            if fresh_source:
                with engine.begin() as connection:
                    facts["new_source"] = new_source(connection)
            findings += _database_findings(engine, facts) if not bridge else _bridge_findings(engine)
    result = {"ok": not findings, "findings": findings} | facts
    if as_json:
        say_json(result)
    else:
        for finding in findings or ["nothing is wrong"]:
            say(finding)
    raise typer.Exit(1 if findings else 0)


def _server_findings(url: str) -> list[str]:
    try:
        parked = call(url, "GET", "transactions", query="?state=PARKED&max=1000")["transactions"]
        query = f"?state=PREPARED&older_than={DOUBT_SECONDS:g}&max=1000"
        in_doubt = call(url, "GET", "transactions", query=query)["transactions"]
        alarms = call(url, "GET", "overview")["alarms"]
    except NotifyError as error:
        if error.status in (401, 403):
            return [f"the server refuses to be looked at: {error}. Set NOTIFY_TOKEN to one that may `view`."]
        return [f"the server does not answer: {error}. Start it with `notify serve`."]
    # Parked and old transactions are said below, with what to do.
    found = [alarm["text"] for alarm in alarms if alarm["name"] not in ("parked", "in_doubt")]
    if parked:
        found.append(
            f"{len(parked)} transactions are parked: see `notify transaction list --state PARKED`, then commit, "
            "rollback or resume them"
        )
    offline = _offline(url, {t["producer_group"] for t in in_doubt if not t["producer_online"]})
    for group in sorted(offline):
        count = sum(t["producer_group"] == group for t in in_doubt)
        found.append(
            f"{count} transactions of producer group {group} are in doubt, and no producer of it is there to be asked: "
            "start one (an AsyncTransactionProducer that is made before its event loop runs answers from `await "
            f"producer.start()` on), or let `notify check --dsn … --group {group}` answer from the database"
        )
    old = [t for t in in_doubt if t["age"] > OLD_SECONDS and t["producer_group"] not in offline]
    if old:
        found.append(
            f"{len(old)} transactions are undecided for over {OLD_SECONDS / 60:g} minutes, though producers of their "
            "groups are asked: `notify transaction show` says what they answer"
        )
    return found + _bridges_and_members(url)


def _offline(url: str, groups: set[str]) -> set[str]:
    """Those of these producer groups that no server has heard of lately: each knows only of producers that ask it."""
    if not groups:
        return groups
    for member in call(url, "GET", "nodes")["members"]:
        with contextlib.suppress(NotifyError):  # one that is away has nobody asking it
            rows = call(member["url"], "GET", "transactions", query="?max=1000")["transactions"]
            groups = groups - {t["producer_group"] for t in rows if t["producer_online"]}
    return groups


DOUBT_SECONDS, OLD_SECONDS = 10.0, 600.0
"""The first check comes 5 s after the half by default: whoever is there to be asked has answered after the first."""
SILENT_SECONDS, LAG_SECONDS, CLOCK_SECONDS = 30.0, 60.0, 1.0


def _bridges_and_members(url: str) -> list[str]:
    """Bridges that stand still, lag or were refused something, and servers whose clock is off."""
    found = []
    try:
        bridges = call(url, "GET", "bridges")["bridges"]
    except NotifyError:
        bridges = []  # nobody here has queues
    for b in bridges:
        name = f"the bridge of source {b['source']}"
        if b["silent_seconds"] > SILENT_SECONDS:
            found.append(
                f"{name} has been silent for {b['silent_seconds']:.0f} s: start it, its output says what stops it"
            )
        elif b["lag_seconds"] > LAG_SECONDS:
            found.append(f"{name} is {b['lag_seconds']:.0f} s behind: is the queue server or the bridge short of CPU?")
        if b["refused"]:
            found.append(f"{name} brought {b['refused']} transactions that no queue could take: its output names them")
    for m in call(url, "GET", "nodes")["members"]:
        offset = m["detail"].get("clock_offset_seconds", 0.0)
        if abs(offset) > CLOCK_SECONDS:
            found.append(f"the clock of server {m['url']} is {offset:+.1f} s from its database's: run NTP on both")
    return found


_DURABILITY = {
    "postgresql": ("SHOW synchronous_commit", "off", "synchronous_commit is off: set it to on"),
    "mysql": (
        "SELECT @@innodb_flush_log_at_trx_commit",
        None,
        "innodb_flush_log_at_trx_commit is not 1: set it to 1",
    ),
}


def _bridge_findings(engine: sa.Engine) -> list[str]:
    """Faults that keep `notify bridge` from reading the binlog, or could let it miss something later."""
    if engine.dialect.name not in ("mysql", "mariadb"):
        return [f"{engine.dialect.name} has no binlog: use `notify relay`"]
    from notify.binlog_bridge import source
    from notify.binlog_bridge.pump import default_server_id

    try:
        with engine.connect() as connection:
            return [str(finding) for finding in source.findings(connection, default_server_id(""))]
    except sa.exc.SQLAlchemyError as error:
        return [f"the database does not answer: {str(error).splitlines()[0]}"]


def _database_findings(engine: sa.Engine, facts: dict[str, Any]) -> list[str]:
    """Faults that could let an acknowledged commit vanish after its message went out, and what the tables say."""
    found = []
    try:
        with engine.connect() as connection:
            facts["source"] = read_source(connection)[0]
            query = _DURABILITY.get("mysql" if engine.dialect.name == "mariadb" else engine.dialect.name)
            if query is not None:
                value = str(connection.exec_driver_sql(query[0]).scalar())
                if value == query[1] or (query[1] is None and value != "1"):
                    found.append(f"{query[2]}, or a crash of the database loses commits whose messages went out")
        facts |= counts(engine)
    except (sa.exc.SQLAlchemyError, CheckUnavailable) as error:
        detail = str(error).splitlines()[0]
        return [f"the database is not ready: {detail}. `notify doctor --dsn … --create-tables` makes the tables."]
    if facts["refused_by_server"]:
        found.append(f"{facts['refused_by_server']} outbox rows were refused by the server (relayed = 2): look at them")
    return found
