"""`notify settings`: shows, changes and rolls back settings while servers run."""

from __future__ import annotations

import typer

from notify.admin_api import server
from notify.cli.api import AS_JSON, DRY_RUN, REASON, URL, call, fields, pairs, show_rows
from notify.cli.writes import add_write, send_write, show_write, write_body

group = typer.Typer(no_args_is_help=True)


@group.command("list")
def list_settings(url: str = URL, as_json: bool = AS_JSON) -> None:
    """List settings: value, origin, and whether it may change while servers run."""
    columns = fields("name", "value", "from", "live", "low", "high")
    show_rows(call(url, "GET", "settings"), as_json, "settings", columns)


@group.command("set")
def set_settings(
    changes: list[str] = typer.Argument(
        ..., help="NAME=VALUE, or NAME= for the value that the server was started with."
    ),
    reason: str = REASON,
    dry_run: bool = DRY_RUN,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Change settings of all servers, as a new revision."""
    values = {name: value or None for name, value in pairs(changes).items()}
    answer = send_write(server.SETTINGS_PUT, url, body=write_body(reason, dry_run, values=values))
    show_write(server.SETTINGS_PUT.name, answer, as_json)


@group.command()
def history(
    max: int = typer.Option(20, min=1, max=10_000, help="Show at most this many."),
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """List revisions: the changes, by whom, when and why."""
    answer = call(url, "GET", "settings", "revisions", query=f"?max={max}")
    show_rows(answer, as_json, "revisions", fields("number", "at", "who", "reason", "values"))


add_write(group, "rollback", server.SETTINGS_ROLLBACK, "Return to the settings and limits of an earlier revision.")
