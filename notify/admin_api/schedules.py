"""Writes to schedules, which send a message repeatedly: declared, paused, resumed and deleted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from notify.admin_api.declaration import AdminWrite, FanOut, Flag, Input, Write, declared
from notify.admin_api.description import Description
from notify.admin_api.words import count, duration, exactly


# A field is a row of a table: itself, its input, its flag.
# fmt: off
@dataclass(frozen=True, kw_only=True)
class ScheduleWrite(Write):
    """The whole schedule: a field that is left out gets its default."""

    topic: str = declared(description="the topic that gets the messages", examples=["report.wanted"],
        input=Input(), flag=Flag("The topic that gets the messages."))
    body: str | None = declared(None, "text",
        input=Input(help="Text, such as JSON; it is sent as it is.", kind="body", required=True),
        flag=Flag("The message's text, such as JSON.", default=""))
    body_base64: str | None = declared(None, "bytes")
    key: str | None = declared(None, input=Input(help="Messages of one key keep their order."),
        flag=Flag("The message's key.", default=""))
    tag: str | None = declared(None, input=Input(help="Subscriptions may filter by it."),
        flag=Flag("The message's tag.", default=""))
    headers: dict[str, str] | None = declared(None, input=Input(help="NAME=VALUE, one a line."),
        flag=Flag("NAME=VALUE, a header (repeatable).", name="header", default=[], type=list[str]))
    ttl: float | None = declared(None, "seconds after which a message expires", gt=0,
        input=Input("Time to live, seconds", "Empty: the messages do not expire."),
        flag=Flag("Seconds after which a message expires.", 0))
    cron: str | None = declared(None, "five fields: minute, hour, day of month, month, day of week", max_length=200,
        examples=["0 7 * * 1-5"],
        input=Input("Cron expression", "Minute, hour, day of month, month, day of week, such as 0 7 * * 1-5."),
        flag=Flag("Minute, hour, day of month, month and day of week, such as '0 7 * * 1-5'.", default=""))
    every: float | None = declared(None, "seconds, counted from 1970-01-01T00:00:00Z, instead of cron", gt=0,
        input=Input("Or at an interval, in seconds", "Counted from 1970-01-01T00:00:00Z."),
        flag=Flag("Instead of --cron: seconds, counted from 1970-01-01T00:00:00Z.", 1))
    zone: str = declared("UTC", "the IANA time zone of the cron expression", max_length=64, examples=["Europe/Berlin"],
        input=Input("Time zone", "An IANA name, such as Europe/Berlin; empty: UTC."),
        flag=Flag("The IANA time zone of the cron expression, such as Europe/Berlin."))
    catch_up: Literal["last", "skip", "all"] = declared("last",
        "which instants are sent late that no server could send within 60 s",
        input=Input("Instants that were missed", "last: the last one, if nothing else is due; skip: none; all: all."),
        flag=Flag("Which missed instants are sent late: last, skip (none) or all.", type=str))
    catch_up_most: int = declared(100, "the most missed instants that `all` sends, the last ones", ge=1, le=1000,
        input=Input("At most", "The most missed instants that `all` sends; empty: 100."),
        flag=Flag("The most missed instants that all sends.", 1, 1000))
# fmt: on


# --- sentences --------------------------------------------------------------------------------------------------


def _rhythm(result: Mapping[str, Any]) -> str:
    if result["every"]:
        return f"every {duration(result['every'])}"
    return f"at {result['cron']} in {result['zone']}"


_LATE = {
    "last": "Of the instants that were missed it sends the last one, if nothing else is due.",
    "skip": "It sends nothing for instants that were missed.",
}


def put(target: str, result: Mapping[str, Any]) -> Description:
    """A schedule that is made or changed."""
    if not result["changed"]:
        return Description([f"Schedule {target} is like this already: nothing changes."])
    coming = ", ".join(exactly(text) for text in result["next"])
    late = _LATE.get(result["catch_up"], f"It sends up to {count(result['catch_up_most'])} instants that were missed.")
    return Description(
        [
            f"Schedule {target} sends a message to topic {result['topic']} {_rhythm(result)}.",
            f"The next instants are {coming}.",
            late,
        ]
    )


def pause(target: str, result: Mapping[str, Any]) -> Description:
    """A schedule that is paused."""
    return Description([f"Schedule {target} sends nothing until it is resumed."])


def resume(target: str, result: Mapping[str, Any]) -> Description:
    """A schedule that is resumed."""
    description = Description([f"Schedule {target} continues; what was due while it was paused is not sent."])
    if result["next"]:
        description.sentences.append(f"Its next instant is {exactly(result['next'][0])}.")
    return description


def delete(target: str, result: Mapping[str, Any]) -> Description:
    """A schedule that is deleted."""
    return Description([f"Schedule {target} sends nothing any more. Messages that it has sent stay."])


# fmt: off
# --- writes -----------------------------------------------------------------------------------------------------

_PAGE = "/schedules/{schedule}"

PUT = AdminWrite("schedule.put", "PUT", "schedules/{schedule}", ScheduleWrite, FanOut.HERE, put,
    title="Make or change a schedule", back=_PAGE)
PAUSE = AdminWrite("schedule.pause", "POST", "schedules/{schedule}/pause", fan_out=FanOut.HERE, describe=pause,
    title="Pause a schedule", back=_PAGE)
RESUME = AdminWrite("schedule.resume", "POST", "schedules/{schedule}/resume", fan_out=FanOut.HERE, describe=resume,
    title="Resume a schedule", back=_PAGE)
DELETE = AdminWrite("schedule.delete", "DELETE", "schedules/{schedule}", fan_out=FanOut.HERE, describe=delete,
    title="Delete a schedule", back="/schedules", warning="A service that declares it in code makes it again.")

WRITES = (PUT, PAUSE, RESUME, DELETE)
