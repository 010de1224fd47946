"""An objective of a group: set and removed by a command, judged by an alarm, shown by the admin API and the console."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from notify.server.core.objectives import WINDOW_US
from notify.testing import InMemoryServer
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import Caller, publish, subscribe
from tests.support.http import admin, call

TOPIC, GROUP = "order.placed", "mail"


@pytest.fixture
def frozen() -> Iterator[InMemoryServer]:
    """A server that looks for alarms often, and whose clock only the test moves."""
    with InMemoryServer(alarm_every_seconds=0.05, alarm_no_consumer_seconds=0) as server:
        server.freeze()
        subscribe(server.url, GROUP, TOPIC)
        yield server


def command(server: InMemoryServer, *words: str) -> str:
    code, shown = cli("group", "objective", *words, "--reason=a promise", f"--url={server.url}")
    assert code == 0, shown
    return str(shown)


def alarms(server: InMemoryServer) -> list[str]:
    return [a["text"] for a in admin(server.url, "GET", "alarms")["alarms"] if a["name"] == "objective"]


def acknowledge(server: InMemoryServer, count: int, after: float) -> None:
    """Send messages, and acknowledge them so many seconds later."""
    publish(server.url, TOPIC, ["1"] * count)
    consumer = Caller(server.url, GROUP, "one")
    messages = consumer.receive(TOPIC, wait=30, lease=600)
    assert len(messages) == count
    server.advance(after)
    consumer.settle(messages)


def test_an_alarm_says_that_too_few_messages_were_in_time(frozen: InMemoryServer) -> None:
    url = frozen.url
    assert "95 % of the messages of group mail" in command(frozen, "set", GROUP, "--within=5", "--share=0.95")
    acknowledge(frozen, 9, after=1)
    acknowledge(frozen, 1, after=60)
    said = "Group mail acknowledged 90 % of 10 messages within 5.0 s in the last 5 minutes; its objective is 95 %"
    eventually(lambda: alarms(frozen) == [said], "the alarm")
    assert admin(url, "GET", f"groups/{GROUP}")["objective"] == {"within": 5.0, "share": 0.95, "count": 10, "met": 0.9}
    assert "of 10 messages within 5.0 s in 5 min; 95 % wanted" in str(call(url, "GET", f"/groups/{GROUP}"))

    frozen.advance(2 * WINDOW_US / 1e6)
    eventually(lambda: not alarms(frozen), "the end of the alarm")


def test_an_alarm_says_that_a_message_waits_while_none_is_acknowledged(frozen: InMemoryServer) -> None:
    command(frozen, "set", GROUP, "--within=5")
    publish(frozen.url, TOPIC, ["1"])
    frozen.advance(90)
    waits = "acknowledged nothing in the last 5 minutes, and a message has waited for 1 min 30 s"
    eventually(lambda: alarms(frozen) == [f"Group mail {waits}; its objective is 99 % within 5.0 s"], "the alarm")

    admin(frozen.url, "POST", f"groups/{GROUP}/pause", {})
    eventually(lambda: not alarms(frozen), "the end of the alarm of a group that is paused")


def test_an_objective_ends_with_its_removal(frozen: InMemoryServer) -> None:
    command(frozen, "set", GROUP, "--within=5")
    publish(frozen.url, TOPIC, ["1"])
    frozen.advance(90)
    eventually(lambda: alarms(frozen), "the alarm")
    assert "no objective" in command(frozen, "remove", GROUP)
    eventually(lambda: not alarms(frozen), "the end of the alarm")
    assert admin(frozen.url, "GET", f"groups/{GROUP}")["objective"] is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["set", "nobody", "--within=5"], "group 'nobody' has no subscription: subscribe it first"),
        (["set", GROUP, "--within=0"], "0.001"),
        (["set", GROUP, "--within=5", "--share=1.5"], "0.9999"),
        (["remove", GROUP], "group 'mail' has no objective"),
    ],
)
def test_a_wrong_objective_is_refused(frozen: InMemoryServer, words: list[str], sentence: str) -> None:
    code, shown = cli("group", "objective", *words, "--reason=a promise", f"--url={frozen.url}")
    assert code == 2 and sentence in shown["text"]
