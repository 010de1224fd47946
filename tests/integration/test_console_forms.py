"""The console's forms, posted as a browser without scripts does: their fields, previews and effects."""

from __future__ import annotations

import html
import re
import shlex
from typing import Any
from urllib.parse import parse_qsl, urlencode

import pytest

from notify.admin_api.groups import EFFECTS_AGAIN, EFFECTS_KEPT
from notify.admin_api.writes import FORMS
from notify.server.admin import topics
from notify.testing import InMemoryServer
from tests.support.commands import cli
from tests.support.http import admin, ask, post

FORM = "application/x-www-form-urlencoded"


def send(server: InMemoryServer, name: str, step: str, **fields: Any) -> tuple[int, str]:
    """Post a form; return the status and the page."""
    body = urlencode({"reason": "a test", "step": step} | fields).encode()
    status, page = ask(server.url, "POST", f"/do/{name}", body, kind=FORM)
    return status, str(page)


def subscription(server: InMemoryServer, name: str) -> dict[str, Any]:
    (subscription_shown,) = admin(server.url, "GET", f"groups/{name}")["subscriptions"]
    return dict(subscription_shown)


def with_a_consumer(server: InMemoryServer, name: str) -> str:
    """Make a topic and a group of this name, whose consumer has leased a message; return its receipt."""
    admin(server.url, "PUT", f"groups/{name}/subscriptions/{name}", {"start": "earliest"})
    post(server.url, "/v1/messages", {"messages": [{"topic": name, "body": "x"}]})
    asked = {"instance": "i", "topics": [name], "max": 1, "wait": 0, "lease": 60}
    (message,) = post(server.url, f"/v1/groups/{name}/receive", asked)["messages"]
    return str(message["receipt"])


def test_a_mode_that_is_in_use_is_changed_by_force(memory: InMemoryServer, unique: str) -> None:
    with_a_consumer(memory, unique)
    change = {"group": unique, "topic": unique, "mode": "ordered"}
    for step in ("preview", "do"):
        status, page = send(memory, "subscription.put", step, **change)
        assert status == 409 and "mode_in_use" in page
        assert 'name="force"' in page and "consumers may get messages again, or out of order" in page
    assert subscription(memory, unique)["mode"] == "shared"
    assert send(memory, "subscription.put", "do", **change, force="1")[0] == 200
    assert subscription(memory, unique)["mode"] == "ordered"


def test_a_reset_has_effects_again_where_that_is_chosen(memory: InMemoryServer, unique: str) -> None:
    with_a_consumer(memory, unique)
    move = {"group": unique, "topic": unique, "to": "earliest"}
    for chosen, effects, replay in (({}, EFFECTS_KEPT, 0), ({"replay_effects": "1"}, EFFECTS_AGAIN, 1)):
        status, page = send(memory, "group.reset", "preview", **move, **chosen)
        assert status == 200 and effects in page
        assert "repeat effects that took place before" in page  # the form explains it
        assert send(memory, "group.reset", "do", **move, **chosen)[0] == 200
        assert subscription(memory, unique)["replay"] == replay


def test_dead_letters_have_effects_again_where_that_is_chosen(memory: InMemoryServer, unique: str) -> None:
    items = [{"receipt": with_a_consumer(memory, unique), "action": "dead_letter"}]
    post(memory.url, f"/v1/groups/{unique}/settle", {"items": items})
    (letter,) = admin(memory.url, "GET", f"groups/{unique}/dead-letters")["messages"]
    ways = {"dead-letters.redrive-all": {"topic": unique}, "dead-letters.redrive": {"ids": letter["id"]}}
    for name, fields in ways.items():
        for chosen, effects in (({}, EFFECTS_KEPT), ({"replay_effects": "1"}, EFFECTS_AGAIN)):
            status, page = send(memory, name, "preview", group=unique, **fields, **chosen)
            assert status == 200 and effects in page, name
    assert send(memory, name, "do", group=unique, **fields, replay_effects="1")[0] == 200
    asked = {"instance": "i", "max": 1, "wait": 5, "lease": 60}
    (message,) = post(memory.url, f"/v1/groups/{unique}/receive", asked)["messages"]
    assert message["headers"]["notify-replay"] == "1"


def test_a_job_of_dead_letters_is_told_beside_what_it_looks_for(memory: InMemoryServer, unique: str) -> None:
    items = [{"receipt": with_a_consumer(memory, unique), "action": "dead_letter"}]
    post(memory.url, f"/v1/groups/{unique}/settle", {"items": items})
    status, _ = send(memory, "dead-letters.redrive-all", "do", group=unique, topic=unique, replay_effects="1")
    assert status == 200
    asked = {"instance": "i", "max": 1, "wait": 30, "lease": 60}
    (message,) = post(memory.url, f"/v1/groups/{unique}/receive", asked)["messages"]
    assert message["headers"]["notify-replay"] == "1"


def test_a_change_that_changes_nothing_leaves_a_subscription_as_it_was(memory: InMemoryServer, unique: str) -> None:
    settings = {"max_attempts": 5, "retry_min": 2.5, "retry_max": 40.0, "tags": ["a", "b"], "filter": "key == 'k'"}
    admin(memory.url, "PUT", f"groups/{unique}/subscriptions/{unique}", settings)
    before = subscription(memory, unique)
    page = str(ask(memory.url, "GET", f"/groups/{unique}")[1])
    (link,) = re.findall(r'href="/do/subscription\.put\?([^"]+)"[^>]*>change<', page)
    fields = dict(parse_qsl(html.unescape(link)))
    assert send(memory, "subscription.put", "do", **fields)[0] == 200
    assert subscription(memory, unique) == before


def test_priorities_are_a_form_with_a_row_for_each_class(memory: InMemoryServer, unique: str) -> None:
    admin(memory.url, "PUT", f"groups/{unique}/subscriptions/{unique}", {})
    classes = [{"name": name, "weight": n + 1, "topics": [f"{name}.*", "x"]} for n, name in enumerate("abc")]
    admin(memory.url, "PUT", f"groups/{unique}/priorities", {"classes": classes, "shares": {"a.1": 2}})
    page = str(ask(memory.url, "GET", f"/do/priorities.put?group={unique}")[1])
    fields = dict(re.findall(r'<input id="f-\w+" name="(\w+)" value="([^"]*)"', page))
    fields |= dict(re.findall(r'<textarea id="f-\w+" name="(\w+)"[^>]*>([^<]*)</textarea>', page))
    assert fields["class_3"] == "c" and fields["topics_1"] == "a.*, x" and fields["class_4"] == ""
    assert fields["shares"] == "a.1=2"
    del fields["reason"]
    fields |= {"class_2": "", "weight_2": "", "topics_2": "", "class_4": "rest", "weight_4": "9"}
    for step in ("preview", "do"):
        assert send(memory, "priorities.put", step, group=unique, **fields)[0] == 200
    shown = admin(memory.url, "GET", f"groups/{unique}/priorities")
    assert [(c["name"], c["weight"], c["topics"]) for c in shown["classes"]] == [
        ("a", 1, ["a.*", "x"]), ("c", 3, ["c.*", "x"]), ("rest", 9, []),
    ]  # fmt: skip
    assert shown["shares"] == {"a.1": 2}
    status, page = send(memory, "priorities.put", "do", group=unique, weight_2="5", class_1="a", weight_1="1")
    assert status == 422 and "Class 2 has no name" in page


def test_a_group_of_failures_is_previewed_in_sentences(memory: InMemoryServer, unique: str) -> None:
    items = [{"receipt": with_a_consumer(memory, unique), "action": "dead_letter", "reason": "E: no (at shop.add:1)"}]
    post(memory.url, f"/v1/groups/{unique}/settle", {"items": items})
    page = str(ask(memory.url, "GET", f"/groups/{unique}/dead-letters")[1])
    (link,) = re.findall(r'href="/do/dead-letters\.drop\?([^"]+)"', page)
    fields = dict(parse_qsl(html.unescape(link)))
    status, page = send(memory, "dead-letters.drop", "preview", **fields)
    assert status == 200 and "(E in shop.add) has 1 message waiting" in page
    assert "drops the matching ones" in page
    assert send(memory, "dead-letters.drop", "do", **fields)[0] == 200
    (letter,) = admin(memory.url, "GET", f"groups/{unique}/dead-letters")["messages"]
    status, page = send(memory, "dead-letters.drop", "preview", group=unique, ids=letter["id"])
    assert (
        status == 200 and f"1 message of the dead letters of {unique} will be dropped. This cannot be undone." in page
    )


def test_a_schedule_is_made_shown_and_filled_in(memory: InMemoryServer, unique: str) -> None:
    fields = {"schedule": unique, "topic": unique, "body": '{"a": 1}', "cron": "0 7 * * 1-5", "zone": "Europe/Berlin"}
    status, page = send(memory, "schedule.put", "preview", **fields, headers="h=v")
    assert status == 200 and f"sends a message to topic {unique} at 0 7 * * 1-5 in Europe/Berlin" in page
    assert admin(memory.url, "GET", f"schedules?prefix={unique}")["schedules"] == []
    status, page = send(memory, "schedule.put", "do", **fields, headers="h=v")
    assert status == 200 and "The next instants are" in page
    for path in ("/schedules", f"/schedules/{unique}"):
        status, page = ask(memory.url, "GET", path)
        assert status == 200 and "0 7 * * 1-5" in page
    status, page = ask(memory.url, "GET", f"/do/schedule.put?schedule={unique}")
    assert 'value="0 7 * * 1-5"' in page and "h=v</textarea>" in page and "{&#34;a&#34;: 1}</textarea>" in page
    status, page = send(memory, "schedule.put", "preview", **fields | {"cron": "0 7 * *"})
    assert status == 422 and "five fields" in page
    for what, said in (("pause", "until it is resumed"), ("resume", "continues"), ("delete", "any more")):
        status, page = send(memory, f"schedule.{what}", "do", schedule=unique)
        assert status == 200 and said in page


def test_a_form_offers_names_and_leads_back(memory: InMemoryServer, unique: str) -> None:
    with_a_consumer(memory, unique)
    page = str(ask(memory.url, "GET", f"/do/group.reset?group={unique}")[1])
    assert 'name="topic" value="" autocomplete="off" list="names-topics"' in page
    assert f'<a class="button" href="/groups/{unique}">Cancel</a>' in page
    page = str(ask(memory.url, "GET", "/do/group.pause")[1])
    assert 'list="names-groups"' in page and '<a class="button" href="/groups">Cancel</a>' in page
    page = str(ask(memory.url, "GET", "/do/message.send")[1])
    assert '<a class="button" href="/messages">Cancel</a>' in page
    for kind in ("topics", "groups"):
        assert ask(memory.url, "GET", f"/names/{kind}?q={unique[:-1]}")[1] == [unique]
    assert ask(memory.url, "GET", f"/names/schedules?q={unique}")[1] == []
    assert ask(memory.url, "GET", "/names/tokens")[0] == 422


def test_every_form_leads_back_to_a_page(memory: InMemoryServer) -> None:
    for name in FORMS:
        if name == "settings.put":
            continue
        page = str(ask(memory.url, "GET", f"/do/{name}")[1])
        (back,) = re.findall(r'<a class="button" href="([^"]+)">Cancel</a>', page)
        assert ask(memory.url, "GET", html.unescape(back))[0] == 200, f"{name} leads to {back}"


def test_an_empty_server_teaches() -> None:
    """The commands that the overview shows do what it says, and then it shows the topic instead."""
    with InMemoryServer() as server:
        page = html.unescape(str(ask(server.url, "GET", "/")[1]))
        (commands,) = re.findall(r"Commands that send a first message\">(.*?)</pre>", page, re.DOTALL)
        address, send_command, tail = commands.splitlines()
        assert address == f"export NOTIFY_URL={server.url}"
        sent = cli(*shlex.split(send_command)[1:], "--url", server.url)
        assert sent[0] == 0
        code, shown = cli(*shlex.split(tail)[1:], "--url", server.url, "--json")
        assert code == 0 and shown["body"] == '{"hello": "world"}'
        assert "first message" not in str(ask(server.url, "GET", "/")[1])


def test_a_place_for_the_trace_is_asked_for(memory: InMemoryServer) -> None:
    for url in ("https://traces.example/", "javascript:alert('{trace}')"):
        status, page = send(memory, "settings.put", "preview", setting="trace_url", trace_url=url)
        assert status == 422 and "must begin with http:// or https:// and contain {trace}" in page
    url = "https://traces.example/{trace}"
    assert send(memory, "settings.put", "preview", setting="trace_url", trace_url=url)[0] == 200


def test_the_form_of_a_setting_has_its_value(memory: InMemoryServer) -> None:
    """The field was empty: the value that one changes stood on another page, and `false` was shown as `true`."""

    def shown(name: str) -> str:
        page = str(ask(memory.url, "GET", f"/do/settings.put?setting={name}")[1])
        (field,) = re.findall(rf'<(?:input|select) id="f-{name}"[^>]*>(?:<option.*</select>)?', page)
        return str(field)

    url = "https://traces.example/{trace}"
    for name, value in (("check_attempts", "7"), ("create_topics", "false"), ("trace_url", url)):
        assert send(memory, "settings.put", "do", setting=name, **{name: value})[0] == 200
    assert 'value="7"' in shown("check_attempts")
    assert "<option>true</option><option selected>false</option>" in shown("create_topics")
    assert f'value="{url}"' in shown("trace_url")
    assert send(memory, "settings.put", "do", setting="trace_url", trace_url="")[0] == 200
    assert 'value=""' in shown("trace_url"), "a browser sends an emptied field, which empties the setting"
    status, page = send(memory, "settings.put", "do", setting="check_attempts", check_attempts="")
    assert status == 422 and "check_attempts is missing" in page
    admin(memory.url, "POST", "settings/rollback", {"to": 0})


def test_a_form_that_is_sent_twice_acts_once(memory: InMemoryServer, unique: str) -> None:
    """A double click on "Do it", or a reload of the result, sent a message twice."""
    admin(memory.url, "PUT", f"topics/{unique}", {})

    def end() -> int:
        return int(sum(queue["end"] for queue in admin(memory.url, "GET", f"topics/{unique}")["queues"]))

    page = send(memory, "message.send", "preview", topic=unique, body="1")[1]
    (number,) = re.findall(r'name="once" value="([0-9a-f]{16})"', page)
    for said in ("Done, and recorded", "Nothing was done again", "Nothing was done again"):
        status, page = send(memory, "message.send", "do", topic=unique, body="1", once=number)
        assert status == 200 and said in page
    assert end() == 1
    assert "Done, and recorded" in send(memory, "message.send", "do", topic=unique, body="2", once=number)[1]
    assert end() == 2, "another text is another message"
    status, page = send(memory, "topic.delete", "do", topic=f"{unique}x", once=number)
    assert status == 404
    admin(memory.url, "PUT", f"topics/{unique}x", {})
    assert send(memory, "topic.delete", "do", topic=f"{unique}x", once=number)[0] == 200, "it was refused before"


def test_a_token_is_shown_once(memory: InMemoryServer, unique: str) -> None:
    form = {"name": unique, "rights": "view", "reason": "r", "step": "do", "once": "0123456789abcdef"}
    first, again = (
        str(ask(memory.url, "POST", "/do/credential.add", urlencode(form).encode(), kind=FORM)[1]) for _ in range(2)
    )
    assert 'id="token"' in first
    assert 'id="token"' not in again and "Nothing was done again" in again


def test_many_topics_are_listed_by_name_if_they_cannot_be_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A click on a heading led to an error."""
    monkeypatch.setattr(topics, "MOST_SORTED", 3)
    with InMemoryServer() as server:
        for n in range(4):
            admin(server.url, "PUT", f"topics/t{n}", {})
        status, page = ask(server.url, "GET", "/topics?sort=lag")
        assert status == 200 and "sorted by name" in page and "more than 3 topics cannot be sorted" in page
        assert re.findall(r'data-key="(t\d)"', page) == ["t0", "t1", "t2", "t3"]
