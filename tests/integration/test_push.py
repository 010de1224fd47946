"""Push: a group's messages are posted to its webhook, with retries, order, dead letters and bounds as ever."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notify.protocol.message import DEAD_LETTER_REASON
from notify.server import webhooks
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import cli
from tests.support.groups import Caller, lag, publish, subscribe
from tests.support.http import admin, ask, post, refusal
from tests.support.webhook import SECRET, Receiver


@pytest.fixture
def server(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryServer]:
    monkeypatch.setattr("notify.server.core.pushes.RETRY_SECONDS", 0.02)
    monkeypatch.setattr("notify.server.core.pushes.RETRY_MAX_SECONDS", 0.1)
    with InMemoryServer(webhook_hosts=receiver.place, webhook_secret=SECRET) as made:
        yield made


def push(server: str, group: str, receiver: Receiver, **fields: Any) -> dict[str, Any]:
    """Have a group's messages posted to a receiver; what the route answers."""
    answer: dict[str, Any] = admin(server, "PUT", f"groups/{group}/push", {"url": receiver.url, **fields})
    return answer


def texts_of(asked: dict[str, Any]) -> list[str]:
    return [message["body"] for message in asked["messages"]]


def bodies(receiver: Receiver) -> list[list[str]]:
    """The texts of the messages of each call that was made."""
    return [texts_of(asked) for asked in receiver.received]


def is_through(url: str, group: str) -> bool:
    return lag(url, group) == 0


def leased(url: str, group: str) -> int:
    """How many of its messages are handed out."""
    (shown,) = [g for g in admin(url, "GET", f"groups?prefix={group}")["groups"] if g["name"] == group]
    return int(shown["leased"])


def failure(url: str, group: str) -> str:
    """Why the last call failed."""
    return str(admin(url, "GET", "pushes")["pushes"][group]["reason"])


def test_messages_are_posted_and_acknowledged(server: InMemoryServer, receiver: Receiver, unique: str) -> None:
    subscribe(server.url, unique, unique)
    receiver.status = 202
    assert push(server.url, unique, receiver)["result"]["push"]["url"] == receiver.url
    publish(server.url, unique, ["a", "b", "c"])
    eventually(lambda: is_through(server.url, unique), "the messages to be taken")
    assert sorted(bodies(receiver)) == [["a"], ["b"], ["c"]]
    assert receiver.unsigned == 0
    (message,) = receiver.received[0]["messages"]
    assert receiver.received[0]["group"] == unique
    assert message["topic"] == unique and message["attempt"] == 1 and message["id"] and "receipt" not in message
    shown = {"url": receiver.url, "batch": 1, "at_once": 4, "failing_since": None, "reason": ""}
    assert admin(server.url, "GET", "pushes")["pushes"] == {unique: shown}


def test_only_what_fails_alone_fails(server: InMemoryServer, receiver: Receiver, unique: str) -> None:
    """The others of its batch use up no attempt; the one that fails becomes a dead letter, with the reason."""
    subscribe(server.url, unique, unique, max_attempts=2, retry_min=1)
    receiver.status_of = lambda asked: 500 if "poison" in texts_of(asked) else 200
    publish(server.url, unique, ["a", "poison", "b"])
    push(server.url, unique, receiver, batch=10, at_once=1)

    def letters() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = admin(server.url, "GET", f"groups/{unique}/dead-letters")["messages"]
        return found

    eventually(letters, "the dead letter")
    (letter,) = letters()
    assert letter["body"] == "poison" and "answered 500" in letter["headers"][DEAD_LETTER_REASON]
    assert is_through(server.url, unique)
    assert bodies(receiver) == [["a", "poison", "b"], ["a"], ["poison", "b"], ["poison"], ["b"], ["poison"]]
    attempts = Counter(m["body"] for asked in receiver.received for m in asked["messages"] if m["attempt"] > 1)
    assert attempts == {"poison": 1}


@pytest.mark.parametrize("status", [429, 502, 503, 504, 0])
def test_while_the_receiver_is_away_no_attempt_counts(
    server: InMemoryServer, receiver: Receiver, unique: str, status: int
) -> None:
    subscribe(server.url, unique, unique, max_attempts=1)
    receiver.status = status or 200
    if not status:
        receiver.close()
    push(server.url, unique, receiver, at_once=1)
    publish(server.url, unique, ["a"])
    eventually(lambda: failure(server.url, unique), "the failure to be shown")
    if status:
        eventually(lambda: len(receiver.received) > 3, "several calls")
        receiver.status = 200
    else:
        receiver.reopen()
    eventually(lambda: is_through(server.url, unique), "the message to be taken")
    assert {message["attempt"] for asked in receiver.received for message in asked["messages"]} == {1}
    assert admin(server.url, "GET", f"groups/{unique}/dead-letters")["messages"] == []
    assert failure(server.url, unique) == ""


def test_messages_held_by_a_webhook_are_redelivered_immediately_without_an_attempt(
    server: InMemoryServer, receiver: Receiver, unique: str
) -> None:
    """It stayed leased for a minute when its webhook ended or changed, and that used up its last attempt."""
    subscribe(server.url, unique, unique, max_attempts=1, mode="ordered")
    receiver.status = 503
    publish(server.url, unique, ["a"], key=True)

    def comes_again() -> None:
        posted = len(receiver.received)
        eventually(lambda: len(receiver.received) > posted + 1, "calls")

    push(server.url, unique, receiver, at_once=1)
    comes_again()
    push(server.url, unique, receiver, at_once=1, batch=2)
    comes_again()
    admin(server.url, "POST", f"groups/{unique}/pause", {})
    eventually(lambda: not leased(server.url, unique), "the message to be let go")
    posted = len(receiver.received)
    admin(server.url, "POST", f"groups/{unique}/resume", {})
    eventually(lambda: len(receiver.received) > posted, "the next call")
    admin(server.url, "DELETE", f"groups/{unique}/push", {})
    asked = {"instance": "i", "max": 1, "wait": 5, "lease": 30}
    (taken,) = post(server.url, f"/v1/groups/{unique}/receive", asked)["messages"]
    assert (taken["body"], taken["attempt"]) == ("a", 1)


def test_no_answer_is_an_attempt(
    server: InMemoryServer, receiver: Receiver, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message whose handling never ends, or ends the receiver, holds up its group for its attempts alone."""
    monkeypatch.setattr(webhooks, "SECONDS", 0.5)
    subscribe(server.url, unique, unique, max_attempts=1)
    goes_on = threading.Event()
    receiver.answer = lambda asked: {"waited": goes_on.wait()} if asked["messages"][0]["body"] == "hangs" else {}
    push(server.url, unique, receiver, at_once=1)
    publish(server.url, unique, ["hangs", "b"])
    eventually(lambda: is_through(server.url, unique), "both messages to be settled")
    goes_on.set()
    (letter,) = admin(server.url, "GET", f"groups/{unique}/dead-letters")["messages"]
    assert letter["body"] == "hangs" and "no answer within 0.5 s" in letter["headers"][DEAD_LETTER_REASON]


def test_order_is_kept_through_failures(server: InMemoryServer, receiver: Receiver, unique: str) -> None:
    subscribe(server.url, unique, unique, mode="ordered", retry_min=1)
    failed: set[str] = set()

    def status(asked: dict[str, Any]) -> int:
        new = {text for text in texts_of(asked) if text.endswith("0")} - failed
        failed.update(new)
        return 500 if new else 200

    receiver.status_of = status
    texts = [f"{key}{number}" for number in range(5) for key in "abc"]
    for text in texts:
        publish(server.url, unique, [text], key=True)
    push(server.url, unique, receiver, batch=5)
    eventually(lambda: is_through(server.url, unique), "all messages to be taken")
    for key in "abc":
        last = [text for call in bodies(receiver) for text in call if text[0] == key]
        done = list(dict.fromkeys(reversed(last)))[::-1]
        assert done == [f"{key}{number}" for number in range(5)]


def test_a_webhook_that_fails_raises_an_alarm(receiver: Receiver, unique: str) -> None:
    given = {"webhook_hosts": receiver.place, "webhook_secret": SECRET, "alarm_every_seconds": 0.1}
    with InMemoryServer(**given, alarm_no_consumer_seconds=0.5) as server:
        subscribe(server.url, unique, unique)
        receiver.status = 503
        push(server.url, unique, receiver)
        publish(server.url, unique, ["a"])

        def alarms() -> dict[str, str]:
            shown = admin(server.url, "GET", "overview")["alarms"]
            return {alarm["name"]: alarm["text"] for alarm in shown}

        eventually(lambda: "answered 503" in alarms().get("push", ""), "the alarm")
        receiver.status = 200
        eventually(lambda: "push" not in alarms(), "the alarm to end")


def test_the_console_says_where_and_why(server: InMemoryServer, receiver: Receiver, unique: str) -> None:
    subscribe(server.url, unique, unique)
    receiver.status = 503
    push(server.url, unique, receiver, batch=7)
    publish(server.url, unique, ["a"])
    eventually(lambda: failure(server.url, unique), "a call that fails")
    page = str(ask(server.url, "GET", f"/groups/{unique}")[1])
    assert f"posted to {receiver.url}, at most 7 per call" in page and "answered 503" in page


def test_it_ends_when_it_is_told_to(server: InMemoryServer, receiver: Receiver, unique: str) -> None:
    subscribe(server.url, unique, unique)
    push(server.url, unique, receiver)
    publish(server.url, unique, ["a"])
    eventually(lambda: is_through(server.url, unique), "the message to be taken")
    admin(server.url, "DELETE", f"groups/{unique}/push", {})
    assert admin(server.url, "GET", "pushes")["pushes"] == {}
    publish(server.url, unique, ["b"])
    assert not is_through(server.url, unique)
    assert refusal(server.url, "DELETE", f"groups/{unique}/push")[0] == 404


@pytest.mark.parametrize("mode", ["exclusive", "failover", "broadcast"])
def test_nothing_is_posted_once_the_mode_has_changed(
    server: InMemoryServer, receiver: Receiver, unique: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages were posted for 20 s more, and the group's consumer was refused for the minute of its lease."""
    monkeypatch.setattr("notify.server.core.pushes.WAIT_SECONDS", 0.5)
    subscribe(server.url, unique, unique)
    push(server.url, unique, receiver, at_once=1)
    publish(server.url, unique, ["a"])
    eventually(lambda: is_through(server.url, unique), "the message to be taken")
    subscribe(server.url, unique, unique, mode=mode, force=True)
    consumer = Caller(server.url, unique, "x")
    consumer.receive(unique)
    publish(server.url, unique, ["b"])
    assert [m["body"] for m in consumer.receive(unique, wait=50)] == ["b"]
    eventually(lambda: "in mode " + mode in failure(server.url, unique), "the webhook to say why it posts nothing")
    assert bodies(receiver) == [["a"]]


@pytest.mark.long
def test_an_invalid_webhook_is_refused(server: InMemoryServer, receiver: Receiver, unique: str) -> None:
    path = f"groups/{unique}/push"
    assert refusal(server.url, "PUT", path, url=receiver.url) == (404, "not_subscribed")
    subscribe(server.url, unique, unique, mode="exclusive")
    assert refusal(server.url, "PUT", path, url=receiver.url) == (422, "invalid_push")
    subscribe(server.url, unique, unique, mode="shared", force=True)
    assert refusal(server.url, "PUT", path, url="http://192.0.2.1:80/") == (422, "invalid_webhook")
    for bounds in ({"batch": 0}, {"batch": 1001}, {"at_once": 0}, {"at_once": 65}):
        assert refusal(server.url, "PUT", path, url=receiver.url, **bounds)[0] == 422
    for number in range(15):
        subscribe(server.url, f"{unique}.{number}", unique)
        push(server.url, f"{unique}.{number}", receiver, at_once=64)
    assert refusal(server.url, "PUT", path, url=receiver.url, at_once=64) == (422, "out_of_bounds")


def test_it_goes_on_after_a_kill(receiver: Receiver, tmp_path: Path, unique: str) -> None:
    """The server is killed while a call is under way: what was posted is posted again, and nothing is lost."""
    settings = {"NOTIFY_WEBHOOK_HOSTS": receiver.place, "NOTIFY_WEBHOOK_SECRET": SECRET}
    is_asked, goes_on = threading.Event(), threading.Event()

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        is_asked.set()
        goes_on.wait()
        return {}

    receiver.answer = answer
    process = ServerProcess(tmp_path / "data", environment=settings).start()
    try:
        subscribe(process.url, unique, unique)
        push(process.url, unique, receiver, at_once=1)
        publish(process.url, unique, ["a", "b"])
        assert is_asked.wait(PATIENCE_SECONDS)
        process.kill()
        goes_on.set()
        process.start()
        eventually(lambda: is_through(process.url, unique), "the messages to be taken")
    finally:
        process.stop()
    assert {text for call in bodies(receiver) for text in call} == {"a", "b"}


def test_the_command_sets_shows_and_ends_it(server: InMemoryServer, receiver: Receiver, unique: str) -> None:
    subscribe(server.url, unique, unique)
    why = ("--reason", "a test", "--url", server.url)
    code, shown = cli("group", "push", "set", unique, receiver.url, "--batch", "5", *why)
    assert code == 0, shown
    code, shown = cli("group", "push", "show", unique, "--url", server.url, "--json")
    assert code == 0 and shown["batch"] == 5 and shown["url"] == receiver.url
    code, shown = cli("group", "push", "stop", unique, "--reason", "a test", "--url", server.url)
    assert code == 0, shown
    code, shown = cli("group", "push", "show", unique, "--url", server.url)
    assert code == 2 and "not posted to a webhook" in str(shown)
    code, shown = cli("group", "push", "stop", unique, "--url", server.url)
    assert code == 2 and "--reason" in str(shown)
