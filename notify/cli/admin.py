"""`notify topic`, `group`, `transaction`, `message`, `dead-letter`: what the admin routes do, for a terminal."""

from __future__ import annotations

import typer

from notify.cli.api import AS_JSON, DRY_RUN, REASON, URL, call, show, write


def register(app: typer.Typer) -> None:
    _topics(app)
    _groups(app)
    _transactions(app)
    _messages(app)
    _dead_letters(app)


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
        queues: int = typer.Option(1, min=1, max=1024, help="Queues; keys are spread over them."),
        retention: float = typer.Option(0, min=0, help="Seconds to keep messages; 0: the server's default."),
        flush: str = typer.Option(
            "sync", help="Answer once on the disk (sync), in the kernel (async), at once (memory)."
        ),
        reason: str = REASON,
        dry_run: bool = DRY_RUN,
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """Make or change a topic."""
        body = write(reason, dry_run, queues=queues, retention=retention, flush=flush)
        show(call(url, "PUT", "topics", name, body=body), as_json)

    @group.command()
    def delete(
        name: str, reason: str = REASON, dry_run: bool = DRY_RUN, url: str = URL, as_json: bool = AS_JSON
    ) -> None:
        """Delete a topic with its messages and subscriptions."""
        show(call(url, "DELETE", "topics", name, body=write(reason, dry_run)), as_json)


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
        reason: str = REASON,
        dry_run: bool = DRY_RUN,
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """Move a group's position; what is leased there becomes stale."""
        target: str | int = int(to) if to.isdigit() else to
        body = write(reason, dry_run, topic=topic, to=target)
        show(call(url, "POST", "groups", name, "reset", body=body), as_json)

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

    @group.command()
    def redrive(
        group_name: str = typer.Argument(..., metavar="GROUP"),
        id: list[str] = typer.Option([], help="Only these messages (repeatable)."),
        max: int = typer.Option(100, min=1, max=4096),
        reason: str = REASON,
        dry_run: bool = DRY_RUN,
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """Send dead letters to their topic again; a repeated redrive sends each once."""
        body = write(reason, dry_run, ids=id or None, max=max)
        show(call(url, "POST", "groups", group_name, "dead-letters", "redrive", body=body), as_json)
