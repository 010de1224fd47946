"""Writes to topics: made, changed, purged and deleted; and messages that an operator sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from notify.admin_api.declaration import AdminWrite, FanOut, Flag, Input, StrictInt, Write, declared
from notify.admin_api.description import Description, messages, text
from notify.admin_api.queue_rows import kept
from notify.admin_api.words import count, duration, size
from notify.protocol.limits import LIMITS


# A field is a row of a table: itself, its input, its flag.
# fmt: off
@dataclass(frozen=True, kw_only=True)
class TopicWrite(Write):
    queues: int | None = declared(None, ge=1, le=1024, input=Input(help="The number can grow, not shrink."),
        flag=Flag("Number of queues; keys are spread over them.", 1, 1024))
    retention: float | None = declared(None, "seconds; 0: the server's default", ge=0, le=3650 * 86_400,
        input=Input("Retention, seconds", "0: the server's default."),
        flag=Flag("Seconds to keep messages; 0: the server's setting.", 0))
    retention_bytes: int | None = declared(None, "payload bytes to keep; 0: no bound", ge=0, le=1 << 50,
        input=Input("Retention, bytes", "0: no bound."), flag=Flag("Bytes of messages to keep; 0: no bound.", 0))
    flush: Literal["sync", "async", "memory"] | None = declared(None, "when messages are answered",
        input=Input("Answer when"),
        flag=Flag("Answer once messages are on disk (sync), in the kernel (async) or in memory (memory).",
            type=str | None))
    ttl: float | None = declared(None, "seconds; 0: messages do not expire", ge=0, le=LIMITS.ttl_seconds,
        input=Input("Time to live, seconds", "0: messages do not expire."),
        flag=Flag("Seconds after which messages expire; 0: never.", 0))
    backlog: int | None = declared(None, "messages that the slowest group may be behind; 0: no bound", ge=0, le=1 << 40,
        input=Input("Backlog, messages", "0: no bound."),
        flag=Flag("How many messages the slowest group may be behind; 0: no bound.", 0))
    backlog_policy: Literal["refuse", "hold", "drop_oldest"] | None = declared(None,
        input=Input("When the backlog is full"),
        flag=Flag("When the backlog is full: refuse, hold or drop_oldest.", type=str | None))


@dataclass(frozen=True, kw_only=True)
class SendMessage(Write):
    body: str | None = declared(None, "text",
        input=Input(help="Text, such as JSON; it is sent as it is.", kind="body", required=True))
    body_base64: str | None = declared(None, "bytes")
    key: str | None = declared(None, input=Input(help="Messages of one key keep their order."))
    tag: str | None = declared(None, input=Input(help="Subscriptions may filter by it."))
    headers: dict[str, str] | None = declared(None, input=Input(help="NAME=VALUE, one a line."))
    delay: float | None = declared(None, "seconds", input=Input("Delay, seconds"))


@dataclass(frozen=True, kw_only=True)
class Purge(Write):
    before: str | StrictInt = declared(
        description="latest (all messages), an instant, or an offset if the topic has one queue",
        examples=["2026-01-31T12:00:00Z"], input=Input(help="An instant (RFC 3339), or latest for all messages."),
        flag=Flag("latest (all messages), an instant (RFC 3339), or an offset if the topic has one queue.", type=str))


@dataclass(frozen=True, kw_only=True)
class PurgeTopic(Purge):
    force: bool = declared(False, "also messages that a group has not settled",
        input=Input("Also messages that groups have not settled"),
        flag=Flag("Also purge messages that a group has not settled."))
# fmt: on


# --- sentences --------------------------------------------------------------------------------------------------


def send(target: str, result: Mapping[str, Any]) -> Description:
    """A message that an operator sends."""
    groups = (
        f"these groups receive it: {text(result['groups'])}" if result["groups"] else "no group subscribes to it now"
    )
    if result["groups"] is None:
        groups = "only who has the right view sees which groups receive it"
    if "items" not in result:
        return Description([f"The message goes to topic {target}; {groups}."])
    (item,) = result["items"]
    if item["status"] != 201:
        return Description([f"The message was refused: {text(item.get('detail'))}."])
    return Description([f"The message is in topic {target} as {item['id']}; {groups}."])


def purge(target: str, result: Mapping[str, Any]) -> Description:
    """A topic's messages, or a group's dead letters, that are deleted."""
    dropped = sum(q["dropped"] for q in result["queues"])
    are = "is" if dropped == 1 else "are"
    deleted = f"At most {messages(dropped)} of {target} {are} deleted. This cannot be undone."
    description = Description([deleted if dropped else "Nothing is deleted."])
    for group, number in result["missed"].items():
        description.sentences.append(f"Group {group} never receives {messages(number)} that it has not settled.")
    if dropped and not result["missed"]:
        description.sentences.append("No group loses a message: all groups have settled them.")
    return description


def delete_topic(target: str, result: Mapping[str, Any]) -> Description:
    """A topic that is deleted with its messages and subscriptions."""
    if "deleted" in result:
        return Description([f"Topic {result['deleted']} is deleted."])
    number = messages(kept(result["queues"]))
    return Description([f"Topic {target} is deleted with its {number} at most, and with all subscriptions to it."])


_ANSWERED = {
    "sync": "Senders are answered once messages are on the disk.",
    "async": "Senders are answered once the kernel has the messages: a crash of the machine may lose the newest.",
    "memory": "Senders are answered before anything is written: a crash of the server may lose the newest messages.",
}


_FULL = {
    "refuse": "more are refused",
    "hold": "senders wait until there is room",
    "drop_oldest": "the oldest are dropped",
}


def put_topic(target: str, result: Mapping[str, Any]) -> Description:
    """A topic that is created or changed. All workers of a server have the same queues."""
    number = result["queue_count"] if "queue_count" in result else len({q["queue"] for q in result["queues"]})
    description = Description([f"Topic {target} has {'1 queue' if number == 1 else f'{count(number)} queues'}."])
    age = (
        f"for {duration(result['retention'])}"
        if result["retention"]
        else "as long as the setting retention_seconds says"
    )
    bound = f", at most {size(result['retention_bytes'])}" if result["retention_bytes"] else ""
    description.sentences.append(f"It keeps messages {age}{bound}.")
    description.sentences.append(_ANSWERED[result["flush"]])
    if result["ttl"]:
        description.sentences.append(f"Messages that were not received within {duration(result['ttl'])} expire.")
    if result["backlog"]:
        full = _FULL[result["backlog_policy"]]
        description.sentences.append(f"When a group is {messages(result['backlog'])} behind, {full}.")
    return description


# fmt: off
# --- writes -----------------------------------------------------------------------------------------------------

TOPIC_PUT = AdminWrite("topic.put", "PUT", "topics/{topic}", TopicWrite, describe=put_topic,
    title="Make or change a topic", back="/topics/{topic}")
MESSAGE_SEND = AdminWrite("message.send", "POST", "topics/{topic}/messages", SendMessage, FanOut.OF_KEY, send,
    title="Send a message", back="/messages?topic={topic}",
    warning="Every group that the preview names receives it, and handles it like any other message.")
TOPIC_DELETE = AdminWrite("topic.delete", "DELETE", "topics/{topic}", describe=delete_topic, title="Delete a topic",
    back="/topics",
    warning="All its messages and subscriptions are deleted, including messages that were not delivered.")
TOPIC_PURGE = AdminWrite("topic.purge", "POST", "topics/{topic}/purge", PurgeTopic, describe=purge,
    title="Purge a topic's messages", back="/topics/{topic}",
    warning="Purged messages are not delivered and cannot be restored. The preview shows what each group loses.")

WRITES = (TOPIC_PUT, MESSAGE_SEND, TOPIC_DELETE, TOPIC_PURGE)
