"""`notify dead-letter`: messages that a group failed to handle."""

from __future__ import annotations

from operator import itemgetter
from typing import Any
from urllib.parse import quote

import typer

from notify.admin_api import dead_letters
from notify.admin_api.declaration import AdminWrite
from notify.cli.api import AS_JSON, URL, WIDE, Columns, call, seconds, show_rows
from notify.cli.job import to_the_end
from notify.cli.printed import say
from notify.cli.writes import add_write, option, send_write
from notify.protocol.message import DEAD_LETTER_REASON

COLUMNS: Columns = {
    "message": itemgetter("id"),
    "topic": itemgetter("topic"),
    "dead since": lambda m: seconds(m["dead_at"]),
    "sent again": lambda m: "dropped" if m.get("dropped") else "yes" if m["redriven"] else "no",
    "reason": lambda m: (m.get("headers") or {}).get(DEAD_LETTER_REASON, ""),
}

FAILURES: Columns = {
    "failure": itemgetter("fingerprint"),
    "open": itemgetter("open"),
    "all": itemgetter("count"),
    "type": lambda f: f["type"] or "-",
    "in": lambda f: f["place"] or "-",
    "first": lambda f: seconds(f["first_at"]),
    "last": lambda f: seconds(f["last_at"]),
    "the newest": lambda f: f["example"]["reason"],
}

GROUP = typer.Argument(..., metavar="GROUP")

group = typer.Typer(no_args_is_help=True)


@group.command("list")
def list_dead(
    group_name: str = GROUP,
    max: int = typer.Option(100, min=1, max=10_000, help="Show at most this many."),
    failure: str = option(dead_letters.LetterConditions, "failure"),
    wide: bool = WIDE,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """List a group's dead letters with the reasons."""
    result = _listed(url, group_name, max, f"&failure={quote(failure)}" if failure else "")
    _check_known(url, group_name, result["messages"])
    show_rows(result, as_json, "messages", COLUMNS, wide)


@group.command("failures")
def list_failures(
    group_name: str = GROUP,
    wide: bool = WIDE,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """List the causes of a group's dead letters: one for each exception type and function that raised it."""
    result = call(url, "GET", "groups", group_name, "dead-letters", "failures")
    _check_known(url, group_name, result["failures"])
    show_rows(result, as_json, "failures", FAILURES, wide)
    if not as_json and result["looked_at"] < result["of"]:
        say(f"{result['looked_at']:,} of {result['of']:,} dead letters were counted so far; ask again", err=True)


def _listed(url: str, group_name: str, most: int, condition: str) -> dict[str, Any]:
    """The first `most` letters of a list. A server looks at some letters for each answer, which may be empty."""
    offset: int | str = 0
    messages: list[Any] = []
    while True:
        query = f"?max={most - len(messages)}{condition}&offset={quote(str(offset))}"
        page = call(url, "GET", "groups", group_name, "dead-letters", query=query)
        messages += page["messages"]
        if len(messages) >= most or page["next_offset"] in (0, offset):
            return page | {"messages": messages}
        offset = page["next_offset"]


def _whole(write: AdminWrite, url: str, group_name: str, *, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a redrive or drop, made of one answer for each part of the letters that the server looked at.

    It ends at the body's `max` letters, or if the body has ids, at the last letter.
    """
    if write is dead_letters.REDRIVE and not body.keys() & {"ids", "all", "max", "wanted"}:
        raise typer.BadParameter("say which: --id, --all, --max, or conditions such as --contains")
    if write is dead_letters.DROP and not body.keys() & {"ids", "wanted"}:
        raise typer.BadParameter(
            "say which: --id, or conditions such as --contains; `notify dead-letter purge` deletes all"
        )
    rows: dict[str, list[Any]] = {}
    most = body.setdefault("max", dead_letters.REDRIVEN) if write is dead_letters.REDRIVE else 0
    while True:
        answer = send_write(write, url, group_name, body=body)
        result = answer["result"]
        rows = {name: rows.get(name, []) + result[name] for name in ("ids", "items") if name in result}
        result |= rows
        if "items" in result:  # the last answer refuses ids that an earlier one has found
            found = {item["id"] for item in result["items"] if item["status"] != 404}
            result["items"] = [item for item in result["items"] if item["status"] != 404 or item["id"] not in found]
        left = most - max(map(len, rows.values()), default=0)
        if not result.get("next_offset") or (body.get("ids") is None and left <= 0):
            return answer
        body |= {"offset": result["next_offset"]} | ({} if body.get("ids") else {"max": left})


def _check_known(url: str, group_name: str, rows: list[Any]) -> None:
    """Raises NotFound if the group does not exist, because its empty list would look like that of a healthy group."""
    if not rows:
        call(url, "GET", "groups", group_name)


add_write(
    group, "purge", dead_letters.PURGE, "Delete a group's dead letters up to a point, redriven or not.",
    group_name=GROUP,
)  # fmt: skip
add_write(
    group, "redrive", dead_letters.REDRIVE,
    "Send dead letters to their group again; a repeated redrive sends each once.",
    send=_whole, show=to_the_end, group_name=GROUP,
)  # fmt: skip
add_write(
    group, "drop", dead_letters.DROP,
    "Drop dead letters, as a job unless --id names them. They cannot be sent again afterwards.",
    send=_whole, show=to_the_end, group_name=GROUP,
)  # fmt: skip
add_write(
    group, "edit", dead_letters.EDIT,
    "Correct a dead letter and send it, once, to its own group again; the dead letter itself stays unchanged.",
    group_name=GROUP,
)  # fmt: skip
