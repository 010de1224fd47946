"""`python -m tools.bench topics`: compares the rate with many topics and with few, and measures the memory of an idle
topic.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec

from notify.cli.bench.runner import Bench
from notify.cli.bench.verify import Topics
from notify.client.transport.http import HttpClient
from notify.protocol.wire import JSON, Items, States, encode_msgpack
from tools.bench.compare.ratios import Spread
from tools.bench.fill import filled

FEW = 16
SMALL = 16
"""The body bytes of the one message in each topic; few, so that buffers do not hide the memory of the topics."""
WARM_SECONDS = 2.0


def run(
    *,
    counts: tuple[int, ...] = (10_000, 100_000),
    clients: int = 1024,
    seconds: float = 5.0,
    runs: int = 5,
    body: int = 256,
) -> dict[str, Any]:
    """Measure `counts`, numbers of topics, each compared with 16 topics, in `runs` interleaved runs of `seconds`.

    Returns the figures by name. Raises NotifyError if a process could not run.
    """
    with Bench() as bench:
        servers = {count: bench.server(f"data-{count}") for count in (FEW, *counts)}
        for count, server in servers.items():
            filled(server.url, messages=count, body=SMALL, topics=count)
        rates: dict[int, list[float]] = {count: [] for count in servers}
        acknowledged: dict[int, list[str]] = {count: [] for count in servers}
        for _ in range(runs):
            for count, server in servers.items():
                result = bench.produce(
                    server.url, clients=clients, seconds=seconds, warmup=WARM_SECONDS, body=body, topics=count
                ).result()
                rates[count].append(result["committed"] / result["seconds"])
                acknowledged[count] += Path(result["ids"]).read_text().split()
        lost = doubled = 0
        for count, server in servers.items():
            missing, extra = committed_in_all(server.url, acknowledged[count], sent_besides=count)
            lost += missing
            doubled += extra
    few = rates.pop(FEW)
    summary: dict[str, Any] = {
        "transactions_per_second_16": round(statistics.median(few)),
        "bytes_per_idle_topic": round(_bytes_per_topic(max(counts))),
        "committed": sum(map(len, acknowledged.values())),
        "lost": lost,
        "duplicated": doubled,
        "flush": "sync",
    }
    for count, values in rates.items():
        # Compare within a round, because the machine may be busier in another round.
        spread = Spread.from_ratios([many / rate for many, rate in zip(values, few, strict=True)])
        summary[f"ratio_{count}_to_16"] = round(spread.median, 3)
        summary[f"spread_{count}"] = [round(spread.minimum, 3), round(spread.maximum, 3)]
    return summary


def _bytes_per_topic(count: int) -> float:
    """Bytes a topic: the memory of `count` topics with one message each, minus that of `count` messages in few topics.

    The median of three measurements.
    """
    bytes_each = []
    for _ in range(3):
        grown = []
        for topics in (FEW, count):
            with Bench() as bench:
                server = bench.server()
                time.sleep(0.5)
                before = server.anonymous_bytes()
                filled(server.url, messages=count, body=SMALL, topics=topics)
                time.sleep(0.5)
                grown.append(server.anonymous_bytes() - before)
        bytes_each.append((grown[1] - grown[0]) / count)
    return statistics.median(bytes_each)


def committed_in_all(url: str, acknowledged: list[str], sent_besides: int) -> tuple[int, int]:
    """The numbers of acknowledged transactions that are not COMMITTED, and of surplus messages.

    Transactions must have one message each; `sent_besides`: the number of other messages. Uses the states and the ends
    of the queues, because reading 100,000 topics would take longer than the bench.
    """
    return asyncio.run(_committed(url, acknowledged, sent_besides))


async def _committed(url: str, acknowledged: list[str], sent_besides: int) -> tuple[int, int]:
    http = HttpClient(url)
    try:
        missing = 0
        for first in range(0, len(acknowledged), 4096):
            request = encode_msgpack(States(producer_group="bench", ids=acknowledged[first : first + 4096]))
            answer = msgspec.msgpack.decode(await http.call("POST", "/v1/transactions/states", request, 60), type=Items)
            missing += sum([item.state != "COMMITTED" for item in answer.items])
        listed = await http.call("GET", "/v1/admin/topics", b"", 60, JSON)
    finally:
        http.close()
    topics = msgspec.json.decode(listed, type=Topics).topics
    stored = sum(queue.end - queue.start for topic in topics for queue in topic.queues)
    return missing, max(0, stored - sent_besides - len(acknowledged))
