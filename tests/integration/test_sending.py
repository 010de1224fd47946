"""A person sends a message to a topic, and a dead letter with a corrected body."""

from __future__ import annotations

from typing import Any

import pytest

import notify.client
from notify.testing import InMemoryServer
from notify.testing.ports import free_port
from tests.support.commands import cli
from tests.support.groups import Caller, bodies, die, publish, subscribe
from tests.support.http import admin, ask, refusal


def letter(url: str, group: str) -> dict[str, Any]:
    """A dead letter of a group, which another group handled."""
    subscribe(url, group, group)
    subscribe(url, group + "-other", group)
    publish(url, group, ["amount: ten"], key=True)
    die(Caller(url, group, "i"), group, 1, "ValueError: ten")
    other = Caller(url, group + "-other", "i")
    other.settle(other.receive(group))
    (message,) = admin(url, "GET", f"groups/{group}/dead-letters")["messages"]
    return dict(message)


def test_a_message_is_sent_to_a_topic(frozen_server: InMemoryServer, unique: str) -> None:
    url, path = frozen_server.url, f"topics/{unique}/messages"
    assert refusal(url, "POST", path, body="x") == (404, "not_found")  # a mistyped name makes no topic
    subscribe(url, unique, unique)
    fields = {"body": '{"n": 1}', "key": "7", "tag": "vip", "headers": {"of": "a test"}}
    preview = admin(url, "POST", path, fields | {"dry_run": True})["result"]
    assert preview == {"groups": [unique]} and Caller(url, unique, "i").receive(unique) == []
    (item,) = admin(url, "POST", path, fields)["result"]["items"]
    (message,) = Caller(url, unique, "i").receive(unique)
    assert (message["id"], message["body"], message["key"], message["tag"]) == (item["id"], '{"n": 1}', "7", "vip")
    assert message["headers"] == {"of": "a test"}
    assert refusal(url, "POST", path, dry_run=True)[1] == "invalid_body"
    assert refusal(url, "POST", path, body="x", tag="no tag", dry_run=True)[1] == "invalid_name"
    (action,) = [a for a in admin(url, "GET", "actions?what=message.send")["actions"] if a["target"] == unique]
    assert action["result"]["items"][0]["id"] == item["id"]


def test_a_message_to_no_server_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's producer tried again for 10 s, and said nothing meanwhile."""

    def producer(*words: object, **options: object) -> None:
        raise AssertionError("a producer tries again")

    monkeypatch.setattr(notify.client, "TransactionProducer", producer)
    code, answer = cli("message", "send", "greetings", "hello", "--url", f"http://127.0.0.1:{free_port()}")
    assert code == 2 and "is it started, and is this its address?" in answer["text"]


def test_a_corrected_letter_goes_to_its_group_alone_once(frozen_server: InMemoryServer, unique: str) -> None:
    url, path = frozen_server.url, f"groups/{unique}/dead-letters/edit"
    dead = letter(url, unique)
    edit = {"id": dead["id"], "body": "amount: 10", "tag": "mended"}
    assert admin(url, "POST", path, edit | {"dry_run": True})["result"]["changed"] == ["body", "tag"]
    result = admin(url, "POST", path, edit)["result"]
    assert [item["status"] for item in result["items"]] == [201] and result["changed"] == ["body", "tag"]
    (message,) = Caller(url, unique, "i").receive(unique)
    assert (message["body"], message["key"], message["tag"]) == ("amount: 10", "a", "mended")
    assert message["headers"]["notify-edited"] == "body, tag"
    assert message["headers"]["notify-first-id"] == dead["id"]
    assert Caller(url, unique + "-other", "i").receive(unique) == []
    (listed,) = admin(url, "GET", f"groups/{unique}/dead-letters")["messages"]
    assert listed["redriven"] and bodies([listed]) == ["amount: ten"]  # the letter stays as it was
    assert admin(url, "GET", f"groups/{unique}/dead-letters/failures")["failures"][0]["open"] == 0
    assert refusal(url, "POST", path, **edit) == (409, "letter_closed")
    (action,) = [a for a in admin(url, "GET", "actions?what=dead_letter.edit")["actions"] if a["target"] == unique]
    assert action["result"]["changed"] == ["body", "tag"]


def test_an_invalid_edit_is_refused(frozen_server: InMemoryServer, unique: str) -> None:
    url, path = frozen_server.url, f"groups/{unique}/dead-letters/edit"
    dead = letter(url, unique)
    assert refusal(url, "POST", path, id=dead["id"]) == (422, "invalid")  # nothing is changed
    assert refusal(url, "POST", path, id=dead["id"], body="amount: ten") == (422, "invalid")
    assert refusal(url, "POST", path, id=dead["id"], body="x" * (2 << 20), dry_run=True)[0] == 413
    status, problem = ask(url, "POST", f"/v1/admin/{path}", {"reason": "r", "id": "no-id", "body": "x"})
    assert (status, problem["code"]) == (404, "not_found")
    changed = admin(url, "POST", path, {"id": dead["id"], "key": "", "headers": {"a": "b"}})["result"]["changed"]
    assert changed == ["key", "headers"]
    (message,) = Caller(url, unique, "i").receive(unique)
    assert "key" not in message and message["headers"]["a"] == "b" and message["body"] == "amount: ten"


def test_a_letter_is_corrected_from_the_command_line(frozen_server: InMemoryServer, unique: str) -> None:
    url = frozen_server.url
    dead = letter(url, unique)
    flags = ("--body", "amount: 10", "--header", "a=b", "--reason", "typed wrongly", "--url", url)
    code, done = cli("dead-letter", "edit", unique, dead["id"], *flags, "--json")
    assert code == 0 and done["result"]["changed"] == ["body", "headers"]
    (message,) = Caller(url, unique, "i").receive(unique)
    assert message["body"] == "amount: 10" and message["headers"]["a"] == "b"
