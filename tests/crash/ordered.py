"""Ordered mode with randomly killed consumers: no message of a key before its turn, none lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import msgspec

from notify.cli.bench.consumers import ranges
from notify.client.threads.loop import new_event_loop
from notify.client.transport.http import HttpClient
from notify.protocol.wire import Receive, Received, Settle, encode_msgpack
from notify.testing import forked
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import subscribe
from tests.support.http import admin
from tools.bench.fill import fill

TOPIC = "bench-0"
GROUP = "ordered"
LEASE = 1.0
_decode = msgspec.msgpack.Decoder(Received).decode


async def consume(url: str, instance: str, journal: int) -> None:
    """Note received messages, note the acks to come, then acknowledge; until killed."""
    http = HttpClient(url)
    request = encode_msgpack(Receive(instance=instance, max=1000, wait=0.5, lease=LEASE))
    while True:
        messages = _decode(await http.call("POST", f"/v1/groups/{GROUP}/receive", request, PATIENCE_SECONDS)).messages
        if not messages:
            continue
        _write(journal, [("r", m.key, m.offset) for m in messages])
        _write(journal, [("a", m.key, m.offset) for m in messages])
        settle = encode_msgpack(Settle(ranges([m.receipt for m in messages])))
        await http.call("POST", f"/v1/groups/{GROUP}/settle", settle, PATIENCE_SECONDS)


def _write(journal: int, events: list[tuple[str, str | None, int]]) -> None:
    """Write one line with the machine's time; a kill leaves whole lines only."""
    os.write(journal, (json.dumps([time.monotonic_ns(), events]) + "\n").encode())


def inversions(journals: list[Path]) -> tuple[int, int]:
    """From all journals by time: violations of the order of keys, and the number of different messages."""
    lines: list[tuple[int, list[Any]]] = []
    for journal in journals:
        for line in journal.read_bytes().splitlines():
            try:
                at, events = json.loads(line)
            except ValueError:
                continue  # cut short by the kill
            lines.append((at, events))
    lines.sort(key=lambda line: line[0])
    last: dict[str, int] = {}
    asked: set[int] = set()
    seen: set[int] = set()
    wrong = 0
    for _, events in lines:
        for event, key, offset in events:
            if event == "a":
                asked.add(offset)
            elif offset not in seen:
                before = last.get(key)
                wrong += before is not None and (offset < before or before not in asked)
                last[key] = offset
                seen.add(offset)
    return wrong, len(seen)


def run(messages: int, keys: int, consumers: int, kills: int, seed: int) -> str:
    """Fill a topic, drain it with consumers that are killed and replaced; what was found, in words.

    The kills come at equal parts of the way. Raises AssertionError if the order is broken or a message is missing.
    """
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="notify-ordered-") as directory:
        server = ServerProcess(Path(directory) / "data").start()
        running: list[ForkServerProcess] = []
        journals: list[Path] = []

        def begin() -> ForkServerProcess:
            journals.append(Path(directory) / f"journal-{len(journals)}")
            journals[-1].touch()  # it may be killed before it writes a line
            process = forked.context().Process(
                target=work, args=(server.url, f"i{len(journals)}", str(journals[-1])), daemon=True
            )
            process.start()
            return process

        def left() -> int:
            return int(admin(server.url, "GET", f"groups/{GROUP}")["queues"][0]["lag"])

        def drained_to(wanted: int) -> None:
            """Waits as long as it continues."""
            while (before := left()) > wanted:
                eventually(lambda before=before: left() < before, f"less than {before} messages to be left")  # type: ignore[misc]

        try:
            subscribe(server.url, GROUP, TOPIC, mode="ordered", max_attempts=1000, max_deaths=1000)
            asyncio.run(fill({"url": server.url, "messages": messages, "body": 16, "topics": 1, "keys": keys}))
            running = [begin() for _ in range(consumers)]
            for n in range(kills):
                drained_to(messages - messages * (n + 1) // (kills + 1))
                victim = chance.randrange(consumers)
                _end(running[victim])
                running[victim] = begin()
            drained_to(0)
        finally:
            for process in running:
                _end(process)
            server.stop()
        wrong, seen = inversions(journals)
    words = f"{messages:,} messages over {keys:,} keys, {kills} consumers killed: {wrong} inversions, {seen:,} came"
    if wrong or seen != messages:
        raise AssertionError(words)
    return words


def _end(process: ForkServerProcess) -> None:
    process.kill()
    process.join(PATIENCE_SECONDS)


def work(url: str, instance: str, journal: str) -> None:
    """One consumer: a process."""
    fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(consume(url, instance, fd))
