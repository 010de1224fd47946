"""`notify bench topics`: compares the rate with many topics and with few, and measures the memory of an idle topic."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.cli.bench import children, verify
from notify.testing.process import ServerProcess

FEW = 16
SMALL = 16
"""The body bytes of the one message in each topic; few, so that buffers do not hide the memory of the topics."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`counts`: numbers of topics, each compared with 16 topics, in `runs` interleaved runs of `seconds`."""

    counts: tuple[int, ...] = (10_000, 100_000)
    clients: int = 1024
    seconds: float = 5.0
    warmup: float = 2.0
    runs: int = 5
    body: int = 256


def run(plan: Plan) -> dict[str, Any]:
    """Measure, and return the figures by name. Raises NotifyError if a process could not run."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-bench-")))
        servers: dict[int, ServerProcess] = {}
        for count in (FEW, *plan.counts):
            server = servers[count] = ServerProcess(directory / f"data-{count}").start()
            stack.callback(server.stop)
            _fill(server, count, count)
        rates: dict[int, list[float]] = {count: [] for count in servers}
        committed = lost = doubled = 0
        for _ in range(plan.runs):
            for count, server in servers.items():
                rate, acknowledged = _rate(plan, server, count, directory)
                rates[count].append(rate)
                committed += acknowledged
        for count, server in servers.items():
            missing, extra = verify.committed_in_all(server.url, _acknowledged(directory, count), sent_besides=count)
            lost += missing
            doubled += extra
    few = rates.pop(FEW)
    summary: dict[str, Any] = {
        "transactions_per_second_16": round(statistics.median(few)),
        "bytes_per_idle_topic": round(_bytes_per_topic(max(plan.counts))),
        "committed": committed,
        "lost": lost,
        "duplicated": doubled,
        "flush": "sync",
    }
    for count, values in rates.items():
        # Compare within a round, because the machine may be busier in another round.
        ratios = [many / few_rate for many, few_rate in zip(values, few, strict=True)]
        summary[f"ratio_{count}_to_16"] = round(statistics.median(ratios), 3)
        summary[f"spread_{count}"] = [round(min(ratios), 3), round(max(ratios), 3)]
    return summary


def _fill(server: ServerProcess, messages: int, topics: int) -> None:
    spec = {"url": server.url, "messages": messages, "body": SMALL, "topics": topics}
    children.result(children.start("notify.cli.bench.load", spec))


def _bytes_per_topic(count: int) -> float:
    """Bytes a topic: the memory of `count` topics with one message each, minus that of `count` messages in few topics.

    The median of three measurements.
    """
    bytes_each = []
    for _ in range(3):
        grown = []
        for topics in (FEW, count):
            with tempfile.TemporaryDirectory(prefix="notify-bench-") as directory:
                server = ServerProcess(Path(directory) / "data").start()
                time.sleep(0.5)
                before = server.anonymous_bytes()
                _fill(server, count, topics)
                time.sleep(0.5)
                grown.append(server.anonymous_bytes() - before)
                server.stop()
        bytes_each.append((grown[1] - grown[0]) / count)
    return statistics.median(bytes_each)


def _acknowledged(directory: Path, topics: int) -> list[str]:
    return (directory / f"acknowledged-{topics}").read_text().split()


def _rate(plan: Plan, server: ServerProcess, topics: int, directory: Path) -> tuple[float, int]:
    load = children.start_load(
        server.url,
        directory / "ids",
        clients=plan.clients,
        seconds=plan.seconds,
        warmup=plan.warmup,
        body=plan.body,
        topics=topics,
    )
    result = children.result(load)
    with (directory / f"acknowledged-{topics}").open("a") as file:
        file.write((directory / "ids").read_text() + "\n")
    return result["committed"] / result["seconds"], result["acknowledged"]
