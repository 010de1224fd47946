"""`notify topic`, `group`, `transaction`, `message`, `dead-letter`: what the admin routes do, for a terminal."""

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
    help="Handlers with an Inbox have their effects again; otherwise they skip what they did.",
)
BEFORE_INBOX = typer.Option(
    False, "--force", help="Although the rows of some of these messages may be purged from the group's inbox."
)
BEFORE = "latest (all that is there), an instant (RFC 3339), or an offset where the topic has one queue."


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
        """All topics with the offsets they hold."""
        show(call(url, "GET", "topics"), as_json, "topics")

    @group.command()
    def create(
        name: str,
        queues: int | None = typer.Option(None, min=1, max=1024, help="Queues; keys are spread over them."),
        retention: float | None = typer.Option(None, min=0, help="Seconds to keep messages; 0: the server's default."),
        retention_bytes: int | None = typer.Option(None, min=0, help="Bytes of messages to keep; 0: no bound."),
        flush: str | None = typer.Option(
            None, help="Answer once on the disk (sync), in the kernel (async), at once (memory)."
        ),
        ttl: float | None = typer.Option(None, min=0, help="Seconds after which messages expire; 0: never."),
        backlog: int | None = typer.Option(
            None, min=0, help="Messages that the slowest group may be behind; 0: no bound."
        ),
        backlog_policy: str | None = typer.Option(None, help="What then: refuse, hold or drop_oldest."),
        reason: str = REASON,
        dry_run: bool = DRY_RUN,
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """Make a topic, or change one: what is not given stays."""
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
        force: bool = typer.Option(False, "--force", help="Although a group still has to get some of them."),
        reason: str = REASON,
        dry_run: bool = DRY_RUN,
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """Let go of a topic's messages up to a point."""
        body = write(reason, dry_run, before=_place(before), force=force)
        show(call(url, "POST", "topics", name, "purge", body=body), as_json)


def _groups(app: typer.Typer) -> None:
    group = typer.Typer(help="Consumer groups.", no_args_is_help=True)
    app.add_typer(group, name="group")

    @group.command("list")
    def list_groups(url: str = URL, as_json: bool = AS_JSON) -> None:
        """All groups with their lag."""
        show(call(url, "GET", "groups"), as_json, "groups")

    @group.command("show")
    def show_group(name: str, url: str = URL, as_json: bool = AS_JSON) -> None:
        """One group: subscriptions, positions, leases, instances."""
        show(call(url, "GET", "groups", name), as_json)

    @group.command()
    def reset(
        name: str,
        topic: str = typer.Option(..., help="The topic to move in."),
        to: str = typer.Option(..., help="earliest, latest, an offset or an instant (RFC 3339)."),
        replay_effects: bool = REPLAY_EFFECTS,
        force: bool = BEFORE_INBOX,
        reason: str = REASON,
        dry_run: bool = DRY_RUN,
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """Move a group's position; what is leased there becomes stale."""
        body = write(reason, dry_run, topic=topic, to=_place(to), **_given(replay_effects=replay_effects, force=force))
        show(call(url, "POST", "groups", name, "reset", body=body), as_json)

    @group.command()
    def subscribe(
        name: str,
        topic: str = typer.Argument(..., help="A topic, or a pattern with * for topics to come."),
        mode: str = typer.Option("shared", help=", ".join(MODES) + "."),
        start: str | None = typer.Option(None, help="Of a new one: earliest, latest, an offset or an instant."),
        tag: list[str] = typer.Option([], help="Only messages of these tags (repeatable)."),
        filter: str = typer.Option("", help="CEL over headers, key, tag and topic."),
        max_attempts: int = typer.Option(16, min=1, max=1000),
        force: bool = typer.Option(False, "--force", help="Change the mode although consumers have messages."),
        reason: str = REASON,
        dry_run: bool = DRY_RUN,
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """Make or change a subscription."""
        fields = {"mode": mode, "tags": tag, "filter": filter, "max_attempts": max_attempts, "force": force}
        where = int(start) if start is not None and start.isdigit() else start
        body = write(reason, dry_run, start=where, **fields)
        show(call(url, "PUT", "groups", name, "subscriptions", topic, body=body), as_json)

    @group.command()
    def priorities(
        name: str,
        klass: list[str] = typer.Option(
            [], "--class", help="NAME=WEIGHT:PATTERN,PATTERN (repeatable, in order); WEIGHT may be left out: 6, 3, 1."
        ),
        share: list[str] = typer.Option([], help="TOPIC=TURNS within its class (repeatable)."),
        reason: str = typer.Option("", help="Why; needed to change them."),
        dry_run: bool = DRY_RUN,
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """How a group's topics share its deliveries; with --class, other classes from now on."""
        if not klass:
            show(call(url, "GET", "groups", name, "priorities"), as_json)
            return
        body = write(reason, dry_run, classes=[_class(text) for text in klass], shares=dict(_share(s) for s in share))
        show(call(url, "PUT", "groups", name, "priorities", body=body), as_json)

    @group.command()
    def pause(name: str, reason: str = REASON, url: str = URL, as_json: bool = AS_JSON) -> None:
        """Hand nothing to a group until it is resumed."""
        show(call(url, "POST", "groups", name, "pause", body=write(reason, False)), as_json)

    @group.command()
    def resume(name: str, reason: str = REASON, url: str = URL, as_json: bool = AS_JSON) -> None:
        """Let a paused group go on."""
        show(call(url, "POST", "groups", name, "resume", body=write(reason, False)), as_json)


def _transactions(app: typer.Typer) -> None:
    group = typer.Typer(help="Transactions in doubt and parked.", no_args_is_help=True)
    app.add_typer(group, name="transaction")

    @group.command("list")
    def list_transactions(
        state: str | None = typer.Option(None, help="PREPARED or PARKED."),
        producer_group: str | None = typer.Option(None, help="Only this producer group's."),
        older_than: float = typer.Option(0, min=0, help="Seconds."),
        max: int = typer.Option(100, min=1, max=10_000),
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """Undecided transactions, the oldest first."""
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
        """One transaction."""
        show(call(url, "GET", "transactions", id), as_json)

    def action(name: str, text: str) -> None:
        @group.command(name, help=text)
        def act(
            id: str, reason: str = REASON, dry_run: bool = DRY_RUN, url: str = URL, as_json: bool = AS_JSON
        ) -> None:
            show(call(url, "POST", "transactions", id, name, body=write(reason, dry_run)), as_json)

    action("commit", "Force the commit of an undecided transaction.")
    action("rollback", "Force the rollback of an undecided transaction.")
    action("check", "Ask its producer again now.")
    action("resume", "Back from PARKED, with all its checks before it.")


def _messages(app: typer.Typer) -> None:
    group = typer.Typer(help="Single messages.", no_args_is_help=True)
    app.add_typer(group, name="message")

    @group.command("show")
    def show_message(id: str, url: str = URL, as_json: bool = AS_JSON) -> None:
        """One message's life, from half to every group."""
        show(call(url, "GET", "messages", id), as_json)

    @group.command("find")
    def find_messages(
        key: str | None = typer.Option(None, help="The messages' key."),
        topic: str | None = typer.Option(None, help="Their topic."),
        since: str | None = typer.Option(None, "--from", help="Committed at or after this instant (RFC 3339)."),
        until: str | None = typer.Option(None, "--to", help="Committed before this instant."),
        max: int = typer.Option(100, min=1, max=10_000),
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """Messages by key, or of a topic by time."""
        given = {"key": key, "topic": topic, "from": since, "to": until, "max": str(max)}
        query = "?" + urlencode({name: value for name, value in given.items() if value is not None})
        show(call(url, "GET", "messages", query=query), as_json, "messages")


def _dead_letters(app: typer.Typer) -> None:
    group = typer.Typer(help="Messages that a group could not handle.", no_args_is_help=True)
    app.add_typer(group, name="dead-letter")

    @group.command("list")
    def list_dead(
        group_name: str = typer.Argument(..., metavar="GROUP"),
        max: int = typer.Option(100, min=1, max=10_000),
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """A group's dead letters, with why they are there."""
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
        """Let go of a group's dead letters that died before a point, redriven or not."""
        body = write(reason, dry_run, before=_place(before))
        show(call(url, "POST", "groups", group_name, "dead-letters", "purge", body=body), as_json)

    @group.command()
    def redrive(
        group_name: str = typer.Argument(..., metavar="GROUP"),
        id: list[str] = typer.Option([], help="Only these messages (repeatable)."),
        topic: str | None = typer.Option(None, help="Only those of this topic."),
        tag: str | None = typer.Option(None, help="Only those with this tag."),
        key: str | None = typer.Option(None, help="Only those with this key."),
        contains: str | None = typer.Option(None, help="Only those whose reason contains this."),
        filter: str = typer.Option("", help="Only those for which this is true: CEL over headers, key, tag and topic."),
        max: int = typer.Option(100, min=1, max=4096),
        replay_effects: bool = REPLAY_EFFECTS,
        force: bool = BEFORE_INBOX,
        all: bool = typer.Option(False, "--all", help="Every one, as a job; waits for it and shows its progress."),
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
        """The newest jobs."""
        show(call(url, "GET", "jobs", query=f"?max={max}"), as_json, "jobs")

    @group.command("show")
    def show_job(
        number: int,
        offset: int = typer.Option(0, min=0, help="The number of the first item to show."),
        max: int = typer.Option(100, min=1, max=10_000),
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """A job's progress, and what became of its items."""
        show(call(url, "GET", "jobs", str(number), query=f"?offset={offset}&max={max}"), as_json)

    @group.command("cancel")
    def cancel_job(
        number: int, reason: str = REASON, dry_run: bool = DRY_RUN, url: str = URL, as_json: bool = AS_JSON
    ) -> None:
        """Stop a job for good; what it has done stays done."""
        show(call(url, "POST", "jobs", str(number), "cancel", body=write(reason, dry_run)), as_json)


def _given(**flags: bool) -> dict[str, bool]:
    """The flags that are set: an older server refuses fields that it does not know."""
    return {name: True for name, value in flags.items() if value}


def _place(text: str) -> str | int:
    """An offset as a number; anything else as it is."""
    return int(text) if text.isdigit() else text


def _followed(url: str, number: int, as_json: bool) -> dict[str, Any]:
    """Wait until a job has ended, showing how far it is."""
    with Progress(console=console(stderr=True), disable=as_json) as progress:
        bar = progress.add_task(f"job {number}", total=1.0)
        while (job := call(url, "GET", "jobs", str(number)))["state"] == "running":
            progress.update(bar, completed=job["progress"])
            time.sleep(FOLLOW_SECONDS)
        progress.update(bar, completed=job["progress"])
    return job


def _class(text: str) -> dict[str, Any]:
    """NAME[=WEIGHT][:PATTERN,…] as a class."""
    head, _, patterns = text.partition(":")
    name, _, weight = head.partition("=")
    if weight and not weight.isdigit():
        raise typer.BadParameter(f"{weight!r} is not a weight; write NAME=WEIGHT:PATTERN,PATTERN")
    return {"name": name, "weight": int(weight) if weight else None, "topics": [p for p in patterns.split(",") if p]}


def _share(text: str) -> tuple[str, int]:
    topic, _, turns = text.rpartition("=")
    if not topic or not turns.isdigit():
        raise typer.BadParameter(f"{text!r} is not TOPIC=TURNS")
    return topic, int(turns)
