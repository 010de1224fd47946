"""The table of rights: each route of the server with the rights that it takes, and its request.

A new route needs a line here: `tests/integration/test_rights.py` has every caller ask each of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tests.support.http import REASON
from tests.support.rights import (
    ANY_GROUP,
    ANY_TOPIC,
    ANYONE,
    KNOWN,
    SOME,
    Asked,
    Case,
    Needs,
    Part,
    Room,
    Things,
    needs,
)
from tests.support.transactions import new_id

VIEW, ADMIN = needs("view"), needs("admin")
SECRET = ((KNOWN, "{secret}"),)
"""The data that an answer shows to a caller with the right."""
CHECK, CONSUME = needs("check:{producer}"), needs("consume:{group}@{topic}")
ADMIN_TOPIC, ADMIN_GROUP, ADMIN_PRODUCER = needs("admin:{topic}"), needs("admin:{group}"), needs("admin:{producer}")
SUBSCRIPTION = "PUT /v1/groups/{group}/subscriptions/{topic}"
SUBSCRIBE = needs("consume:{group}@{topic}", "admin:{group} admin:{topic}")

Add = Callable[..., None]
"""`AdminRoutes.add`."""


def cases(room: Room) -> list[Case]:
    """Each route with the rights that it takes and its request. A new route needs a line here."""
    return [*producing(room), *consuming(room), *bridging(room), *administration(room), *edges(room)]


def publishing(*topics: str) -> Asked:
    return Asked("POST", "/v1/messages", {"messages": [{"topic": topic, "body": "x"} for topic in topics]})


def producing(room: Room) -> list[Case]:
    kept = {things.whose: room.half(things, new_id()) for things in (room.own, room.foreign)}

    def store(*topics: tuple[str, ...]) -> Any:
        def ask(t: Things, o: Things) -> Asked:
            halves = [
                {"id": new_id(), "messages": [{"topic": t.fill(topic, o), "body": "x"} for topic in names]}
                for names in topics
            ]
            return Asked("POST", "/v1/transactions", {"producer_group": t.producer, "transactions": halves})

        return ask

    def take_over(t: Things, o: Things) -> Asked:
        """Store an own half under the other's id."""
        half = {"id": kept[o.whose], "messages": [{"topic": t.topic, "body": "x"}]}
        return Asked("POST", "/v1/transactions", {"producer_group": t.producer, "transactions": [half]})

    def publish_as(t: Things, o: Things) -> Asked:
        """Publish a message under the other's id."""
        message = {"id": f"{kept[o.whose]}.0", "topic": t.topic, "body": "x"}
        return Asked("POST", "/v1/messages", {"messages": [message]})

    def outcomes(**fields: Any) -> Any:
        def ask(t: Things, o: Things) -> Asked:
            items = [{"id": kept[who.whose], "outcome": "UNKNOWN"} | fields for who in (t, o)]
            return Asked("POST", "/v1/transactions/outcomes", {"producer_group": t.producer, "outcomes": items})

        return ask

    def states(t: Things, o: Things) -> Asked:
        ids = [kept[t.whose], kept[o.whose]]
        return Asked("POST", "/v1/transactions/states", {"producer_group": t.producer, "ids": ids})

    def poll(t: Things, o: Things) -> Asked:
        room.half(t, new_id())
        room.half(o, new_id())
        room.server.server.advance(60)
        body = {"producer_group": t.producer, "instance": "i", "topics": [t.topic], "wait": 0, "max": 100}
        return Asked("POST", "/v1/checks/poll", body)

    def leave(t: Things, o: Things) -> Asked:
        report = {"producer_group": t.producer, "source": t.source, "transactions": 0}
        return Asked("POST", "/v1/transactions/left-behind", report)

    def declare(topic: str, name: str) -> Any:
        def ask(t: Things, o: Things) -> Asked:
            for things in (t, o):
                fields = {"topic": things.topic, "body": "x", "every": 86_400}
                room.do("PUT", f"/v1/admin/schedules/{things.topic}", fields)
            body = {"message": {"topic": t.fill(topic, o), "body": "x"}, "every": 3600}
            return Asked("PUT", "/v1/schedules/" + t.fill(name, o), body)

        return ask

    def unschedule(t: Things, o: Things) -> Asked:
        return Asked("DELETE", declare("{topic}", "{topic}")(t, o).path)

    def withdrawal(t: Things, o: Things) -> Asked:
        headers = {"notify-cancels": f"{new_id()}.0"}
        body = {"messages": [{"topic": t.topic, "body": "", "key": t.secret, "headers": headers}]}
        (item,) = room.do("POST", "/v1/messages", body)["items"]
        return Asked("GET", f"/v1/withdrawals/{item['id']}")

    own, others = needs("publish:{topic}"), needs("publish:{other_topic}")
    both = needs("publish:{topic} publish:{other_topic}")
    mixed = (Part(KNOWN, 200), Part(KNOWN, 409, is_foreign=True))
    post, schedule = "POST /v1/transactions", "PUT /v1/schedules/{schedule}"
    return [
        Case("POST /v1/messages", KNOWN, lambda t, o: publishing(t.topic), parts=[Part(own, 201)]),
        Case("POST /v1/messages", KNOWN, lambda t, o: publishing(t.topic, o.topic, t.topic), what="to mixed topics",
             parts=[Part(own, 201), Part(others, 201), Part(own, 201)]),
        Case("POST /v1/messages", KNOWN, lambda t, o: publishing(f"dead-letter.{t.group}"), what="as a dead letter",
             parts=[Part(needs("publish:dead-letter.{group}"), 201)]),
        Case("POST /v1/messages", KNOWN, publish_as, what="under another's id",
             parts=[Part(own, 409, is_foreign=True)]),
        Case(schedule, own, declare("{topic}", "{topic}")),
        Case(schedule, others, declare("{other_topic}", "{other_topic}"), what="of another's topic"),
        Case(schedule, both, declare("{topic}", "{other_topic}"), what="in place of another's"),
        Case("DELETE /v1/schedules/{schedule}", own, unschedule),
        Case(post, CHECK, store(("{topic}",)), parts=[Part(own, 201)]),
        Case(post, CHECK, store(("{topic}",), ("{other_topic}",), ("{topic}", "{other_topic}")), what="to mixed topics",
             parts=[Part(own, 201), Part(others, 201), Part(both, 201)]),
        Case(post, CHECK, take_over, what="under another's id", parts=[Part(own, 409, is_foreign=True)]),
        Case(post + "/outcomes", CHECK, outcomes(), what="UNKNOWN, of another's too", parts=mixed),
        Case(post + "/outcomes", CHECK, outcomes(check="5", unavailable=True), what="a check, of another's too",
             parts=(Part(KNOWN, 410), Part(KNOWN, 409, is_foreign=True))),
        Case(post + "/outcomes", CHECK, outcomes(outcome="COMMIT"), what="COMMIT, of another's too", parts=mixed),
        Case(post + "/states", CHECK, states, what="of another's too", parts=mixed),
        Case(post + "/left-behind", CHECK, leave),
        Case("POST /v1/checks/poll", CHECK, poll, shows=SECRET),
        Case("GET /v1/withdrawals/{id}", own, withdrawal),
        Case("GET /v1/members", SOME, lambda t, o: Asked("GET", "/v1/members"), is_of_things=False),
    ]  # fmt: skip


def consuming(room: Room) -> list[Case]:
    some = needs(f"consume:{{group}}@{ANY_TOPIC}")
    others = needs("consume:{group}@{other_topic}")
    both = needs("consume:{group}@{topic} consume:{group}@{other_topic}")

    def receive(*topics: str) -> Any:
        def ask(t: Things, o: Things) -> Asked:
            room.publish((t.topic, t.secret), (o.topic, o.secret))
            asked: dict[str, Any] = {"instance": "i", "max": 10_000, "wait": 0, "lease": 3600}
            if topics:
                asked["topics"] = [t.fill(topic, o) for topic in topics]
            return Asked("POST", f"/v1/groups/{t.group}/receive", asked)

        return ask

    def settle(t: Things, o: Things) -> Asked:
        """Settle receipts of the own topic, of the other's topic, and of the other's group."""
        receipts = [room.receipt(t, t), room.receipt(t, o), room.receipt(o, o)]
        items = [{"receipt": receipt, "action": "ack"} for receipt in receipts]
        return Asked("POST", f"/v1/groups/{t.group}/settle", {"items": items})

    def put(path: str, body: dict[str, Any]) -> Any:
        return lambda t, o: Asked("PUT", f"/v1/groups/{t.group}/subscriptions/{t.fill(path, o)}", body)

    pull = "/v1/topics/{topic}/queues/0/messages"
    return [
        Case("POST /v1/groups/{group}/receive", CONSUME, receive("{topic}"), shows=SECRET),
        Case("POST /v1/groups/{group}/receive", some, receive(), what="of all topics",
             shows=((CONSUME, "{secret}"), (others, "{other_secret}"))),
        Case("POST /v1/groups/{group}/receive", both, receive("{topic}", "{other_topic}"), what="of mixed topics",
             shows=((both, "{secret}"), (both, "{other_secret}"))),
        Case("POST /v1/groups/{group}/settle", some, settle, what="of mixed topics and groups",
             refers_to=("{other_topic}", "{topic}"),
             parts=[Part(CONSUME, 200), Part(others, 200), Part(KNOWN, 410)]),
        Case("POST /v1/groups/{group}/leave", some,
             lambda t, o: Asked("POST", f"/v1/groups/{t.group}/leave", {"instance": "i"})),
        Case("GET /v1/topics/{topic}/queues/{queue}/messages", needs("read:{topic}"),
             lambda t, o: Asked("GET", t.fill(pull, o)), shows=SECRET),
        Case("GET /v1/topics/{topic}",
             needs("read:{topic}", "publish:{topic}", f"consume:{ANY_GROUP}@{{topic}}"),
             lambda t, o: Asked("GET", f"/v1/topics/{t.topic}")),
        Case("GET /v1/limits", KNOWN, lambda t, o: Asked("GET", "/v1/limits"), is_of_things=False),
        Case(SUBSCRIPTION, CONSUME, put("{topic}", {})),
        Case(SUBSCRIPTION, others, put("{other_topic}", {}), what="to the other's topic"),
        Case(SUBSCRIPTION, needs("consume:{group}@*"), put("*", {"mode": "none"}), what="to every topic", status=422),
        Case(SUBSCRIPTION + "/inbox", CONSUME, put("{topic}/inbox", {"whole_from": "2020-01-01T00:00:00Z"})),
    ]  # fmt: skip


def bridging(room: Room) -> list[Case]:
    def append(t: Things, o: Things, **fields: Any) -> Asked:
        """Append a batch with these fields."""
        body = {"epoch": 1, "expected_position": "", "position": ""} | fields
        return Asked("POST", f"/v1/bridge/{t.source}/batches", body)

    def begin(t: Things) -> str:
        """Prepare a part of a source's large transaction, which only its later batches may commit; return its id."""
        name = new_id()
        part = {"id": name, "producer_group": t.producer, "messages": [{"topic": t.topic, "body": "x"}]}
        for fields in ({"claim": True}, {"transactions": [part], "prepare": True}):
            asked = append(t, t, **fields)
            room.do(asked.method, asked.path, asked.body)
        return name

    prepared = {things.whose: begin(things) for things in (room.own, room.foreign)}
    bridge = needs("bridge:{source}")

    def steal(t: Things, o: Things) -> Asked:
        """Commit a transaction that the other's source prepared."""
        return append(t, o, commit=[prepared[o.whose]])

    return [
        Case("GET /v1/bridge/{source}", bridge, lambda t, o: Asked("GET", f"/v1/bridge/{t.source}")),
        Case("POST /v1/bridge/{source}/batches", bridge, append),
        Case(
            "PUT /v1/sources/{source}/refused",
            bridge,
            lambda t, o: Asked("PUT", f"/v1/sources/{t.source}/refused", {"waiting": 0}),
        ),
        Case("POST /v1/bridge/{source}/batches", bridge, steal, what="with another's half", status=409),
    ]


class AdminRoutes:
    """Makes cases of admin routes. Paths and bodies have the placeholders of `Things.fill`, and those of `PLACES`."""

    PLACES = ("half", "message", "private_message", "job")
    """Placeholders of what was made for the cases: `{half}` is one's own, `{other_half}` the other's."""

    def __init__(self, room: Room) -> None:
        self.table: list[Case] = []
        self._made: dict[str, dict[str, Any]] = {name: {} for name in self.PLACES}
        for things in (room.own, room.foreign):
            self._make(room, things)

    def _make(self, room: Room, things: Things) -> None:
        """Make a half, a message that is a dead letter, a message of a private topic, and a job."""
        half = room.half(things, new_id())
        (message,) = room.publish((things.topic, things.secret))
        (private,) = room.publish((things.private, things.secret))
        receipt = room.receipt(things, things)
        dead = {"items": [{"receipt": receipt, "action": "dead_letter", "reason": things.secret}]}
        room.do("POST", f"/v1/groups/{things.group}/settle", dead)
        redrive = room.do("POST", f"/v1/admin/groups/{things.group}/dead-letters/redrive", {"all": True})
        for name, value in zip(self.PLACES, (half, message, private, redrive["result"]["job"]), strict=True):
            self._made[name][things.whose] = value

    def add(
        self, route: str, takes: Needs, path: str | None = None, body: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Add a route; `path`: the one to ask, where it differs from the route's."""
        method, _, template = route.partition(" ")
        text = template if path is None else path

        def ask(t: Things, o: Things) -> Asked:
            sent = None if body is None else self._fill({"reason": REASON} | body, t, o)
            if sent is not None and "whole_from" in sent:
                del sent["reason"]
            return Asked(method, "/v1/admin" + self._fill(text, t, o), sent)

        is_of_things = re.search(r"\{\w+\}", text + json.dumps(body)) is not None
        self.table.append(Case(f"{method} /v1/admin{template}", takes, ask, is_of_things=is_of_things, **options))

    def _fill(self, value: Any, t: Things, o: Things) -> Any:
        if isinstance(value, dict):
            return {k: self._fill(v, t, o) for k, v in value.items()}
        if isinstance(value, list):
            return [self._fill(v, t, o) for v in value]
        if not isinstance(value, str):
            return value
        for name, made in self._made.items():
            value = value.replace(f"{{{name}}}", str(made[t.whose]))
            value = value.replace(f"{{other_{name}}}", str(made[o.whose]))
        return t.fill(value, o)


def administration(room: Room) -> list[Case]:
    routes = AdminRoutes(room)
    for add_cases in (_lists_and_alarms, _topics, _groups, _transactions, _messages_and_jobs, _settings_and_backups):
        add_cases(routes.add)
    return routes.table


def _lists_and_alarms(add: Add) -> None:
    for path in ("topics", "groups", "transactions", "limits", "jobs", "bridges", "refused", "left-behind", "nodes",
                 "settings", "settings/revisions", "backups", "check-webhooks", "credentials", "pushes", "actions",
                 "audits", "overview", "status", "history", "dead-letters", "alarms", "schedules",
                 "stored-bodies"):  # fmt: skip
        add(f"GET /{path}", VIEW)
    add("POST /alarms/{name}/silence", ADMIN, "/alarms/disk/silence", {"seconds": 60})
    add("POST /alarms/{name}/unsilence", ADMIN, "/alarms/parked/unsilence", {}, status=404)  # it is not silent


def _topics(add: Add) -> None:
    add("GET /topics/{name}", needs("view", "read:{topic}"), "/topics/{topic}")
    add("GET /topics/{name}/groups", VIEW, "/topics/{topic}/groups")
    add("GET /topics/{name}/senders", VIEW, "/topics/{topic}/senders")
    add("GET /topics/{name}/history", VIEW, "/topics/{topic}/history")
    add("GET /groups/{name}/history", VIEW, "/groups/{group}/history")
    add("PUT /topics/{name}", ADMIN_TOPIC, "/topics/{topic}", {"queues": 1})
    add("DELETE /topics/{name}", needs("admin:{private}"), "/topics/{private}", {}, spoils=True)
    add("POST /topics/{name}/messages", ADMIN_TOPIC, "/topics/{topic}/messages", {"body": "x"})
    for action in ("cancel", "replace"):
        add("POST /topics/{name}/messages/{message_id}/" + action, ADMIN_TOPIC,
            "/topics/{topic}/messages/{message}/" + action, {"dry_run": True})  # fmt: skip
    add("POST /topics/{name}/purge", ADMIN_TOPIC, "/topics/{topic}/purge", {"before": 0})


def _groups(add: Add) -> None:
    group = "/groups/{group}"
    subscription = group + "/subscriptions/{topic}"
    add("GET /groups/{name}", VIEW, group)
    add("GET /groups/{name}/priorities", VIEW, group + "/priorities")
    add("GET /groups/{name}/dead-letters", VIEW, group + "/dead-letters", shows=SECRET)
    add("GET /groups/{name}/dead-letters/failures", VIEW, group + "/dead-letters/failures", shows=SECRET)
    add("PUT /groups/{name}/subscriptions/{topic}", SUBSCRIBE, subscription, {})
    add("PUT /groups/{name}/subscriptions/{topic}",
        needs("consume:{group}@{other_topic}", "admin:{group} admin:{other_topic}"),
        group + "/subscriptions/{other_topic}", {}, what="to the other's topic")  # fmt: skip
    add("PUT /groups/{name}/subscriptions/{topic}", needs("consume:{group}@*", "admin:{group} admin"),
        group + "/subscriptions/*", {"dry_run": True}, what="to every topic")  # fmt: skip
    add("DELETE /groups/{name}/subscriptions/{topic}", needs("admin:{group} admin:{topic}"), subscription, {},
        spoils=True)  # fmt: skip
    add("PUT /groups/{name}/subscriptions/{topic}/inbox", SUBSCRIBE, subscription + "/inbox",
        {"whole_from": "2020-01-01T00:00:00Z"})  # fmt: skip
    add("POST /groups/{name}/reset", ADMIN_GROUP, group + "/reset", {"topic": "{topic}", "to": "latest"}, spoils=True)
    add("PUT /groups/{name}/priorities", ADMIN_GROUP, group + "/priorities", {"classes": [{"name": "one"}]})
    add("PUT /groups/{name}/push", ADMIN_GROUP, group + "/push", {"url": "http://192.0.2.1/"}, status=422)
    add("DELETE /groups/{name}/push", ADMIN_GROUP, group + "/push", {}, status=404)
    add("PUT /groups/{name}/objective", ADMIN_GROUP, group + "/objective", {"within": 5, "dry_run": True})
    add("DELETE /groups/{name}/objective", ADMIN_GROUP, group + "/objective", {}, status=404)
    add("GET /groups/{name}/held-keys", VIEW, group + "/held-keys")
    add("GET /groups/{name}/tenants", VIEW, group + "/tenants")
    for action in ("retry", "skip", "release"):
        add(f"POST /groups/{{name}}/held-keys/{action}", ADMIN_GROUP, f"{group}/held-keys/{action}", {"all": True})
    for action in ("pause", "resume"):
        add("POST /groups/{name}/{action}", ADMIN_GROUP, f"{group}/{action}", {}, what=action, spoils=True)
    add("POST /groups/{name}/dead-letters/redrive", ADMIN_GROUP, group + "/dead-letters/redrive", {"max": 1})
    add("POST /groups/{name}/dead-letters/redrive", ADMIN_GROUP, group + "/dead-letters/redrive", {"all": True},
        what="as a job")  # fmt: skip
    add("POST /groups/{name}/dead-letters/drop", ADMIN_GROUP, group + "/dead-letters/drop", {"ids": ["{message}"]})
    add("POST /groups/{name}/dead-letters/edit", ADMIN_GROUP, group + "/dead-letters/edit",
        {"id": "{message}", "body": "x"}, status=409)  # fmt: skip
    add("POST /groups/{name}/dead-letters/purge", ADMIN_GROUP, group + "/dead-letters/purge", {"before": 0})
    add("POST /groups/{name}/redeliver", ADMIN_GROUP, group + "/redeliver",
        {"ids": ["{message}", "{other_private_message}"]}, what="of another's message, too")  # fmt: skip


def _transactions(add: Add) -> None:
    add("GET /transactions/{transaction_id}", VIEW, "/transactions/{half}", shows=SECRET)
    for action in ("check", "commit"):
        add("POST /transactions/{transaction_id}/{action}", ADMIN_PRODUCER, "/transactions/{half}/" + action, {},
            what=action, status=200)  # fmt: skip
    add("POST /transactions/{transaction_id}/{action}", ADMIN_PRODUCER, "/transactions/{half}/commit",
        {"dry_run": True}, what="its preview")  # fmt: skip
    for action in ("check", "commit", "rollback"):
        dry, theirs = {"dry_run": True}, {"producer_group": "{producer}"}
        add(f"POST /transactions/{action}", ADMIN_PRODUCER, f"/transactions/{action}", {"ids": ["{half}"]} | dry,
            what="by id")  # fmt: skip
        add(f"POST /transactions/{action}", ADMIN_PRODUCER, f"/transactions/{action}",
            {"all": True, "wanted": theirs} | dry, what="all of a producer group")  # fmt: skip


def _messages_and_jobs(add: Add) -> None:
    add("GET /messages", VIEW, "/messages?topic={topic}", shows=SECRET, what="of a topic")
    add("GET /messages", VIEW, "/messages?key={secret}", shows=SECRET, what="of a key")
    add("GET /messages", VIEW, "/messages?id={message}", shows=SECRET, what="by id")
    add("GET /messages/{message_id}", VIEW, "/messages/{message}", shows=SECRET)
    add("POST /messages/republish", ADMIN, None, {"messages": [{"id": "{message}"}]})
    add("GET /jobs/{number}", VIEW, "/jobs/{job}")
    add("POST /jobs/{number}/cancel", ADMIN_GROUP, "/jobs/{job}/cancel", {}, status=409)  # the job has ended
    add("GET /bridges/{source}", VIEW, "/bridges/{source}")


def _settings_and_backups(add: Add) -> None:
    add("PUT /limits", ADMIN, None, {})
    add("PUT /settings", ADMIN, None, {"values": {"check_attempts": 15}})
    add("POST /settings/rollback", ADMIN, None, {"to": 0})
    add("PUT /schedules/{name}", ADMIN, "/schedules/{topic}", {"topic": "{topic}", "body": "x", "every": 60})
    add("GET /schedules/{name}", VIEW, "/schedules/none", status=404)
    for action in ("pause", "resume"):
        add(f"POST /schedules/{{name}}/{action}", ADMIN, f"/schedules/none/{action}", {}, status=404)
    add("DELETE /schedules/{name}", ADMIN, "/schedules/none", {}, status=404)
    add("PUT /check-webhooks", ADMIN, None, {"webhooks": {}})
    add("POST /credentials", ADMIN, None, {"name": "x", "rights": ["admin"]})
    add("POST /credentials/{number}/revoke", ADMIN, "/credentials/000000000000/revoke", {}, status=404)
    add("POST /audits", ADMIN, None, {"verdict": "PASS", "counts": {}, "report": "<p>kept</p>"})
    add("GET /audits/{number}/report", VIEW, "/audits/1000000/report", status=404)
    add("POST /backups", ADMIN, None, {}, status=422)  # a server in memory has no log
    add("GET /backups/{name}/files/{file:path}", needs("view admin"), "/backups/x/files/log/y", status=404)
    add("DELETE /backups/{name}", ADMIN, "/backups/x", {}, status=404)


def edges(room: Room) -> list[Case]:
    """Health routes, the OpenAPI document, and the console's pages, which take the rights of their admin routes."""
    half = {things.whose: room.half(things, new_id()) for things in (room.own, room.foreign)}
    message = {things.whose: room.publish((things.topic, things.secret))[0] for things in (room.own, room.foreign)}
    table: list[Case] = []

    def add(route: str, takes: Needs, path: str | None = None, body: bytes | None = None, **options: Any) -> None:
        method, _, template = route.partition(" ")
        text = template if path is None else path

        def ask(t: Things, o: Things) -> Asked:
            filled = text.replace("{half}", half[t.whose]).replace("{message}", message[t.whose])
            sent = None if body is None else t.fill(body.decode(), o).encode()
            return Asked(method, t.fill(filled, o), sent)

        is_of_things = "{" in text or b"{" in (body or b"")
        table.append(Case(route, takes, ask, is_of_things=is_of_things, **options))

    add("GET /livez", ANYONE)
    add("GET /readyz", ANYONE)
    add("GET /metrics", VIEW)
    add("GET /openapi.json", KNOWN)
    add("HEAD /openapi.json", KNOWN)
    table.append(
        Case("GET /static/{file}", ANYONE, lambda t, o: Asked("GET", "/static/console.css"), is_of_things=False)
    )
    add("GET /login", ANYONE)
    add("POST /login", ANYONE, None, f"token={room.all}".encode(), status=303)
    add("POST /logout", KNOWN, None, b"", status=303)
    for path in ("/", "/transactions", "/topics", "/groups", "/dead-letters", "/schedules", "/nodes", "/audits",
                 "/jobs", "/settings", "/access", "/actions", "/overview/history"):  # fmt: skip
        add(f"GET {path}", VIEW)
    add("GET /messages", KNOWN)  # only the form
    add("GET /messages", VIEW, "/messages?topic={topic}", shows=SECRET, what="of a topic")
    add("GET /transactions/{transaction}", VIEW, "/transactions/{half}")
    add("GET /messages/{message}", VIEW, "/messages/{message}")
    add("GET /names/{kind}", VIEW, "/names/topics?q={topic}")
    add("GET /find", KNOWN, "/find?q=", status=303)  # leads to the form
    add("GET /find", VIEW, "/find?q={topic}", status=303, what="a topic")
    add("GET /topics/{topic}", VIEW)
    add("GET /topics/{topic}/history", VIEW)
    add("GET /groups/{group}", VIEW)
    add("GET /groups/{group}/history", VIEW)
    add("GET /groups/{group}/dead-letters", VIEW)
    add("GET /groups/{group}/held-keys", VIEW)
    add("GET /schedules/{schedule}", VIEW, "/schedules/none", status=404)
    add("GET /jobs/{job}", VIEW, "/jobs/1")
    add("GET /audits/{number}/report", KNOWN, "/audits/1/report", status=303)  # redirects to an admin route
    add("GET /do/{name}", KNOWN, "/do/group.pause", what="a form, and nothing else")
    add("GET /do/{name}", VIEW, "/do/settings.put?setting=check_attempts", what="a form with a value in it")
    do = "group={group}&reason=a+test&step="
    add("POST /do/{name}", ADMIN_GROUP, "/do/group.pause", (do + "preview").encode(), what="its preview")
    add("POST /do/{name}", ADMIN_GROUP, "/do/group.resume", (do + "do").encode(), what="a group's")
    return table
