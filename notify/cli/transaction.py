"""`notify transaction`: transactions in doubt and parked."""

from __future__ import annotations

from operator import itemgetter

import typer

from notify.cli.api import (
    AS_JSON,
    DRY_RUN,
    REASON,
    URL,
    WATCH,
    WIDE,
    Columns,
    call,
    show,
    show_rows,
    watched,
    write,
)

COLUMNS: Columns = {
    "transaction": itemgetter("id"),
    "state": itemgetter("state"),
    "age": lambda t: f"{t['age']:.0f} s",
    "producer group": lambda t: t["producer_group"] + ("" if t["producer_online"] else " (offline)"),
    "topics": itemgetter("messages"),
}

group = typer.Typer(help="Transactions in doubt and parked.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(group, name="transaction")


@group.command("list")
def list_transactions(
    state: str | None = typer.Option(None, help="PREPARED or PARKED."),
    producer_group: str | None = typer.Option(None, help="Only transactions of this producer group."),
    older_than: float = typer.Option(0, min=0, help="Only transactions older than so many seconds."),
    max: int = typer.Option(100, min=1, max=10_000, help="Show at most so many."),
    wide: bool = WIDE,
    watch: float = WATCH,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """List undecided transactions, the oldest first."""
    query = f"?max={max}&older_than={older_than}"
    query += f"&state={state}" if state else ""
    query += f"&producer_group={producer_group}" if producer_group else ""

    def look() -> None:
        result = call(url, "GET", "transactions", query=query)
        if not as_json:
            for row in result["transactions"]:
                row["messages"] = ", ".join(m["topic"] for m in row["messages"])
        show_rows(result, as_json, "transactions", COLUMNS, wide)

    watched(watch, look)


@group.command("show")
def show_transaction(id: str, url: str = URL, as_json: bool = AS_JSON) -> None:
    """Show one transaction."""
    show(call(url, "GET", "transactions", id), as_json)


def action(name: str, text: str) -> None:
    @group.command(name, help=text)
    def act(id: str, reason: str = REASON, dry_run: bool = DRY_RUN, url: str = URL, as_json: bool = AS_JSON) -> None:
        show(call(url, "POST", "transactions", id, name, body=write(reason, dry_run)), as_json)


action("commit", "Force the commit of an undecided transaction.")
action("rollback", "Force the rollback of an undecided transaction.")
action("check", "Check a transaction now: ask its producer group.")
action("resume", "Resume a parked transaction: its checks start again.")
