"""Rules for requests that name no worker: which workers are asked, and how their answers are combined."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from notify.admin_api.declaration import FanOut
from notify.admin_api.queue_rows import kept, sent, sorted_groups
from notify.admin_api.writes import WRITES
from notify.errors import InvalidRequest
from notify.protocol.limits import digits
from notify.server.letters.failures import MOST_FAILURES
from notify.server.spread.combining import Answer, columns, combined, ordered
from notify.server.spread.cursors import OVER, parsed, written

T = TypeVar("T")

HIGHEST_QUEUE = 99_999
"""A number above that of any queue."""

Combine = Callable[[Sequence[str], Sequence[Answer], Mapping[str, str]], Answer]
"""Called with the workers' names, the answer of each, and the request's query."""


def _simply(names: Sequence[str], answers: Sequence[Answer], query: Mapping[str, str]) -> Answer:
    return combined(names, answers)


def _unchanged(name: str, query: Mapping[str, str]) -> Mapping[str, str]:
    return query


def _charts(names: Sequence[str], answers: Sequence[Answer], query: Mapping[str, str]) -> Answer:
    return columns(names, answers)


def _topics(names: Sequence[str], answers: Sequence[Answer], query: Mapping[str, str]) -> Answer:
    figures: dict[str, Callable[[Answer], Any]] = {
        "newest": lambda row: row.get("newest_at") or "",
        "rate": lambda row: row.get("per_second") or 0.0,
        "lag": lambda row: row.get("lag") or 0,
        "sent": lambda row: sent(row["queues"]),
        "kept": lambda row: kept(row["queues"]),
    }
    figure = figures.get(query.get("sort", "name"))
    key = figure or itemgetter("name")
    whole = combined(names, answers) | {"of": max(answer["of"] for answer in answers)}
    return ordered(whole, "topics", key, _most(query, 1_000_000), largest_first=figure is not None)


def _groups(names: Sequence[str], answers: Sequence[Answer], query: Mapping[str, str]) -> Answer:
    whole = combined(names, answers)
    rows = sorted_groups(whole["groups"], query.get("sort", "name"), _most(query, 1_000_000))
    return whole | {"groups": rows, "of": max(answer["of"] for answer in answers)}


def _all_groups(name: str, query: Mapping[str, str]) -> Mapping[str, str]:
    """A worker's query: the first groups of all workers together may be others than the first of each."""
    return query if query.get("sort", "name") == "name" else {**query, "max": "1000000"}


def _listed(rows: str, key: Callable[[Answer], Any], *, largest_first: bool = False, most: int = 100) -> Combine:
    """Combines answers, sorts their list `rows`, and shortens it to the request's `max`, by default `most`."""
    return lambda names, answers, query: ordered(
        combined(names, answers), rows, key, _most(query, most), largest_first=largest_first
    )


def _decisions(names: Sequence[str], answers: Sequence[Answer], query: Mapping[str, str]) -> Answer:
    """Each worker decides its own transactions, and leaves out the transactions that it does not know."""
    whole = combined(names, answers)
    targets = {answer["target"] for answer in answers} - {"*"}
    whole["target"] = targets.pop() if len(targets) == 1 else "*"
    first, result = answers[0]["result"], whole["result"]
    if "left_out" in result:
        requested = first["left_out"] + first["count"]  # every worker got the same ids
        result["left_out"] = max(0, requested - result["count"])
    return whole


def _messages(names: Sequence[str], answers: Sequence[Answer], query: Mapping[str, str]) -> Answer:
    """Messages by time. With the newest first, `next` says where the list continues (see `_continued`)."""
    newest = _is_newest(query)
    whole = combined(names, answers)
    place = itemgetter("committed_at", "worker", "queue", "offset")
    cut = ordered(whole, "messages", place, _most(query, 100), largest_first=newest)
    if "next" in cut:
        rows = cut["messages"]
        is_more = len(whole["messages"]) > len(rows) or any(answer.get("next") for answer in answers)
        cut["next"] = _place(rows[-1]) if rows and is_more else ""
    return cut


def _place(row: Answer) -> str:
    at = datetime.fromisoformat(row["committed_at"]).astimezone(UTC)
    whole = int(at.replace(microsecond=0).timestamp()) * 1_000_000 + at.microsecond
    return f"{whole}.{row['queue']}.{row['offset']}@{row['worker']}"


def _continued(name: str, query: Mapping[str, str]) -> Mapping[str, str]:
    """One worker's query for the next part of a list with the newest first.

    The worker of the last message continues after that message's queue and offset, the other workers after its time.
    If other workers have messages of exactly that time, those of workers with greater names were shown already.
    """
    place, at, last = query.get("before", "").partition("@")
    at_us = digits(place.partition(".")[0])
    if not at or at_us is None:
        return query
    if name != last:
        place = f"{at_us - (name > last)}.{HIGHEST_QUEUE}.0"
    return {**query, "before": place}


def _letters(names: Sequence[str], answers: Sequence[Answer], query: Mapping[str, str]) -> Answer:
    """Dead letters by time. At each worker the list continues after the last shown letter (see `_letters_at`)."""
    newest = _is_newest(query)
    most = _most(query, 100)
    if not names:
        return {"messages": [], "next_before" if newest else "next_offset": 0}
    cut = ordered(combined(names, answers), "messages", itemgetter("dead_at"), most, largest_first=newest)
    places = _places(query)
    for name, answer in zip(names, answers, strict=True):
        offsets = [row["offset"] for row in cut["messages"] if row["worker"] == name]
        if len(offsets) < len(answer["messages"]):
            if offsets:
                places[name] = str(offsets[-1] if newest else offsets[-1] + 1)
        elif newest:
            places[name] = str(answer["next_before"] or OVER)
        else:
            earlier = places.get(name, query.get("offset", "0"))
            is_over = not answer["messages"] and str(answer["next_offset"]) == earlier
            places[name] = OVER if is_over else str(answer["next_offset"])
    return cut | {"next_before" if newest else "next_offset": written(names, places)}


def _letters_at(name: str, query: Mapping[str, str]) -> Mapping[str, str] | None:
    """One worker's query for the next part of its list; None if its list has ended."""
    place = _places(query).get(name)
    if place == OVER:
        return None
    field = "before" if _is_newest(query) else "offset"
    if ":" in query.get(field, ""):
        return {**query, field: place or "0"}
    return query


def _places(query: Mapping[str, str]) -> dict[str, str]:
    """Where a list of dead letters continues at each worker, as the earlier answer said."""
    return parsed(query.get("before" if _is_newest(query) else "offset", ""))


def _is_newest(query: Mapping[str, str]) -> bool:
    return _read(_FLAG, query, "newest", False)


def _failures(names: Sequence[str], answers: Sequence[Answer], query: Mapping[str, str]) -> Answer:
    """Failure groups, at most MOST_FAILURES as one worker would list them, those with the most open letters first."""
    whole = combined(names, answers)
    newest = {}
    for row in sorted((row for answer in answers for row in answer["failures"]), key=lambda row: row["last_at"]):
        newest[row["fingerprint"]] = row["example"]
    rows = sorted(whole["failures"], key=lambda row: row["last_at"], reverse=True)
    rows = [row | {"example": newest[row["fingerprint"]]} for row in sorted(rows, key=lambda row: -row["open"])]
    left_out = sum(row["count"] for row in rows[MOST_FAILURES:])
    return whole | {"failures": rows[:MOST_FAILURES], "others": whole["others"] + left_out}


def _overview(names: Sequence[str], answers: Sequence[Answer], query: Mapping[str, str]) -> Answer:
    whole = combined(names, answers)
    whole["alarms"].sort(key=lambda alarm: alarm["severity"] != "critical")
    queues = whole.get("queues")
    if queues:
        whole["queues"] = ordered(queues, "lagging", itemgetter("lag"), 10, largest_first=True)
    return whole


def job_number(worker: int, number: int) -> int:
    """The number of a worker's job that is unique among all workers; `worker` counts from 0."""
    return number * 100 + worker + 1


def job_of(number: int) -> tuple[int, int]:
    """The worker (from 0) of a job, and the job's number at that worker."""
    return number % 100 - 1, number // 100


def renumbered(worker: int, body: bytes) -> bytes:
    """The answer with job numbers that are unique among all workers."""
    if b'"job' not in body and b'"progress"' not in body:
        return body
    answer = json.loads(body)
    if isinstance(answer, dict):
        for row in (answer, *answer.get("jobs", ())):
            if isinstance(row, dict) and "progress" in row:
                row["id"] = job_number(worker, row["id"])
        result = answer.get("result")
        if isinstance(result, dict):
            if isinstance(result.get("job"), int):
                result["job"] = job_number(worker, result["job"])
            if "progress" in result:
                result["id"] = job_number(worker, result["id"])
    return json.dumps(answer).encode()


def _most(query: Mapping[str, str], default: int) -> int:
    return _read(_NUMBER, query, "max", default)


_NUMBER, _FLAG = TypeAdapter(int), TypeAdapter(bool)


def _read(kind: TypeAdapter[T], query: Mapping[str, str], name: str, default: T) -> T:
    """A value of a query, as the routes' own declarations read it; `default` if they would refuse it."""
    try:
        return kind.validate_python(query[name]) if name in query else default
    except ValidationError:
        return default


@dataclass(frozen=True, slots=True)
class Rule:
    """For a route: which workers are asked, and how their answers are combined."""

    asked: FanOut
    combine: Combine = _simply
    query: Callable[[str, Mapping[str, str]], Mapping[str, str] | None] = _unchanged
    """Makes a worker's query from its name and the request's query; None: the worker is not asked."""


_SHARED = (
    "settings|settings/revisions|limits|credentials|actions|check-webhooks|pushes|schedules|schedules/[^/]+|"
    "audits|audits/.*|nodes"
)
_READS: tuple[tuple[str, Rule], ...] = (
    (_SHARED, Rule(FanOut.HERE)),
    ("overview", Rule(FanOut.ALL, _overview)),
    ("history|(topics|groups)/[^/]+/history", Rule(FanOut.ALL, _charts)),
    ("topics", Rule(FanOut.ALL, _topics)),
    ("groups", Rule(FanOut.ALL, _groups, _all_groups)),
    ("transactions", Rule(FanOut.ALL, _listed("transactions", lambda row: str(row.get("stored_at", ""))))),
    ("messages", Rule(FanOut.ALL, _messages, _continued)),
    ("jobs", Rule(FanOut.ALL, _listed("jobs", itemgetter("started_at"), largest_first=True))),
    ("dead-letters", Rule(FanOut.ALL, _listed("groups", itemgetter("count"), largest_first=True))),
    ("groups/[^/]+/dead-letters", Rule(FanOut.ALL, _letters, _letters_at)),
    ("groups/[^/]+/dead-letters/failures", Rule(FanOut.ALL, _failures)),
    ("groups/[^/]+/held-keys", Rule(FanOut.ALL, _listed("held", itemgetter("since")))),
    ("groups/[^/]+/tenants", Rule(FanOut.ALL, _listed("tenants", itemgetter("waiting"), largest_first=True, most=20))),
    ("transactions/[^/]+|messages/[^/]+|bridges/[^/]+", Rule(FanOut.KNOWING)),
    ("jobs/.*", Rule(FanOut.JOB)),
    ("backups/.*|stored-bodies", Rule(FanOut.NONE)),
)
_DECIDING = "transactions/(check|commit|rollback)"


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(path, re.DOTALL)  # a name may hold a line feed


_COMPILED: dict[str, list[tuple[re.Pattern[str], Rule]]] = {"GET": [(_pattern(path), rule) for path, rule in _READS]}
for _write in WRITES.values():
    _rule = Rule(_write.fan_out, _decisions if re.fullmatch(_DECIDING, _write.path) else _simply)
    _COMPILED.setdefault(_write.method, []).append((_pattern(re.sub(r"\{\w+\}", "[^/]+", _write.path)), _rule))
_OTHERWISE = Rule(FanOut.ALL)


def rule_of(method: str, path: str, query: Mapping[str, str]) -> Rule:
    """The rule of a route; `path`: the part after `/v1/admin/`."""
    if path == "messages" and query.get("id"):
        return Rule(FanOut.KNOWING)
    rules = _COMPILED.get(method, ())
    return next((rule for pattern, rule in rules if pattern.fullmatch(path)), _OTHERWISE)


def refuse_offsets(path: str, body: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if a write names an offset, because each worker has its own offsets."""
    for field in ("to", "start", "before"):
        if type(body.get(field)) is int and path.startswith(("groups/", "topics/")):
            raise InvalidRequest(
                f"{field} is an offset, and each worker has its own offsets: give an instant, earliest or latest, "
                "or send the request to one worker at its own address (`notify node list`)",
                "names_no_worker",
            )
