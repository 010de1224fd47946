"""`notify group`: consumer groups, their subscriptions and positions."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import typer

from notify.cli.api import (
    AS_JSON,
    BEFORE_INBOX,
    DRY_RUN,
    REASON,
    REPLAY_EFFECTS,
    URL,
    WATCH,
    WIDE,
    Columns,
    call,
    given,
    place,
    show,
    show_rows,
    show_write,
    watched,
    write,
)
from notify.errors import NotFound
from notify.limits import MODES, digits

COLUMNS: Columns = {
    "group": itemgetter("name"),
    "lag": itemgetter("lag"),
    "leased": itemgetter("leased"),
    "consumers": itemgetter("consumers"),
    "paused": lambda g: "paused" if g["paused"] else "",
}

group = typer.Typer(help="Consumer groups.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(group, name="group")


@group.command("list")
def list_groups(wide: bool = WIDE, watch: float = WATCH, url: str = URL, as_json: bool = AS_JSON) -> None:
    """List groups with their lag."""
    watched(watch, lambda: show_rows(call(url, "GET", "groups"), as_json, "groups", COLUMNS, wide))


@group.command("show")
def show_group(name: str, watch: float = WATCH, url: str = URL, as_json: bool = AS_JSON) -> None:
    """Show a group: subscriptions, positions, leases, instances."""
    watched(watch, lambda: show(call(url, "GET", "groups", name), as_json))


@group.command()
def reset(
    name: str,
    topic: str = typer.Option(..., help="The topic to reset."),
    to: str = typer.Option(..., help="The new position: earliest, latest, an offset or an instant (RFC 3339)."),
    replay_effects: bool = REPLAY_EFFECTS,
    force: bool = BEFORE_INBOX,
    reason: str = REASON,
    dry_run: bool = DRY_RUN,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Move a group's position in a topic; its leases there become stale."""
    body = write(reason, dry_run, topic=topic, to=place(to), **given(replay_effects=replay_effects, force=force))
    show_write("group.reset", call(url, "POST", "groups", name, "reset", body=body), as_json)


@group.command()
def subscribe(
    name: str,
    topic: str = typer.Argument(..., help="A topic, or a pattern with *, which also matches later topics."),
    mode: str = typer.Option("shared", help="The mode: " + ", ".join(MODES) + "."),
    start: str | None = typer.Option(
        None, help="The start of a new subscription: earliest, latest, an offset or an instant."
    ),
    tag: list[str] = typer.Option([], help="Only messages with this tag (repeatable)."),
    filter: str = typer.Option(
        "", help="Only messages for which this CEL expression over headers, key, tag and topic is true."
    ),
    max_attempts: int = typer.Option(16, min=1, max=1000, help="Failed attempts before a message is a dead letter."),
    max_deaths: int = typer.Option(
        16, min=1, max=1000, help="Deaths of consumers that hold a message before it is a dead letter."
    ),
    retry_min: float = typer.Option(1.0, help="Seconds before the first retry; each later one waits twice as long."),
    retry_max: float = typer.Option(300.0, help="Seconds before any retry, at most."),
    force: bool = typer.Option(False, "--force", help="Change the mode even if consumers hold messages."),
    reason: str = REASON,
    dry_run: bool = DRY_RUN,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Create or change a subscription."""
    position = None if start is None else place(start)
    body = write(
        reason, dry_run, start=position, mode=mode, tags=tag, filter=filter, max_attempts=max_attempts,
        retry_min=retry_min, retry_max=retry_max, force=force,
        **({"max_deaths": max_deaths} if max_deaths != 16 else {}),  # an older server does not know it
    )  # fmt: skip
    answer = call(url, "PUT", "groups", name, "subscriptions", topic, body=body)
    show_write("subscription.put", answer, as_json)


@group.command()
def priorities(
    name: str,
    klass: list[str] = typer.Option(
        [], "--class", help="NAME=WEIGHT:PATTERN,PATTERN (repeatable, in order); default weights: 6, 3, 1."
    ),
    share: list[str] = typer.Option([], help="TOPIC=TURNS, a topic's turns within its class (repeatable)."),
    reason: str = typer.Option(
        "", envvar="NOTIFY_REASON", help="Why you change them; required with --class. [env: NOTIFY_REASON]"
    ),
    dry_run: bool = DRY_RUN,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Show a group's priority classes, or set them with --class."""
    if share and not klass:
        raise typer.BadParameter("--share goes with --class: name all classes")
    if klass and not reason:
        raise typer.BadParameter("say why with --reason")
    if not klass:
        show(call(url, "GET", "groups", name, "priorities"), as_json)
        return
    body = write(reason, dry_run, classes=[_class(text) for text in klass], shares=dict(_share(s) for s in share))
    show_write("priorities.put", call(url, "PUT", "groups", name, "priorities", body=body), as_json)


@group.command()
def push(
    name: str,
    webhook: str = typer.Argument(
        "", help="The address that messages are posted to; without it the current one is shown."
    ),
    batch: int = typer.Option(1, min=1, max=1000, help="The most messages in a call."),
    at_once: int = typer.Option(4, min=1, max=64, help="The most concurrent calls of each server."),
    stop: bool = typer.Option(False, "--stop", help="Post no more; the messages wait for consumers."),
    reason: str = typer.Option(
        "", envvar="NOTIFY_REASON", help="Why you change it; required to set or stop it. [env: NOTIFY_REASON]"
    ),
    dry_run: bool = DRY_RUN,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Post a group's messages to a webhook, show its address, or stop posting."""
    if stop and webhook:
        raise typer.BadParameter("give either an address or --stop")
    if (stop or webhook) and not reason:
        raise typer.BadParameter("say why with --reason")
    if stop:
        answer = call(url, "DELETE", "groups", name, "push", body=write(reason, dry_run))
        show_write("push.delete", answer, as_json)
    elif webhook:
        body = write(reason, dry_run, url=webhook, batch=batch, at_once=at_once)
        show_write("push.put", call(url, "PUT", "groups", name, "push", body=body), as_json)
    else:
        pushes = call(url, "GET", "pushes")["pushes"]
        if name not in pushes:
            raise NotFound(f"the messages of group {name!r} are not posted to a webhook")
        show(pushes[name], as_json)


@group.command()
def pause(name: str, reason: str = REASON, dry_run: bool = DRY_RUN, url: str = URL, as_json: bool = AS_JSON) -> None:
    """Pause a group: it receives nothing until it is resumed."""
    show_write("group.pause", call(url, "POST", "groups", name, "pause", body=write(reason, dry_run)), as_json)


@group.command()
def resume(name: str, reason: str = REASON, dry_run: bool = DRY_RUN, url: str = URL, as_json: bool = AS_JSON) -> None:
    """Resume a paused group."""
    show_write("group.resume", call(url, "POST", "groups", name, "resume", body=write(reason, dry_run)), as_json)


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
