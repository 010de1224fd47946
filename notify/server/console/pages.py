"""The console's pages: each page calls admin routes, and has a template that shows the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Request

from notify.admin_api.queue_rows import GROUP_SORTS
from notify.errors import NotifyError, Unavailable, WrongRole
from notify.server.console.api import Api, path_of
from notify.server.console.filters import group_of
from notify.server.console.story import drawn, trace_id

ROWS = 100
MOST_TENANTS = 10
"""The most tenants that a group's page shows."""
MOST_OF_A_PREFIX = 10_000
"""The most groups whose names begin with that of the group whose dead letters a page counts."""
WORST = 20
"""The most groups that the overview shows."""
CAUSES, ACTIONS = 3, 5
"""The most causes of dead letters that a group's page shows, and the most actions on what a page is about."""
MOST_GROUPS_CLOSED, ACTIONS_LOOKED_AT, JOBS_LOOKED_AT = 5, 50, 5
"""How many groups of a message, how many of the newest actions on each, and how many of the jobs that these began, are
searched for who closed its dead letter."""
LETTERS = {
    "dead_letter": "dead letter", "redriven": "dead letter, sent again", "dropped": "dead letter, dropped",
}  # fmt: skip
"""The words for the state of a dead letter, by the kind of the event that led to it."""
Page = Callable[[Api, Request], Awaitable[dict[str, Any]]]


async def _overview(api: Api, request: Request) -> dict[str, Any]:
    overview = await api.get("overview")
    sort = _sort(request, "pain")
    values = {"o": overview, "sort": sort}
    if overview["queues"] is None:
        return values | {"groups": [], "of": 0}
    answer = await api.get("groups", sort=sort, max=WORST)
    ages = {row["name"]: row["oldest_seconds"] for row in overview["queues"]["lagging"]}  # those of this moment
    groups = [row | {"oldest_seconds": ages.get(row["name"], row["oldest_seconds"])} for row in answer["groups"]]
    return values | {"groups": groups, "of": answer["of"]}


def _sort(request: Request, default: str) -> str:
    """The order of a list of groups that the address asks for."""
    sort = request.query_params.get("sort", default)
    return sort if sort in GROUP_SORTS or sort == "name" else default


async def _transactions(api: Api, request: Request) -> dict[str, Any]:
    query = request.query_params
    search = {name: query.get(name, "").strip() for name in ("id", "state", "producer_group", "older_than")}
    conditions = {name: text for name, text in search.items() if name != "id"}
    return await api.get("transactions", **conditions, max=ROWS) | {"asked": search, "rows": ROWS}


async def _transaction(api: Api, request: Request) -> dict[str, Any]:
    name = request.path_params["transaction"]
    transaction = await api.get(path_of("transactions/{id}", id=name))
    return {"title": f"Transaction {name}", "t": transaction, "actions": await _actions_on(api, name)}


async def _messages(api: Api, request: Request) -> dict[str, Any]:
    query = request.query_params
    search = {name: query.get(name, "").strip() for name in ("id", "key", "topic", "from", "to")}
    if search["id"]:
        return {"messages": None, "to_message": search["id"], "asked": search, "rows": ROWS, "following": ""}
    messages, following = None, ""
    if search["key"] or search["topic"]:
        wanted: dict[str, Any] = search | {name: _instant(search[name]) for name in ("from", "to")}
        if not search["key"]:
            wanted |= {"newest": "true", "before": query.get("before")}
        answer = await api.get("messages", **wanted, max=ROWS)
        messages, following = answer["messages"], answer.get("next", "")
    return {"messages": messages, "asked": search, "rows": ROWS, "to_message": "", "following": following}


def _instant(text: str) -> str:
    """The value of a date and time field as an instant in UTC; an RFC 3339 instant stays unchanged."""
    return text + "Z" if text and not text.endswith("Z") and "+" not in text else text


async def _message(api: Api, request: Request) -> dict[str, Any]:
    name = request.path_params["message"]
    life = await api.get(path_of("messages/{id}", id=name))
    story = drawn(life, request.query_params.get("scale", ""))
    letters = _letters(life["timeline"])
    life["groups"].sort(key=lambda g: (letters.get(g["group"]) != LETTERS["dead_letter"], g["state"] == "settled"))
    trace = trace_id(life["message"].get("headers"))
    await _add_who_closed(api, name, life["timeline"])
    return {
        "title": f"Message {name}",
        "m": life,
        "story": story,
        "trace": trace,
        "letters": letters,
        "failures": Counter(e["group"] for e in life["timeline"] if e["kind"] in ("failed", "dead_letter")),
    }


async def _add_who_closed(api: Api, message: str, timeline: list[dict[str, Any]]) -> None:
    """Add to each event that closed a dead letter the recorded action that did so, as `action`, if it is known."""
    closed = [event for event in timeline if event["kind"] in ("redriven", "dropped")]
    groups = list(dict.fromkeys(event["group"].partition("@")[0] for event in closed))[:MOST_GROUPS_CLOSED]
    actions = {group: await _actions_on(api, group, "dead_letter.", ACTIONS_LOOKED_AT) for group in groups}
    for event in closed:
        of_group = actions.get(event["group"].partition("@")[0], ())
        event["action"] = next((a for a in of_group if _has_closed(a["result"], message)), None)
        if event["action"] is None:  # an action that began a job records the job only
            event["action"] = await _job_that_closed(api, of_group, event)


def _has_closed(result: Any, message: str) -> bool:
    items = result.get("items") if isinstance(result, dict) else None
    return any(item.get("id") == message and item.get("status") in (201, 204) for item in items or ())


async def _job_that_closed(api: Api, actions: Sequence[dict[str, Any]], event: dict[str, Any]) -> dict[str, Any] | None:
    """The action whose job ran at the time of an event; None if there are several, since any of them may be it."""
    wanted = {"redriven": "dead_letter.redrive", "dropped": "dead_letter.drop"}[event["kind"]]
    begun = [
        action
        for action in actions
        if action["what"] == wanted and action["at"] <= event["at"] and isinstance(action["result"], dict)
        if "job" in action["result"]
    ]
    fits = []
    for action in begun[:JOBS_LOOKED_AT]:
        try:
            ran = await api.get(path_of("jobs/{id}", id=str(action["result"]["job"])), max=1)
        except NotifyError:
            continue
        if ran["ended_at"] is None or ran["ended_at"] >= event["at"]:
            fits.append(action)
    return fits[0] if len(fits) == 1 else None


def _letters(timeline: list[dict[str, Any]]) -> dict[str, str]:
    """The state of a message's dead letter in each group that gave the message up."""
    letters = {}
    for entry in timeline:
        if entry["kind"] in LETTERS:
            letters[entry["group"]] = LETTERS[entry["kind"]]
    return letters


async def _topics(api: Api, request: Request) -> dict[str, Any]:
    query = request.query_params
    sort = query.get("sort", "name")
    conditions = {"prefix": query.get("prefix"), "max": ROWS, "internal": "true" if query.get("internal") else "false"}
    unsorted = ""
    try:
        place = {"after": query.get("after")} if sort == "name" else {"sort": sort}
        answer = await api.get("topics", **conditions, **place)
    except NotifyError as error:
        if sort == "name" or error.code != "invalid_query":
            raise
        sort, unsorted = "name", str(error)  # there are too many to sort
        answer = await api.get("topics", **conditions)
    shown = {"rows": ROWS, "internal": bool(query.get("internal")), "sort": sort, "unsorted": unsorted}
    return answer | shown


async def _groups(api: Api, request: Request) -> dict[str, Any]:
    query, sort = request.query_params, _sort(request, "name")
    place = {"after": query.get("after")} if sort == "name" else {"sort": sort}
    return await api.get("groups", prefix=query.get("prefix"), **place, max=ROWS) | {"rows": ROWS, "sort": sort}


async def _topic(api: Api, request: Request) -> dict[str, Any]:
    name = request.path_params["topic"]
    return {
        "title": f"Topic {name}",
        "t": await api.get(path_of("topics/{name}", name=name)),
        "groups": (await api.get(path_of("topics/{name}/groups", name=name)))["groups"],
        "senders": await api.get(path_of("topics/{name}/senders", name=name)),
        "actions": await _actions_on(api, name),
    }


async def _group(api: Api, request: Request) -> dict[str, Any]:
    name = request.path_params["group"]
    group = await api.get(path_of("groups/{name}", name=name))
    priorities = await _if_queues_are_here(api.get(path_of("groups/{name}/priorities", name=name)))
    push = (await api.get("pushes"))["pushes"].get(name)
    dead = None
    if priorities:  # dead letters in Kafka are counted only on their own page
        counted = (await api.get("dead-letters", prefix=name, max=MOST_OF_A_PREFIX))["groups"]
        dead = next((row["count"] for row in counted if row["group"] == name), 0)
    held = None
    if priorities:  # keys are held in the own queues only
        held = await api.get(path_of("groups/{name}/held-keys", name=name), max=1)
    read = [s for s in group["subscriptions"] + group["patterns"] if not s["topic"].startswith("retry/")]
    tenants = None
    if any(s.get("fair_by") for s in read):
        tenants = await api.get(path_of("groups/{name}/tenants", name=name), max=MOST_TENANTS)
    causes = None
    if dead:
        causes = (await api.get(path_of("groups/{name}/dead-letters/failures", name=name)))["failures"][:CAUSES]
    alarms = [row for row in (await api.get("alarms"))["alarms"] if group_of(row) == name and not row["silence"]]
    values = {"priorities": priorities, "push": push, "dead": dead, "held": held, "tenants": tenants, "read": read}
    values |= {"causes": causes, "alarms": alarms, "actions": await _actions_on(api, name)}
    values["history"] = await api.get(path_of("groups/{name}/history", name=name))
    if group["paused"]:
        values["pause"] = next(iter(await _actions_on(api, name, "group.pause")), None)
    return {"title": f"Group {name}", "g": group} | values


async def _actions_on(api: Api, target: str, what: str = "", most: int = ACTIONS) -> list[dict[str, Any]]:
    """The newest actions on this target."""
    actions: list[dict[str, Any]] = (await api.get("actions", exact_target=target, what=what, max=most))["actions"]
    return actions


async def _if_queues_are_here(call: Awaitable[dict[str, Any]]) -> dict[str, Any] | None:
    """The answer of a call; None if this server has no queues itself."""
    try:
        return await call
    except NotifyError as error:
        if error.status != WrongRole.status:
            raise
        return None


async def _dead_letter_groups(api: Api, request: Request) -> dict[str, Any]:
    query = request.query_params
    return await api.get("dead-letters", prefix=query.get("prefix"), max=ROWS) | {"rows": ROWS}


async def _dead_letters(api: Api, request: Request) -> dict[str, Any]:
    name, query = request.path_params["group"], request.query_params
    search = {field: query.get(field, "") for field in ("topic", "tag", "key", "contains", "filter", "failure")}
    # Groups over Kafka have no priorities; there a message cannot be found by its id, nor a letter be corrected.
    indexed = await _if_queues_are_here(api.get(path_of("groups/{name}/priorities", name=name))) is not None
    place = {"newest": "true", "before": query.get("before"), "max": ROWS}
    letters = await api.get(path_of("groups/{name}/dead-letters", name=name), **search, **place)
    failures = await api.get(path_of("groups/{name}/dead-letters/failures", name=name))
    cause = next((f for f in failures["failures"] if f["fingerprint"] == search["failure"]), None)
    values = {"failures": failures, "asked": search, "letters": letters, "indexed": indexed, "rows": ROWS}
    values |= {"cause": cause, "trace": ""}
    if cause and indexed:
        values["trace"] = await _last_trace(api, name, cause["example"]["id"])
    return {"title": f"Dead letters of {name}", "group": name} | values


async def _last_trace(api: Api, group: str, message: str) -> str:
    """The traceback of the last failure of a message in a group; empty if it is not known, or the message is gone."""
    try:
        timeline = (await api.get(path_of("messages/{id}", id=message)))["timeline"]
    except NotifyError:
        return ""
    return next((str(e["trace"]) for e in reversed(timeline) if e.get("group") == group and "trace" in e), "")


async def _held_keys(api: Api, request: Request) -> dict[str, Any]:
    name, topic = request.path_params["group"], request.query_params.get("topic", "")
    held = await api.get(path_of("groups/{name}/held-keys", name=name), topic=topic, max=ROWS)
    return {"title": f"Held keys of {name}", "group": name, "held": held, "asked": {"topic": topic}}


async def found(api: Api, text: str) -> str:
    """The page of what an id, the name of a group or a topic, or a key leads to; without a match, the search by key."""
    for path, page in (
        ("groups/{name}", "/groups/{}"),
        ("topics/{name}", "/topics/{}"),
        ("transactions/{name}", "/transactions/{}"),
        ("messages/{name}", "/messages/{}"),
    ):
        try:
            await api.get(path_of(path, name=text))
        except NotifyError as error:
            if error.status not in (400, 404, 405, 422, WrongRole.status):
                raise
        else:
            return page.format(quote(text, safe=""))
    return "/messages?" + urlencode({"key": text})


async def _schedules(api: Api, request: Request) -> dict[str, Any]:
    query = request.query_params
    answer = await api.get("schedules", prefix=query.get("prefix"), after=query.get("after"), max=ROWS)
    return answer | {"rows": ROWS}


async def _schedule(api: Api, request: Request) -> dict[str, Any]:
    name = request.path_params["schedule"]
    return {"title": f"Schedule {name}", "s": await api.get(path_of("schedules/{name}", name=name))}


async def _nodes(api: Api, request: Request) -> dict[str, Any]:
    away, refused = "", []
    try:
        sources = await _if_queues_are_here(api.get("bridges"))
        refused = [row for row in (await api.get("refused"))["sources"] if row["waiting"]]
    except NotifyError as error:
        if error.status != Unavailable.status:
            raise
        sources, away = None, str(error)
    bridges = None if sources is None else sources["bridges"]
    left_behind = (await api.get("left-behind"))["left_behind"]
    shown = {"bridges": bridges, "away": away, "refused": refused, "left_behind": left_behind}
    return {"nodes": await api.get("nodes")} | shown


async def _audits(api: Api, request: Request) -> dict[str, Any]:
    return {"audits": (await api.get("audits"))["audits"]}


async def _jobs(api: Api, request: Request) -> dict[str, Any]:
    return {"jobs": (await api.get("jobs", max=ROWS))["jobs"]}


async def _job(api: Api, request: Request) -> dict[str, Any]:
    number = request.path_params["job"]
    return {"title": f"Job {number}", "job": await api.get(path_of("jobs/{id}", id=number), max=ROWS), "rows": ROWS}


async def _settings(api: Api, request: Request) -> dict[str, Any]:
    answer = await api.get("settings")
    return {
        "settings": answer["settings"],
        "revision": answer["revision"],
        "revisions": (await api.get("settings/revisions", max=20))["revisions"],
        "limits": await api.get("limits"),
    }


async def _access(api: Api, request: Request) -> dict[str, Any]:
    return await api.get("credentials", all="true" if request.query_params.get("all") else None)


async def _actions(api: Api, request: Request) -> dict[str, Any]:
    query = request.query_params
    search = {name: query.get(name, "") for name in ("what", "target")}
    answer = await api.get("actions", **search, before=query.get("before"), max=ROWS)
    return {"actions": answer["actions"], "asked": search, "rows": ROWS}


PAGES: tuple[tuple[str, str, str, Page], ...] = (
    ("/", "overview.html", "Overview", _overview),
    ("/transactions", "transactions.html", "Transactions without an outcome", _transactions),
    ("/transactions/{transaction}", "transaction.html", "", _transaction),
    ("/messages", "messages.html", "Messages", _messages),
    ("/messages/{message}", "message.html", "", _message),
    ("/topics", "topics.html", "Topics", _topics),
    ("/topics/{topic}", "topic.html", "", _topic),
    ("/groups", "groups.html", "Consumer groups", _groups),
    ("/groups/{group}", "group.html", "", _group),
    ("/groups/{group}/dead-letters", "dead_letters.html", "", _dead_letters),
    ("/groups/{group}/held-keys", "held_keys.html", "", _held_keys),
    ("/dead-letters", "dead_letter_groups.html", "Dead letters", _dead_letter_groups),
    ("/schedules", "schedules.html", "Schedules", _schedules),
    ("/schedules/{schedule}", "schedule.html", "", _schedule),
    ("/nodes", "nodes.html", "Nodes and bridges", _nodes),
    ("/audits", "audits.html", "Audits", _audits),
    ("/jobs", "jobs.html", "Jobs", _jobs),
    ("/jobs/{job}", "job.html", "", _job),
    ("/settings", "settings.html", "Settings and limits", _settings),
    ("/access", "access.html", "Access", _access),
    ("/actions", "actions.html", "Audit log", _actions),
)
