"""The console's pages as their readers have them: what they offer to whom, behind a proxy's prefix, with odd names."""

from __future__ import annotations

import html
import http.client
import re
from collections.abc import Iterator
from email.message import Message
from urllib.parse import quote, urlencode, urlsplit

import pytest

from notify.server.access import lookup
from notify.server.console.rendering import NAVIGATION, SECURITY
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import Caller, die, publish, subscribe
from tests.support.http import admin, ask, post
from tests.support.rights import Room, Things
from tests.support.servers import GuardedInMemory
from tests.support.transactions import new_id

HTML = {"accept": "text/html"}
LISTS = [path for _, pages in NAVIGATION for path, _ in pages]


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    """Two parties' things: each has a dead letter, a transaction in doubt, a schedule and a paused group."""
    with pytest.MonkeyPatch.context() as patched, GuardedInMemory() as server:
        patched.setattr(lookup, "WAIT_SECONDS", PATIENCE_SECONDS)
        made = Room(server)
        made.restore()
        for things in (made.own, made.foreign):
            receipt = made.receipt(things, things)
            dead = {"receipt": receipt, "action": "dead_letter", "reason": "no such customer"}
            made.do("POST", f"/v1/groups/{things.group}/settle", {"items": [dead]})
            made.half(things, new_id())
            daily = {"topic": things.topic, "body": "1", "cron": "0 7 * * *", "zone": "UTC"}
            made.do("PUT", f"/v1/admin/schedules/{things.group}", daily)
        yield made
        made.close()


def pages_of(room: Room, things: Things) -> list[str]:
    (letter,) = room.do("GET", f"/v1/admin/groups/{things.group}/dead-letters")["messages"]
    (half,) = room.do("GET", f"/v1/admin/transactions?producer_group={things.producer}")["transactions"]
    return [
        f"/groups/{things.group}", f"/groups/{things.group}/dead-letters", f"/groups/{things.group}/held-keys",
        f"/topics/{things.topic}", f"/messages?topic={things.topic}", f"/messages/{letter['id']}",
        f"/transactions/{half['id']}", f"/schedules/{things.group}",
    ]  # fmt: skip


def offered(page: str) -> set[str]:
    """The writes that a page offers: addresses of forms, of links and of buttons that can be pressed."""
    links = set(re.findall(r'<a [^>]*href="(/do/[^"]+)"', page))
    if re.search(r'name="ids" value="[^"]*"(?![^>]*disabled)', page):
        links |= set(re.findall(r'(?:form)?action="(/do/[^"]+)"', page))
    return {html.unescape(link) for link in links}


def test_a_page_offers_the_writes_that_its_reader_may_do(room: Room) -> None:
    """A reader with the right `view` saw every button, and each was refused after a form and a preview."""
    seen: dict[str, set[str]] = {}
    for rights in ("view", "view admin:{group} admin:{topic} admin:{producer}", "view admin"):
        token = room.server.make(*(room.own.fill(right, room.foreign) for right in rights.split()))
        seen[rights] = set()
        for path in [*LISTS, *pages_of(room, room.own), *pages_of(room, room.foreign)]:
            status, page = ask(room.server.url, "GET", path, token=token, headers=HTML)
            assert status == 200, path
            seen[rights] |= offered(str(page))
        for link in sorted(seen[rights]):
            name, _, query = link.partition("?")
            body = (query + ("&" if query else "") + "reason=r").encode()
            form = "application/x-www-form-urlencoded"
            status, page = ask(room.server.url, "POST", name, body, kind=form, token=token, headers=HTML)
            assert status != 403, (rights, link)
    nothing, some, everything = seen.values()
    assert not nothing
    kinds = {link.partition("?")[0] for link in everything}
    assert some < everything and len(kinds) > 20
    assert any(f"group={room.own.group}" in link for link in some)
    assert not any(room.foreign.group in link for link in some)


def raw(url: str, method: str, path: str, body: str | None = None, **headers: str) -> tuple[int, Message, str]:
    """One request; (the answer's status, its headers, its text)."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_SECONDS)
    fields = {"content-type": "application/x-www-form-urlencoded"} if body is not None else {}
    connection.request(method, path, body, fields | {name.replace("_", "-"): text for name, text in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, text


def test_behind_a_prefix_every_address_has_it(room: Room) -> None:
    """nginx: `location /notify/ { proxy_pass http://127.0.0.1:7400/; proxy_set_header X-Forwarded-Prefix /notify; }`"""
    url, token, prefix = room.server.url, room.server.admin, {"x-forwarded-prefix": "/ops/notify/"}
    search, ops = "/topics?prefix=order.&sort=lag", {"x_forwarded_prefix": "/ops/notify"}
    sign_in = "/login?" + urlencode({"next": search})
    for path in [*LISTS, *pages_of(room, room.own), f"/do/group.pause?group={room.own.group}", "/groups/nobody"]:
        page = str(ask(url, "GET", path, token=token, headers=HTML | prefix)[1])
        addresses = re.findall(r' (?:href|src|action|formaction|data-source)="(/[^"]*)"', page)
        assert len(addresses) > 15 and 'data-prefix="/ops/notify"' in page
        assert [a for a in addresses if not a.startswith("/ops/notify/")] == []
    _, login, _ = raw(url, "GET", search, accept="text/html", **ops)
    assert login["location"] == "/ops/notify" + sign_in
    _, _, text = raw(url, "GET", sign_in, x_forwarded_prefix="/ops")
    assert 'action="/ops/login"' in text and 'value="/topics?prefix=order.&amp;sort=lag"' in text
    form = urlencode({"token": token, "next": search})
    _, signed_in, _ = raw(url, "POST", "/login", form, **ops)
    assert signed_in["location"] == "/ops/notify" + search
    assert "Path=/ops/notify;" in signed_in["set-cookie"]
    _, report, _ = raw(url, "GET", "/audits/7/report", authorization=f"Bearer {token}", **ops)
    assert report["location"] == "/ops/notify/v1/admin/audits/7/report"


@pytest.mark.parametrize(
    "prefix", ["//evil.example", "https://evil.example", '/"><script>', "/a/../b?", "/" + "a" * 999]
)
def test_a_prefix_leads_to_this_server_only(room: Room, prefix: str) -> None:
    page = str(
        ask(room.server.url, "GET", "/", token=room.server.admin, headers=HTML | {"x-forwarded-prefix": prefix})[1]
    )
    assert 'href="/static/console.css"' in page and 'data-prefix=""' in page


def test_a_form_that_is_sent_after_the_session_ended_is_not_lost(room: Room) -> None:
    """It led to the page to sign in, and from there to an empty form."""
    status, _, page = raw(room.server.url, "POST", "/do/group.pause", "group=g&reason=r&step=do", accept="text/html")
    assert status == 401 and "your browser sends the form again" in page and 'href="/login"' in page


def test_no_page_has_styles_or_scripts_within(room: Room) -> None:
    assert "unsafe" not in SECURITY["content-security-policy"]
    for path in [*LISTS, *pages_of(room, room.own), "/login"]:
        page = str(ask(room.server.url, "GET", path, token=room.server.admin, headers=HTML)[1])
        assert not re.search(r'<style|<script(?! src="/static/)| style="| on\w+="', page), path


MARK = '<em class="odd">'
ODD = [f"{MARK}\"'&amp;</em>", "عربي \u202e txt", "🫖" * 50, "x" * 200]
"""Texts that a page must show as they are: HTML, from right to left, beyond the basic plane, and one long word."""


def test_odd_texts_are_shown_as_they_are(memory: InMemoryServer, unique: str) -> None:
    subscribe(memory.url, unique, unique, max_attempts=1)
    messages = [{"topic": unique, "body": text, "key": text, "headers": {"odd": text}} for text in ODD]
    assert [item["status"] for item in post(memory.url, "/v1/messages", {"messages": messages})["items"]] == [201] * 4
    caller = Caller(memory.url, unique, "i")
    for message in caller.receive(unique, wait=30, max=4):
        caller.settle([message], "dead_letter", reason=message["body"], trace=message["body"])
    letters = admin(memory.url, "GET", f"groups/{unique}/dead-letters")["messages"]
    paths = [f"/groups/{unique}", f"/groups/{unique}/dead-letters", f"/messages?topic={unique}"]
    paths += ["/messages?" + urlencode({"key": text}) for text in ODD]
    paths += [f"/messages/{letter['id']}" for letter in letters] + ["/actions?" + urlencode({"target": ODD[0]})]
    paths += [f"/do/dead-letters.edit?group={unique}&id={letter['id']}" for letter in letters]
    shown = ""
    for path in paths:
        status, page = ask(memory.url, "GET", path, headers=HTML)
        assert status == 200 and MARK not in str(page), path
        shown += html.unescape(str(page))
    assert all(text in shown for text in ODD)
    for text in ODD:
        assert ask(memory.url, "GET", f"/find?q={quote(text)}", headers=HTML)[0] == 303


def test_the_overview_counts_the_topics_that_people_made() -> None:
    """It counted those of retries and dead letters, too, and led to a list without them."""
    with InMemoryServer() as server:
        subscribe(server.url, "points", "order.placed", max_attempts=1)
        publish(server.url, "order.placed", ["1"])
        die(Caller(server.url, "points", "points-1"), "order.placed", 1, "no such customer")
        of_list = admin(server.url, "GET", "topics?internal=false")["of"]
        assert of_list == 1 < admin(server.url, "GET", "topics")["of"]
        assert admin(server.url, "GET", "overview")["queues"]["topics"] == of_list


def test_a_message_says_who_closed_its_dead_letter(memory: InMemoryServer, unique: str) -> None:
    """It said that the message was sent again, and not by whom."""
    subscribe(memory.url, unique, unique, max_attempts=1)
    publish(memory.url, unique, ["0", "1", "2", "3"])
    die(Caller(memory.url, unique, "i"), unique, 4, "no such customer")
    letters = [m["id"] for m in admin(memory.url, "GET", f"groups/{unique}/dead-letters")["messages"]]
    path = f"groups/{unique}/dead-letters"
    why = {n: f"reason {n} of {unique}" for n in range(4)}
    users = {n: {"x-notify-user": f"user-{n}"} for n in range(4)}
    for n, (what, body) in enumerate([("redrive", {}), ("drop", {}), ("edit", {"body": "9"})]):
        chosen = {"id": letters[n]} if what == "edit" else {"ids": [letters[n]]}
        ask(memory.url, "POST", f"/v1/admin/{path}/{what}", chosen | body | {"reason": why[n]}, headers=users[n])
    status, answer = ask(
        memory.url, "POST", f"/v1/admin/{path}/redrive", {"all": True, "reason": why[3]}, headers=users[3]
    )
    assert status == 200, answer
    for n, letter in enumerate(letters):

        def shown(letter: str = letter, n: int = n) -> str:
            page = str(ask(memory.url, "GET", f"/messages/{letter}", headers=HTML)[1])
            return page if f"user-{n}" in page else ""

        page = eventually(shown, f"who closed letter {n}")  # a job does the last one
        assert f'href="/actions?what=dead_letter&amp;target={unique}">user-{n}</a>' in page and why[n] in page


@pytest.mark.long
def test_a_groups_dead_letters_are_counted_beside_many_groups_of_like_names() -> None:
    """The count was looked for among the 100 groups with the most dead letters: beyond, the page said 0."""
    with InMemoryServer() as server:
        groups = ["points", *(f"points.{n}" for n in range(100))]
        for group in groups:
            subscribe(server.url, group, "order.placed", max_attempts=1)
        publish(server.url, "order.placed", ["1", "2"])
        for group in groups:
            die(Caller(server.url, group, "i"), "order.placed", 1 if group == "points" else 2, "no such customer")
        page = str(ask(server.url, "GET", "/groups/points", headers=HTML)[1])
        assert 'aria-label="Dead letters: 1"' in page
