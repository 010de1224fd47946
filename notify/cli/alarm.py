"""`notify alarm`: faults that need an operator, and silencing one for a time."""

from __future__ import annotations

from operator import itemgetter

import typer

from notify.admin_api import server
from notify.cli.api import AS_JSON, URL, WIDE, Columns, call, seconds, show_rows
from notify.cli.writes import add_write

COLUMNS: Columns = {
    "alarm": itemgetter("name"),
    "target": itemgetter("target"),
    "severity": itemgetter("severity"),
    "since": lambda a: seconds(a["since"]),
    "silent until": lambda a: seconds(a["silence"]["until"]) if a["silence"] else "-",
    "text": itemgetter("text"),
}

group = typer.Typer(no_args_is_help=True)


@group.command("list")
def list_alarms(wide: bool = WIDE, url: str = URL, as_json: bool = AS_JSON) -> None:
    """List the raised alarms, silenced ones too."""
    show_rows(call(url, "GET", "alarms"), as_json, "alarms", COLUMNS, wide)


add_write(
    group, "silence", server.SILENCE,
    "Silence an alarm for a time: no webhook, no metric, and no exit code 1 of `notify overview`.", name=str,
)  # fmt: skip
add_write(group, "unsilence", server.UNSILENCE, "End an alarm's silence early.", name=str)
