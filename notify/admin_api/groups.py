"""Writes to consumer groups: subscriptions, positions, priorities, pauses, webhooks and objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from notify.admin_api.declaration import AdminWrite, Body, Bounds, FanOut, Flag, Input, StrictInt, Write, declared
from notify.admin_api.description import MOST_ROWS, Description, Rows, capital, messages, text
from notify.admin_api.words import count, duration, percent
from notify.errors import InvalidRequest
from notify.protocol.limits import FAIR_BY, LIMITS, MODES, NAME_CHARACTERS, ON_EXHAUSTED

# A field is a row of a table: itself, its input, its flag.
# fmt: off
MOST_BATCH, MOST_AT_ONCE = 1000, 64
"""The most messages in a call to a webhook, and the most calls at once from each server."""
MOST_CLASSES = 16


def replay_effects(description: str) -> Any:
    """The field of the writes that deliver messages to a group again, whether their effects are repeated."""
    return declared(False, description, input=Input("Repeat the effects",
            "Handlers with an inbox repeat effects that took place before. Without it they skip such messages."),
        flag=Flag("Repeat the effects of handlers with an Inbox; without this flag they skip messages that they "
            "handled."))


def before_inbox(description: str) -> Any:
    """The field of the same writes, whether they take messages from before the inbox's rows."""
    return declared(False, description, input=Input("Also messages whose inbox rows may be purged",
            "Without it messages older than the inbox's rows are refused (`before_inbox`). With it they take effect a "
            "second time if their row is gone."),
        flag=Flag("Do it even if the inbox rows of some of these messages may be purged."))


EFFECTS_AGAIN = "handlers with an inbox take effect again, also for messages that took effect before"
EFFECTS_KEPT = "handlers with an inbox skip messages that took effect before; handlers without an inbox run again"
SOME_BEFORE_INBOX = "even if the inbox may have purged its rows of some of these messages"


@dataclass(frozen=True, kw_only=True)
class SubscriptionWrite(Write):
    mode: str = declared("shared", pattern=f"^({'|'.join(MODES)})$", input=Input(kind="choice", choices=MODES),
        flag=Flag("The mode: " + ", ".join(MODES) + "."))
    start: str | StrictInt | None = declared(None,
        input=Input("Start of a new subscription", "earliest, latest, an offset or an instant."),
        flag=Flag("The start of a new subscription: earliest, latest, an offset or an instant.", type=str | None))
    tags: list[str] = declared([], max_length=LIMITS.tags, input=Input(help="Separated by commas; empty: all."),
        flag=Flag("Only messages with this tag (repeatable).", name="tag"))
    filter: str = declared("", "CEL over headers, key, tag and topic; empty: every message",
        input=Input(help="CEL over headers, key, tag and topic."),
        flag=Flag("Only messages for which this CEL expression over headers, key, tag and topic is true."))
    max_attempts: int = declared(16, ge=1, le=LIMITS.attempts,
        input=Input("Failed attempts before the dead-letter queue"),
        flag=Flag("Failed attempts before a message is a dead letter.", 1, 1000))
    max_deaths: int = declared(16, ge=1, le=LIMITS.attempts,
        input=Input("Deaths of consumers before the dead-letter queue"),
        flag=Flag("Deaths of consumers that hold a message before it is a dead letter.", 1, 1000))
    retry_min: float = declared(1.0, ge=LIMITS.retry_min_seconds, le=LIMITS.retry_first_seconds,
        input=Input("First retry after, seconds", "Default: 1 second."),
        flag=Flag("Seconds before the first retry; each later one waits twice as long."))
    retry_max: float = declared(300.0, ge=LIMITS.retry_min_seconds, le=LIMITS.retry_max_seconds,
        input=Input("Later retries after at most, seconds", "Default: 300 seconds."),
        flag=Flag("Seconds before any retry, at most."))
    on_exhausted: str = declared("dead_letter",
        "in mode ordered, hold: the key of a message that has used up its attempts stops",
        pattern=f"^({'|'.join(ON_EXHAUSTED)})$",
        input=Input("When the attempts are used up", "hold: in mode ordered, the message's key stops until you decide.",
            kind="choice", choices=ON_EXHAUSTED),
        flag=Flag("When a message has used up its attempts: dead_letter, or in mode ordered hold, which stops its key "
            "until you decide (`notify held-key`)."))
    fair_by: str = declared("", "key or header:NAME: tenants named by it take turns; empty: oldest first",
        pattern=f"^{FAIR_BY}$",
        input=Input("Tenants take turns by", "key, or header: and its name. Empty: the oldest message is first."),
        flag=Flag("The part of a message that names its tenant: key, or header:NAME. Tenants take turns."))
    force: bool = declared(False, "change the mode or fair_by while consumers are active: they may get messages again",
        input=Input("Change the mode or fair_by while consumers are active",
            "Without it another one is refused (`mode_in_use`) if a consumer of the group has asked within 60 s. "
            "With it consumers may get messages again, or out of order."),
        flag=Flag("Change the mode or fair_by even if consumers hold messages."))


@dataclass(frozen=True, kw_only=True)
class Reset(Write):
    topic: str = declared(input=Input(), flag=Flag("The topic to reset."))
    to: str | StrictInt = declared(input=Input(help="earliest, latest, an offset or an instant (RFC 3339)."),
        flag=Flag("The new position: earliest, latest, an offset or an instant (RFC 3339).", type=str))
    replay_effects: bool = replay_effects(EFFECTS_AGAIN)
    force: bool = before_inbox(SOME_BEFORE_INBOX)


Pattern = Annotated[str, Bounds(max_length=NAME_CHARACTERS)]


@dataclass(frozen=True, kw_only=True)
class ClassFields(Body):
    name: str = declared(min_length=1, max_length=64)
    topics: list[Pattern] = declared([], "names, or patterns with *", max_length=10_000)
    weight: int | None = declared(None, "default of the first three classes: 6, 3, 1", ge=1, le=1000)


@dataclass(frozen=True, kw_only=True)
class PrioritiesWrite(Write):
    classes: list[ClassFields] = declared(min_length=1, max_length=MOST_CLASSES)
    shares: dict[Pattern, Annotated[int, Bounds(ge=1, le=1000)]] = declared({}, "turns by topic")


_CLASS_NAME = "Its name. Empty: there is no such class."
_CLASS_TOPICS = (
    "Names, or patterns with *, separated by commas. Topics that no class names belong to the class normal, or else to "
    "the last one."
)


def class_inputs(count: int) -> tuple[Input, ...]:
    """The inputs of `count` priority classes, the highest first, and of the topics' shares."""
    classes = [
        (
            Input(f"Class {n}", _CLASS_NAME if n == 1 else "", "text", name=f"class_{n}"),
            Input(f"Weight of class {n}", "From 1 to 1000." if n == 1 else "", "number", name=f"weight_{n}"),
            Input(f"Topics of class {n}", _CLASS_TOPICS if n == 1 else "", "list", name=f"topics_{n}"),
        )
        for n in range(1, min(count, MOST_CLASSES) + 1)
    ]
    every = "TOPIC=TURNS, one a line. A topic that is not listed has one turn."
    shares = Input("Turns of a topic", every, "rates", name="shares")
    return (*(i for group in classes for i in group), shares)


def _classes(fields: dict[str, Any]) -> dict[str, Any]:
    """The classes of a form, as the admin route expects them. Raises InvalidRequest."""
    classes = []
    for number in range(1, MOST_CLASSES + 1):
        name, weight, topics = (fields.get(f"{part}_{number}") for part in ("class", "weight", "topics"))
        if not name and (weight or topics):
            raise InvalidRequest(f"Class {number} has no name. Give it one, or leave its weight and topics empty.")
        if name:
            row = {"name": name, "weight": weight, "topics": topics or []}
            classes.append({field: value for field, value in row.items() if value is not None})
    return {"classes": classes, "shares": fields["shares"]}


@dataclass(frozen=True, kw_only=True)
class PushWrite(Write):
    url: str = declared(description="the webhook; its host must be on the allow-list; calls are signed",
        flag=Flag("The address that messages are posted to.", is_argument=True, name="webhook"),
        max_length=2000, input=Input("Address", "Its host must be in the setting webhook_hosts."))
    batch: int = declared(1, "the most messages in a call", ge=1, le=MOST_BATCH,
        input=Input("Messages in a call, at most", "From 1 to 1000; default: 1."),
        flag=Flag("The most messages in a call.", 1, MOST_BATCH))
    at_once: int = declared(4, "the most calls that each server makes at once", ge=1, le=MOST_AT_ONCE,
        input=Input("Calls at once from each server, at most", "From 1 to 64; default: 4."),
        flag=Flag("The most concurrent calls of each server.", 1, MOST_AT_ONCE))


@dataclass(frozen=True, kw_only=True)
class ObjectiveWrite(Write):
    within: float = declared(description="seconds from the commit, or from when it was due, until the acknowledgement",
        ge=0.001, le=1000.0,
        flag=Flag("Seconds from a message's commit until it is acknowledged.", 0.001, 1000.0),
        input=Input("Acknowledged within, seconds", "From the commit, or from when a delayed message was due."))
    share: float = declared(0.99, "of the messages, 0.99 for 99 %", ge=0.5, le=0.9999,
        input=Input("Share of the messages", "From 0.5 to 0.9999; default: 0.99, which is 99 %."),
        flag=Flag("The share of the messages that this holds for; 0.99 is 99 %.", 0.5, 0.9999))
# fmt: on


# --- sentences --------------------------------------------------------------------------------------------------


def reset(target: str, result: Mapping[str, Any]) -> Description:
    """A group that continues at another offset of a topic."""
    queues = result["queues"]
    again = sum(q["again"] or 0 for q in queues)
    left_out = sum(q["left_out"] or 0 for q in queues)
    description = Description()
    if not (again or left_out):
        description.sentences.append("No message is repeated, and none is left out.")
    if again:
        description.sentences.append(f"The group gets {messages(again)} again.")
    if left_out:
        description.sentences.append(f"It does not get {messages(left_out)} that it has not settled yet.")
    description.sentences.append(
        "Messages that its consumers handle at this moment are delivered again if they lie after the new position."
    )
    description.sentences.append(f"Effects: {result['effects']}.")
    cells = [[text(q.get(name)) for name in ("queue", "from", "to", "again", "left_out")] for q in queues[:MOST_ROWS]]
    description.rows = Rows(["Queue", "From", "To", "Again", "Left out"], cells, max(0, len(queues) - MOST_ROWS))
    return description


def pause(target: str, result: Mapping[str, Any]) -> Description:
    """A group that is paused or resumed."""
    if result["paused"]:
        return Description(
            [f"Group {target} is paused: its consumers receive nothing until it is resumed. Its messages wait."]
        )
    return Description([f"Group {target} receives messages again."])


def subscribe(target: str, result: Mapping[str, Any]) -> Description:
    """A subscription that is created or changed."""
    group, _, topic = target.partition("/")
    what = f"topics that match {topic}" if "*" in topic else f"topic {topic}"
    description = Description([f"Group {group} receives {what} in mode {result['mode']}."])
    if result.get("fair_by"):
        description.sentences.append(f"Tenants take turns by {result['fair_by']}.")
    if result.get("made_topic"):
        description.sentences.append("The topic is new.")
    if result.get("lag"):
        description.sentences.append(f"{capital(messages(result['lag']))[:-1]} wait for it.")
    if result.get("topics"):
        description.sentences.append(f"These topics match now: {text(result['topics'])}.")
    return description


def unsubscribe(target: str, result: Mapping[str, Any]) -> Description:
    """A subscription that ends."""
    group, _, topic = target.partition("/")
    return Description([f"Group {group} no longer receives {topic}, and its position there is forgotten."])


def prioritise(target: str, result: Mapping[str, Any]) -> Description:
    """The priority classes that share a group's deliveries."""
    description = Description([f"Group {target} receives messages of these classes in proportion to their weights:"])
    cells = [[c["name"], count(c["weight"]), text(c["topics"])] for c in result["classes"]]
    description.rows = Rows(["Class", "Weight", "Topics"], cells)
    if result["shares"]:
        turns = ", ".join(f"{topic} {count(number)}" for topic, number in result["shares"].items())
        description.sentences.append(f"Within a class each topic has one turn, except: {turns}.")
    return description


def push(target: str, result: Mapping[str, Any]) -> Description:
    """A group whose messages are posted to a webhook, or are not any more."""
    webhook = result.get("push")
    if webhook is None:
        return Description([f"Messages of group {target} are no longer posted; they wait for consumers."])
    batch = f"{messages(webhook['batch'])} a call at most"
    calls = f"{count(webhook['at_once'])} calls at once"
    return Description([f"Messages of group {target} are posted to {webhook['url']}: {batch}, {calls}."])


def objective(target: str, result: Mapping[str, Any]) -> Description:
    """A group that gets an objective, or loses it."""
    wanted = result["objective"]
    if wanted is None:
        return Description([f"Group {target} has no objective: no alarm says how long its messages take."])
    share, within = percent(wanted["share"]), duration(wanted["within"])
    return Description(
        [
            f"{share} of the messages of group {target} are to be acknowledged within {within}.",
            "The alarm `objective` is raised if the share over five minutes is lower.",
        ]
    )


# fmt: off
# --- writes -----------------------------------------------------------------------------------------------------

_PAGE = "/groups/{group}"

SUBSCRIPTION_PUT = AdminWrite("subscription.put", "PUT", "groups/{group}/subscriptions/{topic}", SubscriptionWrite,
    describe=subscribe, title="Make or change a subscription", back=_PAGE)
SUBSCRIPTION_DELETE = AdminWrite("subscription.delete", "DELETE", "groups/{group}/subscriptions/{topic}",
    describe=unsubscribe, title="End a subscription", back=_PAGE,
    warning="The group's position in this topic is forgotten.")
RESET = AdminWrite("group.reset", "POST", "groups/{group}/reset", Reset, describe=reset,
    title="Reset a group in a topic", back=_PAGE,
    warning="The group skips the messages before the new position, and receives those after it, even if it received "
        "them before.")
PAUSE = AdminWrite("group.pause", "POST", "groups/{group}/pause", describe=pause, title="Pause a group", back=_PAGE,
    warning="Its consumers get no messages until it is resumed; the messages wait.")
RESUME = AdminWrite("group.resume", "POST", "groups/{group}/resume", describe=pause, title="Resume a group", back=_PAGE)
PUSH_PUT = AdminWrite("push.put", "PUT", "groups/{group}/push", PushWrite, FanOut.HERE, push,
    title="Post a group's messages to a webhook", back=_PAGE,
    warning="A status of 2xx acknowledges the messages of a call. Calls are signed.")
PUSH_DELETE = AdminWrite("push.delete", "DELETE", "groups/{group}/push", fan_out=FanOut.HERE, describe=push,
    title="Stop posting a group's messages", back=_PAGE, warning="Its messages then wait for consumers.")
PRIORITIES_PUT = AdminWrite("priorities.put", "PUT", "groups/{group}/priorities", PrioritiesWrite, describe=prioritise,
    title="Change a group's priorities", back=_PAGE, chosen=class_inputs(3), shape=_classes)
OBJECTIVE_PUT = AdminWrite("objective.put", "PUT", "groups/{group}/objective", ObjectiveWrite, FanOut.HERE, objective,
    title="Set a group's objective", back=_PAGE)
OBJECTIVE_DELETE = AdminWrite("objective.delete", "DELETE", "groups/{group}/objective", fan_out=FanOut.HERE,
    describe=objective, title="Remove a group's objective", back=_PAGE)

WRITES = (
    SUBSCRIPTION_PUT, SUBSCRIPTION_DELETE, RESET, PAUSE, RESUME, PUSH_PUT, PUSH_DELETE, PRIORITIES_PUT, OBJECTIVE_PUT,
    OBJECTIVE_DELETE,
)  # fmt: skip
