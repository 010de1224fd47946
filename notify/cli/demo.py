"""`notify demo`: runs the demo and prints its proof."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.live import Live
from rich.panel import Panel

from notify.cli.demo_shop.conductor import SECONDS
from notify.cli.demo_shop.proof import Proof
from notify.cli.demo_shop.run import Demo
from notify.cli.printed import Rows, say_json
from notify.cli.printed import console as new_console
from notify.runtime.signals import exit_on_signal
from notify.runtime.visible import visible


def demo(
    context: typer.Context,
    dsn: str | None = typer.Option(None, envvar="NOTIFY_DEMO_DSN", help="An empty database instead of SQLite files."),
    seconds: float = typer.Option(
        SECONDS, min=5, max=600, help="The least time for which processes are killed, after the first order."
    ),
    seed: int | None = typer.Option(None, help="The seed of the order of kills."),
    audit: Path | None = typer.Option(
        None, help="Audit the run with Spark at the end, and write the report to this directory."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """A shop whose processes are killed all the time, and the proof that every order took effect exactly once."""
    context.with_resource(exit_on_signal())
    if as_json:
        proof = Demo(dsn, seconds, seed, lambda *_: None, audit=audit).run()
        say_json(as_dict(proof))
        raise typer.Exit(0 if proof.ok else 1)
    console = new_console()
    with Live(_progress(Proof(), "starting"), console=console, refresh_per_second=8, transient=True) as live:
        proof = Demo(dsn, seconds, seed, lambda p, act: live.update(_progress(p, act)), audit=audit).run()
    show_summary(console, proof, audit)
    raise typer.Exit(0 if proof.ok else 1)


def as_dict(proof: Proof) -> dict[str, Any]:
    """The object that --json prints."""
    computed = {"ok": proof.ok, "reasons": proof.reasons(), "resolved_by_check": proof.resolved_by_check}
    return dataclasses.asdict(proof) | computed


def _progress(proof: Proof, act: str) -> Panel:
    table = Rows.grid(padding=(0, 3))
    killed = ", ".join(f"{name} {times}×" for name, times in proof.killed.items() if times) or "none yet"
    died = ", ".join(f"{point} {times}×" for point, times in proof.killed_at.items() if times) or "none yet"
    table.add_row("orders committed", f"{proof.committed:,}")
    table.add_row("effects so far", f"{proof.effects:,}")
    table.add_row("transactions undecided now", f"{proof.undecided:,}")
    table.add_row("resolved by asking back", f"{proof.resolved_by_check:,}")
    table.add_row("killed at random moments", killed)
    table.add_row("producers killed", died)
    return Panel(table, title="Notify demo: a shop under fire", subtitle=act, expand=False)


def show_summary(console: Console, proof: Proof, audit: Path | None = None) -> None:
    _show_what_happened(console, proof)
    if proof.proved:
        _show_proof(console, proof)
    if proof.audit is not None:
        _show_audit(console, proof.audit, audit)
    if not proof.ok:
        _show_last_words(console, proof)
    summary = (
        f"{proof.exactly_once:,} of {proof.committed:,} committed orders took effect exactly once, "
        f"{proof.ghosts:,} others did, {proof.resolved_by_check:,} lost outcomes were resolved by asking back, "
        f"in {proof.seconds:.0f} s"
    )
    verdict = f"PASS {summary}" if proof.ok else f"FAIL {'; '.join(proof.reasons())}"
    console.print(visible(f"VERDICT: {verdict}"), soft_wrap=True)


def _show_what_happened(console: Console, proof: Proof) -> None:
    console.print("\nWhat happened", style="bold")
    killed = ", ".join(f"{name} {times}×" for name, times in proof.killed.items())
    console.print(f"  Killed with SIGKILL at random moments: {killed}.")
    died = ", ".join(f"{point} {times}×" for point, times in proof.killed_at.items())
    console.print(f"  Producers that killed themselves at the worst moments: {died}.")
    if proof.proved:
        console.print(
            f"  {proof.attempts:,} orders were begun. {proof.committed:,} committed to the shop's database; "
            f"{proof.not_committed:,} rolled back or died with their process."
        )
    resolved = ", ".join(f"{count} {state}" for state, count in sorted(proof.in_doubt.items())) or "none"
    console.print(f"  Transactions whose outcome got lost, resolved by asking back: {resolved}.")
    for state in sorted(proof.in_doubt):
        example = next((lost for lost in proof.lost if lost.state == state and lost.checks), None)
        if example is not None:
            process, point = example.process, example.point
            console.print(f"    {example.transaction}: {process} killed {point}; the check found it {state}.")
    console.print(f"  Messages delivered more than once, and absorbed by the inbox: {proof.redelivered:,}.")


def _show_proof(console: Console, proof: Proof) -> None:
    console.print("\nThe proof, counted in the two databases", style="bold")
    table = Rows("", "count", "must be")
    table.add_row("committed orders with exactly one effect", f"{proof.exactly_once:,}", f"{proof.committed:,}")
    table.add_row("committed orders without an effect", f"{proof.missing:,}", "0")
    table.add_row("orders with more than one effect", f"{proof.doubled:,}", "0")
    table.add_row("effects of orders that never committed", f"{proof.ghosts:,}", "0")
    table.add_row("transactions left undecided", f"{proof.undecided:,}", "0")
    console.print(table)


def _show_audit(console: Console, result: dict[str, Any], report: Path | None) -> None:
    counts = ", ".join(f"{count} {name}" for name, count in result["counts"].items() if count) or "no finding"
    totals = result["totals"]
    console.print(
        f"\nThe audit by Spark: {result['verdict']}. {totals['committed']:,} committed messages, "
        f"{totals['in_queues']:,} in queues, {totals['effects']:,} with effects; {counts}."
    )
    for reason in result["reasons"]:
        console.print(visible(f"  not judged: {reason}"))
    console.print(f"  The report: {report}/report.html", soft_wrap=True)


def _show_last_words(console: Console, proof: Proof) -> None:
    console.print("\nThe last lines of each process", style="bold")
    for name, lines in proof.stderr.items():
        for line in lines:
            console.print(visible(f"  {name}: {line}"), soft_wrap=True)
    console.print(f"  The run's other files: {proof.directory}", soft_wrap=True)
