"""`notify bench`: figures for this machine, verified."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table

from notify.bench import transactions as transactions_bench


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Measure on this machine, through the public SDK, and verify what was measured.")
    app.add_typer(group, name="bench")

    @group.callback()
    def bench() -> None:
        """Measure on this machine."""

    @group.command()
    def transactions(
        clients: int = typer.Option(128, min=1, max=4096, help="Concurrent callers."),
        processes: int = typer.Option(1, min=1, max=64, help="Load processes that share them."),
        mode: str = typer.Option("asyncio", help="asyncio (half and outcome) or threads (a real SQLAlchemy session)."),
        body: int = typer.Option(256, min=0, max=1 << 20, help="Bytes in a message's body."),
        topics: int = typer.Option(16, min=1, max=100_000, help="Topics to spread over."),
        seconds: float = typer.Option(8.0, min=0.5, max=3600, help="Measured time, after a warm-up of 2 s."),
        rate: float = typer.Option(0.0, min=0, help="Transactions/s in all; 0: as fast as it goes."),
        consume: bool = typer.Option(False, "--consume", help="Also deliver and acknowledge everything."),
        no_batching: bool = typer.Option(False, "--no-batching", help="One request a half."),
        url: str | None = typer.Option(None, help="A running server, instead of one of its own."),
        dsn: str | None = typer.Option(None, help="Database for --mode threads (default: SQLite)."),
        as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
    ) -> None:
        """Transactions (half and outcome both recorded, durably) per second."""
        if mode not in ("asyncio", "threads"):
            raise typer.BadParameter("mode is asyncio or threads")
        plan = transactions_bench.Plan(
            clients=clients,
            processes=min(processes, clients),
            mode=mode,
            body=body,
            topics=topics,
            seconds=seconds,
            rate=rate,
            consume=consume,
            batching=not no_batching,
            url=url,
            dsn=dsn,
        )
        show(transactions_bench.run(plan), as_json)


def show(result: dict[str, object], as_json: bool) -> None:
    """Print a result; exit code 1 if anything was lost or doubled."""
    if as_json:
        typer.echo(json.dumps(result))
    else:
        table = Table("figure", "value")
        for name, value in result.items():
            table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
        Console().print(table)
    raise typer.Exit(1 if result["lost"] or result["duplicated"] else 0)
