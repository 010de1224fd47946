"""`notify topic`: topics and their queues."""

from __future__ import annotations

from operator import itemgetter

import typer

from notify.admin_api import topics
from notify.cli import tail
from notify.cli.api import AS_JSON, URL, WIDE, Columns, call, show, show_rows
from notify.cli.group import in_words
from notify.cli.writes import add_write

COLUMNS: Columns = {
    "topic": itemgetter("name"),
    "queues": lambda t: len({q["queue"] for q in t["queues"]}),
    "starts": lambda t: ", ".join(str(q["start"]) for q in t["queues"]),
    "ends": lambda t: ", ".join(str(q["end"]) for q in t["queues"]),
    "flush": itemgetter("flush"),
}

group = typer.Typer(no_args_is_help=True)


@group.command("list")
def list_topics(wide: bool = WIDE, url: str = URL, as_json: bool = AS_JSON) -> None:
    """List topics with their offsets."""
    show_rows(call(url, "GET", "topics"), as_json, "topics", COLUMNS, wide)


@group.command("show")
def show_topic(name: str, url: str = URL, as_json: bool = AS_JSON) -> None:
    """Show a topic: its policy, its queues, and the groups that subscribe to it with their lag."""
    answer = call(url, "GET", "topics", name) | call(url, "GET", "topics", name, "groups")
    show(answer if as_json else in_words(answer), as_json)


add_write(
    group, "create", topics.TOPIC_PUT, "Create or change a topic; options that are not given keep their values.",
    name=str,
)  # fmt: skip
add_write(group, "delete", topics.TOPIC_DELETE, "Delete a topic with its messages and subscriptions.", name=str)
add_write(group, "purge", topics.TOPIC_PURGE, "Delete a topic's messages up to a point.", name=str)
group.command()(tail.tail)
