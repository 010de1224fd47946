"""A log that was restored without the newest subscriptions: consumers subscribe again as they are, and miss nothing."""

from __future__ import annotations

import shutil
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from notify.client import Consumer
from notify.client.consumer import session
from notify.protocol.limits import Mode
from notify.protocol.message import ReceivedMessage
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.groups import lag, publish, running
from tests.support.http import admin, ask


class Got:
    """The bodies that a consumer has handled."""

    def __init__(self) -> None:
        self.bodies: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, message: ReceivedMessage) -> None:
        with self._lock:
            self.bodies.append(message.text)


@pytest.mark.long
@pytest.mark.parametrize(
    ("wanted", "options", "handled_again"),
    [
        ("t", {"mode": "ordered", "start": "earliest"}, ["old", "older"]),
        ("t", {"mode": "shared"}, []),
        ("t", {"mode": "broadcast"}, []),
        ("t*", {"start": "earliest"}, ["old", "older"]),
    ],
)
def test_a_consumer_goes_on_as_it_had_subscribed(
    tmp_path: Path, wanted: str, options: dict[str, Any], handled_again: list[str]
) -> None:
    """The server's process is killed, and its directory is that of before the subscription."""
    server = ServerProcess(tmp_path / "data").start()
    publish(server.url, "t", ["old", "older"])
    server.stop()
    shutil.copytree(server.data_dir, tmp_path / "before")
    server.start()
    got = Got()
    consumer = Consumer(server.url, group="g", lease=2)
    consumer.subscribe(wanted, **options)(got)
    try:
        with running(consumer, subscribed=True):
            eventually(lambda: ask(server.url, "GET", "/v1/admin/groups/g")[0] == 200, "the subscription")
            # A broadcast group begins with the first request of its instance.
            eventually(lambda: _received(server, got), "a message that is received")
            server.kill()
            shutil.rmtree(server.data_dir)
            shutil.copytree(tmp_path / "before", server.data_dir)
            got.bodies = []  # before the start: the consumer asks again at once
            server.start()
            publish(server.url, "t", ["new"])
            if options.get("mode") == "broadcast":  # an instance begins with its first request
                eventually(lambda: _received(server, got), "a message that is sent once the instance is back")
            else:
                eventually(lambda: {*got.bodies} == {*handled_again, "new"}, "what is still to come")
            (subscription,) = [s for s in admin(server.url, "GET", "groups/g")["subscriptions"] if s["topic"] == "t"]
            assert subscription["mode"] == options.get("mode", "shared")
    finally:
        server.stop()


@pytest.mark.parametrize("mode", ["shared", "broadcast"])
def test_a_consumer_goes_on_at_once_when_its_topic_is_deleted(
    notify_server: InMemoryServer, unique: str, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It heard of that after its poll only, and an instance of a broadcast missed what was sent meanwhile."""
    monkeypatch.setattr(session, "POLL_SECONDS", 60.0)
    url, got = notify_server.url, Got()
    consumer = Consumer(url, group=unique, instance="x")
    consumer.subscribe(unique, mode=mode)(got)
    name = f"{unique}@x" if mode == "broadcast" else unique
    with running(consumer, subscribed=True):
        eventually(lambda: _is_followed(url, name, unique), "the consumer to ask")
        publish(url, unique, ["before"])
        eventually(lambda: got.bodies == ["before"], "the message")
        admin(url, "DELETE", f"topics/{unique}", {})
        eventually(lambda: _is_followed(url, name, unique), "the consumer to subscribe again", seconds=30)
        publish(url, unique, ["after"])
        eventually(lambda: got.bodies == ["before", "after"], "the message of the new topic")


def test_a_consumer_whose_subscription_is_ended_gets_nothing_old_again(
    notify_server: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It subscribed again from the start of its process on, and handled all messages since then a second time."""
    monkeypatch.setattr(session, "AGAIN", timedelta())
    url, got = notify_server.url, Got()
    consumer = Consumer(url, group=unique)
    consumer.subscribe(unique)(got)
    with running(consumer, subscribed=True):
        publish(url, unique, ["a", "b"])
        eventually(lambda: sorted(got.bodies) == ["a", "b"] and lag(url, unique) == 0, "both messages")
        admin(url, "DELETE", f"groups/{unique}/subscriptions/{unique}", {})
        eventually(lambda: _is_followed(url, unique, unique), "the consumer to subscribe again")
        publish(url, unique, ["c"])
        eventually(lambda: "c" in got.bodies, "the next message")
    assert sorted(got.bodies) == ["a", "b", "c"]


def test_a_consumer_whose_clock_is_ahead_says_that_it_begins_again_at_the_newest_message(
    notify_server: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It missed what was sent in between, and nobody was told."""
    monkeypatch.setattr(session, "AGAIN", timedelta(hours=-2))  # to the server the time before now is still to come
    url, got = notify_server.url, Got()
    consumer = Consumer(url, group=unique)
    consumer.subscribe(unique)(got)
    with running(consumer, subscribed=True):
        publish(url, unique, ["before"])
        eventually(lambda: got.bodies == ["before"], "the message")
        admin(url, "DELETE", f"groups/{unique}/subscriptions/{unique}", {})
        eventually(lambda: _is_followed(url, unique, unique), "the consumer to subscribe again")
        publish(url, unique, ["after"])
        eventually(lambda: "after" in got.bodies, "the next message")
    assert f"{unique}: begins again at the newest message" in caplog.text and "clock" in caplog.text


def _is_followed(url: str, group: str, topic: str) -> bool:
    """Whether a group subscribes to a topic."""
    status, shown = ask(url, "GET", f"/v1/admin/groups/{group}")
    return status == 200 and any(s["topic"] == topic for s in shown["subscriptions"])


def _received(server: ServerProcess, got: Got) -> bool:
    before = got.bodies.count("again")
    publish(server.url, "t", ["again"])
    return got.bodies.count("again") > before
