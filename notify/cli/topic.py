"""`notify topic`: topics and their queues."""

from __future__ import annotations

from operator import itemgetter

import typer

from notify.cli import tail
from notify.cli.api import (
    AS_JSON,
    BEFORE,
    DRY_RUN,
    REASON,
    URL,
    WIDE,
    Columns,
    call,
    place,
    show_rows,
    show_write,
    write,
)

COLUMNS: Columns = {
    "topic": itemgetter("name"),
    "queues": lambda t: len({q["queue"] for q in t["queues"]}),
    "starts": lambda t: ", ".join(str(q["start"]) for q in t["queues"]),
    "ends": lambda t: ", ".join(str(q["end"]) for q in t["queues"]),
    "flush": itemgetter("flush"),
}

group = typer.Typer(help="Topics and their queues.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    tail.register(group)
    app.add_typer(group, name="topic")


@group.command("list")
def list_topics(wide: bool = WIDE, url: str = URL, as_json: bool = AS_JSON) -> None:
    """List topics with their offsets."""
    show_rows(call(url, "GET", "topics"), as_json, "topics", COLUMNS, wide)


@group.command()
def create(
    name: str,
    queues: int | None = typer.Option(None, min=1, max=1024, help="Number of queues; keys are spread over them."),
    retention: float | None = typer.Option(None, min=0, help="Seconds to keep messages; 0: the server's setting."),
    retention_bytes: int | None = typer.Option(None, min=0, help="Bytes of messages to keep; 0: no bound."),
    flush: str | None = typer.Option(
        None, help="Answer once messages are on disk (sync), in the kernel (async) or in memory (memory)."
    ),
    ttl: float | None = typer.Option(None, min=0, help="Seconds after which messages expire; 0: never."),
    backlog: int | None = typer.Option(
        None, min=0, help="How many messages the slowest group may be behind; 0: no bound."
    ),
    backlog_policy: str | None = typer.Option(None, help="When the backlog is full: refuse, hold or drop_oldest."),
    reason: str = REASON,
    dry_run: bool = DRY_RUN,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Create or change a topic; options that are not given keep their values."""
    fields = {
        "queues": queues,
        "retention": retention,
        "retention_bytes": retention_bytes,
        "flush": flush,
        "ttl": ttl,
        "backlog": backlog,
        "backlog_policy": backlog_policy,
    }
    body = write(reason, dry_run, **{name: value for name, value in fields.items() if value is not None})
    show_write("topic.put", call(url, "PUT", "topics", name, body=body), as_json)


@group.command()
def delete(name: str, reason: str = REASON, dry_run: bool = DRY_RUN, url: str = URL, as_json: bool = AS_JSON) -> None:
    """Delete a topic with its messages and subscriptions."""
    show_write("topic.delete", call(url, "DELETE", "topics", name, body=write(reason, dry_run)), as_json)


@group.command("purge")
def purge_topic(
    name: str,
    before: str = typer.Option(..., help=BEFORE),
    force: bool = typer.Option(False, "--force", help="Also purge messages that a group has not settled."),
    reason: str = REASON,
    dry_run: bool = DRY_RUN,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Delete a topic's messages up to a point."""
    body = write(reason, dry_run, before=place(before), force=force)
    show_write("topic.purge", call(url, "POST", "topics", name, "purge", body=body), as_json)
