"""`notify held-key`: keys that a group holds, because a message of each has used up its attempts."""

from __future__ import annotations

from operator import itemgetter
from urllib.parse import quote

import typer

from notify.admin_api import held_keys
from notify.cli.api import AS_JSON, URL, WIDE, Columns, call, seconds, show_first
from notify.cli.writes import add_write

COLUMNS: Columns = {
    "key": itemgetter("key"),
    "message": lambda h: h["id"] or "no longer retained",
    "topic": itemgetter("topic"),
    "held since": lambda h: seconds(h["since"]),
    "failures": itemgetter("failures"),
    "deaths": itemgetter("deaths"),
    "waiting": itemgetter("waiting"),
    "reason": itemgetter("reason"),
}

GROUP = typer.Argument(..., metavar="GROUP")

group = typer.Typer(no_args_is_help=True)


@group.command("list")
def list_held(
    group_name: str = GROUP,
    topic: str = typer.Option("", help="Only keys of this topic."),
    max: int = typer.Option(100, min=1, max=held_keys.AT_ONCE, help="Show at most this many."),
    wide: bool = WIDE,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """List the keys that a group holds, the longest held first: since when, and why."""
    query = f"?max={max}" + (f"&topic={quote(topic, safe='')}" if topic else "")
    result = call(url, "GET", "groups", group_name, "held-keys", query=query)
    show_first(result, as_json, "held", COLUMNS, wide, "held keys")


add_write(
    group, "retry", held_keys.RETRY, "Deliver the messages that hold keys again; a failure holds the key again.",
    group_name=GROUP,
)  # fmt: skip
add_write(
    group, "skip", held_keys.SKIP,
    "Make the messages that hold keys dead letters, with the reason; the keys continue.", group_name=GROUP,
)  # fmt: skip
add_write(
    group, "release", held_keys.RELEASE, "Deliver the messages that hold keys again, with all their attempts.",
    group_name=GROUP,
)  # fmt: skip
