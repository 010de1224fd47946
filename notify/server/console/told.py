"""Sentences and tables that tell people what a write does, or has done: the admin routes answer with data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from notify.server.console.shown import count, exactly, status

MOST_ROWS = 200


@dataclass(slots=True)
class Rows:
    """A table: its headings, and its cells as text."""

    headings: Sequence[str]
    cells: Sequence[Sequence[str]]
    left_out: int = 0
    """Rows beyond MOST_ROWS."""


@dataclass(slots=True)
class Told:
    """Sentences, a table where there are several things, and other fields by name."""

    sentences: list[str] = field(default_factory=list)
    rows: Rows | None = None
    facts: dict[str, str] = field(default_factory=dict)


def told(name: str, target: str, result: Any) -> Told:
    """The answer of a write, by the write's name in the console; `target` as the admin route names it."""
    if not isinstance(result, Mapping):
        return Told([text(result)])
    known = _KNOWN.get(name)
    made = known(target, result) if known is not None else Told()
    if "within_seconds" in result:
        made.sentences.append(f"Consumers follow within {count(result['within_seconds'])} s.")
    if not (made.sentences or made.rows):
        made.facts = {label(key): text(value) for key, value in result.items() if not _is_table(value)}
        for value in result.values():
            if _is_table(value):
                made.rows = table(value)
    return made


IN_SHORT_CHARACTERS = 70
_RECORDED = {"dead_letter": "dead-letters", "message.redeliver": "messages.redeliver"}


def in_short(what: str, target: str, result: Any) -> str:
    """The recorded result of an action in one line. An older version may have recorded it in another form."""
    if not isinstance(result, Mapping) or result.get("state") in ("begun", "failed"):
        return text(result)[:IN_SHORT_CHARACTERS]
    noun, _, verb = what.partition(".")
    name = _RECORDED.get(what, f"{_RECORDED.get(noun, noun)}.{verb}")
    try:
        made = told(name, target, result)
    except (KeyError, TypeError, AttributeError):
        made = Told(facts={label(key): text(value) for key, value in result.items()})
    facts = (f"{k}: {v}" for k, v in made.facts.items() if v not in ("0", "–", "no", "none", target))
    said = made.sentences[0] if made.sentences else ", ".join(facts) or "done"
    return said if len(said) <= IN_SHORT_CHARACTERS else said[: IN_SHORT_CHARACTERS - 1] + "…"


def table(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """Rows of one shape, with a heading for each of their fields."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[text(row.get(name)) for name in names] for row in rows[:MOST_ROWS]]
    return Rows([label(name) for name in names], cells, max(0, len(rows) - MOST_ROWS))


def label(name: str) -> str:
    """A field's name as a heading."""
    return name.replace("_", " ").capitalize()


def text(value: Any) -> str:
    """A value as a person writes it."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return count(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {text(v)}" for k, v in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(text(v) for v in value) or "none"
    return str(value)


def capital(sentence: str) -> str:
    """A text as a sentence."""
    return sentence[:1].upper() + sentence[1:] + "."


def messages(number: float) -> str:
    """A number of messages."""
    return "1 message" if number == 1 else f"{count(number)} messages"


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


# --- writes -------------------------------------------------------------------------------------------------------


def _transaction(target: str, r: Mapping[str, Any]) -> Told:
    after = r.get("becomes", r["state"])
    if "becomes" not in r:
        return Told([f"The transaction is {after}."])
    then = "stays so" if after == r["state"] else f"becomes {after}"
    made = Told([f"The transaction is {r['state']} now, and {then}."])
    if "messages" in r:
        number = messages(len(r["messages"]))
        if after == "COMMITTED":
            made.sentences.append(f"It has {number}, which these groups receive:")
        else:
            made.sentences.append(f"It has {number}, which no group ever receives:")
        cells = [
            [m["topic"], text(m["key"]), "not known here" if m["groups"] is None else text(m["groups"])]
            for m in r["messages"][:MOST_ROWS]
        ]
        made.rows = Rows(["Topic", "Key", "Groups that receive it"], cells)
    return made


def _reset(target: str, r: Mapping[str, Any]) -> Told:
    queues = r["queues"]
    again = sum(q["again"] or 0 for q in queues)
    left_out = sum(q["left_out"] or 0 for q in queues)
    made = Told()
    if not (again or left_out):
        made.sentences.append("The group stays where it is: nothing is repeated, and nothing is left out.")
    if again:
        made.sentences.append(f"The group gets {messages(again)} again.")
    if left_out:
        made.sentences.append(f"It does not get {messages(left_out)} that it has not settled yet.")
    made.sentences.append("What its consumers have in hand becomes stale, and is delivered again if it lies ahead.")
    made.sentences.append(f"Effects: {r['effects']}.")
    cells = [[text(q.get(name)) for name in ("queue", "from", "to", "again", "left_out")] for q in queues[:MOST_ROWS]]
    made.rows = Rows(["Queue", "From", "To", "Again", "Left out"], cells, max(0, len(queues) - MOST_ROWS))
    return made


def _pause(target: str, r: Mapping[str, Any]) -> Told:
    if r["paused"]:
        return Told([f"Group {target} is paused: its consumers get nothing until it is resumed; messages wait."])
    return Told([f"Group {target} receives messages."])


def _failure(r: Mapping[str, Any]) -> list[str]:
    """The failure group that a job is about, where it is about one."""
    f = r.get("failure")
    if f is None:
        return []
    what = " in ".join(part for part in (f["type"], f["place"]) if part) or f["text"]
    closed = f["count"] - f["open"]
    before = f", and {messages(closed)} of it that were sent again or dropped before" if closed else ""
    when = f"the first died at {exactly(f['first_at'])}, the last at {exactly(f['last_at'])}"
    return [f"Failure group {f['fingerprint']} ({what}) has {messages(f['open'])} that wait{before}: {when}."]


def _silence(target: str, r: Mapping[str, Any]) -> Told:
    alarm = f"Alarm {r['name']}" + (f" of {r['target']}" if r["target"] else "")
    if "who" not in r:
        return Told([f"{alarm} is heard again."])
    return Told([f"{alarm} is silent until {exactly(r['until'])}. The overview still shows it."])


def _drop(target: str, r: Mapping[str, Any]) -> Told:
    if "ids" in r:
        made = Told([f"This drops {messages(len(r['ids']))} of the dead letters of {target} for good."])
        made.rows = Rows(["Message"], [[name] for name in r["ids"][:MOST_ROWS]], max(0, len(r["ids"]) - MOST_ROWS))
        return made
    if "at_most" in r:
        job = f"A job looks at {messages(r['at_most'])} at most, and drops those that match for good."
        return Told([*_failure(r), job, "Dead letters that were sent again before stay sent."])
    if "job" in r:
        return Told([f"Job {r['job']} does it; its page shows how far it is."])
    return _items(target, r)


def _redrive(target: str, r: Mapping[str, Any]) -> Told:
    if "ids" in r:
        effects = f"Effects: {r['effects']}."
        number = len(r["ids"])
        made = Told(
            [f"{messages(number)} of the dead letters {'goes' if number == 1 else 'go'} to {target} again.", effects]
        )
        made.rows = Rows(["Message"], [[name] for name in r["ids"][:MOST_ROWS]], max(0, len(r["ids"]) - MOST_ROWS))
        return made
    if "at_most" in r:
        effects = f"Effects: {r['effects']}."
        looked_at = messages(r["at_most"])
        job = f"A job looks at {looked_at} at most, and sends those that match to group {target}."
        return Told([*_failure(r), job, effects])
    if "job" in r:
        return Told([f"Job {r['job']} does it; its page shows how far it is."])
    return _items(target, r)


def _items(target: str, r: Mapping[str, Any]) -> Told:
    """One result for each message; an item of a preview has no status yet unless it is refused."""
    if not _is_table(r.get("items")):
        return Told()
    numbers = [item.get("status") for item in r["items"]]
    words = [(None, "to be sent again"), (201, "sent again"), (204, "dropped"), (200, "sent again or dropped before")]
    counts = [(sum(n == number for n in numbers), word) for number, word in words]
    counts.append((len(numbers) - sum(c for c, _ in counts), "refused"))
    sentence = ", ".join(f"{messages(c)} {word}" for c, word in counts if c)
    results = [word_of(item.get("status")) for item in r["items"]]
    cells = [[item["id"], result, text(item.get("detail"))] for item, result in zip(r["items"], results, strict=True)]
    rows = Rows(["Message", "Result", "Why"], cells[:MOST_ROWS], max(0, len(cells) - MOST_ROWS))
    return Told([capital(sentence)], rows)


def word_of(number: int | None) -> str:
    """The result of one item, None where it is still to be sent."""
    return "to be sent" if number is None else status(number)


def _send(target: str, r: Mapping[str, Any]) -> Told:
    groups = f"these groups receive it: {text(r['groups'])}" if r["groups"] else "no group subscribes to it now"
    if r["groups"] is None:
        groups = "to see which groups receive it takes the right view"
    if "items" not in r:
        return Told([f"The message goes to topic {target}; {groups}."])
    (item,) = r["items"]
    if item["status"] != 201:
        return Told([f"The message was refused: {text(item.get('detail'))}."])
    return Told([f"The message is in topic {target} as {item['id']}; {groups}."])


def _edit(target: str, r: Mapping[str, Any]) -> Told:
    if "items" not in r:
        changed = f"Group {target} alone gets the message again, with another {' and '.join(r['changed'])}."
        return Told([changed, f"Effects: {r['effects']}."])
    return _items(target, r)


def _purge(target: str, r: Mapping[str, Any]) -> Told:
    dropped = sum(q["dropped"] for q in r["queues"])
    deleted = f"{capital(messages(dropped))[:-1]} of {target} at most are deleted for good."
    made = Told([deleted if dropped else "Nothing is deleted."])
    for group, number in r["missed"].items():
        made.sentences.append(f"Group {group} never gets {messages(number)} that it has not settled: missed.")
    if dropped and not r["missed"]:
        made.sentences.append("No group is missed: all have settled them.")
    return made


def _delete_topic(target: str, r: Mapping[str, Any]) -> Told:
    if "deleted" in r:
        return Told([f"Topic {r['deleted']} is deleted."])
    kept = sum(q["end"] - q["start"] for q in r["queues"])
    return Told([f"Topic {target} is deleted with its {messages(kept)} at most, and with all subscriptions to it."])


_KNOWN = {
    "transaction.check": _transaction,
    "transaction.resume": _transaction,
    "transaction.commit": _transaction,
    "transaction.rollback": _transaction,
    "group.reset": _reset,
    "group.pause": _pause,
    "group.resume": _pause,
    "dead-letters.redrive": _redrive,
    "dead-letters.redrive-all": _redrive,
    "dead-letters.drop": _drop,
    "dead-letters.edit": _edit,
    "message.send": _send,
    "alarm.silence": _silence,
    "alarm.unsilence": _silence,
    "dead-letters.purge": _purge,
    "messages.redeliver": _items,
    "topic.purge": _purge,
    "topic.delete": _delete_topic,
}
