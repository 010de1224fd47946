"""`notify message`: shows, finds and sends messages."""

from __future__ import annotations

from operator import itemgetter
from typing import Any
from urllib.parse import urlencode

import typer

from notify.admin_api import messages
from notify.admin_api.declaration import AdminWrite
from notify.admin_api.words import describe_body, duration
from notify.cli.api import (
    AS_JSON,
    URL,
    WIDE,
    Columns,
    call,
    check_answers,
    pairs,
    place_of,
    seconds,
    show,
    show_rows,
)
from notify.cli.writes import add_write, show_write

BODY_CHARACTERS = 60
COLUMNS: Columns = {
    "message": itemgetter("id"),
    "place": place_of,
    "committed": lambda m: seconds(m["committed_at"]),
    "key": lambda m: m.get("key"),
    "body": lambda m: describe_body(m) or str(m.get("body", "(bytes)"))[:BODY_CHARACTERS],
}

group = typer.Typer(no_args_is_help=True)


@group.command("show")
def show_message(id: str, url: str = URL, as_json: bool = AS_JSON) -> None:
    """Show one message's history, from half to every group."""
    answer = call(url, "GET", "messages", id)
    if not as_json:
        _tell(answer)
    show(answer, as_json)


def _tell(life: dict[str, Any]) -> None:
    """Put a message's history into people's words: ages with units, and which groups have it as a dead letter."""
    if transaction := life.get("transaction"):
        transaction["age"] = duration(transaction["age"])
        del transaction["messages"]  # always empty here, and `none` would say that the transaction has no message
    last = {event["group"]: event["kind"] for event in life["timeline"] if event.get("group")}
    for row in life["groups"]:
        if row["state"] == "settled" and last.get(row["group"]) == "dead_letter":
            row["state"] = "dead letter"


@group.command("send")
def send_message(
    topic: str,
    body: str = typer.Argument(..., help="The body: text."),
    key: str | None = typer.Option(None, help="The key: messages of a key keep their order."),
    tag: str | None = typer.Option(None, help="The tag."),
    header: list[str] = typer.Option([], help="NAME=VALUE (repeatable)."),
    delay: float | None = typer.Option(None, min=0, help="Seconds until the message is delivered."),
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Send a message without a transaction, for example to try a consumer."""
    from notify.client import Message, TransactionProducer  # imports SQLAlchemy

    headers = pairs(header)
    check_answers(url)
    with TransactionProducer(url, group="notify-cli") as producer:
        message_id = producer.publish(Message(topic, body, key=key, tag=tag, headers=headers, delay=delay))
    show({"id": message_id, "topic": topic}, as_json)


@group.command("find")
def find_messages(
    key: str | None = typer.Option(None, help="Messages with this key."),
    topic: str | None = typer.Option(None, help="Messages of this topic."),
    since: str | None = typer.Option(None, "--from", help="Committed at or after this instant (RFC 3339)."),
    until: str | None = typer.Option(None, "--to", help="Committed before this instant."),
    max: int = typer.Option(100, min=1, max=10_000, help="Show at most this many."),
    wide: bool = WIDE,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Find messages by key, or by topic and time."""
    conditions = {"key": key, "topic": topic, "from": since, "to": until, "max": str(max)}
    query = "?" + urlencode({name: value for name, value in conditions.items() if value is not None})
    show_rows(call(url, "GET", "messages", query=query), as_json, "messages", COLUMNS, wide)


def _show_withdrawal(write: AdminWrite, _: str, answer: dict[str, Any], as_json: bool) -> None:
    """Print what became of a withdrawal. Exits with code 1 if it had no effect."""
    is_done = answer["result"].get("outcome") not in ("TOO_LATE", "ALREADY", "NOT_FOUND")
    show_write(write.name, answer, as_json, is_done=is_done)
    if not is_done:
        raise typer.Exit(1)


add_write(
    group, "cancel", messages.CANCEL,
    "Cancel a delayed message: if it is not due yet, it is never delivered. Exit code 1 if it is too late.",
    show=_show_withdrawal, topic=str, message=str,
)  # fmt: skip
add_write(
    group, "replace", messages.REPLACE,
    "Replace a delayed message by one with another body, or due at another time. Exit code 1 if it is too late.",
    show=_show_withdrawal, topic=str, message=str,
)  # fmt: skip
