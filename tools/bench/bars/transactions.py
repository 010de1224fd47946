"""`make bench`: every main bar in one run, medians of repeated runs with their range, and a verdict."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.cli.bench.transactions import run
from notify.client.producer.packing import pack
from notify.client.producer.transactions import TransactionClient
from notify.client.threads.loop import new_event_loop
from notify.protocol.message import Message
from notify.runtime.signals import exit_on_signal
from notify.testing.process import ServerProcess
from tools.bench.bars.judged import Tell, judge
from tools.bench.reference import Reference
from tools.bench.reference import measure as measure_reference

PILE_MB = 400
PILE_CALLERS, PILE_TOPICS = 1024, 16
READY = 1000.0
"""The start after kill -9 may take so many times as long as a transaction of the reference with 1,024 callers."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure of a run with `options`, and the bar of its ratio to a figure of the reference with so many callers."""

    name: str
    options: dict[str, Any]
    figure: str
    bar: float
    reference: Callable[[Reference], float]
    reference_callers: int
    at_most: bool = False


def bars(seconds: float) -> list[Bar]:
    def rate(name: str, figure: str, bar: float, **options: Any) -> Bar:
        options |= {"seconds": seconds}
        return Bar(name, options, figure, bar, lambda r: r.transactions_per_second, options["clients"])

    def latency(name: str, figure: str, bar: float, **options: Any) -> Bar:
        return Bar(name, options | {"seconds": seconds}, figure, bar, lambda r: r.p50_ms, 1, at_most=True)

    recorded = "transactions_per_second"
    paced = {"clients": 64, "rate": 2000, "consume": True}
    return [
        rate("1,024 callers, transactions/s", recorded, 0.15, clients=1024),
        rate("1,024 callers, delivered and acknowledged/s", "delivered_per_second", 0.11, clients=1024, consume=True),
        rate("128 callers, transactions/s", recorded, 0.18, clients=128),
        latency("1 caller, p50 in ms", "p50_ms", 3.0, clients=1),
        rate("one request a half, 128 callers, transactions/s", recorded, 0.06, clients=128, batching=False),
        latency("2,000/s, commit to handler, p50 in ms", "handler_p50_ms", 1.5, **paced),
        latency("2,000/s, commit to handler, p99 in ms", "handler_p99_ms", 8.0, **paced),
    ]


def measure(bar: Bar, repeats: int, tell: Tell) -> list[str]:
    """Judge repeated runs; names of what is missed, and of runs in which a message was lost or doubled."""
    figures: list[float] = []
    references: list[float] = []
    wrong = 0
    for _ in range(repeats):
        references.append(bar.reference(measure_reference(bar.reference_callers)))
        result = run(**bar.options)
        figures.append(float(result[bar.figure]))
        wrong += result["lost"] + result["duplicated"]
    missed = judge(tell, bar.name, figures, bar.bar, at_most=bar.at_most, references=references)
    return missed + [f"{bar.name}: {wrong} lost or doubled"] * bool(wrong)


def measure_pile(messages: int, tell: Tell) -> list[str]:
    """Measure memory with a backlog, and the start after kill -9; names of what is missed."""
    seconds = measure_reference(PILE_CALLERS).p50_ms / 1000
    memory = pile(messages)
    missed = judge(
        tell, f"{messages:,} undelivered messages, RssAnon in MB", [memory.anonymous_mb], PILE_MB, at_most=True
    )
    ready = [statistics.median(memory.ready_seconds)]
    return missed + judge(tell, "ready after kill -9, in s", ready, READY, at_most=True, references=[seconds])


@dataclass(frozen=True, slots=True)
class Pile:
    """`anonymous_mb`: RssAnon with the backlog. `ready_seconds`: after each kill, from the process's start to ready."""

    anonymous_mb: float
    ready_seconds: list[float]


def pile(messages: int, starts: int = 3) -> Pile:
    """Commit transactions of 256 bytes without a consumer, then kill and start the server `starts` times."""
    with tempfile.TemporaryDirectory(prefix="notify-pile-") as directory:
        server = ServerProcess(Path(directory) / "data").start()
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(_load(server.url, messages))
            time.sleep(3)  # lets the server finish sealing a segment
            anonymous = server.anonymous_bytes() / (1 << 20)
            ready = []
            for _ in range(starts):
                server.kill()
                ready.append(server.start().ready_seconds)
        finally:
            server.stop()
    return Pile(anonymous, ready)


async def _load(url: str, messages: int) -> None:
    client = TransactionClient(url, "pile", instance="pile", half_seconds=60)
    packed = [pack(Message(f"pile-{n}", bytes(256))) for n in range(PILE_TOPICS)]
    numbers = iter(range(messages))

    async def caller() -> None:
        for number in numbers:
            item = await client.half([packed[number % PILE_TOPICS]])
            await client.outcome_soon(item.id, item.shard, "COMMIT")

    await asyncio.gather(*(caller() for _ in range(PILE_CALLERS)))
    await client.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--pile", type=int, default=5_000_000, help="undelivered messages; 0 leaves that out")
    options = parser.parse_args()

    def tell(line: str) -> None:
        print(line, flush=True)

    missed = [name for bar in bars(options.seconds) for name in measure(bar, options.repeats, tell)]
    if options.pile:
        missed += measure_pile(options.pile, tell)
    print(f"VERDICT: {'FAIL ' + '; '.join(missed) if missed else 'PASS every bar is met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    with exit_on_signal():
        sys.exit(main())
