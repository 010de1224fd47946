"""Consumers whose process stands still for longer than their leases: SIGSTOP, a paused machine, a sleeping laptop."""

from __future__ import annotations

import signal

import pytest

from notify.testing import InMemoryServer
from tests.support.groups import Caller, bodies, publish
from tests.support.told import Told

STANDING = """
import asyncio, os, signal, sys, time
from notify.client import AsyncConsumer, Consumer

url, topic, kind, batch = sys.argv[1:]
consumer = (AsyncConsumer if kind == "async" else Consumer)(url, group=topic, lease=1.0, concurrency=1)

def note(given):
    for message in given if batch else [given]:
        print("handling", message.text, flush=True)
    if message.text == ("b1" if batch else "a1"):
        ran = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        while (now := time.monotonic()) - ran < 1:  # a thread runs on until the kernel has stopped it as well
            ran = now

async def note_soon(given):
    note(given)

options = {"mode": "ordered", "start": "earliest", "batch": int(batch) if batch else None}
consumer.subscribe(topic, **options)(note_soon if kind == "async" else note)
asyncio.run(consumer.run()) if kind == "async" else consumer.run()
"""
"""A consumer that stops itself in the handler of the first messages of several."""


@pytest.mark.parametrize("batch", ["", "2"])
@pytest.mark.parametrize("kind", ["threads", "async"])
def test_what_waited_while_a_process_stood_still_is_not_handled_behind_its_successors(
    memory: InMemoryServer, unique: str, kind: str, batch: str
) -> None:
    """Every message in hand was handled after another consumer had handled it, and later ones of its key."""
    publish(memory.url, unique, ["w"], key=True)
    with Told(STANDING, memory.url, unique, kind, batch) as standing:
        standing.wait_for("handling w")
        publish(memory.url, unique, ["a1", "b1", "c1", "d1", "a2", "b2", "c2", "d2"], key=True)
        standing.wait_for("handling b1" if batch else "handling a1")
        other, done = Caller(memory.url, unique, "other"), set[str]()
        while len(done) < 8:
            if received := other.receive(unique, wait=5):
                done |= set(bodies(received))
                other.settle(received)
        standing.tell("handling", signal.SIGCONT)
        publish(memory.url, unique, ["z1"], key=True)
        standing.wait_for("handling z1")
        handled = [line.removeprefix("handling ") for line in standing.output.splitlines() if "handling " in line]
    begun = ["a1", "b1"] if batch else ["a1"]
    assert handled == ["w", *begun, "z1"]
