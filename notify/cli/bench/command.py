"""`notify bench`: measures this machine and verifies each run."""

from __future__ import annotations

import typer

from notify.cli.bench import transactions as transactions_bench
from notify.cli.printed import Rows, console, say_json
from notify.runtime.signals import exit_on_signal

AS_JSON = typer.Option(False, "--json", help="One JSON object on stdout.")
CLIENT = typer.Option(
    "wire",
    help="What consumes: wire (whole batches, no handler); with an empty handler: plain (a script over HTTP), threads "
    "(Consumer), coroutines (AsyncConsumer).",
)
BODY = typer.Option(256, min=0, max=1 << 20, help="Bytes in a message's body.")


group = typer.Typer(no_args_is_help=True)


@group.callback()
def bench(context: typer.Context) -> None:
    """Measure this machine."""
    context.with_resource(exit_on_signal())


@group.command()
def transactions(
    clients: int = typer.Option(128, min=1, max=4096, help="Concurrent callers."),
    processes: int = typer.Option(1, min=1, max=64, help="Processes that share the callers."),
    body: int = BODY,
    topics: int = typer.Option(16, min=1, max=100_000, help="Topics that the messages are spread over."),
    seconds: float = typer.Option(8.0, min=0.5, max=3600, help="Measured time, after a warm-up of 2 s."),
    rate: float = typer.Option(0.0, min=0, help="Transactions/s in all; 0: as fast as possible."),
    queue_outcomes: bool = typer.Option(
        False, "--queue-outcomes", help="Callers continue once an outcome is queued, like sessions after their commit."
    ),
    consume: bool = typer.Option(False, "--consume", help="Also deliver and acknowledge everything."),
    client: str = CLIENT,
    no_batching: bool = typer.Option(False, "--no-batching", help="Send each half in a separate request."),
    url: str | None = typer.Option(None, help="A running server, instead of a new one."),
    storage: str | None = typer.Option(None, help="A database as the server's storage, instead of the log."),
    workers: int = typer.Option(1, min=1, max=64, help="Workers of the server."),
    keys: int = typer.Option(0, min=0, help="Distinct keys; 0: messages without a key."),
    as_json: bool = AS_JSON,
) -> None:
    """Measure transactions per second (half and outcome durably recorded)."""
    figures = transactions_bench.run(
        clients=clients,
        processes=min(processes, clients),
        body=body,
        topics=topics,
        seconds=seconds,
        rate=rate,
        consume=consume,
        client=known(client),
        batching=not no_batching,
        queues_outcomes=queue_outcomes,
        url=url,
        storage=storage,
        workers=workers,
        keys=keys,
    )
    show(figures, as_json)


def known(client: str) -> str:
    if client not in transactions_bench.CLIENTS:
        raise typer.BadParameter(f"--client must be one of {', '.join(transactions_bench.CLIENTS)}")
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
