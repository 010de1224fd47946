"""`notify bench`: measures this machine and verifies each run."""

from __future__ import annotations

import typer

from notify.bench import backlog as backlog_bench
from notify.bench import delivery as delivery_bench
from notify.bench import topics as topics_bench
from notify.bench import transactions as transactions_bench
from notify.cli.database import opened
from notify.cli.printed import Rows, console, say_json
from notify.errors import InvalidRequest
from notify.protocol.limits import MODES
from notify.runtime.signals import exit_on_signal

_AS_JSON = typer.Option(False, "--json", help="One JSON object on stdout.")
_CLIENT = typer.Option(
    "wire",
    help="What consumes: wire (whole batches, no handler); with an empty handler: plain (a script over HTTP), threads "
    "(Consumer), coroutines (AsyncConsumer).",
)
_BODY = typer.Option(256, min=0, max=1 << 20, help="Bytes in a message's body.")


group = typer.Typer(help="Measure this machine; every run is verified.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(group, name="bench")


@group.callback()
def bench(context: typer.Context) -> None:
    """Measure this machine."""
    context.with_resource(exit_on_signal())


@group.command()
def transactions(
    clients: int = typer.Option(128, min=1, max=4096, help="Concurrent callers."),
    processes: int = typer.Option(1, min=1, max=64, help="Processes that share the callers."),
    body: int = _BODY,
    topics: int = typer.Option(16, min=1, max=100_000, help="Topics that the messages are spread over."),
    seconds: float = typer.Option(8.0, min=0.5, max=3600, help="Measured time, after a warm-up of 2 s."),
    rate: float = typer.Option(0.0, min=0, help="Transactions/s in all; 0: as fast as possible."),
    queue_outcomes: bool = typer.Option(
        False, "--queue-outcomes", help="Callers go on once an outcome is queued, like sessions after their commit."
    ),
    consume: bool = typer.Option(False, "--consume", help="Also deliver and acknowledge everything."),
    client: str = _CLIENT,
    no_batching: bool = typer.Option(False, "--no-batching", help="Send each half in a separate request."),
    url: str | None = typer.Option(None, help="A running server, instead of a new one."),
    storage: str | None = typer.Option(None, help="A database as the server's storage, instead of the log."),
    workers: int = typer.Option(1, min=1, max=64, help="Workers of the server."),
    keys: int = typer.Option(0, min=0, help="Distinct keys; 0: messages without a key."),
    as_json: bool = _AS_JSON,
) -> None:
    """Measure transactions a second (half and outcome durably recorded)."""
    plan = transactions_bench.Plan(
        clients=clients,
        processes=min(processes, clients),
        body=body,
        topics=topics,
        seconds=seconds,
        rate=rate,
        consume=consume,
        client=_known(client),
        batching=not no_batching,
        queues_outcomes=queue_outcomes,
        url=url,
        storage=storage,
        workers=workers,
        keys=keys,
    )
    show(transactions_bench.run(plan), as_json)


@group.command()
def bridge(
    dsn: str = typer.Option(..., "--dsn", envvar="NOTIFY_DSN", help="A MySQL or MariaDB whose binlog is read."),
    rows: int = typer.Option(100_000, min=1000, help="Single-row transactions written beforehand."),
    rate: float = typer.Option(4500.0, min=1, help="Rows/s while the lag is measured; at most half the highest rate."),
    seconds: float = typer.Option(10.0, min=1, max=600, help="How long the lag is measured."),
    body: int = _BODY,
    as_json: bool = _AS_JSON,
) -> None:
    """Measure rows/s from a binlog to the durable log, and the lag of new rows."""
    from notify.bench import bridge as bridge_bench

    with opened(dsn) as engine:
        if engine.dialect.name not in ("mysql", "mariadb"):
            raise InvalidRequest(f"{engine.dialect.name} has no binlog: name a MySQL or MariaDB with --dsn")
    show(bridge_bench.run(bridge_bench.Plan(dsn, rows, rate, seconds, body)), as_json)


@group.command()
def delivery(
    groups: int = typer.Option(15, min=1, max=1000, help="Groups; each receives all messages."),
    messages: int = typer.Option(300_000, min=1, help="Messages stored beforehand."),
    topics: int = typer.Option(1, min=1, max=100_000, help="Topics that the messages are spread over."),
    processes: int = typer.Option(1, min=1, max=64, help="Consumer processes that share the groups."),
    mode: str = typer.Option("shared", help=f"The subscriptions' mode: {', '.join(MODES)}."),
    keys: int = typer.Option(0, min=0, help="Distinct keys; 0: messages without a key."),
    client: str = _CLIENT,
    batch: int = typer.Option(0, min=0, max=10_000, help="Messages in a call of the SDK's handler; 0: one."),
    body: int = _BODY,
    as_json: bool = _AS_JSON,
) -> None:
    """Measure acknowledged deliveries a second, summed over the groups."""
    if mode not in MODES or mode == "broadcast":
        raise typer.BadParameter("--mode must be shared, ordered, failover or exclusive")
    sizes = groups, messages, topics, body, min(processes, groups)
    show(delivery_bench.run(delivery_bench.Plan(*sizes, mode, keys, _known(client), batch or None)), as_json)


@group.command()
def topics(
    counts: list[int] = typer.Option(
        [10_000, 100_000], "--topics", min=1, max=1_000_000, help="Numbers of topics, compared with 16."
    ),
    clients: int = typer.Option(1024, min=1, max=4096, help="Concurrent callers."),
    seconds: float = typer.Option(5.0, min=0.5, max=3600, help="Measured time of a run, after 2 s of warm-up."),
    runs: int = typer.Option(5, min=1, max=100, help="Interleaved runs of each number of topics."),
    body: int = _BODY,
    as_json: bool = _AS_JSON,
) -> None:
    """Compare the rate over many topics with the rate over 16, and measure the memory of an idle topic."""
    plan = topics_bench.Plan(tuple(counts), clients, seconds, runs=runs, body=body)
    show(topics_bench.run(plan), as_json)


@group.command()
def backlog(
    messages: int = typer.Option(1_000_000, min=1000, help="Messages stored while every consumer is down."),
    clients: int = typer.Option(1024, min=1, max=4096, help="Concurrent callers of the producers."),
    seconds: float = typer.Option(5.0, min=0.5, max=3600, help="Measured time of a run."),
    runs: int = typer.Option(5, min=1, max=100, help="Interleaved runs of each kind."),
    body: int = _BODY,
    as_json: bool = _AS_JSON,
) -> None:
    """Measure a backlog: producers, the server's memory, its start after kill -9, and a drain with cold caches."""
    show(backlog_bench.run(backlog_bench.Plan(messages, body, clients, seconds, runs)), as_json)


def _known(client: str) -> str:
    if client not in delivery_bench.CLIENTS:
        raise typer.BadParameter(f"--client must be one of {', '.join(delivery_bench.CLIENTS)}")
    return client


def show(result: dict[str, object], as_json: bool) -> None:
    """Print a result. Exit code 1 if a message was lost or doubled."""
    if as_json:
        say_json(result)
    else:
        table = Rows("figure", "value")
        for name, value in result.items():
            table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
        console().print(table)
    raise typer.Exit(1 if result["lost"] or result["duplicated"] else 0)
