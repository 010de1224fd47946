"""A consumer that starts says where it receives, what, and where it begins: also what is mistyped."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from notify.client import Consumer
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import cli
from tests.support.groups import Caller, die, publish, redrive, running, subscribe
from tests.support.http import call

SERVICE = """
import os, sys, threading
from notify.client import Consumer

consumer = Consumer(sys.argv[1], group="banner", instance="me")

@consumer.subscribe("banner.placd", mode="ordered")
def on_placed(message):
    consumer.stop()

threading.Timer(60, consumer.stop).start()
consumer.subscribe("banner.old")(on_placed)
consumer.run()
os._exit(0)
"""


def test_a_consumer_says_what_it_does(memory: InMemoryServer, unique: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "notify.consumer")
    subscribe(memory.url, unique, unique)
    publish(memory.url, unique, ["a", "b"])
    consumer = Consumer(memory.url, group=unique, instance="me")
    consumer.subscribe(unique, tags=["vip"])(lambda message: None)
    consumer.subscribe(f"{unique}.placd", mode="ordered", start="earliest")(lambda message: None)
    consumer.subscribe(f"{unique}*")(lambda message: None)

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if "receives from" in record.getMessage()]

    with running(consumer, subscribed=True):
        eventually(lambda: len(said()) == 1, "the banner")
    first, *topics = said()[0].splitlines()
    assert first == f"consumer of group {unique} (me) receives from {memory.url}"
    assert topics == [
        f"  {unique}: shared, tags vip, 2 messages wait",
        f"  {unique}.placd: ordered, the topic did not exist and was made just now (is its name right?), "
        "a new subscription that begins at earliest, 0 messages wait",
        f"  {unique}*: shared, 1 topic meets the pattern",
    ]


def test_a_program_without_logging_shows_it_on_stderr(memory: InMemoryServer) -> None:
    publish(memory.url, "banner.old", ["x"])
    subscribe(memory.url, "banner", "banner.old", start="earliest")
    code, sent = cli("message", "send", "banner.old", "tried", "--tag", "vip", "--url", memory.url, "--json")
    assert code == 0 and cli("message", "show", sent["id"], "--url", memory.url, "--json")[1]["message"]["tag"] == "vip"
    done = subprocess.run(
        [sys.executable, "-c", SERVICE, memory.url], env=os.environ, capture_output=True, text=True,
        timeout=2 * PATIENCE_SECONDS, check=True,
    )  # fmt: skip
    assert done.stdout == "" and "consumer of group banner (me) receives from http://" in done.stderr
    assert "is its name right?" in done.stderr and "banner.old: shared, 2 messages wait" in done.stderr


def test_dead_letters_that_were_sent_again_wait_too(memory: InMemoryServer, unique: str) -> None:
    """The first line of a consumer said "0 messages wait" of five that had just been sent again."""
    subscribe(memory.url, unique, unique)
    publish(memory.url, unique, ["a"])
    die(Caller(memory.url, unique, "me"), unique, 1, "refused")
    redrive(memory.url, unique, all=True)
    path = f"/v1/groups/{unique}/subscriptions/{unique}"
    eventually(lambda: call(memory.url, "PUT", path, {"mode": "shared"})["lag"] == 1, "the message that came again")
