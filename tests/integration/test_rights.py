"""The matrix of rights: every route of the server is asked by every caller, for own things and for another's.

tests/support/rights_table.py states once which rights each route takes. The expected answers follow from that, and are
compared with the server's: a caller with the right is let in; another one is refused, sees nothing of the other's, and
changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from fastapi.routing import iter_route_contexts

from notify.server.access import lookup
from notify.server.app import App
from notify.server.data.routes import DataRoutes
from notify.server.management import Management
from notify.server.running import Running
from notify.server.settings import Settings
from notify.storage.memory import MemoryStore
from tests.support.clock import PATIENCE_SECONDS
from tests.support.rights import ANY_TOPIC, Asked, Caller, Case, Room, Things, covers
from tests.support.rights_table import cases
from tests.support.servers import GuardedInMemory

SINGLE = ("publish:{topic}", "check:{producer}", "consume:{group}", "consume:{group}@{topic}", "read:{topic}",
          "bridge:{source}", "admin:{topic}", "admin:{group}", "admin:{producer}")  # fmt: skip
"""Rights to one thing each; there are callers with them, who ask for own things and for the other's."""
SEVERAL = (
    "publish:{topic} check:{producer}",
    "publish:{topic} check:{other_producer}",
    "admin:{group} admin:{topic}",
    "admin:{group} admin:{other_topic}",
    "consume:{group}@{other_topic}",
    "publish:{prefix}* check:{prefix}* consume:{prefix}*@{prefix}* read:{prefix}* bridge:{prefix}* admin:{prefix}*",
)
WILD = ("publish", "publish:dead-letter.*", "check", "consume", "read", "bridge", "view", "admin", "admin view")


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    with pytest.MonkeyPatch.context() as patched, GuardedInMemory() as server:
        # Otherwise a slow machine answers an unknown token with 503 until it has read the records.
        patched.setattr(lookup, "WAIT_SECONDS", PATIENCE_SECONDS)
        made = Room(server)
        made.restore()
        yield made
        made.close()


@pytest.fixture(scope="module")
def table(room: Room) -> list[Case]:
    return cases(room)


def callers(room: Room) -> list[Caller]:
    """All callers of the matrix."""
    own, foreign = room.own, room.foreign
    every = ("admin", "view", "publish", "check", "consume", "read", "bridge")
    revoked, expired = room.server.make(*every, name="gone"), room.server.make(*every, expires_in=1)
    room.server.server.advance(1)
    room.do("POST", f"/v1/admin/credentials/{revoked.split('_')[1]}/revoke", {})
    listed = [
        Caller("nobody", None, None),
        Caller("an unknown token", "nt_000000000000_" + "A" * 43, None),
        Caller("a revoked token", revoked, None),
        Caller("an expired token", expired, None),
        Caller("no right", room.server.make(), ()),
    ]
    # Rights to the other's things alone are what these are where the other's things are asked for.
    wanted = [own.fill(right, foreign) for right in (*SINGLE, *SEVERAL)]
    for rights in (*wanted, *WILD):
        parts = tuple(rights.split())
        listed.append(Caller(rights, room.server.make(*parts), parts))
    return listed


def routes() -> set[str]:
    """Every route that the server has, native or FastAPI's."""
    names = {f"{method} {path}" for method, path, _ in DataRoutes.ROUTES} | {"GET /login", "GET /static/{file}"}
    for route in iter_route_contexts(Management(App(Settings(), MemoryStore)).fastapi.routes):
        methods = getattr(route, "methods", None) or {"MOUNT"}
        names |= {f"{method} {route.path}" for method in methods}
    return names


async def _kept(running: Running) -> Any:
    """All that the server keeps, but for when credentials were used: a refused request must not change it."""
    core = running.core
    queues, records = core.queues, running.administration.records
    topics = [(t, [queues.bounds(t.name, q) for q in range(t.queues)]) for t in queues.topics()]
    undecided = await core.store.undecided(None, None, None, 100_000)
    groups = {name: (g.paused, sorted(g.leases), sorted(g.instances)) for name, g in core.delivery.groups.items()}
    positions = {
        name: [(c.topic, c.next, c.progress.floor) for c in g.cursors.values()]
        for name, g in core.delivery.groups.items()
    }
    return {
        "topics": topics,
        "subscriptions": sorted(queues.subscriptions(), key=repr),
        "patterns": list(queues.patterns()),
        "undecided": [(t.id, t.state, t.attempts, t.next_check_us) for t in undecided],
        "groups": groups,
        "positions": positions,
        "bridges": list(queues.bridges()),
        "actions": records.actions(1),
        "credentials": [dataclasses.replace(c, used_us=0) for c in records.credentials()],
        "revision": records.revision(),
    }


def kept(room: Room) -> Any:
    return room.server.server.inside(_kept)


def statuses(raw: bytes, status: int, case: Case) -> list[int]:
    """The answer's status, and those of its items."""
    if status != 200 or not case.parts:
        return [status]
    return [status, *(item["status"] for item in json.loads(raw)["items"])]


def shown_wrongly(raw: bytes, asked: Asked, case: Case, caller: Caller, room: Room, things: Things) -> list[str]:
    """Names and data in the answer that the caller may not see, and that the request did not have."""
    text = raw.decode()
    wrong = [
        name
        for who in (room.own, room.foreign)
        if who.prefix in text and not caller.may_see(who)
        for name in who.names
        if name in text
    ]
    if wrong:
        referred = [things.fill(name, room.other(things)) for name in case.refers_to]
        known = asked.path + json.dumps(asked.body, default=bytes.decode) + " ".join(referred)
        wrong = [name for name in wrong if name not in known]
    if case.parts and b'"items"' in raw:
        # An answer tells nothing of another's transaction, not even its state.
        for part, item in zip(case.parts, json.loads(raw)["items"], strict=True):
            if part.is_foreign and "state" in item:
                wrong.append(f"the state {item['state']}")
    return wrong


def test_every_route_is_in_the_matrix(room: Room, table: list[Case]) -> None:
    existing, covered = routes(), {case.route for case in table}
    new = sorted(existing - covered)
    assert new == [], (
        f"{', '.join(new)}: add a Case to `cases` in {__file__}, which says which right on which thing lets a request "
        "in, and how one asks for one's own thing and for another's"
    )
    assert sorted(covered - existing) == [], "these routes are gone: take their lines out of `cases`"


def test_the_document_has_every_data_route(room: Room) -> None:
    """The document lists the data routes, which FastAPI does not serve, too."""
    document = room.do("GET", "/openapi.json")["paths"]
    told = {f"{m.upper()} {p}" for p, methods in document.items() for m in methods if not p.startswith("/v1/admin")}
    assert {f"{method} {path}" for method, path, _ in DataRoutes.ROUTES} == {t for t in told if " /v1/" in t}


REFUSED_TURNS = 6
"""In `make test` a route is asked by one of so many of those whom it refuses, in turns; in `make test-long` by all."""


def test_every_route_answers_every_caller_by_its_rights(
    room: Room, table: list[Case], pytestconfig: pytest.Config
) -> None:
    """Promise: denied by default. Every route by everyone, on their own things and on another's."""
    turns = REFUSED_TURNS if pytestconfig.getoption("markexpr") == "not long" else 1
    everyone = callers(room)
    strangers = [caller for caller in everyone if room.own.prefix in caller.name]
    wrong: list[str] = []
    cells = 0
    for number, case in enumerate(table):
        for things in (room.own, room.foreign) if case.is_of_things else (room.own,):
            # For the other's things only callers with own rights ask: the rest would be the same with names changed.
            who = everyone if things is room.own else strangers
            other = room.other(things)
            asked = case.ask(things, other)
            expected = {caller.name: case.expected(caller, things, other) for caller in who}
            # Callers that are refused ask first: after them nothing may have changed.
            refused = [c for c in who if set(expected[c.name][1:] or expected[c.name]) <= {401, 403, 409}]
            let_in = [c for c in who if c not in refused]
            before = kept(room)
            for caller in (*refused[number % turns :: turns], *let_in):
                request = f"{case.route}{case.what and ' (' + case.what + ')'} by {caller.name!r}, {things.whose}"
                if caller in let_in:
                    if before is not None and (after := kept(room)) != before:
                        changed = [name for name, value in after.items() if value != before[name]]
                        wrong.append(f"{case.route} ({case.what}), {things.whose}: refused, and yet changed {changed}")
                    before = None
                    asked = case.ask(things, other)
                status, raw = room.ask(asked, caller.token)
                cells += 1
                actual = statuses(raw, status, case)
                if actual != expected[caller.name]:
                    wrong.append(f"{request}: expected {expected[caller.name]}, answered {actual} {raw[:200].decode()}")
                if leaked := shown_wrongly(raw, asked, case, caller, room, things):
                    wrong.append(f"{request}: the answer ({status}) shows {leaked}")
                for takes, text in case.shows if status == 200 else ():
                    if (things.fill(text, other) in raw.decode()) != caller.meets(takes, things, other):
                        wrong.append(f"{request}: the answer shows {text} to whom it may not, or not to whom it must")
                if case.spoils and caller in let_in:
                    room.restore()
            if before is not None and kept(room) != before:
                wrong.append(f"{case.route} ({case.what}), {things.whose}: refused to all, and yet it changed a thing")
    assert wrong == [], f"{len(wrong)} of {cells} cells:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("right", "need", "is_covered"),
    [
        ("publish:order.*", "publish:order.placed", True),
        ("publish:order.*", "publish:orders", False),
        ("publish", "publish:dead-letter.g", False),
        ("publish:dead-letter.*", "publish:dead-letter.g", True),
        ("consume:g", "consume:g@t", True),
        ("consume:g@t", "consume:g@u", False),
        ("consume:g@t", f"consume:g@{ANY_TOPIC}", True),
        ("consume:g@t", "consume:g@*", False),
        ("admin:t", "admin", False),
        ("admin", "admin:t", True),
        ("view", "admin", False),
    ],
)
def test_rights_match_the_table(right: str, need: str, is_covered: bool) -> None:
    assert covers(right, need) is is_covered


def test_a_right_with_a_wildcard_reports_no_inbox_by_brackets(room: Room) -> None:
    """The only wildcard of a pattern is `*`: brackets would let a right's characters match other topics."""
    t = room.own
    token = room.server.make(f"consume:{t.group}@*.x*")
    path = f"/v1/admin/groups/{t.group}/subscriptions/{quote('*[.x]*')}/inbox"
    before = kept(room)
    status, raw = room.ask(Asked("PUT", path, {"whole_from": "2030-01-01T00:00:00Z"}), token)
    assert (status, json.loads(raw)["code"]) == (422, "invalid_name")
    assert kept(room) == before


@pytest.mark.parametrize("mode", ["exclusive", "broadcast"])
def test_a_topic_that_one_may_not_consume_is_left_out(room: Room, unique: str, mode: str) -> None:
    """A poll without `topics` leaves out a topic without a right to it, whether exclusive or broadcast."""
    own, other = f"{unique}.own", f"{unique}.other"
    for topic, of_mode in ((own, "shared"), (other, mode)):
        room.do("PUT", f"/v1/admin/groups/{unique}/subscriptions/{topic}", {"mode": of_mode, "start": "earliest"})
    asked = {"instance": "somebody", "topics": [other], "max": 1, "wait": 0, "lease": 30}
    for _ in range(2):  # an instance gets broadcasts from its first poll on
        room.publish((other, "theirs"))
        room.do("POST", f"/v1/groups/{unique}/receive", asked)
    room.publish((own, "mine"), (other, "theirs"))
    poll = Asked("POST", f"/v1/groups/{unique}/receive", {"instance": "me", "max": 10, "wait": 0, "lease": 30})
    status, raw = room.ask(poll, room.server.make(f"consume:{unique}@{own}"))
    assert status == 200, raw
    assert [message["body"] for message in json.loads(raw)["messages"]] == ["mine"]
    assert f"{unique}@me" not in json.dumps(room.do("GET", "/v1/admin/groups"))  # no broadcast instance was made for it
    status, raw = room.ask(poll, room.all)
    code = {"exclusive": "topic_is_taken", "broadcast": "mixed_modes"}[mode]
    assert json.loads(raw)["code"] == code  # a caller with both rights is refused
