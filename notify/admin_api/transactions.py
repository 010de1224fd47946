"""Writes to transactions that an operator decides, or has checked again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from notify.admin_api.declaration import AdminWrite, Body, FanOut, Input, Instant, Write, declared, inputs_of
from notify.admin_api.description import MOST_ROWS, Description, Rows, by_job, messages, text, transactions
from notify.admin_api.words import count, whole
from notify.errors import InvalidRequest

# A field is a row of a table: itself, its input, its flag.
# fmt: off
MOST_NAMED = 5
"""The most producer groups that a sentence names; more are only counted."""


IDS_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True)
class TransactionConditions(Body):
    """Conditions on transactions without an outcome; a condition that is left out matches all transactions."""

    state: str | None = declared(None, pattern="^(PREPARED|PARKED)$",
        input=Input(help="PREPARED or PARKED; empty: both."))
    producer_group: str | None = declared(None, input=Input())
    older_than: float | None = declared(None, "seconds", ge=0, le=3650 * 86_400, input=Input("Older than, seconds"))
    stored_before: Instant | None = declared(None, "at this instant or before",
        input=Input(help="An instant (RFC 3339). Later transactions are left out."))


@dataclass(frozen=True, kw_only=True)
class Decision(Write):
    ids: list[str] | None = declared(None, "these transactions", max_length=IDS_AT_ONCE,
        input=Input("Transactions", "Ids, separated by commas."))
    wanted: TransactionConditions = declared(TransactionConditions())
    all: bool = declared(False, "the oldest 4,096 that match `wanted`, as a job: see jobs/{id}",
        input=Input("All that match the fields below",
            "Instead of single ids: a job takes the oldest 4,096 that match."))


def _which(fields: dict[str, Any]) -> dict[str, Any]:
    """The transactions that a form chooses. Raises InvalidRequest unless it has either ids or `all`."""
    chosen = {name: fields.pop(name) for name in ("ids", "all") if fields.get(name)}
    if len(chosen) != 1:
        raise InvalidRequest("Choose either single transactions or all that match, not both.")
    return chosen | ({"wanted": fields} if "all" in chosen else {})
# fmt: on


# --- sentences --------------------------------------------------------------------------------------------------


def transaction(target: str, result: Mapping[str, Any]) -> Description:
    """One transaction that is, or was, decided or checked."""
    after = result.get("becomes", result["state"])
    if "becomes" not in result:
        return Description([f"The transaction is {after}."])
    then = "stays so" if after == result["state"] else f"becomes {after}"
    description = Description([f"The transaction is {result['state']} now, and {then}."])
    if "messages" in result:
        number = messages(len(result["messages"]))
        if after == "COMMITTED":
            description.sentences.append(f"It has {number}, which these groups receive:")
        else:
            description.sentences.append(f"It has {number}, which no group ever receives:")
        cells = [
            [
                message["topic"],
                text(message["key"]),
                "not shown here" if message["groups"] is None else text(message["groups"]),
            ]
            for message in result["messages"][:MOST_ROWS]
        ]
        description.rows = Rows(["Topic", "Key", "Groups that receive it"], cells)
    return description


def decision(target: str, result: Mapping[str, Any]) -> Description:
    """Several transactions that are, or were, decided or checked."""
    if "job" in result:
        return by_job(result)
    if "items" in result:
        return _decided(result)
    left_out = result["left_out"]
    refused = f"{transactions(left_out)} of those chosen will be refused: they are decided already, or not known."
    if not result["count"]:
        return Description(
            ["No transaction without an outcome matches: nothing will be done.", *[refused] * bool(left_out)]
        )
    youngest, oldest = whole(result["youngest_seconds"]), whole(result["oldest_seconds"])
    age = oldest if youngest == oldest else f"{youngest} to {oldest}"
    subject = f"{transactions(result['count'])} {_of_groups(result['producer_groups'])}, in doubt for {age},"
    number = f"{messages(result['messages'])} " if "messages" in result else ""
    description = Description()
    if result["becomes"] == "COMMITTED":
        description.sentences.append(f"{subject} will be committed: {number}will be delivered.")
    elif result["becomes"] == "ROLLED_BACK":
        description.sentences.append(f"{subject} will be rolled back: {number}will never be delivered.")
    else:
        description.sentences.append(f"{subject} will be checked now: the server asks their producers.")
        description.sentences += _checked(result)
    if result.get("young"):
        of_them = "They are" if result["young"] == result["count"] else f"{count(result['young'])} of them are"
        description.sentences.append(
            f"{of_them} PREPARED and younger than 10 min: their local transactions may still run."
        )
        description.sentences.append("An outcome of their producer that contradicts yours is refused afterwards.")
    description.sentences += [refused] * bool(left_out)
    if result["is_more"]:
        description.sentences.append(
            f"More match: these are the oldest {count(result['count'])}. Do it again for the others."
        )
    description.rows = _topics_of(result)
    return description


def _checked(result: Mapping[str, Any]) -> list[str]:
    sentences = []
    if result["parked"]:
        number = "They are" if result["parked"] == result["count"] else f"{count(result['parked'])} of them are"
        sentences.append(f"{number} PARKED: they become PREPARED, and get all their checks again.")
    if result["offline"]:
        names = ", ".join(result["offline"][:MOST_NAMED]) + (
            " and others" if len(result["offline"]) > MOST_NAMED else ""
        )
        sentences.append(f"No producer polls for the checks of {names} now. These checks wait until one does.")
    return sentences


def _of_groups(groups: Mapping[str, int]) -> str:
    if len(groups) == 1:
        return f"of producer group {next(iter(groups)) or '–'}"
    if len(groups) > MOST_NAMED:
        return f"of {count(len(groups))} producer groups"
    *others, last = [f"{name or '–'} ({count(number)})" for name, number in groups.items()]
    return f"of producer groups {', '.join(others)} and {last}"


def _topics_of(result: Mapping[str, Any]) -> Rows | None:
    """The messages of several transactions by topic; for a commit, with the groups that receive some of them."""
    if not result.get("topics"):
        return None
    shown_topics = result["topics"][:MOST_ROWS]
    headings, cells = ["Topic", "Messages"], [[row["topic"], count(row["messages"])] for row in shown_topics]
    if result["becomes"] == "COMMITTED":
        headings.append("Groups that receive some")
        for row, line in zip(shown_topics, cells, strict=True):
            line.append("not shown here" if row["groups"] is None else text(row["groups"]))
    return Rows(headings, cells, max(0, len(result["topics"]) - MOST_ROWS))


def _decided(result: Mapping[str, Any]) -> Description:
    items = result["items"]
    done = sum(item["status"] == 200 for item in items)
    verb = "is" if done == 1 else "are"
    sentence = f"{transactions(done)} {verb} {result['becomes']}" + (
        ", due for a check now" * (result["becomes"] == "PREPARED")
    )
    if done < len(items):
        sentence += f"; {count(len(items) - done)} refused"
    cells = [[item["id"], item.get("state", "unknown"), text(item.get("detail"))] for item in items[:MOST_ROWS]]
    return Description(
        [sentence + "."], Rows(["Transaction", "State", "Why not"], cells, max(0, len(items) - MOST_ROWS))
    )


# fmt: off
# --- writes -----------------------------------------------------------------------------------------------------


def _one(action: str, title: str, warning: str = "") -> AdminWrite:
    return AdminWrite(
        f"transaction.{action}", "POST", f"transactions/{{transaction}}/{action}", fan_out=FanOut.KNOWING,
        describe=transaction, title=title, back="/transactions/{transaction}", warning=warning,
    )  # fmt: skip


def _several(action: str, title: str, warning: str = "") -> AdminWrite:
    return AdminWrite(
        f"transactions.{action}", "POST", f"transactions/{action}", Decision, describe=decision, title=title,
        back="/transactions", chosen=inputs_of(Decision) + inputs_of(TransactionConditions), shape=_which,
        warning=warning,
    )  # fmt: skip


WRITES = (
    _one("check", "Ask the producers now"),
    _one("resume", "Resume the checks", "A parked transaction goes back to the normal schedule of checks."),
    _one(
        "commit",
        "Force a commit",
        "Its messages are delivered, whatever the producer's database says. Look there first: this cannot be "
        "undone, and the audit reports it if the database disagrees.",
    ),
    _one(
        "rollback",
        "Force a rollback",
        "Its messages are never delivered, whatever the producer's database says. Look there first: this "
        "cannot be undone, and the audit reports it if the database disagrees.",
    ),
    _several("check", "Check transactions now"),
    _several(
        "commit",
        "Force the commit of transactions",
        "Their messages are delivered, whatever the producers' databases say. Look there first: this cannot "
        "be undone, and the audit reports each one that a database contradicts.",
    ),
    _several(
        "rollback",
        "Force the rollback of transactions",
        "Their messages are never delivered, whatever the producers' databases say. Look there first: this "
        "cannot be undone, and the audit reports each one that a database contradicts.",
    ),
)
