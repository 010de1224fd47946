"""Ordered mode with consumers that are killed at random: per key no message before its turn, none lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from notify.bench import children
from notify.bench.admin import subscribe
from notify.bench.consume import ranges
from notify.client.http import HttpClient
from notify.client.loop import new_event_loop
from notify.testing.process import ServerProcess
from notify.wire import Receive, Received, Settle, encode_msgpack
from tests.support.http import admin

TOPIC = "bench-0"
GROUP = "ordered"
LEASE = 1.0
_decode = msgspec.msgpack.Decoder(Received).decode


async def consume(url: str, instance: str, journal: int) -> None:
    """Write down what came, then what is about to be acknowledged, then acknowledge it; until killed."""
    http = HttpClient(url)
    request = encode_msgpack(Receive(instance=instance, max=1000, wait=0.5, lease=LEASE))
    while True:
        found = _decode(await http.call("POST", f"/v1/groups/{GROUP}/receive", request, 30)).messages
        if not found:
            continue
        _write(journal, [("r", m.key, m.offset) for m in found])
        _write(journal, [("a", m.key, m.offset) for m in found])
        settle = encode_msgpack(Settle(ranges([m.receipt for m in found])))
        await http.call("POST", f"/v1/groups/{GROUP}/settle", settle, 30)


def _write(journal: int, events: list[tuple[str, str | None, int]]) -> None:
    """One line with the time of the machine's clock: a kill leaves whole lines, or none."""
    os.write(journal, (json.dumps([time.monotonic_ns(), events]) + "\n").encode())


def inversions(journals: list[Path]) -> tuple[int, int]:
    """Over all consumers' journals by time: violations of the order per key, and how many different messages came."""
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
        for what, key, offset in events:
            if what == "a":
                asked.add(offset)
            elif offset not in seen:
                before = last.get(key)
                wrong += before is not None and (offset < before or before not in asked)
                last[key] = offset
                seen.add(offset)
    return wrong, len(seen)


def run(messages: int, keys: int, consumers: int, kill_every: float, seed: int) -> str:
    """Fill a topic, drain it with consumers that are killed and replaced; what was found, in words."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="notify-ordered-") as directory:
        server = ServerProcess(Path(directory) / "data").start()
        running: list[subprocess.Popen[bytes]] = []
        journals: list[Path] = []

        def begin() -> subprocess.Popen[bytes]:
            journals.append(Path(directory) / f"journal-{len(journals)}")
            journals[-1].touch()  # it may be killed before it writes a line
            words = [server.url, f"i{len(journals)}", str(journals[-1])]
            return subprocess.Popen([sys.executable, "-m", "tests.crash.ordered", *words])

        kills = 0
        try:
            subscribe(server.url, GROUP, TOPIC, mode="ordered", max_attempts=1000)
            spec = {"url": server.url, "messages": messages, "body": 16, "topics": 1, "keys": keys}
            children.result(children.start("notify.bench.fill", spec))
            running = [begin() for _ in range(consumers)]
            deadline = time.monotonic() + 900
            while admin(server.url, "GET", f"groups/{GROUP}")["queues"][0]["lag"]:
                assert time.monotonic() < deadline, "the topic is not drained"
                time.sleep(kill_every * chance.random() * 2)
                victim = chance.randrange(consumers)
                running[victim].send_signal(signal.SIGKILL)
                running[victim].wait()
                kills += 1
                running[victim] = begin()
        finally:
            for process in running:
                process.kill()
                process.wait()
            server.stop()
        wrong, seen = inversions(journals)
    words = f"{messages:,} messages over {keys:,} keys, {kills} consumers killed: {wrong} inversions, {seen:,} came"
    if wrong or seen != messages:
        raise AssertionError(words)
    return words


def main() -> None:
    """One consumer: URL, instance and journal as arguments."""
    url, instance, journal = sys.argv[1:]
    fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(consume(url, instance, fd))


if __name__ == "__main__":
    main()
