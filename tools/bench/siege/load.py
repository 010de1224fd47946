"""The clients whose rates are measured, producers of halves and outcomes and a consumer at each worker; and the figures
of one phase of the siege.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import time
from typing import Any, NamedTuple

import msgspec

from notify.client.transport.http import HttpClient
from notify.errors import NotifyError
from notify.protocol import ids
from notify.protocol.keys import shard_of_key
from notify.protocol.wire import (
    OutcomeItem,
    Outcomes,
    PackedMessage,
    PackedTransaction,
    PackedTransactions,
    Receive,
    Settle,
    SettleItem,
    encode_msgpack,
)
from notify.protocol.workers import worker_names
from notify.testing import usage
from notify.testing.process import ServerProcess

CALLERS = 8
BODY = b"x" * 200
BUCKETS, BASE, FIRST_SECONDS = 200, 1.08, 0.0001
"""Latencies are counted in buckets, each 8 % wider than the one before."""


class Counts(NamedTuple):
    """All that was counted up to a moment."""

    sent: int
    received: int
    latencies: list[int]

    def latency(self, before: Counts, quantile: float) -> float:
        """A quantile of the latencies (seconds, of a half) that were counted since `before`; 0 if there are none."""
        counts = [count - earlier for count, earlier in zip(self.latencies, before.latencies, strict=True)]
        left = sum(counts) * quantile
        for bucket, count in enumerate(counts):
            left -= count
            if left <= 0 and count:
                return float(FIRST_SECONDS * BASE ** (bucket + 1))
        return 0.0


class Load:
    """The clients' process, and what it counts."""

    def __init__(self, url: str, token: str, workers: int) -> None:
        context: Any = multiprocessing.get_context("spawn")
        self._counts = context.Array("q", 2 + BUCKETS, lock=False)
        self.process = context.Process(target=_run, args=(url, token, workers, self._counts), daemon=True)
        self.process.start()

    def counts(self) -> Counts:
        """The counts so far."""
        counts = list(self._counts)
        return Counts(counts[0], counts[1], counts[2:])


def _run(url: str, token: str, workers: int, counts: Any) -> None:
    asyncio.run(_load(url, token, workers, counts))


async def _load(url: str, token: str, workers: int, counts: Any) -> None:
    names = worker_names(workers) if workers > 1 else ()
    clients = [HttpClient(f"{url}/{name}" if name else url, token=token) for name in names or ("",)]
    keys = [_key_of(name, names) for name in names or ("",)]

    async def produce(number: int) -> None:
        http, key = clients[number % len(clients)], keys[number % len(keys)]
        while True:
            name = ids.to_text(ids.new_id())
            half = PackedTransaction(id=name, messages=[PackedMessage(topic="order", body=BODY, key=key)])
            outcome = OutcomeItem(id=name, outcome="COMMIT")
            began = time.perf_counter()
            with contextlib.suppress(NotifyError):
                request = PackedTransactions(producer_group="shop", transactions=[half])
                await http.call("POST", "/v1/transactions", encode_msgpack(request), 10)
                _count(counts, time.perf_counter() - began)
                outcomes = Outcomes(producer_group="shop", outcomes=[outcome])
                await http.call("POST", "/v1/transactions/outcomes", encode_msgpack(outcomes), 10)
                counts[0] += 1

    async def consume(http: HttpClient) -> None:
        asked = encode_msgpack(Receive(instance="points-1", topics=["order"], max=100, wait=5, lease=30))
        while True:
            with contextlib.suppress(NotifyError):
                answer = await http.call("POST", "/v1/groups/points/receive", asked, 20)
                receipts = [message["receipt"] for message in msgspec.msgpack.decode(answer)["messages"]]
                if receipts:
                    items = [SettleItem(receipt=receipt, action="ack") for receipt in receipts]
                    await http.call("POST", "/v1/groups/points/settle", encode_msgpack(Settle(items=items)), 20)
                    counts[1] += len(receipts)

    await asyncio.gather(*[produce(n) for n in range(CALLERS)], *[consume(http) for http in clients])


def _count(counts: Any, seconds: float) -> None:
    bucket = int(math.log(max(seconds, FIRST_SECONDS) / FIRST_SECONDS, BASE))
    counts[2 + min(bucket, BUCKETS - 1)] += 1


def _key_of(name: str, names: tuple[str, ...]) -> str:
    """A long key that belongs to a worker."""
    keys = (str(number) + "k" * 199 for number in range(1000))
    return next(key for key in keys if not name or shard_of_key(key, names) == name)


SAMPLE_SECONDS = 0.25


class Measured:
    """Rates of producer and consumer, the producer's latency, and the server's memory and CPU time, in one phase."""

    def __init__(self, server: ServerProcess, load: Load, seconds: float) -> None:
        began, before, cpu = time.monotonic(), load.counts(), _cpu_seconds(server)
        self.most_bytes = _bytes(server)
        while (passed := time.monotonic() - began) < seconds:
            time.sleep(min(SAMPLE_SECONDS, seconds - passed))  # the pause between two samples
            self.most_bytes = max(self.most_bytes, _bytes(server))
        self.last_bytes = _bytes(server)
        counts = load.counts()
        self.sent = (counts.sent - before.sent) / passed
        self.received = (counts.received - before.received) / passed
        self.half_seconds, self.late_seconds = counts.latency(before, 0.5), counts.latency(before, 0.99)
        self.cores = (_cpu_seconds(server) - cpu) / passed

    def line(self, phase: str) -> str:
        memory, half, late = self.most_bytes / (1 << 20), self.half_seconds * 1000, self.late_seconds * 1000
        return (
            f"{phase:<16}{self.sent:>8,.0f} sent/s{self.received:>8,.0f} received/s  p50{half:>7.1f} p99{late:>8.1f} ms"
            f"{memory:>7,.0f} MiB at most{self.cores:>6.2f} cores"
        )


def _processes(server: ServerProcess) -> list[int]:
    assert server.process is not None
    return [server.process.pid, *server.workers()]


def _bytes(server: ServerProcess) -> int:
    """The memory of the server with its workers, without mapped files (RssAnon)."""
    total = 0
    for pid in _processes(server):
        with contextlib.suppress(OSError):  # a worker has just ended
            total += usage.anonymous_bytes(pid)
    return total


def _cpu_seconds(server: ServerProcess) -> float:
    return sum(usage.cpu_seconds(pid) for pid in _processes(server))
