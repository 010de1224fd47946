"""`notify topic`, `group`, `transaction`, `message`, `dead-letter`, `job`: the admin routes on a terminal."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlencode

import typer
from rich.progress import Progress

from notify.cli.api import AS_JSON, DRY_RUN, REASON, URL, call, show, write
from notify.cli.printed import console
from notify.limits import MODES

FOLLOW_SECONDS = 0.2
REPLAY_EFFECTS = typer.Option(
    False,
    "--replay-effects",
    help="Repeat the effects of handlers with an Inbox; without this they skip messages that they handled.",
)
BEFORE_INBOX = typer.Option(
    False, "--force", help="Do it although the inbox rows of some of these messages may be purged."
)
BEFORE = "latest (all messages), an instant (RFC 3339), or an offset if the topic has one queue."


def register(app: typer.Typer) -> None:
    _topics(app)
    _groups(app)
    _transactions(app)
    _messages(app)
    _dead_letters(app)
    _jobs(app)


def _topics(app: typer.Typer) -> None:
    group = typer.Typer(help="Topics and their queues.", no_args_is_help=True)
    app.add_typer(group, name="topic")

    @group.command("list")
    def list_topics(url: str = URL, as_json: bool = AS_JSON) -> None:
        """List topics with their offsets."""
        show(call(url, "GET", "topics"), as_json, "topics")

    @group.command()
    def create(
        name: str,
        queues: int | None = typer.Option(None, min=1, max=1024, help="Number of queues; keys are spread over them."),
        retention: float | None = typer.Option(
            None, min=0, help="Seconds to keep messages; 0: as the server's setting says."
        ),
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
        """Make or change a topic; options that are not given keep their value."""
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
        show(call(url, "PUT", "topics", name, body=body), as_json)

    @group.command()
    def delete(
        name: str, reason: str = REASON, dry_run: bool = DRY_RUN, url: str = URL, as_json: bool = AS_JSON
    ) -> None:
        """Delete a topic with its messages and subscriptions."""
        show(call(url, "DELETE", "topics", name, body=write(reason, dry_run)), as_json)

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
        body = write(reason, dry_run, before=_place(before), force=force)
        show(call(url, "POST", "topics", name, "purge", body=body), as_json)


def _groups(app: typer.Typer) -> None:
    group = typer.Typer(help="Consumer groups.", no_args_is_help=True)
    app.add_typer(group, name="group")

    @group.command("list")
    def list_groups(url: str = URL, as_json: bool = AS_JSON) -> None:
        """List groups with their lag."""
        show(call(url, "GET", "groups"), as_json, "groups")

    @group.command("show")
    def show_group(name: str, url: str = URL, as_json: bool = AS_JSON) -> None:
        """Show a group: subscriptions, positions, leases, instances."""
        show(call(url, "GET", "groups", name), as_json)

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
        body = write(reason, dry_run, topic=topic, to=_place(to), **_given(replay_effects=replay_effects, force=force))
        show(call(url, "POST", "groups", name, "reset", body=body), as_json)

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
        max_attempts: int = typer.Option(16, min=1, max=1000, help="Attempts before a message is a dead letter."),
        force: bool = typer.Option(False, "--force", help="Change the mode although consumers hold messages."),
        reason: str = REASON,
        dry_run: bool = DRY_RUN,
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """Make or change a subscription."""
        fields = {"mode": mode, "tags": tag, "filter": filter, "max_attempts": max_attempts, "force": force}
        position = int(start) if start is not None and start.isdigit() else start
        body = write(reason, dry_run, start=position, **fields)
        show(call(url, "PUT", "groups", name, "subscriptions", topic, body=body), as_json)

    @group.command()
    def priorities(
        name: str,
        klass: list[str] = typer.Option(
            [], "--class", help="NAME=WEIGHT:PATTERN,PATTERN (repeatable, in order); default weights: 6, 3, 1."
        ),
        share: list[str] = typer.Option([], help="TOPIC=TURNS, a topic's turns within its class (repeatable)."),
        reason: str = typer.Option("", help="Why you change them; required with --class."),
        dry_run: bool = DRY_RUN,
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """Show a group's priority classes, or set them with --class."""
        if not klass:
            show(call(url, "GET", "groups", name, "priorities"), as_json)
            return
        body = write(reason, dry_run, classes=[_class(text) for text in klass], shares=dict(_share(s) for s in share))
        show(call(url, "PUT", "groups", name, "priorities", body=body), as_json)

    @group.command()
    def pause(name: str, reason: str = REASON, url: str = URL, as_json: bool = AS_JSON) -> None:
        """Pause a group: it receives nothing until it is resumed."""
        show(call(url, "POST", "groups", name, "pause", body=write(reason, False)), as_json)

    @group.command()
    def resume(name: str, reason: str = REASON, url: str = URL, as_json: bool = AS_JSON) -> None:
        """Resume a paused group."""
        show(call(url, "POST", "groups", name, "resume", body=write(reason, False)), as_json)


def _transactions(app: typer.Typer) -> None:
    group = typer.Typer(help="Transactions in doubt and parked.", no_args_is_help=True)
    app.add_typer(group, name="transaction")

    @group.command("list")
    def list_transactions(
        state: str | None = typer.Option(None, help="PREPARED or PARKED."),
        producer_group: str | None = typer.Option(None, help="Only transactions of this producer group."),
        older_than: float = typer.Option(0, min=0, help="Only transactions older than so many seconds."),
        max: int = typer.Option(100, min=1, max=10_000),
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """List undecided transactions, the oldest first."""
        query = f"?max={max}&older_than={older_than}"
        query += f"&state={state}" if state else ""
        query += f"&producer_group={producer_group}" if producer_group else ""
        result = call(url, "GET", "transactions", query=query)
        if not as_json:
            for row in result["transactions"]:
                row["messages"] = ", ".join(m["topic"] for m in row["messages"])
        show(result, as_json, "transactions")

    @group.command("show")
    def show_transaction(id: str, url: str = URL, as_json: bool = AS_JSON) -> None:
        """Show one transaction."""
        show(call(url, "GET", "transactions", id), as_json)

    def action(name: str, text: str) -> None:
        @group.command(name, help=text)
        def act(
            id: str, reason: str = REASON, dry_run: bool = DRY_RUN, url: str = URL, as_json: bool = AS_JSON
        ) -> None:
            show(call(url, "POST", "transactions", id, name, body=write(reason, dry_run)), as_json)

    action("commit", "Force the commit of an undecided transaction.")
    action("rollback", "Force the rollback of an undecided transaction.")
    action("check", "Check a transaction now: ask its producer group.")
    action("resume", "Resume a parked transaction: its checks start again.")


def _messages(app: typer.Typer) -> None:
    group = typer.Typer(help="Single messages.", no_args_is_help=True)
    app.add_typer(group, name="message")

    @group.command("show")
    def show_message(id: str, url: str = URL, as_json: bool = AS_JSON) -> None:
        """Show one message's history, from half to every group."""
        show(call(url, "GET", "messages", id), as_json)

    @group.command("find")
    def find_messages(
        key: str | None = typer.Option(None, help="Messages with this key."),
        topic: str | None = typer.Option(None, help="Messages of this topic."),
        since: str | None = typer.Option(None, "--from", help="Committed at or after this instant (RFC 3339)."),
        until: str | None = typer.Option(None, "--to", help="Committed before this instant."),
        max: int = typer.Option(100, min=1, max=10_000),
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """Find messages by key, or by topic and time."""
        given = {"key": key, "topic": topic, "from": since, "to": until, "max": str(max)}
        query = "?" + urlencode({name: value for name, value in given.items() if value is not None})
        show(call(url, "GET", "messages", query=query), as_json, "messages")


def _dead_letters(app: typer.Typer) -> None:
    group = typer.Typer(help="Messages that a group failed to handle.", no_args_is_help=True)
    app.add_typer(group, name="dead-letter")

    @group.command("list")
    def list_dead(
        group_name: str = typer.Argument(..., metavar="GROUP"),
        max: int = typer.Option(100, min=1, max=10_000),
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """List a group's dead letters with the reasons."""
        show(call(url, "GET", "groups", group_name, "dead-letters", query=f"?max={max}"), as_json, "messages")

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
        body = write(reason, dry_run, before=_place(before))
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
        all: bool = typer.Option(
            False, "--all", help="All of them, as a job; waits for its end and shows its progress."
        ),
        reason: str = REASON,
        dry_run: bool = DRY_RUN,
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """Send dead letters to their group again; a repeated redrive sends each once."""
        chosen = {"topic": topic, "tag": tag, "key": key, "contains": contains, "filter": filter}
        wanted = {name: value for name, value in chosen.items() if value}
        body = write(
            reason, dry_run, ids=id or None, max=max, wanted=wanted, all=all, **_given(replay_effects=replay_effects)
        )
        answer = call(url, "POST", "groups", group_name, "dead-letters", "redrive", body=body)
        if all and not dry_run:
            answer = _followed(url, answer["result"]["job"], as_json)
        show(answer, as_json)
        if all and not dry_run and (answer["state"] != "done" or answer["failed"]):
            raise typer.Exit(1)


def _jobs(app: typer.Typer) -> None:
    group = typer.Typer(help="Long work on the server.", no_args_is_help=True)
    app.add_typer(group, name="job")

    @group.command("list")
    def list_jobs(max: int = typer.Option(100, min=1, max=10_000), url: str = URL, as_json: bool = AS_JSON) -> None:
        """List the newest jobs."""
        show(call(url, "GET", "jobs", query=f"?max={max}"), as_json, "jobs")

    @group.command("show")
    def show_job(
        number: int,
        offset: int = typer.Option(0, min=0, help="The number of the first item to show."),
        max: int = typer.Option(100, min=1, max=10_000),
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """Show a job's progress and the results of its items."""
        show(call(url, "GET", "jobs", str(number), query=f"?offset={offset}&max={max}"), as_json)

    @group.command("cancel")
    def cancel_job(
        number: int, reason: str = REASON, dry_run: bool = DRY_RUN, url: str = URL, as_json: bool = AS_JSON
    ) -> None:
        """Cancel a job for good; items that it has finished stay so."""
        show(call(url, "POST", "jobs", str(number), "cancel", body=write(reason, dry_run)), as_json)


def _given(**flags: bool) -> dict[str, bool]:
    """Only the flags that are set, because an older server refuses fields that it does not know."""
    return {name: True for name, value in flags.items() if value}


def _place(text: str) -> str | int:
    """An offset as a number; other text unchanged."""
    return int(text) if text.isdigit() else text


def _followed(url: str, number: int, as_json: bool) -> dict[str, Any]:
    """Wait for the end of a job, and show its progress."""
    with Progress(console=console(stderr=True), disable=as_json) as progress:
        bar = progress.add_task(f"job {number}", total=1.0)
        while (job := call(url, "GET", "jobs", str(number)))["state"] == "running":
            progress.update(bar, completed=job["progress"])
            time.sleep(FOLLOW_SECONDS)
        progress.update(bar, completed=job["progress"])
    return job


def _class(text: str) -> dict[str, Any]:
    """A class from NAME[=WEIGHT][:PATTERN,…]."""
    head, _, patterns = text.partition(":")
    name, _, weight = head.partition("=")
    if weight and not weight.isdigit():
        raise typer.BadParameter(f"{weight!r} is not a weight; write NAME=WEIGHT:PATTERN,PATTERN")
    return {"name": name, "weight": int(weight) if weight else None, "topics": [p for p in patterns.split(",") if p]}


def _share(text: str) -> tuple[str, int]:
    topic, _, turns = text.rpartition("=")
    if not topic or not turns.isdigit():
        raise typer.BadParameter(f"{text!r} is not a share; write TOPIC=TURNS")
    return topic, int(turns)
