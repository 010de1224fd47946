"""All administrative writes by name, and descriptions of what one does, or has done, from the answer of its route."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from notify.admin_api import dead_letters, groups, held_keys, messages, schedules, server, topics, transactions
from notify.admin_api.declaration import AdminWrite
from notify.admin_api.description import Description, is_table, label, table, text
from notify.admin_api.words import count

WRITES: Mapping[str, AdminWrite] = {
    write.name: write
    for noun in (transactions, topics, messages, groups, dead_letters, held_keys, schedules, server)
    for write in noun.WRITES
}  # fmt: skip
FORMS = {name: write for name, write in WRITES.items() if write.title}
"""The writes that the console has a form for. The input of `settings.put` is made from the setting."""


def described(name: str, target: str, result: Any) -> Description:
    """The description of a write's answer. `name`: the write's name in the console; `target`: the thing that the write
    changes, as the admin route names it."""
    if not isinstance(result, Mapping):
        return Description([text(result)])
    write = WRITES.get(name)
    description = Description() if write is None or write.describe is None else write.describe(target, result)
    if "within_seconds" in result:
        description.sentences.append(f"Consumers follow within {count(result['within_seconds'])} s.")
    if not (description.sentences or description.rows):
        description.facts = {label(key): text(value) for key, value in result.items() if not is_table(value)}
        for value in result.values():
            if is_table(value):
                description.rows = table(value)
    return description


IN_SHORT_CHARACTERS = 70
_RECORDED = {"dead_letter": "dead-letters", "held_key": "held-keys", "message.redeliver": "messages.redeliver"}
"""The console's names of writes that are recorded under other names."""


def in_short(what: str, target: str, result: Any) -> str:
    """The recorded result of an action in one line. An older version may have recorded it in another format."""
    if not isinstance(result, Mapping) or result.get("state") in ("begun", "failed"):
        return text(result)[:IN_SHORT_CHARACTERS]
    noun, _, verb = what.partition(".")
    name = _RECORDED.get(what, f"{_RECORDED.get(noun, noun)}.{verb}")
    try:
        description = described(name, target, result)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
        description = Description(facts={label(key): text(value) for key, value in result.items()})
    facts = (f"{k}: {v}" for k, v in description.facts.items() if v not in ("0", "–", "no", "none", target))
    line = description.sentences[0] if description.sentences else ", ".join(facts) or "done"
    return line if len(line) <= IN_SHORT_CHARACTERS else line[: IN_SHORT_CHARACTERS - 1] + "…"
