"""`notify schedule`: messages that are sent by a cron expression or at an interval."""

from __future__ import annotations

from operator import itemgetter
from typing import Any
from urllib.parse import quote

import typer

from notify.admin_api import schedules
from notify.cli.api import AS_JSON, URL, WATCH, WIDE, Columns, call, seconds, show, show_first, watched
from notify.cli.writes import Send, add_write, send_write


def _rhythm(schedule: dict[str, Any]) -> str:
    return f"every {schedule['every']:g} s" if schedule["every"] else f"{schedule['cron']} {schedule['zone']}"


COLUMNS: Columns = {
    "schedule": itemgetter("name"),
    "state": itemgetter("state"),
    "topic": itemgetter("topic"),
    "when": _rhythm,
    "next": lambda s: seconds(s["next"][0] if s["next"] else None),
    "last sent": lambda s: seconds(s["last_sent_at"]),
    "sent": itemgetter("sent"),
    "missed": itemgetter("missed"),
}

group = typer.Typer(no_args_is_help=True)
NAME = typer.Argument(..., metavar="NAME", help="The schedule's name.")


@group.command("list")
def list_schedules(
    prefix: str = typer.Option("", help="Only schedules whose names begin with this."),
    max: int = typer.Option(1000, min=1, max=10_000, help="Show at most this many."),
    wide: bool = WIDE,
    watch: float = WATCH,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """List schedules: when each is due next, and what it has sent and missed."""

    def look() -> None:
        query = f"?max={max}" + (f"&prefix={quote(prefix, safe='')}" if prefix else "")
        result = call(url, "GET", "schedules", query=query, here=True)
        show_first(result, as_json, "schedules", COLUMNS, wide)

    watched(watch, look)


@group.command("show")
def show_schedule(name: str = NAME, watch: float = WATCH, url: str = URL, as_json: bool = AS_JSON) -> None:
    """Show a schedule: its next ten instants, what it has sent and missed, and its message."""
    watched(watch, lambda: show(call(url, "GET", "schedules", name, here=True), as_json))


def _here(send: Send) -> Send:
    """The writes go to the server at the address: it may be one without queues."""
    return lambda *arguments, **named: send(*arguments, **named, here=True)


for _command, _write, _text in (
    ("set", schedules.PUT, "Make or replace a schedule; with other instants than before it begins now."),
    ("pause", schedules.PAUSE, "Send nothing for a schedule until it is resumed."),
    ("resume", schedules.RESUME, "Resume a schedule; what was due while it was paused is not sent."),
    ("delete", schedules.DELETE, "Delete a schedule; the messages that it has sent stay."),
):
    add_write(group, _command, _write, _text, send=_here(send_write), name=NAME)
