"""`python -m tools.bench NAME`: measures this machine, and verifies each run."""

from __future__ import annotations

import contextlib
import runpy
import sys

import typer

from notify.cli.bench.command import AS_JSON, BODY, CLIENT, known, show, transactions
from notify.cli.database import opened
from notify.cli.main import Commands
from notify.errors import InvalidRequest, NotifyError
from notify.protocol.limits import MODES
from notify.runtime.signals import exit_on_signal
from tools.bench import backlog as backlog_bench
from tools.bench import bridge as bridge_bench
from tools.bench import delivery as delivery_bench
from tools.bench import topics as topics_bench

PROGRAMS = (
    "audit", "audit_fan_in", "bars.backlog", "bars.queue", "bars.transactions", "compare", "console", "consumers",
    "kafka.bridge", "long_query", "observed", "peers", "profile", "session", "shipping", "siege", "soak", "sql",
)  # fmt: skip
"""Modules that read their options themselves; most print a verdict."""

app = typer.Typer(
    cls=Commands,
    help="Measure this machine; every run is verified.",
    epilog=f"Others, with options of their own: {', '.join(PROGRAMS)}.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def bench(context: typer.Context) -> None:
    """Measure this machine."""
    context.with_resource(exit_on_signal())


app.command()(transactions)


@app.command()
def bridge(
    dsn: str = typer.Option("", "--dsn", envvar="NOTIFY_DSN", help="A MySQL, MariaDB or PostgreSQL."),
    database: str = typer.Option(
        "", "--database", help=f"Instead of --dsn: a server that is started here: {', '.join(bridge_bench.DATABASES)}."
    ),
    mover: str = typer.Option("bridge", "--mover", help=f"What moves the rows: {', '.join(bridge_bench.MOVERS)}."),
    rows: int = typer.Option(100_000, min=1000, help="Single-row transactions written beforehand."),
    rate: float = typer.Option(4500.0, min=1, help="Rows/s while the lag is measured; at most half the highest rate."),
    seconds: float = typer.Option(10.0, min=1, max=600, help="How long the lag is measured."),
    body: int = BODY,
    as_json: bool = AS_JSON,
) -> None:
    """Measure rows/s from a database, through a bridge or a relay, to the durable log, and the lag of new rows."""
    if bool(dsn) == bool(database) or database not in ("", *bridge_bench.DATABASES) or mover not in bridge_bench.MOVERS:
        raise typer.BadParameter("give --dsn or --database with one of its names, and --mover with one of its own")
    with contextlib.ExitStack() as stack:
        pid = 0
        if database:
            dsn, pid = stack.enter_context(bridge_bench.started(database))
        if stack.enter_context(opened(dsn)).dialect.name == "sqlite":
            raise InvalidRequest("SQLite has one writer, and no log: name a MySQL, MariaDB or PostgreSQL")
        figures = bridge_bench.run(dsn, mover=mover, rows=rows, rate=rate, seconds=seconds, body=body, database_pid=pid)
        show(figures, as_json)


@app.command()
def delivery(
    groups: int = typer.Option(15, min=1, max=1000, help="Groups; each receives all messages."),
    messages: int = typer.Option(300_000, min=1, help="Messages stored beforehand."),
    topics: int = typer.Option(1, min=1, max=100_000, help="Topics that the messages are spread over."),
    processes: int = typer.Option(1, min=1, max=64, help="Consumer processes that share the groups."),
    mode: str = typer.Option("shared", help=f"The subscriptions' mode: {', '.join(MODES)}."),
    keys: int = typer.Option(0, min=0, help="Distinct keys; 0: messages without a key."),
    client: str = CLIENT,
    batch: int = typer.Option(0, min=0, max=10_000, help="Messages in a call of the SDK's handler; 0: one."),
    body: int = BODY,
    as_json: bool = AS_JSON,
) -> None:
    """Measure acknowledged deliveries a second, summed over the groups."""
    if mode not in MODES or mode == "broadcast":
        raise typer.BadParameter("--mode must be shared, ordered, failover or exclusive")
    figures = delivery_bench.run(
        groups=groups,
        messages=messages,
        topics=topics,
        body=body,
        processes=min(processes, groups),
        mode=mode,
        keys=keys,
        client=known(client),
        batch=batch or None,
    )
    show(figures, as_json)


@app.command()
def topics(
    counts: list[int] = typer.Option(
        [10_000, 100_000], "--topics", min=1, max=1_000_000, help="Numbers of topics, compared with 16."
    ),
    clients: int = typer.Option(1024, min=1, max=4096, help="Concurrent callers."),
    seconds: float = typer.Option(5.0, min=0.5, max=3600, help="Measured time of a run, after 2 s of warm-up."),
    runs: int = typer.Option(5, min=1, max=100, help="Interleaved runs of each number of topics."),
    body: int = BODY,
    as_json: bool = AS_JSON,
) -> None:
    """Compare the rate over many topics with the rate over 16, and measure the memory of an idle topic."""
    show(topics_bench.run(counts=tuple(counts), clients=clients, seconds=seconds, runs=runs, body=body), as_json)


@app.command()
def backlog(
    messages: int = typer.Option(1_000_000, min=1000, help="Messages stored while every consumer is down."),
    clients: int = typer.Option(1024, min=1, max=4096, help="Concurrent callers of the producers."),
    seconds: float = typer.Option(5.0, min=0.5, max=3600, help="Measured time of a run."),
    runs: int = typer.Option(5, min=1, max=100, help="Interleaved runs of each kind."),
    body: int = BODY,
    as_json: bool = AS_JSON,
) -> None:
    """Measure a backlog: producers, the server's memory, its start after kill -9, and a drain with cold caches."""
    show(backlog_bench.run(messages=messages, body=body, clients=clients, seconds=seconds, runs=runs), as_json)


def main() -> None:
    """Run a bench. Exit codes: 0 success, 1 a message was lost or doubled, 2 the bench could not run."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in PROGRAMS:
        del sys.argv[1]
        runpy.run_module(f"tools.bench.{name}", run_name="__main__", alter_sys=True)
        return
    try:
        app(auto_envvar_prefix="NOTIFY_BENCH")
    except NotifyError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
