"""`notify doctor`: checks servers or Kafka, and databases; each finding says what to do."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import sqlalchemy as sa
import typer

from notify.check.listener import CheckUnavailable
from notify.check.question import read_source
from notify.cli.api import AS_JSON, URL, call
from notify.cli.bridge import by_name
from notify.cli.database import SCHEMA, away, not_ready, opened
from notify.cli.kafka.line import Line
from notify.cli.printed import say, say_json
from notify.client.tables.creation import create_tables, new_source
from notify.client.tables.definitions import (
    EVERYTHING,
    LEFT_BEHIND_INDEX,
    LEFT_KEY_INDEX,
    WITHOUT_INDEX,
    WITHOUT_KEY_INDEX,
    with_left_behind_index,
)
from notify.client.tables.left_rows import counted
from notify.client.tables.purge import counts
from notify.errors import InvalidRequest, NotifyError
from notify.movers.outbox import LOCAL, SERVER
from notify.runtime import guarantees
from notify.runtime.databases import schema_of, within_schema
from notify.runtime.pooler import REMEDY, TRANSACTION, pool_mode
from notify.runtime.schemas import found_in
from notify.runtime.urls import without_secrets
from notify.storage.sql import checkup


def doctor(
    dsn: list[str] = typer.Option(
        [],
        "--dsn",
        envvar="NOTIFY_DSN",
        help="Also check this database. Repeatable: the candidates of a bridge (also as `name=URL`), or all nodes of a "
        "cluster.",
    ),
    url: str = URL,
    schema: str | None = SCHEMA,
    create: bool = typer.Option(False, "--create-tables", help="Make missing tables in the database."),
    bridge: bool = typer.Option(False, "--bridge", help="Also check whether its log can be bridged without gaps."),
    fresh_source: bool = typer.Option(False, "--new-source", help="Give a cloned database a new source id."),
    kafka: str = typer.Option("", "--kafka", help="Check this Kafka cluster (kafka://…) instead of a server."),
    role: str = typer.Option(
        "", "--as", help="With --kafka: also check the rights of bridge:SOURCE, consumer:GROUP, server, audit or sweep."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Check the server or Kafka, and databases; each finding says what to do. Exit code 1 if there are findings."""
    if role and not kafka:
        raise InvalidRequest("--as goes with --kafka: name the cluster")
    for flag, is_given in (
        ("--create-tables", create), ("--bridge", bridge), ("--new-source", fresh_source), ("--schema", bool(schema)),
    ):  # fmt: skip
        if is_given and not dsn:
            raise InvalidRequest(f"{flag} goes with --dsn: name the database")
    addresses = [(name, each) for name, urls in by_name(dsn).items() for each in urls]
    if fresh_source and len(addresses) > 1:
        raise InvalidRequest("--new-source is for one database: give one --dsn")
    lines = _kafka_lines(kafka, role) if kafka else []
    bad = [f"{line.check}: {line.text}" for line in lines if line.level in ("warn", "fail")]
    findings = bad if kafka else _server_findings(url)
    facts: dict[str, Any] = (
        {"kafka": [dataclasses.asdict(line) for line in lines]} if kafka else {"server": without_secrets(url)}
    )
    nodes: list[checkup.Node] = []
    for name, address in addresses:
        its_facts: dict[str, Any] = {}
        with opened(address) as opened_engine:
            engine = within_schema(opened_engine, schema)
            if create:
                create_tables(engine)
            if fresh_source:
                with engine.begin() as connection:
                    its_facts["new_source"] = new_source(connection)
            found = _bridge_findings(engine, name) if bridge else _database_findings(engine, its_facts, nodes)
        if len(addresses) == 1:
            facts |= its_facts
            findings = findings + found
            continue
        shown = without_secrets(address)
        facts.setdefault("databases", {})[shown] = its_facts | {"findings": found}
        findings = findings + [f"{shown}: {each}" for each in found]
    findings = findings + [str(finding) for finding in checkup.writer_findings(nodes)]
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
        with contextlib.suppress(NotifyError):  # no producer polls an unreachable server
            rows = call(member["url"], "GET", "transactions", query="?max=1000")["transactions"]
            groups = groups - {t["producer_group"] for t in rows if t["producer_online"]}
    return groups


DOUBT_SECONDS, OLD_SECONDS = 10.0, 600.0
"""The first check comes 5 s after the half by default, so after DOUBT_SECONDS an online producer has answered it."""
SILENT_SECONDS, LAG_SECONDS, CLOCK_SECONDS = 30.0, 60.0, 1.0
LEFT_SECONDS = 60.0
"""From this age on, a row that a producer has left behind is a finding."""


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
            findings.append(f"{name} is {lag_seconds:.0f} s behind: check whether it or the queue server lacks CPU")
        if refused:
            findings.append(f"{name} has refused transactions ({refused}): see them with `notify refused list --dsn …`")
    for member in call(url, "GET", "nodes")["members"]:
        offset = member["detail"].get("clock_offset_seconds", 0.0)
        if abs(offset) > CLOCK_SECONDS:
            findings.append(
                f"the clock of server {member['url']} differs from its database's by {offset:+.1f} s: run NTP on both"
            )
    return findings


def _left_behind(engine: sa.Engine, facts: dict[str, Any]) -> list[str]:
    """The findings about rows that wait for a producer; rows of the last minute may just be on their way."""
    with engine.connect() as connection:
        groups = counted(connection)
    facts["left_behind_since"] = min((each.since for each in groups), default="")
    return [
        f"producer group {each.group}: {transactions(each.transactions)} left behind since {each.since}, in mode auto: "
        f"start a process of the group, or run `notify check --dsn … --group {each.group}`, `notify relay` or a "
        "bridge, which send them; if one runs, its log says why the server does not take them"
        for each in groups
        if each.seconds >= LEFT_SECONDS
    ]


def _bridge_findings(engine: sa.Engine, name: str) -> list[str]:
    """Findings that prevent `notify bridge` from reading the log, or could make it miss transactions later.

    `name`: the source's name, if it was given.
    """
    from notify.binlog_bridge.kinds import log_of
    from notify.binlog_bridge.scope import Scope
    from notify.binlog_bridge.source import id_of

    if engine.dialect.name not in ("mysql", "mariadb", "postgresql"):
        return [f"{engine.dialect.name} has no log to bridge: use `notify relay`"]
    its_log = log_of(engine.url)
    try:
        with engine.connect() as connection:
            scope = Scope.of(connection, schema_of(engine), None)
            return [str(finding) for finding in its_log.findings(connection, name or id_of(connection), scope)]
    except (sa.exc.SQLAlchemyError, RuntimeError) as error:
        why = its_log.denied(error)
        if why is None and not isinstance(error, sa.exc.SQLAlchemyError):
            raise
        return [why or away(error)]  # type: ignore[arg-type]


def _database_findings(engine: sa.Engine, facts: dict[str, Any], nodes: list[checkup.Node]) -> list[str]:
    """Findings about lost durability, clusters, and tables that are missing or cannot keep what is promised.

    `facts` gets the source id and the counts of the tables, `nodes` the database if it is a node of Galera.
    """
    findings: list[str] = []
    try:
        with engine.connect() as connection:
            findings += map(str, [*checkup.findings(connection), *checkup.standby_findings(connection)])
            if node := checkup.node(connection, without_secrets(str(engine.url))):
                nodes.append(node)
    except sa.exc.SQLAlchemyError as error:
        return [away(error)]
    try:
        tables = set(sa.inspect(engine).get_table_names(schema=schema_of(engine)))
        # A database of `notify serve --storage` needs no tables of a service.
        is_of_a_service = LOCAL.table.name in tables or SERVER.table.name not in tables
        with engine.connect() as connection:
            faults = guarantees.faults(connection, EVERYTHING if is_of_a_service else ())
            if SERVER.table.name in tables:
                from notify.storage.sql.schema import NEEDS  # imports Alembic

                faults += guarantees.faults(connection, NEEDS)
            findings += map(str, faults)
            if any(fault.hides for fault in faults):
                return findings  # what is counted below would be less than there is
            if is_of_a_service:
                facts["source"] = read_source(connection)[0]
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
        with engine.connect() as connection:
            place = found_in(connection, LOCAL.table.name)
            for index, lack in ((LEFT_BEHIND_INDEX, WITHOUT_INDEX), (LEFT_KEY_INDEX, WITHOUT_KEY_INDEX)):
                if not with_left_behind_index(connection, [place], index=index):
                    findings.append(lack)
        if facts["left_behind"]:
            findings += _left_behind(engine, facts)
    except (sa.exc.SQLAlchemyError, CheckUnavailable) as error:
        return [*findings, not_ready(error)]
    if facts["refused_by_server"]:
        findings.append(
            f"no target takes {facts['refused_by_server']} outbox rows: see them with `notify refused list --dsn …`"
        )
    return findings
