"""`notify demo`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import typer
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from notify.demo.run import Demo, Proof


def register(app: typer.Typer) -> None:
    @app.command()
    def demo(
        dsn: str | None = typer.Option(
            None, envvar="NOTIFY_DEMO_DSN", help="An empty database instead of SQLite files."
        ),
        seconds: float = typer.Option(18.0, min=5, max=600, help="How long processes are killed."),
        seed: int | None = typer.Option(None, help="Repeat the same order of kills."),
        audit: Path | None = typer.Option(
            None, help="At the end audit it with Spark, and put the report into this directory."
        ),
        as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
    ) -> None:
        """A shop whose processes are killed all the time, and the proof that every order took effect exactly once."""
        if as_json:
            proof = Demo(dsn, seconds, seed, lambda *_: None, audit=audit).run()
            typer.echo(json.dumps(dataclasses.asdict(proof) | {"ok": proof.ok}))
            raise typer.Exit(0 if proof.ok else 1)
        console = Console()
        with Live(_progress(Proof(), "starting"), console=console, refresh_per_second=8, transient=True) as live:
            proof = Demo(dsn, seconds, seed, lambda p, act: live.update(_progress(p, act)), audit=audit).run()
        show_summary(console, proof, audit)
        raise typer.Exit(0 if proof.ok else 1)


def _progress(proof: Proof, act: str) -> Panel:
    table = Table.grid(padding=(0, 3))
    killed = ", ".join(f"{name} {times}×" for name, times in proof.killed.items() if times) or "nobody yet"
    table.add_row("orders committed", f"{proof.committed:,}")
    table.add_row("effects so far", f"{proof.effects:,}")
    table.add_row("transactions undecided now", f"{proof.undecided:,}")
    table.add_row("killed with SIGKILL", killed)
    return Panel(table, title="Notify demo: a shop under fire", subtitle=act, expand=False)


def show_summary(console: Console, proof: Proof, audit: Path | None = None) -> None:
    console.print("\n[bold]What happened[/bold]")
    killed = ", ".join(f"{name} {times} times" for name, times in proof.killed.items())
    console.print(f"  Killed with SIGKILL at random moments: {killed}.")
    console.print(
        f"  {proof.attempts:,} orders were begun. {proof.committed:,} committed to the shop's database; "
        f"{proof.not_committed:,} rolled back or died with their process."
    )
    resolved = ", ".join(f"{count} {state}" for state, count in sorted(proof.in_doubt.items())) or "none came up"
    console.print(f"  Transactions whose outcome got lost, resolved by asking back: {resolved}.")
    console.print(f"  Messages delivered more than once, and absorbed by the inbox: {proof.redelivered:,}.")
    console.print("\n[bold]The proof, counted in the two databases[/bold]")
    table = Table("", "count", "must be")
    table.add_row("committed orders with exactly one effect", f"{proof.exactly_once:,}", f"{proof.committed:,}")
    table.add_row("committed orders without an effect", f"{proof.missing:,}", "0")
    table.add_row("orders with more than one effect", f"{proof.doubled:,}", "0")
    table.add_row("effects of orders that never committed", f"{proof.ghosts:,}", "0")
    table.add_row("transactions left undecided", f"{proof.undecided:,}", "0")
    console.print(table)
    if proof.audit is not None:
        counts = ", ".join(f"{count} {name}" for name, count in proof.audit["counts"].items() if count) or "no finding"
        totals = proof.audit["totals"]
        console.print(
            f"\n[bold]The audit by Spark[/bold]: {proof.audit['verdict']}. {totals['committed']:,} committed messages, "
            f"{totals['in_queues']:,} in queues, {totals['effects']:,} with effects; {counts}."
        )
        for reason in proof.audit["reasons"]:
            console.print(f"  not judged: {reason}")
        console.print(f"  The report: {audit}/report.html", soft_wrap=True)
    verdict = "PASS" if proof.ok else "FAIL"
    what = (
        f"{proof.exactly_once:,} of {proof.committed:,} committed orders took effect exactly once, "
        f"{proof.ghosts:,} others did, in {proof.seconds:.0f} s"
    )
    console.print(f"VERDICT: {verdict} {what}", soft_wrap=True, highlight=False)
