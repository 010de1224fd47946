"""The consumer process of a bench over Kafka: it counts what its empty handler gets, and how long that takes.

Run as `python -m notify.bench.kafka.handled` with a JSON specification; prints one JSON object.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from notify.client import AsyncConsumer, Consumer, ReceivedMessage

PLAIN_BATCH = 500
"""Records between two commits of the plain consumer."""


class Count:
    """Messages from the first on, until there are enough or the time is over; then it calls `stop`."""

    def __init__(self, enough: int, seconds: float) -> None:
        self._enough = enough
        self._seconds = seconds
        self.handled = 0
        self.is_over = False
        self._first_at = self._last_at = 0.0
        self._cpu_before = self._cpu = 0.0
        self.stop: Callable[[], None] = _nothing

    def add(self, messages: int = 1) -> None:
        """Threads of a consumer call it at the same time; a count that is a few short is good enough."""
        if self.is_over:
            return
        now = time.perf_counter()
        if not self.handled:
            self._first_at, self._cpu_before = now, time.process_time()
        self.handled += messages
        if self.handled >= self._enough or now - self._first_at > self._seconds:
            self.is_over = True
            self._last_at, self._cpu = now, time.process_time()
            self.stop()

    def figures(self) -> dict[str, float]:
        """Messages a second of the run, and microseconds of this process's CPU time for each."""
        cpu = self._cpu - self._cpu_before
        return {"per_second": self.handled / (self._last_at - self._first_at), "cpu_us": cpu / self.handled * 1e6}


def _nothing() -> None:
    pass


def plain(spec: dict[str, Any], count: Count) -> None:
    """A consumer as the client's manual has it: a batch, its handlers one by one, a commit."""
    import confluent_kafka

    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": spec["brokers"],
            "group.id": spec["group"],
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([spec["topic"]])
    while not count.is_over:
        batch = [record for record in consumer.consume(PLAIN_BATCH, 1.0) if record.error() is None]
        for record in batch:
            _handle_plain(record.value())
        if batch:
            consumer.commit(asynchronous=False)
            count.add(len(batch))
    consumer.close()


def _handle_plain(value: bytes | None) -> None:
    pass


def notifys(spec: dict[str, Any], count: Count) -> None:
    """Notify's consumer, `async` or with threads, in a mode, with a `batch` (None: the default)."""
    options: dict[str, Any] = {"group": spec["group"], "batch": spec["batch"]}
    url = f"kafka://{spec['brokers']}"
    if not spec["is_async"]:
        consumer = Consumer(url, **options)
        count.stop = consumer.stop

        @consumer.subscribe(spec["topic"], start="earliest", mode=spec["mode"])
        def handle(message: ReceivedMessage) -> None:
            count.add()

        consumer.run()
        return
    others = AsyncConsumer(url, **options)
    count.stop = others.stop

    @others.subscribe(spec["topic"], start="earliest", mode=spec["mode"])
    async def handle_async(message: ReceivedMessage) -> None:
        count.add()

    asyncio.run(others.run())


def main() -> None:
    """Run the consumer by the specification in argv[1]."""
    spec = json.loads(sys.argv[1])
    count = Count(spec["messages"], spec["seconds"])
    gc.freeze()
    (plain if spec["mode"] == "plain" else notifys)(spec, count)
    print(json.dumps(count.figures()))


if __name__ == "__main__":
    main()
