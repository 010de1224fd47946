"""Sentences and tables that describe what a write does, or has done, made from the data of the admin routes.

The console and the commands use the same sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from notify.told import decisions, queues, server
from notify.told.form import Told, is_table, label, table, text
from notify.words import count


def told(name: str, target: str, result: Any) -> Told:
    """The description of a write's answer. `name`: the write's name in the console; `target`: the thing that the write
    changes, as the admin route names it."""
    if not isinstance(result, Mapping):
        return Told([text(result)])
    describe = KNOWN.get(name)
    description = describe(target, result) if describe is not None else Told()
    if "within_seconds" in result:
        description.sentences.append(f"Consumers follow within {count(result['within_seconds'])} s.")
    if not (description.sentences or description.rows):
        description.facts = {label(key): text(value) for key, value in result.items() if not is_table(value)}
        for value in result.values():
            if is_table(value):
                description.rows = table(value)
    return description


IN_SHORT_CHARACTERS = 70
_RECORDED = {"dead_letter": "dead-letters", "message.redeliver": "messages.redeliver"}
"""The console's names of writes that are recorded under other names."""


def in_short(what: str, target: str, result: Any) -> str:
    """The recorded result of an action in one line. An older version may have recorded it in another format."""
    if not isinstance(result, Mapping) or result.get("state") in ("begun", "failed"):
        return text(result)[:IN_SHORT_CHARACTERS]
    noun, _, verb = what.partition(".")
    name = _RECORDED.get(what, f"{_RECORDED.get(noun, noun)}.{verb}")
    try:
        description = told(name, target, result)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
        description = Told(facts={label(key): text(value) for key, value in result.items()})
    facts = (f"{k}: {v}" for k, v in description.facts.items() if v not in ("0", "–", "no", "none", target))
    line = description.sentences[0] if description.sentences else ", ".join(facts) or "done"
    return line if len(line) <= IN_SHORT_CHARACTERS else line[: IN_SHORT_CHARACTERS - 1] + "…"


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
"""The functions that describe writes, by the write's name. For other writes the fields of the answer are shown."""
