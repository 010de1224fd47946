"""`notify group`: consumer groups, their subscriptions and positions."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any
from urllib.parse import quote

import typer

from notify.admin_api import groups
from notify.admin_api.words import duration
from notify.cli.api import (
    AS_JSON,
    DRY_RUN,
    REASON,
    URL,
    WATCH,
    WIDE,
    Columns,
    call,
    seconds,
    show,
    show_first,
    show_rows,
    watched,
)
from notify.cli.printed import latency
from notify.cli.writes import add_write, send_write, show_write, write_body
from notify.errors import NotFound
from notify.protocol.limits import digits

COLUMNS: Columns = {
    "group": itemgetter("name"),
    "lag": itemgetter("lag"),
    "leased": itemgetter("leased"),
    "consumers": itemgetter("consumers"),
    "paused": lambda g: "paused" if g["paused"] else "",
}

group = typer.Typer(no_args_is_help=True)
push = typer.Typer(help="Post a group's messages to a webhook.", no_args_is_help=True)
priorities = typer.Typer(help="Priority classes of a group's topics.", no_args_is_help=True)
objective = typer.Typer(help="How soon a group's messages are to be acknowledged.", no_args_is_help=True)
group.add_typer(push, name="push")
group.add_typer(objective, name="objective")
group.add_typer(priorities, name="priorities")


@group.command("list")
def list_groups(wide: bool = WIDE, watch: float = WATCH, url: str = URL, as_json: bool = AS_JSON) -> None:
    """List groups with their lag."""
    watched(watch, lambda: show_rows(call(url, "GET", "groups"), as_json, "groups", COLUMNS, wide))


@group.command("show")
def show_group(name: str, watch: float = WATCH, url: str = URL, as_json: bool = AS_JSON) -> None:
    """Show a group: subscriptions, positions, leases, instances."""

    def look() -> None:
        answer = call(url, "GET", "groups", name)
        show(answer if as_json else in_words(answer), as_json)

    watched(watch, look)


TENANTS: Columns = {
    "topic": itemgetter("topic"),
    "tenant": lambda t: "several" if t["are_several"] else "none named" if t["tenant"] is None else t["tenant"],
    "waiting": itemgetter("waiting"),
    "oldest": lambda t: seconds(t["oldest_at"]),
}


@group.command("tenants")
def list_tenants(
    name: str,
    topic: str = typer.Option("", help="Only of this topic."),
    max: int = typer.Option(20, min=1, max=100, help="Show at most this many."),
    wide: bool = WIDE,
    watch: float = WATCH,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """List the tenants that wait for their turns (`--fair-by`): those with the most waiting messages first."""
    query = f"?max={max}" + (f"&topic={quote(topic, safe='')}" if topic else "")

    def look() -> None:
        result = call(url, "GET", "groups", name, "tenants", query=query)
        show_first(result, as_json, "tenants", TENANTS, wide)

    watched(watch, look)


WORDS = {
    "bound": "at most in flight",
    "earlier": "earlier limits",
    "end": "next offset",
    "epoch": "resets",
    "expired": "leases expired",
    "inbox_from": "inbox complete since",
    "latency": "latency, last 2 min",
    "next": "next offset",
    "per_second": "messages/s",
    "position": "acknowledged up to",
    "replay": "replays",
    "settled_above": "acknowledged out of order",
    "share": "turns in its class",
    "start": "first offset",
}
"""The words that people read for the names of fields."""


def in_words(answer: Any) -> Any:
    """An answer with WORDS for the names of its fields, and units for its times."""
    if isinstance(answer, dict):
        return {WORDS.get(name, name): VALUES.get(name, in_words)(value) for name, value in answer.items()}
    return [in_words(each) for each in answer] if isinstance(answer, list) else answer


def _since(instant: str | None) -> str | None:
    """The time from which on an inbox is complete."""
    return "the first message" if instant and instant.startswith("1970-01-01T00:00:00") else instant


VALUES: dict[str, Callable[[Any], Any]] = {
    "backlog": lambda count: count or "no bound",
    "inbox_from": _since,
    "p50": latency,
    "p95": latency,
    "p99": latency,
    "retention": lambda seconds: duration(seconds) if seconds else "the server's setting",
    "retention_bytes": lambda size: size or "no bound",
    "retry_max": duration,
    "retry_min": duration,
    "ttl": lambda seconds: duration(seconds) if seconds else "never expire",
}
"""The functions that make these fields' values readable."""


add_write(
    group, "reset", groups.RESET, "Move a group's position in a topic; its leases there become stale.", name=str
)  # fmt: skip
add_write(
    group, "subscribe", groups.SUBSCRIPTION_PUT, "Create or change a subscription.", name=str,
    topic=typer.Argument(..., help="A topic, or a pattern with *, which also matches later topics."),
)  # fmt: skip


@priorities.command("show")
def show_priorities(name: str, url: str = URL, as_json: bool = AS_JSON) -> None:
    """Show a group's priority classes."""
    show(call(url, "GET", "groups", name, "priorities"), as_json)


@priorities.command("set")
def set_priorities(
    name: str,
    klass: list[str] = typer.Option(
        ..., "--class", help="NAME=WEIGHT:PATTERN,PATTERN (repeatable, in order); default weights: 6, 3, 1."
    ),
    share: list[str] = typer.Option([], help="TOPIC=TURNS, a topic's turns within its class (repeatable)."),
    reason: str = REASON,
    dry_run: bool = DRY_RUN,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Set a group's priority classes: name all of them."""
    body = write_body(reason, dry_run, classes=[_class(text) for text in klass], shares=dict(_share(s) for s in share))
    show_write(groups.PRIORITIES_PUT.name, send_write(groups.PRIORITIES_PUT, url, name, body=body), as_json)


@push.command("show")
def show_push(name: str, url: str = URL, as_json: bool = AS_JSON) -> None:
    """Show the webhook that a group's messages are posted to."""
    pushes = call(url, "GET", "pushes")["pushes"]
    if name not in pushes:
        raise NotFound(f"the messages of group {name!r} are not posted to a webhook")
    show(pushes[name], as_json)


add_write(
    push, "set", groups.PUSH_PUT, "Post a group's messages to a webhook.", name=str,
)  # fmt: skip
add_write(push, "stop", groups.PUSH_DELETE, "Post no more messages; they wait for consumers.", name=str)


add_write(
    objective, "set", groups.OBJECTIVE_PUT, "Set how soon a group's messages are to be acknowledged.", name=str,
)  # fmt: skip
add_write(objective, "remove", groups.OBJECTIVE_DELETE, "Remove a group's objective.", name=str)


add_write(group, "pause", groups.PAUSE, "Pause a group: it receives nothing until it is resumed.", name=str)
add_write(group, "resume", groups.RESUME, "Resume a paused group.", name=str)


def _class(text: str) -> dict[str, Any]:
    """A class from NAME[=WEIGHT][:PATTERN,…]."""
    head, _, patterns = text.partition(":")
    name, _, weight = head.partition("=")
    number = digits(weight)
    if weight and number is None:
        raise typer.BadParameter(f"{weight!r} is not a weight; write NAME=WEIGHT:PATTERN,PATTERN")
    return {"name": name, "weight": number, "topics": [p for p in patterns.split(",") if p]}


def _share(text: str) -> tuple[str, int]:
    topic, _, turns = text.rpartition("=")
    number = digits(turns)
    if not topic or number is None:
        raise typer.BadParameter(f"{text!r} is not a share; write TOPIC=TURNS")
    return topic, number
