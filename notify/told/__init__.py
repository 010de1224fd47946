"""Sentences and tables that tell people what a write does, or has done: the admin routes answer with data.

The console and the commands say the same, in these words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from notify.told import decisions, queues, server
from notify.told.form import Told, is_table, label, table, text
from notify.words import count


def told(name: str, target: str, result: Any) -> Told:
    """A write's answer in sentences; `name` is the write's in the console, `target` what the admin route calls it."""
    if not isinstance(result, Mapping):
        return Told([text(result)])
    known = KNOWN.get(name)
    made = known(target, result) if known is not None else Told()
    if "within_seconds" in result:
        made.sentences.append(f"Consumers follow within {count(result['within_seconds'])} s.")
    if not (made.sentences or made.rows):
        made.facts = {label(key): text(value) for key, value in result.items() if not is_table(value)}
        for value in result.values():
            if is_table(value):
                made.rows = table(value)
    return made


IN_SHORT_CHARACTERS = 70
_RECORDED = {"dead_letter": "dead-letters", "message.redeliver": "messages.redeliver"}
"""The console's name of what is recorded under another name."""


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


KNOWN: Mapping[str, Callable[[str, Mapping[str, Any]], Told]] = {
    "transaction.check": decisions.transaction,
    "transaction.resume": decisions.transaction,
    "transaction.commit": decisions.transaction,
    "transaction.rollback": decisions.transaction,
    "transactions.check": decisions.decision,
    "transactions.commit": decisions.decision,
    "transactions.rollback": decisions.decision,
    "topic.put": queues.put_topic,
    "topic.purge": queues.purge,
    "topic.delete": queues.delete_topic,
    "subscription.put": queues.subscribe,
    "subscription.delete": queues.unsubscribe,
    "group.reset": queues.reset,
    "group.pause": queues.pause,
    "group.resume": queues.pause,
    "priorities.put": queues.prioritise,
    "push.put": queues.push,
    "push.delete": queues.push,
    "dead-letters.redrive": queues.redrive,
    "dead-letters.redrive-all": queues.redrive,
    "dead-letters.drop": queues.drop,
    "dead-letters.edit": queues.edit,
    "dead-letters.purge": queues.purge,
    "message.send": queues.send,
    "messages.redeliver": queues.items,
    "alarm.silence": server.silence,
    "alarm.unsilence": server.silence,
    "settings.put": server.set_settings,
    "settings.rollback": server.roll_back,
    "limits.put": server.limit,
    "credential.add": server.grant,
    "credential.revoke": server.revoke,
    "job.cancel": server.cancel,
}
"""The writes that have sentences, by name. Of another write its fields are shown."""
