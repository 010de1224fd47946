"""The console's writes. Each write is data, so that all have a reason, a preview and a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from notify.errors import InvalidRequest
from notify.limits import MODES


@dataclass(frozen=True, slots=True)
class Input:
    """One field of a form. `kind`: text, exact (empty text is a value), number, hidden (a number that the page gives),
    hours (sent as seconds), choice, check, list (separated by commas), rates (lines NAME=RATE), pairs (lines
    NAME=VALUE), body (a message's unchanged text)."""

    name: str
    label: str
    kind: str = "text"
    choices: tuple[str, ...] = ()
    required: bool = False
    help: str = ""

    def value(self, text: str | None) -> Any:
        """The value of the form's text; None: the field is left out. Raises InvalidRequest."""
        if self.kind == "body":
            return (text or "").replace("\r\n", "\n") or None
        text = (text or "").strip()
        try:
            if self.kind == "exact":
                return text
            if self.kind == "check":
                return True if text else None
            if not text:
                return {} if self.kind in ("rates", "pairs") else None
            if self.kind in ("number", "hidden"):
                return float(text) if "." in text else int(text)
            if self.kind == "list":
                return [part.strip() for part in text.replace("\n", ",").split(",") if part.strip()]
            if self.kind in ("rates", "pairs"):
                convert = float if self.kind == "rates" else str.strip
                pairs = [line.partition("=") for line in text.splitlines() if line.strip()]
                return {name.strip(): convert(value) for name, _, value in pairs}
            if self.kind == "hours":
                return float(text) * 3600
        except ValueError:
            raise InvalidRequest(f"{self.label}: {text[:60]!r} is not valid. {self.help}") from None
        return text


@dataclass(frozen=True, slots=True)
class Change:
    """One write: its admin route, its inputs, and the warning that its form shows."""

    title: str
    method: str
    path: str
    """The path under /v1/admin, with targets in braces."""
    inputs: tuple[Input, ...] = ()
    warning: str = ""
    back: str = "/"
    """The page to continue with, with targets in braces."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are always sent."""
    at: str = ""
    """The request's field that contains the inputs; empty: each input is a field of the request."""
    beside: tuple[Input, ...] = ()
    """Inputs that are always fields of the request; the form shows them last."""
    shape: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Makes the request's fields from the inputs' values; None: the values are the fields."""

    def body(self, form: Mapping[str, str]) -> dict[str, Any]:
        """The request's fields. Raises InvalidRequest for an input that is missing or not valid."""
        fields = _values(self.inputs, form)
        if self.shape is not None:
            fields = self.shape(fields)
        return dict(self.fixed) | ({self.at: fields} if self.at else fields) | _values(self.beside, form)


def _values(inputs: Sequence[Input], form: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in inputs:
        value = item.value(form.get(item.name))
        if value is None and item.required:
            raise InvalidRequest(f"{item.label} is missing. {item.help}")
        if value is not None:
            values[item.name] = value
    return values


_TX = "transactions/{transaction}"
_TX_PAGE = "/transactions/{transaction}"
_DEAD = (
    Input("topic", "Topic"),
    Input("tag", "Tag"),
    Input("key", "Key"),
    Input("contains", "Reason contains"),
    Input("filter", "Filter", help="CEL over headers, key, tag and topic."),
    Input("failure", "Failure group", help="Its fingerprint, as the list of dead letters shows it."),
)
_FROM = Input("offset", "Offset", "hidden")
"""The offset of the oldest letter on the page. Over Kafka the ids are looked for from there on."""
_IN_DOUBT = (
    Input("ids", "Transactions", "list", help="Ids, separated by commas."),
    Input("all", "All that match the fields below", "check",
          help="Instead of single ids: a job takes the oldest 4,096 that match."),
    Input("state", "State", help="PREPARED or PARKED; empty: both."),
    Input("producer_group", "Producer group"),
    Input("older_than", "Older than, seconds", "number"),
    Input("stored_before", "Stored before", help="An instant (RFC 3339). Later transactions are left out."),
)  # fmt: skip
_BEFORE = Input("before", "Before", required=True, help="An instant (RFC 3339), or latest for all messages.")


def _which(fields: dict[str, Any]) -> dict[str, Any]:
    """The transactions that a form chooses. Raises InvalidRequest unless it has either ids or `all`."""
    chosen = {name: fields.pop(name) for name in ("ids", "all") if fields.get(name)}
    if len(chosen) != 1:
        raise InvalidRequest("Choose either single transactions or all that match, not both.")
    return chosen | ({"wanted": fields} if "all" in chosen else {})


_SUBSCRIPTION = (
    Input("mode", "Mode", "choice", MODES),
    Input("start", "Start of a new subscription", help="earliest, latest, an offset or an instant."),
    Input("tags", "Tags", "list", help="Separated by commas; empty: all."),
    Input("filter", "Filter", help="CEL over headers, key, tag and topic."),
    Input("max_attempts", "Failed attempts before the dead-letter queue", "number"),
    Input("max_deaths", "Deaths of consumers before the dead-letter queue", "number"),
    Input("retry_min", "First retry after, seconds", "number", help="Default: 1 second."),
    Input("retry_max", "Later retries after at most, seconds", "number", help="Default: 300 seconds."),
    Input(
        "force", "Change the mode while consumers are active", "check",
        help="Without it another mode is refused (`mode_in_use`) if a consumer of the group has asked within 60 s. "
        "With it consumers may get messages again, or out of order.",
    ),
)  # fmt: skip
_EFFECTS = (
    Input(
        "replay_effects", "Repeat the effects", "check",
        help="Handlers with an inbox repeat effects that took place before. Without it they skip such messages.",
    ),
    Input(
        "force", "Also messages whose inbox rows may be purged", "check",
        help="Without it messages older than the inbox's rows are refused (`before_inbox`). With it they take effect a "
        "second time if their row is gone.",
    ),
)  # fmt: skip
"""Inputs of the writes that deliver messages to a group again."""

MOST_CLASSES = 16
_CLASS_TOPICS = (
    "Names, or patterns with *, separated by commas. Topics that no class names belong to the class normal, or else to "
    "the last one."
)


def class_inputs(count: int) -> tuple[Input, ...]:
    """The inputs of `count` priority classes, the highest first, and of the topics' shares."""
    classes = [
        (
            Input(f"class_{n}", f"Class {n}", help="Its name. Empty: there is no such class." if n == 1 else ""),
            Input(f"weight_{n}", f"Weight of class {n}", "number", help="From 1 to 1000." if n == 1 else ""),
            Input(f"topics_{n}", f"Topics of class {n}", "list", help=_CLASS_TOPICS if n == 1 else ""),
        )
        for n in range(1, min(count, MOST_CLASSES) + 1)
    ]  # fmt: skip
    shares = Input(
        "shares", "Turns of a topic", "rates", help="TOPIC=TURNS, one a line. A topic that is not listed has one turn."
    )
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


CHANGES: dict[str, Change] = {
    "transaction.check": Change("Ask the producers now", "POST", _TX + "/check", back=_TX_PAGE),
    "transaction.resume": Change(
        "Resume the checks", "POST", _TX + "/resume", back=_TX_PAGE,
        warning="A parked transaction goes back to the normal schedule of checks.",
    ),
    "transaction.commit": Change(
        "Force a commit", "POST", _TX + "/commit", back=_TX_PAGE,
        warning="Its messages are delivered, whatever the producer's database says. Look there first: this cannot be "
        "undone, and the audit reports it if the database disagrees.",
    ),
    "transaction.rollback": Change(
        "Force a rollback", "POST", _TX + "/rollback", back=_TX_PAGE,
        warning="Its messages are never delivered, whatever the producer's database says. Look there first: this "
        "cannot be undone, and the audit reports it if the database disagrees.",
    ),
    "transactions.check": Change(
        "Check transactions now", "POST", "transactions/check", inputs=_IN_DOUBT, shape=_which, back="/transactions",
    ),
    "transactions.commit": Change(
        "Force the commit of transactions", "POST", "transactions/commit", inputs=_IN_DOUBT, shape=_which,
        back="/transactions",
        warning="Their messages are delivered, whatever the producers' databases say. Look there first: this cannot "
        "be undone, and the audit reports each one that a database contradicts.",
    ),
    "transactions.rollback": Change(
        "Force the rollback of transactions", "POST", "transactions/rollback", inputs=_IN_DOUBT, shape=_which,
        back="/transactions",
        warning="Their messages are never delivered, whatever the producers' databases say. Look there first: this "
        "cannot be undone, and the audit reports each one that a database contradicts.",
    ),
    "topic.put": Change(
        "Make or change a topic", "PUT", "topics/{topic}", back="/topics/{topic}",
        inputs=(
            Input("queues", "Queues", "number", help="The number can grow, not shrink."),
            Input("retention", "Retention, seconds", "number", help="0: the server's default."),
            Input("retention_bytes", "Retention, bytes", "number", help="0: no bound."),
            Input("ttl", "Time to live, seconds", "number", help="0: messages do not expire."),
            Input("backlog", "Backlog, messages", "number", help="0: no bound."),
            Input("backlog_policy", "When the backlog is full", "choice", ("", "refuse", "hold", "drop_oldest")),
            Input("flush", "Answer when", "choice", ("", "sync", "async", "memory")),
        ),
    ),
    "message.send": Change(
        "Send a message", "POST", "topics/{topic}/messages", back="/messages?topic={topic}",
        inputs=(
            Input("body", "Body", "body", required=True, help="Text, such as JSON; it is sent as it is."),
            Input("key", "Key", help="Messages of one key keep their order."),
            Input("tag", "Tag", help="Subscriptions may filter by it."),
            Input("headers", "Headers", "pairs", help="NAME=VALUE, one a line."),
            Input("delay", "Delay, seconds", "number"),
        ),
        warning="Every group that the preview names receives it, and handles it like any other message.",
    ),
    "topic.delete": Change(
        "Delete a topic", "DELETE", "topics/{topic}", back="/topics",
        warning="All its messages are deleted, also those that were not delivered, and so are its subscriptions.",
    ),
    "topic.purge": Change(
        "Purge a topic's messages", "POST", "topics/{topic}/purge", back="/topics/{topic}",
        inputs=(_BEFORE, Input("force", "Also messages that groups have not settled", "check")),
        warning="Purged messages are not delivered and cannot be restored. The preview shows what each group loses.",
    ),
    "subscription.put": Change(
        "Make or change a subscription", "PUT", "groups/{group}/subscriptions/{topic}", inputs=_SUBSCRIPTION,
        back="/groups/{group}",
    ),
    "subscription.delete": Change(
        "End a subscription", "DELETE", "groups/{group}/subscriptions/{topic}", back="/groups/{group}",
        warning="The group's position in this topic is forgotten.",
    ),
    "group.reset": Change(
        "Reset a group in a topic", "POST", "groups/{group}/reset", back="/groups/{group}",
        inputs=(
            Input("topic", "Topic", required=True),
            Input("to", "To", required=True, help="earliest, latest, an offset or an instant (RFC 3339)."),
        ),
        beside=_EFFECTS,
        warning="The group skips the messages before the new position, and receives those after it, also those that it "
        "has had before.",
    ),
    "group.pause": Change(
        "Pause a group", "POST", "groups/{group}/pause", back="/groups/{group}",
        warning="Its consumers get no messages until it is resumed; the messages wait.",
    ),
    "group.resume": Change("Resume a group", "POST", "groups/{group}/resume", back="/groups/{group}"),
    "push.put": Change(
        "Post a group's messages to a webhook", "PUT", "groups/{group}/push", back="/groups/{group}",
        inputs=(
            Input("url", "Address", required=True, help="Its host must be in the setting webhook_hosts."),
            Input("batch", "Messages in a call, at most", "number", help="From 1 to 1000; default: 1."),
            Input("at_once", "Calls at once from each server, at most", "number", help="From 1 to 64; default: 4."),
        ),
        warning="A status of 2xx acknowledges the messages of a call. Calls are signed.",
    ),
    "push.delete": Change(
        "Stop posting a group's messages", "DELETE", "groups/{group}/push", back="/groups/{group}",
        warning="Its messages then wait for consumers.",
    ),
    "priorities.put": Change(
        "Change a group's priorities", "PUT", "groups/{group}/priorities", back="/groups/{group}",
        inputs=class_inputs(3), shape=_classes,
    ),
    "dead-letters.redrive": Change(
        "Send selected dead letters again", "POST", "groups/{group}/dead-letters/redrive",
        inputs=(Input("ids", "Ids", "list", required=True), _FROM), back="/groups/{group}/dead-letters",
        beside=_EFFECTS,
    ),
    "dead-letters.redrive-all": Change(
        "Send all matching dead letters again", "POST", "groups/{group}/dead-letters/redrive", inputs=_DEAD,
        at="wanted", fixed={"all": True}, back="/jobs", beside=_EFFECTS,
        warning="This runs as a job. Dead letters that were already sent again are left out.",
    ),
    "dead-letters.edit": Change(
        "Correct a dead letter and send it again", "POST", "groups/{group}/dead-letters/edit",
        inputs=(
            Input("id", "Message", required=True),
            Input("body", "Body", "body", help="Empty: the body stays unchanged. So does a body that is not text."),
            Input("key", "Key", "exact"), Input("tag", "Tag", "exact"),
            Input("headers", "Headers", "pairs", help="NAME=VALUE, one a line."),
        ),
        back="/groups/{group}/dead-letters", beside=_EFFECTS,
        warning="This group alone gets the corrected message. The letter itself stays in the log unchanged.",
    ),
    "dead-letters.drop": Change(
        "Drop dead letters", "POST", "groups/{group}/dead-letters/drop", inputs=_DEAD, at="wanted",
        back="/groups/{group}/dead-letters",
        beside=(
            Input("ids", "Ids", "list", help="Only these letters. Without ids: all that match the fields above."),
            _FROM,
        ),
        warning="Dropped letters cannot be sent again.",
    ),
    "dead-letters.purge": Change(
        "Purge dead letters", "POST", "groups/{group}/dead-letters/purge",
        inputs=(_BEFORE,), back="/groups/{group}/dead-letters",
        warning="Purged letters cannot be sent again.",
    ),
    "alarm.silence": Change(
        "Silence an alarm", "POST", "alarms/{name}/silence",
        inputs=(
            Input("target", "Target", help="What the alarm is about, such as a group; empty if it has no target."),
            Input("seconds", "Hours", "hours", required=True, help="From 0.02 to 720."),
        ),
        warning="During this time this server posts the alarm to no webhook and counts it in no metric.",
    ),
    "alarm.unsilence": Change(
        "End an alarm's silence", "POST", "alarms/{name}/unsilence", inputs=(Input("target", "Target"),),
    ),
    "job.cancel": Change(
        "Cancel a job", "POST", "jobs/{job}/cancel", back="/jobs/{job}",
        warning="What it has done stays done.",
    ),
    "messages.redeliver": Change(
        "Send messages to a group again", "POST", "groups/{group}/redeliver",
        inputs=(Input("ids", "Ids", "list", required=True),), back="/groups/{group}",
    ),
    "limits.put": Change(
        "Change rates", "PUT", "limits", back="/settings",
        inputs=(
            Input("topics", "Topics: messages a second", "rates", help="NAME=RATE, one a line."),
            Input("producer_groups", "Producer groups: transactions a second", "rates", help="NAME=RATE, one a line."),
            Input("consumer_groups", "Consumer groups: messages a second", "rates", help="NAME=RATE, one a line."),
        ),
        warning="A name that is not listed here has no rate limit afterwards.",
    ),
    "settings.put": Change(
        "Change a setting", "PUT", "settings", back="/settings", at="values",
        warning="All servers of the registry use the new value within seconds.",
    ),
    "settings.rollback": Change(
        "Go back to a revision", "POST", "settings/rollback", back="/settings",
        inputs=(Input("to", "Revision", "number", required=True, help="0: the settings of the servers' start."),),
    ),
    "credential.add": Change(
        "Add a credential", "POST", "credentials", back="/access",
        inputs=(
            Input("name", "Name", required=True, help="A service or a person."),
            Input("rights", "Rights", "list", required=True,
                  help="Such as publish:order.*, check:orders, consume:points@order.*, view, admin."),
            Input("expires_in", "Expires in, seconds", "number", help="Default: 90 days."),
            Input("kind", "Kind", "choice", ("token", "certificate", "subject")),
            Input("subject", "Subject", help="A certificate's common name, or the sub of a provider's token."),
        ),
    ),
    "credential.revoke": Change(
        "Revoke a credential", "POST", "credentials/{credential}/revoke", back="/access",
        warning="Requests with this credential are refused from now on.",
    ),
}  # fmt: skip
"""Every write of the console, by name. The input of `settings.put` is made from the setting."""
