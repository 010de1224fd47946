"""Changed settings of a subscription hold for what was made from it: a broadcast's instances, and the retry topic."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from notify.runtime.threads import in_thread
from notify.server.admin import writes
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS
from tests.support.groups import Caller, bodies, publish, redrive, subscribe
from tests.support.http import admin, post


def test_an_instance_of_a_broadcast_gets_what_the_present_filter_lets_through(
    frozen_server: InMemoryServer, unique: str
) -> None:
    url, x = frozen_server.url, Caller(frozen_server.url, unique, "x")
    subscribe(url, unique, unique, "broadcast", tags=["red"], filter='headers.size == "small"')
    assert x.receive(unique) == []
    subscribe(url, unique, unique, "broadcast", tags=["blue"], max_attempts=1)
    post(url, "/v1/messages", {"messages": [{"topic": unique, "body": tag, "tag": tag} for tag in ("red", "blue")]})
    received = x.receive(unique)
    assert bodies(received) == ["blue"]
    assert x.settle(received, "retry", delay=0) == [200]
    assert x.receive(unique) == [], "one attempt is all that is left"


@pytest.mark.parametrize(("topic", "mode"), [("{}", "shared"), ("{}.*", "shared"), ("{}", "broadcast")])
def test_redriven_letters_go_by_the_present_settings(
    frozen_server: InMemoryServer, unique: str, topic: str, mode: str
) -> None:
    """They went by those of the first redrive: whoever allowed more attempts got none."""
    url, x = frozen_server.url, Caller(frozen_server.url, unique, "x")
    name, of_letters = topic.format(unique).replace("*", "a"), f"{unique}@x" if mode == "broadcast" else unique

    def attempt() -> list[dict[str, Any]]:
        received = x.receive(name)
        assert not received or x.settle(received, "retry") == [200]
        return received

    subscribe(url, unique, topic.format(unique), mode, max_attempts=1, start="earliest")
    if mode == "broadcast":
        assert x.receive(name) == []
    publish(url, name, ["bad"])
    assert bodies(attempt()) == ["bad"]
    redrive(url, of_letters, reason="a test")
    assert bodies(attempt()) == ["bad"]
    subscribe(url, unique, topic.format(unique), mode, max_attempts=3, retry_min=7, retry_max=7)
    redrive(url, of_letters, reason="a test")
    assert bodies(attempt()) == ["bad"]
    frozen_server.advance(6)
    assert attempt() == []
    frozen_server.advance(1.1)
    assert [m["attempt"] for m in attempt()] == [2]


def test_redriven_letters_go_to_the_owner_alone_once_the_group_has_one(
    frozen_server: InMemoryServer, unique: str
) -> None:
    url, x, y = frozen_server.url, Caller(frozen_server.url, unique, "x"), Caller(frozen_server.url, unique, "y")
    subscribe(url, unique, unique, start="earliest")
    publish(url, unique, ["bad"])
    assert x.settle(x.receive(unique), "dead_letter") == [200]
    redrive(url, unique, reason="a test")
    assert x.settle(x.receive(unique), "dead_letter") == [200]
    subscribe(url, unique, unique, "failover", force=True)
    publish(url, unique, ["good"])
    assert bodies(x.receive(unique)) == ["good"]
    redrive(url, unique, reason="a test")
    assert y.receive(unique) == []
    assert bodies(x.receive(unique)) == ["bad"]


def test_a_group_that_leaves_a_topic_goes_on_with_its_others(frozen_server: InMemoryServer, unique: str) -> None:
    """Redriven letters of that topic waited: each request to receive was answered with 500 until the next restart."""
    url, x, other = frozen_server.url, Caller(frozen_server.url, unique, "x"), f"{unique}-other"
    for topic in (unique, other):
        subscribe(url, unique, topic, start="earliest")
    publish(url, unique, ["bad"])
    assert x.settle(x.receive(unique), "dead_letter") == [200]
    redrive(url, unique, reason="a test")
    admin(url, "DELETE", f"groups/{unique}/subscriptions/{unique}", {})
    publish(url, other, ["good"])
    assert bodies(x.receive(other)) == ["good"]
    subscribe(url, unique, unique)
    assert bodies(x.receive(unique)) == ["bad"]


def test_an_administrators_change_keeps_a_replay_that_begins_while_it_is_recorded(
    frozen_server: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took back the number of the replay, whose messages had no effect then: inboxes had rows of them."""
    url, recording, replayed = frozen_server.url, threading.Event(), threading.Event()
    subscribe(url, unique, unique)

    async def slowly(function: Callable[..., Any], *arguments: Any) -> Any:
        if not recording.is_set():
            recording.set()
            await in_thread(replayed.wait, PATIENCE_SECONDS)
        return await in_thread(function, *arguments)

    monkeypatch.setattr(writes, "in_thread", slowly)
    changing = threading.Thread(target=subscribe, args=(url, unique, unique), kwargs={"max_attempts": 3})
    changing.start()
    assert recording.wait(PATIENCE_SECONDS)
    admin(url, "POST", f"groups/{unique}/reset", {"topic": unique, "to": "earliest", "replay_effects": True})
    replayed.set()
    changing.join(PATIENCE_SECONDS)
    (shown,) = admin(url, "GET", f"groups/{unique}")["subscriptions"]
    assert (shown["max_attempts"], shown["replay"]) == (3, 1)
