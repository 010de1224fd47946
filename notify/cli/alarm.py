"""`notify alarm`: faults that need an operator, and silencing one for a time."""

from __future__ import annotations

from operator import itemgetter

import typer

from notify.cli.api import AS_JSON, DRY_RUN, REASON, URL, WIDE, Columns, call, seconds, show_rows, show_write, write

COLUMNS: Columns = {
    "alarm": itemgetter("name"),
    "target": itemgetter("target"),
    "severity": itemgetter("severity"),
    "since": lambda a: seconds(a["since"]),
    "silent until": lambda a: seconds(a["silence"]["until"]) if a["silence"] else "-",
    "text": itemgetter("text"),
}
TARGET = typer.Option("", help="The alarm's target as `notify alarm list` shows it, such as a group.")

group = typer.Typer(help="Faults that need an operator.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(group, name="alarm")


@group.command("list")
def list_alarms(wide: bool = WIDE, url: str = URL, as_json: bool = AS_JSON) -> None:
    """List the raised alarms, silenced ones too."""
    show_rows(call(url, "GET", "alarms"), as_json, "alarms", COLUMNS, wide)


@group.command()
def silence(
    name: str,
    target: str = TARGET,
    hours: float = typer.Option(1.0, min=0.02, max=720, help="For how long."),
    reason: str = REASON,
    dry_run: bool = DRY_RUN,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Silence an alarm for a time: no webhook, no metric, and no exit code 1 of `notify overview`."""
    body = write(reason, dry_run, target=target, seconds=hours * 3600)
    show_write("alarm.silence", call(url, "POST", "alarms", name, "silence", body=body), as_json)


@group.command()
def unsilence(
    name: str,
    target: str = TARGET,
    reason: str = REASON,
    dry_run: bool = DRY_RUN,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """End an alarm's silence early."""
    answer = call(url, "POST", "alarms", name, "unsilence", body=write(reason, dry_run, target=target))
    show_write("alarm.unsilence", answer, as_json)
