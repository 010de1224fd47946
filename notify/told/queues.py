"""Descriptions of writes to groups, topics and messages: resets, dead letters, purges, sent messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from notify.queue_rows import kept
from notify.told.form import MOST_ROWS, Rows, Told, by_job, capital, is_table, messages, text
from notify.words import count, duration, exactly, size, status


def reset(target: str, result: Mapping[str, Any]) -> Told:
    """A group that continues at another offset of a topic."""
    queues = result["queues"]
    again = sum(q["again"] or 0 for q in queues)
    left_out = sum(q["left_out"] or 0 for q in queues)
    description = Told()
    if not (again or left_out):
        description.sentences.append("The position does not change: no message is repeated, and none is left out.")
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


def pause(target: str, result: Mapping[str, Any]) -> Told:
    """A group that is paused or resumed."""
    if result["paused"]:
        return Told(
            [f"Group {target} is paused: its consumers receive nothing until it is resumed. Its messages wait."]
        )
    return Told([f"Group {target} receives messages again."])


def _failure(result: Mapping[str, Any]) -> list[str]:
    """The description of the failure group that a job is about, if it is about one."""
    failure = result.get("failure")
    if failure is None:
        return []
    what = " in ".join(part for part in (failure["type"], failure["place"]) if part) or failure["text"]
    closed = failure["count"] - failure["open"]
    closed_part = f", and {messages(closed)} of it that were sent again or dropped before" if closed else ""
    when = f"the first died at {exactly(failure['first_at'])}, the last at {exactly(failure['last_at'])}"
    waiting = messages(failure["open"])
    return [f"Failure group {failure['fingerprint']} ({what}) has {waiting} that wait{closed_part}: {when}."]


def drop(target: str, result: Mapping[str, Any]) -> Told:
    """Dead letters that are dropped, by their ids or by a job."""
    if "ids" in result:
        description = Told(
            [f"{capital(messages(len(result['ids'])))[:-1]} of the dead letters of {target} will be dropped for good."]
        )
        description.sentences += _rest(result)
        description.rows = Rows(
            ["Message"], [[name] for name in result["ids"][:MOST_ROWS]], max(0, len(result["ids"]) - MOST_ROWS)
        )
        return description
    if "at_most" in result:
        job = f"A job looks at {messages(result['at_most'])} at most, and drops those that match for good."
        return Told([*_failure(result), job, "Dead letters that were sent again before stay sent."])
    if "job" in result:
        return by_job(result)
    return items(target, result)


def redrive(target: str, result: Mapping[str, Any]) -> Told:
    """Dead letters that are redriven to their group, by their ids or by a job."""
    if "ids" in result:
        effects = f"Effects: {result['effects']}."
        number = len(result["ids"])
        description = Told(
            [f"{messages(number)} of the dead letters {'goes' if number == 1 else 'go'} to {target} again.", effects]
        )
        description.sentences += _rest(result)
        description.rows = Rows(
            ["Message"], [[name] for name in result["ids"][:MOST_ROWS]], max(0, len(result["ids"]) - MOST_ROWS)
        )
        return description
    if "at_most" in result:
        effects = f"Effects: {result['effects']}."
        looked_at = messages(result["at_most"])
        job = f"A job looks at {looked_at} at most, and sends those that match to group {target}."
        return Told([*_failure(result), job, effects])
    if "job" in result:
        return by_job(result)
    return items(target, result)


def _rest(result: Mapping[str, Any]) -> list[str]:
    """The sentence about letters that a bounded search left out."""
    return ["Later dead letters were not looked at."] if result.get("next_offset") else []


def items(target: str, result: Mapping[str, Any]) -> Told:
    """The result of each message; an item of a preview has no status yet, unless it is refused."""
    if not is_table(result.get("items")):
        return Told()
    numbers = [item.get("status") for item in result["items"]]
    words = [(None, "to be sent again"), (201, "sent again"), (204, "dropped"), (200, "sent again or dropped before")]
    counts = [(sum(n == number for n in numbers), word) for number, word in words]
    counts.append((len(numbers) - sum(c for c, _ in counts), "refused"))
    sentence = ", ".join(f"{messages(c)} {word}" for c, word in counts if c)
    results = [_word_of(item.get("status")) for item in result["items"]]
    cells = [
        [item["id"], result, text(item.get("detail"))] for item, result in zip(result["items"], results, strict=True)
    ]
    rows = Rows(["Message", "Result", "Why"], cells[:MOST_ROWS], max(0, len(cells) - MOST_ROWS))
    return Told([capital(sentence), *_rest(result)], rows)


def _word_of(number: int | None) -> str:
    """The word for an item's status; None means that the item is still to be sent."""
    return "to be sent" if number is None else status(number)


def send(target: str, result: Mapping[str, Any]) -> Told:
    """A message that an operator sends."""
    groups = (
        f"these groups receive it: {text(result['groups'])}" if result["groups"] else "no group subscribes to it now"
    )
    if result["groups"] is None:
        groups = "only who has the right view sees which groups receive it"
    if "items" not in result:
        return Told([f"The message goes to topic {target}; {groups}."])
    (item,) = result["items"]
    if item["status"] != 201:
        return Told([f"The message was refused: {text(item.get('detail'))}."])
    return Told([f"The message is in topic {target} as {item['id']}; {groups}."])


def edit(target: str, result: Mapping[str, Any]) -> Told:
    """A dead letter that is corrected and sent again."""
    if "items" not in result:
        changed = f"Only group {target} receives the message again, with another {' and '.join(result['changed'])}."
        return Told([changed, f"Effects: {result['effects']}."])
    return items(target, result)


def purge(target: str, result: Mapping[str, Any]) -> Told:
    """A topic's messages, or a group's dead letters, that are deleted."""
    dropped = sum(q["dropped"] for q in result["queues"])
    deleted = f"{capital(messages(dropped))[:-1]} of {target} at most are deleted for good."
    description = Told([deleted if dropped else "Nothing is deleted."])
    for group, number in result["missed"].items():
        description.sentences.append(f"Group {group} never receives {messages(number)} that it has not settled.")
    if dropped and not result["missed"]:
        description.sentences.append("No group loses a message: all groups have settled them.")
    return description


def delete_topic(target: str, result: Mapping[str, Any]) -> Told:
    """A topic that is deleted with its messages and subscriptions."""
    if "deleted" in result:
        return Told([f"Topic {result['deleted']} is deleted."])
    number = messages(kept(result["queues"]))
    return Told([f"Topic {target} is deleted with its {number} at most, and with all subscriptions to it."])


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


def put_topic(target: str, result: Mapping[str, Any]) -> Told:
    """A topic that is created or changed. All workers of a server have the same queues."""
    number = result["queue_count"] if "queue_count" in result else len({q["queue"] for q in result["queues"]})
    description = Told([f"Topic {target} has {'1 queue' if number == 1 else f'{count(number)} queues'}."])
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


def subscribe(target: str, result: Mapping[str, Any]) -> Told:
    """A subscription that is created or changed."""
    group, _, topic = target.partition("/")
    what = f"topics that match {topic}" if "*" in topic else f"topic {topic}"
    description = Told([f"Group {group} receives {what} in mode {result['mode']}."])
    if result.get("made_topic"):
        description.sentences.append("The topic is new.")
    if result.get("lag"):
        description.sentences.append(f"{capital(messages(result['lag']))[:-1]} wait for it.")
    if result.get("topics"):
        description.sentences.append(f"These topics match now: {text(result['topics'])}.")
    return description


def unsubscribe(target: str, result: Mapping[str, Any]) -> Told:
    """A subscription that ends."""
    group, _, topic = target.partition("/")
    return Told([f"Group {group} no longer receives {topic}, and its position there is forgotten."])


def prioritise(target: str, result: Mapping[str, Any]) -> Told:
    """The priority classes that share a group's deliveries."""
    description = Told([f"Group {target} receives messages of these classes in proportion to their weights:"])
    cells = [[c["name"], count(c["weight"]), text(c["topics"])] for c in result["classes"]]
    description.rows = Rows(["Class", "Weight", "Topics"], cells)
    if result["shares"]:
        turns = ", ".join(f"{topic} {count(number)}" for topic, number in result["shares"].items())
        description.sentences.append(f"Within a class each topic has one turn, except: {turns}.")
    return description


def push(target: str, result: Mapping[str, Any]) -> Told:
    """A group whose messages are posted to a webhook, or are not any more."""
    webhook = result.get("push")
    if webhook is None:
        return Told([f"Messages of group {target} are no longer posted; they wait for consumers."])
    batch = f"{messages(webhook['batch'])} a call at most"
    calls = f"{count(webhook['at_once'])} calls at once"
    return Told([f"Messages of group {target} are posted to {webhook['url']}: {batch}, {calls}."])
