"""`notify transaction`: transactions in doubt and parked."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import typer

from notify.admin_api.words import duration
from notify.admin_api.writes import WRITES
from notify.cli.api import AS_JSON, DRY_RUN, REASON, URL, WATCH, WIDE, Columns, call, show, show_rows, watched
from notify.cli.job import to_the_end
from notify.cli.writes import add_write, send_write, show_write, write_body

COLUMNS: Columns = {
    "transaction": itemgetter("id"),
    "state": itemgetter("state"),
    "age": lambda t: f"{t['age']:.0f} s",
    "producer group": lambda t: t["producer_group"] + ("" if t["producer_online"] else " (offline)"),
    "topics": itemgetter("messages"),
}

group = typer.Typer(no_args_is_help=True)


@group.command("list")
def list_transactions(
    state: str | None = typer.Option(None, help="PREPARED or PARKED."),
    producer_group: str | None = typer.Option(None, help="Only transactions of this producer group."),
    older_than: float = typer.Option(0, min=0, help="Only transactions older than this, in seconds."),
    max: int = typer.Option(100, min=1, max=10_000, help="Show at most this many."),
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
    answer = call(url, "GET", "transactions", id)
    show(answer if as_json else answer | {"age": duration(answer["age"])}, as_json)


def action(command: str, name: str, text: str) -> None:
    """Add the command of a write that decides or checks one transaction, several, or all that match."""

    @group.command(command, help=text)
    def act(
        ids: list[str] = typer.Argument(None, metavar="ID", help="The transactions; or --all."),
        all: bool = typer.Option(
            False, "--all", help="The oldest 4,096 that match, as a job; waits for its end and shows its progress."
        ),
        state: str | None = typer.Option(None, help="With --all: only PREPARED or PARKED ones."),
        producer_group: str | None = typer.Option(None, help="With --all: only this producer group."),
        older_than: float | None = typer.Option(None, min=0, help="With --all: only older ones, in seconds."),
        reason: str = REASON,
        dry_run: bool = DRY_RUN,
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        conditions = {"state": state, "producer_group": producer_group, "older_than": older_than}
        given_conditions = {field: value for field, value in conditions.items() if value is not None}
        if bool(ids) == all or (ids and given_conditions):
            raise typer.BadParameter("give ids, or --all with conditions")
        if ids and len(ids) == 1:
            one = WRITES[f"transaction.{name}"]
            show_write(one.name, send_write(one, url, ids[0], body=write_body(reason, dry_run)), as_json)
            return
        which: dict[str, Any] = {"all": True, "wanted": given_conditions} if all else {"ids": ids}
        several = WRITES[f"transactions.{name}"]
        answer = send_write(several, url, body=write_body(reason, dry_run, **which))
        to_the_end(several, url, answer, as_json, here=True)


action("commit", "commit", "Force the commit of transactions without an outcome: these, or all that match.")
action("rollback", "rollback", "Force the rollback of transactions without an outcome: these, or all that match.")
action(
    "ask", "check",
    "Ask the producers of transactions for their outcomes now; several, or all that match, are resumed as well.",
)  # fmt: skip


add_write(
    group, "resume", WRITES["transaction.resume"], "Resume a parked transaction: its checks start again.", id=str
)  # fmt: skip
