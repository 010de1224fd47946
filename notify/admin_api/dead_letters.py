"""Writes to dead letters, and messages that are sent to a group again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from notify.admin_api.declaration import (
    AdminWrite,
    Body,
    FanOut,
    Flag,
    Input,
    Instant,
    StrictBool,
    StrictInt,
    Write,
    declared,
    inputs_of,
)
from notify.admin_api.description import MOST_ROWS, Description, Rows, by_job, capital, is_table, messages, text
from notify.admin_api.groups import EFFECTS_AGAIN, SOME_BEFORE_INBOX, before_inbox, replay_effects
from notify.admin_api.topics import Purge, purge
from notify.admin_api.words import exactly, status

# A field is a row of a table: itself, its input, its flag.
# fmt: off
AT_ONCE = 4096
"""The most dead letters of a request."""
REDRIVEN = 100
"""How many a redrive sends if the request does not say so."""
MOST_REDELIVERED = 1000
MOST_TEXT = 500


@dataclass(frozen=True, kw_only=True)
class LetterConditions(Body):
    """Conditions on dead letters; a condition that is left out matches all letters."""

    failure: str = declared("", "the fingerprint of a failure group", pattern="^([0-9a-f]{12})?$",
        input=Input("Failure group", "Its fingerprint, as the list of dead letters shows it."),
        flag=Flag("Only dead letters of this failure group; `notify dead-letter failures` lists them."))
    topic: str | None = declared(None, input=Input(), flag=Flag("Only dead letters of this topic.", default=""))
    tag: str | None = declared(None, input=Input(), flag=Flag("Only dead letters with this tag.", default=""))
    key: str | None = declared(None, input=Input(), flag=Flag("Only dead letters with this key.", default=""))
    contains: str | None = declared(None, "text within the reason of death", max_length=MOST_TEXT,
        input=Input("Reason contains"),
        flag=Flag("Only dead letters whose reason contains this text.", default=""))
    filter: str = declared("", "CEL over headers, key, tag and topic",
        input=Input(help="CEL over headers, key, tag and topic."),
        flag=Flag("Only dead letters for which this CEL expression is true."))
    dead_from: Instant | None = declared(None)
    dead_to: Instant | None = declared(None)

    def plain(self) -> dict[str, Any]:
        """The conditions that are given; instants as texts."""
        return {k: v.isoformat() if isinstance(v, datetime) else v for k, v in self.given().items()}


_IDS = Flag("Only these messages (repeatable).", name="id", default=[], type=list[str])


def _offset() -> Any:
    """The form sends the offset of the oldest letter on the page: over Kafka the ids are looked for from there on."""
    return declared(0, "the offset to look from: `next_offset` of an earlier answer", ge=0, le=1 << 62,
        input=Input(kind="hidden"))


@dataclass(frozen=True, kw_only=True)
class Redrive(Write):
    ids: list[str] | None = declared(None, max_length=AT_ONCE, input=Input(required=True), flag=_IDS)
    wanted: LetterConditions = declared(LetterConditions())
    max: StrictInt = declared(REDRIVEN, ge=1, le=AT_ONCE,
        flag=Flag("The most to send; --all has no bound.", 1, AT_ONCE))
    offset: int = _offset()
    replay_effects: bool = replay_effects(EFFECTS_AGAIN)
    force: bool = before_inbox(SOME_BEFORE_INBOX)
    all: StrictBool = declared(False, "every dead letter that matches, as a job: see jobs/{id}",
        flag=Flag("Send all, as a job; waits for its end and shows its progress."))


@dataclass(frozen=True, kw_only=True)
class Drop(Write):
    ids: list[str] | None = declared(None, "these dead letters, within the request", max_length=AT_ONCE,
        input=Input(help="Only these dead letters. Without ids: all that match the fields above."), flag=_IDS)
    wanted: LetterConditions = declared(LetterConditions(), "without ids: every dead letter that matches, as a job")
    offset: int = _offset()


@dataclass(frozen=True, kw_only=True)
class EditLetter(Write):
    """The new content of a letter; a field that is left out stays as the letter has it."""

    id: str = declared(input=Input("Message"), flag=Flag("The id of the dead letter's message.", is_argument=True))
    body: str | None = declared(None, "text",
        input=Input(help="Empty: the body stays unchanged. So does a body that is not text.", kind="body"),
        flag=Flag("The new body: text. Parts that are not given stay unchanged."))
    body_base64: str | None = declared(None, "bytes")
    key: str | None = declared(None, input=Input(kind="exact"), flag=Flag("The new key; an empty text: no key."))
    tag: str | None = declared(None, input=Input(kind="exact"), flag=Flag("The new tag; an empty text: no tag."))
    headers: dict[str, str] | None = declared(None, input=Input(help="NAME=VALUE, one a line."),
        flag=Flag("NAME=VALUE (repeatable): these replace all headers.", name="header", default=[], type=list[str]))
    replay_effects: bool = replay_effects("handlers with an inbox take effect again")
    force: bool = before_inbox("even if the inbox may have purged its row of this message")


@dataclass(frozen=True, kw_only=True)
class Redeliver(Write):
    ids: list[str] = declared(min_length=1, max_length=MOST_REDELIVERED, input=Input())
    force: bool = declared(False, "also messages from before the group's inbox began")
# fmt: on


# --- sentences --------------------------------------------------------------------------------------------------


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
    return [f"Failure group {failure['fingerprint']} ({what}) has {waiting} waiting{closed_part}: {when}."]


def drop(target: str, result: Mapping[str, Any]) -> Description:
    """Dead letters that are dropped, by their ids or by a job."""
    if "ids" in result:
        dropped = capital(messages(len(result["ids"])))[:-1]
        return _of_ids(result, f"{dropped} of the dead letters of {target} will be dropped. This cannot be undone.")
    if "at_most" in result:
        job = f"A job drops the matching ones of {messages(result['at_most'])} at most. This cannot be undone."
        return Description([*_failure(result), job, "Dead letters that were sent again before stay sent."])
    if "job" in result:
        return by_job(result)
    return items(target, result)


def redrive(target: str, result: Mapping[str, Any]) -> Description:
    """Dead letters that are redriven to their group, by their ids or by a job."""
    if "ids" in result:
        effects = f"Effects: {result['effects']}."
        number = len(result["ids"])
        goes = "goes" if number == 1 else "go"
        return _of_ids(result, f"{messages(number)} of the dead letters {goes} to {target} again.", effects)
    if "at_most" in result:
        effects = f"Effects: {result['effects']}."
        looked_at = messages(result["at_most"])
        job = f"A job looks at {looked_at} at most, and sends those that match to group {target}."
        return Description([*_failure(result), job, effects])
    if "job" in result:
        return by_job(result)
    return items(target, result)


def _of_ids(result: Mapping[str, Any], *sentences: str) -> Description:
    """Sentences about the letters of these ids, and the ids."""
    ids = result["ids"]
    rows = Rows(["Message"], [[name] for name in ids[:MOST_ROWS]], max(0, len(ids) - MOST_ROWS))
    return Description([*sentences, *_rest(result)], rows)


def _rest(result: Mapping[str, Any]) -> list[str]:
    """The sentence about letters that a bounded search left out."""
    return ["Later dead letters were not looked at."] if result.get("next_offset") else []


def items(target: str, result: Mapping[str, Any]) -> Description:
    """The result of each message; an item of a preview has no status yet, unless it is refused."""
    if not is_table(result.get("items")):
        return Description()
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
    return Description([capital(sentence), *_rest(result)], rows)


def _word_of(number: int | None) -> str:
    """The word for an item's status; None means that the item is still to be sent."""
    return "to be sent" if number is None else status(number)


def edit(target: str, result: Mapping[str, Any]) -> Description:
    """A dead letter that is corrected and sent again."""
    if "items" not in result:
        changed = f"Only group {target} receives the message again, with another {' and '.join(result['changed'])}."
        return Description([changed, f"Effects: {result['effects']}."])
    return items(target, result)


# fmt: off
# --- writes -----------------------------------------------------------------------------------------------------

_PAGE = "/groups/{group}/dead-letters"
_EFFECTS = inputs_of(Redrive, "replay_effects", "force")
_CONDITIONS = inputs_of(LetterConditions)

REDRIVE = AdminWrite("dead-letters.redrive", "POST", "groups/{group}/dead-letters/redrive", Redrive, FanOut.UP_TO,
    redrive, title="Send selected dead letters again", back=_PAGE)
REDRIVE_ALL = AdminWrite("dead-letters.redrive-all", "POST", "groups/{group}/dead-letters/redrive", Redrive,
    FanOut.UP_TO, redrive, title="Send all matching dead letters again", back=_PAGE, chosen=_CONDITIONS, at="wanted",
    fixed={"all": True}, extra=_EFFECTS,
    warning="This runs as a job. Dead letters that were already sent again are left out.")
EDIT = AdminWrite("dead-letters.edit", "POST", "groups/{group}/dead-letters/edit", EditLetter, FanOut.KNOWING, edit,
    title="Correct a dead letter and send it again", back=_PAGE,
    warning="This group alone gets the corrected message. The dead letter itself stays in the log unchanged.")
DROP = AdminWrite("dead-letters.drop", "POST", "groups/{group}/dead-letters/drop", Drop, describe=drop,
    title="Drop dead letters", back=_PAGE, chosen=_CONDITIONS, at="wanted", extra=inputs_of(Drop),
    warning="Dropped dead letters cannot be sent again.")
PURGE = AdminWrite("dead-letters.purge", "POST", "groups/{group}/dead-letters/purge", Purge, describe=purge,
    title="Purge dead letters", back=_PAGE, warning="Purged dead letters cannot be sent again.")
REDELIVER = AdminWrite("messages.redeliver", "POST", "groups/{group}/redeliver", Redeliver, describe=items,
    title="Send messages to a group again", back="/groups/{group}")

WRITES = (REDRIVE, REDRIVE_ALL, EDIT, DROP, PURGE, REDELIVER)
