"""Compares SQL storage with the database's ceiling for single-row inserts, the bridge with a polling relay, and the
bridges on MySQL and PostgreSQL, and a relay on PostgreSQL, with the bridge on MariaDB.

Run as `python -m tools.bench.sql`; `--only bridge` leaves out the ceilings. pgbench or mysqlslap measures the
ceiling: single-row transactions of the same size, over as many connections as callers, by turns with Notify's
transactions (two writes each: half and outcome). The bench starts the databases, fully durable (fsync,
innodb_flush_log_at_trx_commit = 1, sync_binlog = 1).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from notify.binlog_bridge.binlog import source
from notify.cli.bench import transactions
from notify.cli.bench.runner import Bench
from notify.client.tables.creation import create_tables
from notify.movers.sinks.queue_server import QueueSink
from notify.protocol.wire import PackedBridgeBatch
from notify.runtime.signals import exit_on_signal
from notify.testing.binlog_server import BinlogServer
from notify.testing.databases import BINLOG_SERVERS, SERVERS
from notify.testing.usage import cpu_seconds
from tools.bench import bridge as bridge_bench

CONNECTIONS = 128
BODY = 256
AIM = 1.5
SOURCE = "bench"


def fresh(url: str) -> str:
    """Make an empty database, and return its URL."""
    name = "b" + uuid.uuid4().hex[:10]
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    engine.dispose()
    return sa.make_url(url).set(database=name).render_as_string(hide_password=False)


def postgresql_ceiling(url: str, seconds: int, connections: int = CONNECTIONS) -> float:
    """Single-row inserts a second by pgbench, with prepared statements."""
    database = sa.make_url(fresh(url))
    engine = sa.create_engine(database)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE one (id char(36) PRIMARY KEY, no int, grp text, state text, topic text, body bytea, "
            "at timestamp)"
        )
    engine.dispose()
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(
            "INSERT INTO one VALUES (gen_random_uuid()::text, 0, 'orders', 'PREPARED', 'order.placed', "
            f"decode(repeat('ab', {BODY}), 'hex'), clock_timestamp());\n"
        )
        script.flush()
        process = subprocess.run(
            [
                "pgbench", "-n", "-h", str(database.host), "-p", str(database.port), "-U", str(database.username),
                "-c", str(connections), "-j", "2", "-T", str(seconds), "-M", "prepared", "-f", script.name,
                str(database.database),
            ],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    rate = re.search(r"tps = ([0-9.]+)", process.stdout)
    assert rate is not None, process.stdout
    return float(rate[1])


def mysql_ceiling(url: str, seconds: int) -> float:
    """Single-row inserts per second into MariaDB or MySQL, measured by mysqlslap."""
    database = sa.make_url(fresh(url))
    engine = sa.create_engine(database)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE one (id char(36) PRIMARY KEY, no int, grp varchar(127), state varchar(16), "
            "topic varchar(127), body mediumblob, at datetime(6)) ENGINE = InnoDB"
        )
    engine.dispose()
    queries = 12_000 * seconds
    process = subprocess.run(
        [
            "mysqlslap", f"--host={database.host}", f"--port={database.port}", f"--user={database.username}",
            f"--password={database.password}",
            f"--create-schema={database.database}", "--no-drop", f"--concurrency={CONNECTIONS}",
            f"--number-of-queries={queries}", "--iterations=1",
            "--query=INSERT INTO one VALUES (uuid(), 0, 'orders', 'PREPARED', 'order.placed', "
            f"repeat('ab', {BODY // 2}), now(6))",
        ],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    average = re.search(r"Average number of seconds to run all queries: ([0-9.]+)", process.stdout)
    assert average is not None, process.stdout
    return queries / float(average[1])


def storage(kind: str, rounds: int, seconds: int) -> dict[str, Any]:
    """Measure Notify's transactions/s and the ceiling by turns."""
    ceilings, rates, shares = [], [], []
    with ExitStack() as stack:
        url = stack.enter_context(SERVERS[kind]())
        ceiling = postgresql_ceiling if kind == "postgresql" else mysql_ceiling
        for _ in range(rounds):
            ceilings.append(ceiling(url, seconds))
            figures = transactions.run(clients=CONNECTIONS, body=BODY, seconds=seconds, storage=fresh(url))
            assert figures["lost"] == 0, figures
            rates.append(figures["transactions_per_second"])
            shares.append(rates[-1] / ceilings[-1])
    return {
        "database": kind,
        "single_row_inserts_per_second": round(statistics.median(ceilings)),
        "transactions_per_second": round(statistics.median(rates)),
        "share": round(statistics.median(shares), 2),
        "shares": [round(share, 2) for share in shares],
    }


def load_of(command_name: str, server: BinlogServer, rows: int) -> dict[str, Any]:
    """Measure the cost of moving rows for database, queue server and mover (a bridge, or a polling relay)."""
    url = fresh(server.url)
    engine = sa.create_engine(url)
    create_tables(engine)
    with Bench() as bench, ExitStack() as stack:
        queue = bench.server()
        stack.callback(engine.dispose)
        with engine.connect() as connection:
            position = source.current_position(connection).text
        asyncio.run(_skip_to(queue.url, position))
        bridge_bench.write(sa.make_url(url), rows, BODY)
        before = (cpu_seconds(_pid(server)), queue.cpu_seconds(), _status(server))
        command = [sys.executable, "-m", "notify.cli.main", command_name, "--url", queue.url, "--once", "--dsn"]
        command.append(f"{SOURCE}={url}" if command_name == "bridge" else url)
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.perf_counter() - started
        children_after = resource.getrusage(resource.RUSAGE_CHILDREN)
        after = (cpu_seconds(_pid(server)), queue.cpu_seconds(), _status(server))
        mover = children_after.ru_utime + children_after.ru_stime - children.ru_utime - children.ru_stime
    return {
        "mover": command_name,
        "rows_per_second": round(rows / seconds),
        "database_cpu_us_a_row": round((after[0] - before[0]) / rows * 1e6, 1),
        "queue_cpu_us_a_row": round((after[1] - before[1]) / rows * 1e6, 1),
        "mover_cpu_us_a_row": round(mover / rows * 1e6, 1),
        "statements": after[2]["Questions"] - before[2]["Questions"],
        "rows_read": sum(after[2][name] - before[2][name] for name in after[2] if name.startswith("Handler_read")),
        "rows_updated": after[2]["Handler_update"] - before[2]["Handler_update"],
    }


async def _skip_to(url: str, position: str) -> None:
    """Record a position for the bridge, so that it skips all earlier events."""
    sink = QueueSink(url)
    await sink.append(SOURCE, PackedBridgeBatch(epoch=1, expected_position="", position=position, claim=True))
    await sink.close()


def _status(server: BinlogServer) -> dict[str, int]:
    rows = server.execute(
        "SHOW GLOBAL STATUS WHERE Variable_name IN ('Questions', 'Handler_update') "
        "OR Variable_name LIKE 'Handler_read%%'"
    )
    return {str(name): int(str(value)) for name, value in rows}


def movers(servers: Mapping[str, BinlogServer], postgresql: tuple[str, int], rounds: int, rows: int) -> None:
    """Measure the bridge on each server by turns, and print the ratios to the first one, round by round.

    A connection to MySQL is encrypted by default, and one to MariaDB 10.11 is not; so MySQL is measured both ways.
    `postgresql`: the URL of a server, and the id of its process.
    """
    sources = {name: (server.url, "", "bridge", _pid(server)) for name, server in servers.items()}
    sources["mysql without TLS"] = (servers["mysql"].url, "?ssl_disabled=true", "bridge", _pid(servers["mysql"]))
    sources["postgresql"] = (postgresql[0], "", "bridge", postgresql[1])
    sources["relay on postgresql"] = (postgresql[0], "", "relay", postgresql[1])
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sources}
    for round_ in range(rounds):
        names = list(sources)[:: -1 if round_ % 2 else 1]
        for name in names:
            url, query, mover, pid = sources[name]
            figures = bridge_bench.run(fresh(url) + query, mover=mover, rows=rows, database_pid=pid)
            assert figures["lost"] == figures["duplicated"] == 0, figures
            runs[name].append(figures)
            print(json.dumps({mover: name} | figures), flush=True)
    first, *others = sources
    for name in others:
        for figure in ("rows_per_second", "cpu_us_a_row", "queue_cpu_us_a_row", "database_cpu_us_a_row", "lag_p99_ms"):
            ratios = [own[figure] / its[figure] for own, its in zip(runs[name], runs[first], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            print(f"{name} to {first}, {figure}: {middle:.2f} (quartiles {low:.2f} to {high:.2f})", flush=True)


def _pid(server: BinlogServer) -> int:
    assert server.process is not None
    return server.process.pid


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=6)
    parser.add_argument("--rows", type=int, default=100_000, help="of each run of the bridge")
    parser.add_argument("--only", choices=("storage", "bridge"), default="")
    arguments = parser.parse_args()
    for kind in ("mariadb", "mysql", "postgresql") if arguments.only != "bridge" else ():
        row = storage(kind, arguments.rounds, arguments.seconds)
        print(json.dumps(row), flush=True)
        print(f"{kind}: {row['share']} of the ceiling, the aim is {AIM}")
    if arguments.only == "storage":
        return
    with ExitStack() as stack:
        servers: dict[str, BinlogServer] = {}
        for name, kind_of_server in BINLOG_SERVERS.items():
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-b-")))
            servers[name] = kind_of_server(directory).create()
            stack.callback(servers[name].stop)
        for name, server in servers.items():
            for command_name in ("bridge", "relay"):
                print(json.dumps({"database": name} | load_of(command_name, server, 30_000)), flush=True)
        postgresql = stack.enter_context(bridge_bench.started("postgresql"))
        movers(servers, postgresql, arguments.rounds, arguments.rows)


if __name__ == "__main__":
    with exit_on_signal():
        main()
