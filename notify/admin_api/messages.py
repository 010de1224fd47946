"""Writes to delayed messages: cancel one, or replace it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from notify.admin_api.declaration import AdminWrite, FanOut, Flag, Input, Write, declared
from notify.admin_api.description import Description, text
from notify.protocol.limits import LIMITS


# A field is a row of a table: itself, its input, its flag.
# fmt: off
@dataclass(frozen=True, kw_only=True)
class ReplaceDelayed(Write):
    body: str | None = declared(None, "text; left out: that of the message",
        input=Input(help="Text, such as JSON; empty: the body stays.", kind="body"),
        flag=Flag("The new body: text. Without it the body stays.", default=""))
    delay: float | None = declared(None, "seconds from now; left out: when the message was due", ge=0,
        le=LIMITS.delay_seconds, input=Input("Delay, seconds", "From now; empty: when the message was due."),
        flag=Flag("Seconds from now; without it the message is due when it was.", 0, LIMITS.delay_seconds))
# fmt: on


# --- sentences --------------------------------------------------------------------------------------------------

_NOW = {
    "delayed": "The message is due at {due_at}.",
    "undecided": "The message's transaction is undecided: if it commits, the message is {done}.",
    "released": "It is too late: the message is in its queue.",
    "withdrawn": "The message is withdrawn already, since {withdrawn_at}.",
    "collapsed": "It is too late: an earlier message of its dedupe key was pending, and it is never delivered.",
    "rolled back": "The message's transaction is rolled back: it is never delivered.",
}
_BECAME = {
    "WITHDRAWN": "The message is {done}.",
    "WAITING": "The message's transaction is undecided: if it commits, the message is {done}.",
    "TOO_LATE": "It was too late: the message is in its queue.",
    "ALREADY": "Another withdrawal of the message came first.",
    "NOT_FOUND": "The message was rolled back, or is not there.",
}


def _described(result: Mapping[str, Any], done: str) -> Description:
    words = {name: text(value) for name, value in result.items()} | {"done": done}
    if "outcome" in result:
        return Description([_BECAME[result["outcome"]].format(**words)])
    description = Description([_NOW[result["standing"]].format(**words)])
    if result["standing"] == "delayed":
        description.sentences.append(f"It is {done}.")
    return description


def cancel(target: str, result: Mapping[str, Any]) -> Description:
    """A delayed message that is cancelled."""
    return _described(result, "cancelled: it is never delivered")


def replace(target: str, result: Mapping[str, Any]) -> Description:
    """A delayed message that is replaced."""
    by = f"as {result['replacement']} " if result.get("replacement") else ""
    return _described(result, f"replaced: one with the new content is delivered {by}in its place")


# fmt: off
# --- writes -----------------------------------------------------------------------------------------------------

_PAGE = "/messages/{message}"

CANCEL = AdminWrite("message.cancel", "POST", "topics/{topic}/messages/{message}/cancel", fan_out=FanOut.KNOWING,
    describe=cancel, title="Cancel a delayed message", back=_PAGE,
    warning="A message that is cancelled in time is never delivered, and cannot be restored.")
REPLACE = AdminWrite("message.replace", "POST", "topics/{topic}/messages/{message}/replace", ReplaceDelayed,
    FanOut.KNOWING, replace, title="Replace a delayed message", back=_PAGE,
    warning="Key, tag and headers stay. The replacement has an id of its own.")

WRITES = (CANCEL, REPLACE)
