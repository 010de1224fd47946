"""`notify dead-letter`: what a group could not handle."""

from __future__ import annotations

from operator import itemgetter

import typer

from notify.cli.api import (
    AS_JSON,
    BEFORE,
    BEFORE_INBOX,
    DRY_RUN,
    REASON,
    REPLAY_EFFECTS,
    URL,
    WIDE,
    Columns,
    call,
    given,
    place,
    seconds,
    show,
    show_rows,
    write,
)
from notify.cli.job import followed
from notify.message import DEAD_LETTER_REASON

COLUMNS: Columns = {
    "message": itemgetter("id"),
    "topic": itemgetter("topic"),
    "dead since": lambda m: seconds(m["dead_at"]),
    "sent again": lambda m: "yes" if m["redriven"] else "no",
    "reason": lambda m: (m.get("headers") or {}).get(DEAD_LETTER_REASON, ""),
}

group = typer.Typer(help="Messages that a group failed to handle.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(group, name="dead-letter")


@group.command("list")
def list_dead(
    group_name: str = typer.Argument(..., metavar="GROUP"),
    max: int = typer.Option(100, min=1, max=10_000),
    wide: bool = WIDE,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """List a group's dead letters with the reasons."""
    result = call(url, "GET", "groups", group_name, "dead-letters", query=f"?max={max}")
    show_rows(result, as_json, "messages", COLUMNS, wide)


@group.command("purge")
def purge_dead(
    group_name: str = typer.Argument(..., metavar="GROUP"),
    before: str = typer.Option(..., help=BEFORE),
    reason: str = REASON,
    dry_run: bool = DRY_RUN,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Delete a group's dead letters up to a point, redriven or not."""
    body = write(reason, dry_run, before=place(before))
    show(call(url, "POST", "groups", group_name, "dead-letters", "purge", body=body), as_json)


@group.command()
def redrive(
    group_name: str = typer.Argument(..., metavar="GROUP"),
    id: list[str] = typer.Option([], help="Only these messages (repeatable)."),
    topic: str | None = typer.Option(None, help="Only dead letters of this topic."),
    tag: str | None = typer.Option(None, help="Only dead letters with this tag."),
    key: str | None = typer.Option(None, help="Only dead letters with this key."),
    contains: str | None = typer.Option(None, help="Only dead letters whose reason contains this text."),
    filter: str = typer.Option("", help="Only dead letters for which this CEL expression is true."),
    max: int = typer.Option(100, min=1, max=4096),
    replay_effects: bool = REPLAY_EFFECTS,
    force: bool = BEFORE_INBOX,
    all: bool = typer.Option(False, "--all", help="All of them, as a job; waits for its end and shows its progress."),
    reason: str = REASON,
    dry_run: bool = DRY_RUN,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Send dead letters to their group again; a repeated redrive sends each once."""
    chosen = {"topic": topic, "tag": tag, "key": key, "contains": contains, "filter": filter}
    wanted = {name: value for name, value in chosen.items() if value}
    body = write(
        reason, dry_run, ids=id or None, max=max, wanted=wanted, all=all, **given(replay_effects=replay_effects)
    )
    answer = call(url, "POST", "groups", group_name, "dead-letters", "redrive", body=body)
    if all and not dry_run:
        answer = followed(url, answer["result"]["job"], as_json)
    show(answer, as_json)
    if all and not dry_run and (answer["state"] != "done" or answer["failed"]):
        raise typer.Exit(1)
