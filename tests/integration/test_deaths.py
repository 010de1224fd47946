"""Consumers that are killed: a deployment costs a message nothing, and a message that kills becomes a dead letter."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from notify.testing import InMemoryServer
from tests.support.clock import eventually
from tests.support.groups import Caller, publish, subscribe
from tests.support.http import admin
from tests.support.told import CONSUMING, Told


def letters(server: InMemoryServer, group: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = admin(server.url, "GET", f"groups/{group}/dead-letters")["messages"]
    return found


def deployed(server: InMemoryServer, consumer: Told, group: str) -> None:
    """SIGTERM, and SIGKILL after the grace, in which the handler does not return."""
    left = server.answered(f"/v1/groups/{group}/leave")
    consumer.tell("handling", signal.SIGTERM)
    eventually(lambda: server.answered(f"/v1/groups/{group}/leave") > left, "the consumer has said that it stops")
    consumer.kill()


def killed(server: InMemoryServer, consumer: Told, group: str) -> None:
    consumer.wait_for("handling")
    consumer.kill()


@pytest.mark.parametrize(("end", "attempt"), [(deployed, 1), (killed, 4)])
def test_three_ends_of_a_consumer_make_no_dead_letter_of_a_message_that_never_failed(
    frozen_server: InMemoryServer, unique: str, end: Callable[..., None], attempt: int
) -> None:
    server = frozen_server
    publish(server.url, unique, ["x"])
    for _ in range(3):
        with Told(CONSUMING, server.url, unique, "shared") as consumer:
            consumer.wait_for("handling")
            subscribe(server.url, unique, unique, max_attempts=1)
            end(server, consumer, unique)
        server.advance(31)
    assert letters(server, unique) == []
    assert [m["attempt"] for m in Caller(server.url, unique, "next").receive(unique)] == [attempt]


def test_sixteen_deaths_make_a_dead_letter_that_says_so(frozen_server: InMemoryServer, unique: str) -> None:
    server = frozen_server
    subscribe(server.url, unique, unique, max_attempts=1)
    publish(server.url, unique, ["kills"])
    for _ in range(15):
        assert Caller(server.url, unique, "dies").receive(unique)
        server.advance(31)
    assert letters(server, unique) == []
    with Told(CONSUMING, server.url, unique, "shared") as consumer:
        killed(server, consumer, unique)
    server.advance(31)
    (letter,) = letters(server, unique)
    assert letter["headers"]["notify-dead-letter-attempts"] == letter["headers"]["notify-dead-letter-deaths"] == "16"
    assert letter["headers"]["notify-dead-letter-reason"].startswith("16 attempts ended with the death of the consumer")
