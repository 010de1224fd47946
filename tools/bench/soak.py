"""`make soak SECONDS=3600`: 1,000 transactions a second in every mode; the server's resources must not grow.

A producer prepares, commits, rolls back, and leaves some transactions to check-back; groups of every mode handle, retry
and refuse. The server's own memory (RssAnon), file descriptors, threads and, with a retention of a minute, its data
directory are sampled every few seconds. The medians of the first and the last third after the warm-up are compared. The
last line is the verdict. The exit code is 0 for PASS, 1 for FAIL, and 2 if the run was too short for a verdict.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.check import CheckMessageListener, HalfMessage, Outcome
from notify.client import AsyncConsumer, AsyncTransactionProducer, DeadLetter, Message, ReceivedMessage
from notify.errors import NotifyError
from notify.protocol.limits import MODES, Mode
from notify.runtime.signals import exit_on_signal
from notify.testing.process import ServerProcess

PER_SECOND = 1000
MODE_OF: dict[str, Mode] = {f"soak.{mode}": mode for mode in MODES}
TOPICS = tuple(MODE_OF)
RETENTION_SECONDS = 60
SEGMENT_BYTES = 8 << 20
LOOK_SECONDS = 5.0
WARM_UP_SHARE = 0.3
"""The share of the run that is warm-up; it lasts at least twice the retention."""
SHARES = {"memory": 1.10, "descriptors": 1.10, "threads": 1.0, "directory": 1.25}
"""How many times the first third the last third may be, plus ALLOWED."""
ALLOWED = {"memory": 16 << 20, "descriptors": 8, "threads": 2, "directory": 4 * SEGMENT_BYTES}
"""The noise of one sample, allowed in addition."""
SAMPLES = 3
"""The fewest samples after the warm-up that allow a verdict."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The server's resources at one moment."""

    memory: int
    descriptors: int
    threads: int
    directory: int


def look(server: ServerProcess) -> Sample:
    """Sample the server's resources (Linux)."""
    assert server.process is not None
    process = Path(f"/proc/{server.process.pid}")
    size = 0
    for path in server.data_dir.rglob("*"):
        try:
            size += path.stat().st_blocks * 512
        except OSError:
            continue  # retention has deleted the file
    return Sample(server.anonymous_bytes(), len(os.listdir(process / "fd")), len(os.listdir(process / "task")), size)


def compared(samples: list[Sample]) -> dict[str, dict[str, float | bool]]:
    """For each resource the medians of the first and the last third, and whether it stayed flat."""
    third = max(1, len(samples) // 3)
    rows: dict[str, dict[str, float | bool]] = {}
    for name, share in SHARES.items():
        first = statistics.median(getattr(sample, name) for sample in samples[:third])
        last = statistics.median(getattr(sample, name) for sample in samples[-third:])
        rows[name] = {"first": first, "last": last, "is_flat": last <= first * share + ALLOWED[name]}
    return rows


class Forgotten(CheckMessageListener):
    """Answers checks of the transactions whose outcome the producer does not send."""

    topics = TOPICS

    def check(self, half: HalfMessage) -> Outcome:
        return Outcome.COMMIT


async def produce(url: str, seconds: float) -> dict[str, int]:
    """Send transactions at a steady pace. Returns the number of each kind."""
    counted = {"committed": 0, "rolled_back": 0, "left_to_checks": 0, "failed": 0}
    generator = random.Random()
    until = time.monotonic() + seconds
    async with AsyncTransactionProducer(url, group="soak") as producer:
        producer.add_check_listener(Forgotten())

        async def one() -> None:
            topic = generator.choice(TOPICS)
            delay = generator.random() * 10 if generator.random() < 0.1 else None
            message = Message(topic, b"x" * 256, key=str(generator.randrange(5000)), delay=delay)
            try:
                prepared = await producer.prepare([message], check_after=1.0)
                fate = generator.random()
                if fate < 0.02:
                    counted["left_to_checks"] += 1
                elif fate < 0.1:
                    await prepared.rollback()
                    counted["rolled_back"] += 1
                else:
                    await prepared.commit()
                    counted["committed"] += 1
            except NotifyError as error:
                counted["failed"] += 1
                print(f"failed: {type(error).__name__}: {error}"[:200], file=sys.stderr, flush=True)

        running: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        while time.monotonic() < until:
            for _ in range(PER_SECOND // 50):
                if len(running) < 5 * PER_SECOND:  # bounds the number of requests that a slow server has not answered
                    task = asyncio.ensure_future(one())
                    running.add(task)
                    task.add_done_callback(running.discard)
            due += 0.02
            await asyncio.sleep(max(0.0, due - time.monotonic()))  # the pace
        if running:
            await asyncio.wait(running, timeout=60)
    return counted


async def consume(url: str, seconds: float) -> dict[str, int]:
    """Run a group of each mode. Returns how many messages each group handled."""
    # The handlers fail on purpose, and the SDK would log a traceback for each failure.
    logging.getLogger("notify.consumer").setLevel(logging.ERROR)
    generator = random.Random()

    async def handle(message: ReceivedMessage) -> None:
        fate = generator.random()
        if fate < 0.001:
            raise DeadLetter("refused permanently")
        if fate < 0.01:
            raise ValueError("fails this time")

    consumers = []
    for topic, mode in MODE_OF.items():
        consumer = AsyncConsumer(url, group=mode, instance="soak", concurrency=64, batch=512)
        consumer.subscribe(topic, mode=mode, start="earliest", retry_min=0.5, retry_max=2.0)(handle)
        consumers.append(consumer)
    running = [asyncio.ensure_future(consumer.run()) for consumer in consumers]
    await asyncio.sleep(seconds)  # how long they consume
    for consumer in consumers:
        consumer.stop()
    await asyncio.wait(running, timeout=60)
    return {topic: consumer.handled for topic, consumer in zip(TOPICS, consumers, strict=True)}


def _child(role: str, url: str, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tools.bench.soak", "--child", role, "--url", url, "--seconds", str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def run(seconds: float) -> int:
    """Run the soak, and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="notify-soak-") as directory:
        environment = {"NOTIFY_RETENTION_SECONDS": str(RETENTION_SECONDS), "NOTIFY_SEGMENT_BYTES": str(SEGMENT_BYTES)}
        server = ServerProcess(Path(directory) / "data", environment=environment).start()
        children = [_child("consume", server.url, seconds + 5), _child("produce", server.url, seconds)]
        samples: list[Sample] = []
        warm_up = max(2 * RETENTION_SECONDS, WARM_UP_SHARE * seconds)
        started = time.monotonic()
        try:
            while time.monotonic() - started < seconds:
                time.sleep(LOOK_SECONDS)  # the pause between two samples
                if time.monotonic() - started > warm_up:
                    samples.append(look(server))
            results: list[dict[str, Any]] = [json.loads(child.communicate(timeout=180)[0]) for child in children]
        finally:
            for child in children:
                child.kill()
            server.stop()
    handled, sent = results
    if len(samples) < SAMPLES:
        print(json.dumps({"sent": sent, "handled": handled, "samples": len(samples)}))
        least = warm_up + (SAMPLES + 1) * LOOK_SECONDS
        print(f"VERDICT: INCONCLUSIVE {seconds:g} s are too short, the warm-up takes {warm_up:g} s: run {least:g} s")
        return 2
    rows = compared(samples)
    print(json.dumps({"sent": sent, "handled": handled, "samples": len(samples), "compared": rows}))
    is_flat = all(row["is_flat"] for row in rows.values())
    rate = (sum(sent.values()) - sent["failed"]) / seconds
    verdict = "PASS" if is_flat and not sent["failed"] else "FAIL"
    memory = f"memory {rows['memory']['first'] / 2**20:.0f} to {rows['memory']['last'] / 2**20:.0f} MiB"
    print(f"VERDICT: {verdict} {seconds:g} s at {rate:,.0f}/s, {sum(handled.values()):,} handled, {memory}")
    return 0 if verdict == "PASS" else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--child", choices=("produce", "consume"))
    parser.add_argument("--url")
    options = parser.parse_args()
    if options.child is None:
        return run(options.seconds)
    work = produce if options.child == "produce" else consume
    print(json.dumps(asyncio.run(work(options.url, options.seconds))))
    return 0


if __name__ == "__main__":
    with exit_on_signal():
        sys.exit(main())
