"""Writes to held keys: retry, skip and release the messages that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from notify.admin_api.declaration import AdminWrite, Flag, Input, StrictBool, Write, declared
from notify.admin_api.description import MOST_ROWS, Description, Rows, messages, text
from notify.admin_api.words import count

# A field is a row of a table: itself, its input, its flag.
# fmt: off
AT_ONCE = 1000
"""The most held keys of a request."""


@dataclass(frozen=True, kw_only=True)
class HeldChoice(Write):
    """Which held keys: those of these messages, or all of a topic or key; `all` without conditions for every one."""

    ids: list[str] | None = declared(None, "the messages that hold the keys", max_length=AT_ONCE,
        input=Input("Messages", "The ids of the messages that hold the keys, separated by commas."),
        flag=Flag("Only the keys that these messages hold (repeatable).", name="id", default=[], type=list[str]))
    topic: str | None = declared(None, input=Input(help="Only keys of this topic."),
        flag=Flag("Only keys of this topic.", default=""))
    key: str | None = declared(None, input=Input(help="Only this key."), flag=Flag("Only this key.", default=""))
    all: StrictBool = declared(False, f"every held key that matches, {AT_ONCE:,} at most; `left` counts the others",
        input=Input("All held keys", f"Every held key that matches, {AT_ONCE:,} at most."),
        flag=Flag(f"Every held key that matches, {AT_ONCE:,} at most."))
# fmt: on


# --- sentences --------------------------------------------------------------------------------------------------

_WORDS = {200: "done", 404: "not held"}


def _described(result: Mapping[str, Any], sentence: str) -> Description:
    """The sentence about these keys, and a row for each."""
    items = result["items"]
    keys = sum(item.get("status") != 404 for item in items)
    description = Description([sentence.format(keys="1 key" if keys == 1 else f"{count(keys)} keys")])
    if len(items) > keys:
        description.sentences.append(f"{count(len(items) - keys)} of these messages hold no key.")
    if waiting := sum(item.get("waiting", 0) for item in items):
        description.sentences.append(f"At least {messages(waiting)} wait behind.")
    if result.get("left"):
        description.sentences.append(f"{count(result['left'])} more are held: do the same again.")
    cells = [
        [text(i["id"]), text(i.get("topic")), text(i.get("key")), _WORDS.get(i.get("status", 200), "failed")]
        for i in items[:MOST_ROWS]
    ]
    description.rows = Rows(["Message", "Topic", "Key", "Result"], cells, max(0, len(items) - MOST_ROWS))
    return description


def retry(target: str, result: Mapping[str, Any]) -> Description:
    """Held keys whose messages get one more attempt."""
    return _described(result, "{keys}: one more attempt; if that fails, the key is held again.")


def skip(target: str, result: Mapping[str, Any]) -> Description:
    """Held keys whose messages become dead letters."""
    return _described(result, "{keys}: the message becomes a dead letter with your reason; the key is delivered again.")


def release(target: str, result: Mapping[str, Any]) -> Description:
    """Held keys whose messages get all their attempts again."""
    return _described(result, "{keys}: the message is delivered again, with all its attempts.")


# fmt: off
# --- writes -----------------------------------------------------------------------------------------------------

_PAGE = "/groups/{group}/held-keys"

RETRY = AdminWrite("held-keys.retry", "POST", "groups/{group}/held-keys/retry", HeldChoice, describe=retry,
    title="Retry held keys", back=_PAGE)
SKIP = AdminWrite("held-keys.skip", "POST", "groups/{group}/held-keys/skip", HeldChoice, describe=skip,
    title="Skip the messages that hold keys", back=_PAGE,
    warning="The later messages of these keys are delivered without the effect of the skipped ones. A skipped message "
        "is a dead letter: sent again, it comes after them.")
RELEASE = AdminWrite("held-keys.release", "POST", "groups/{group}/held-keys/release", HeldChoice, describe=release,
    title="Release held keys", back=_PAGE)

WRITES = (RETRY, SKIP, RELEASE)
