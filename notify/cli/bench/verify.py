"""Verifies a bench: counts every message in the queues of its topics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator

import msgspec
import sqlalchemy as sa

from notify.client.transport.http import HttpClient
from notify.protocol.wire import JSON, Delivered, Pulled


class _Queue(msgspec.Struct):
    queue: int
    start: int
    end: int
    worker: str = ""
    """The worker that has the queue; empty if the server has no workers."""


class _Topic(msgspec.Struct):
    name: str
    queues: list[_Queue]


class Topics(msgspec.Struct):
    topics: list[_Topic]


async def pulled(http: HttpClient, topic: str, queue: int = 0, offset: int = 0) -> AsyncIterator[Delivered]:
    """Every message of a queue from an offset on, in order. Raises the errors of HttpClient.call."""
    while True:
        path = f"/v1/topics/{topic}/queues/{queue}/messages?offset={offset}&max=5000"
        page = msgspec.msgpack.decode(await http.call("GET", path, b"", 60), type=Pulled)
        if not page.messages:
            return
        for message in page.messages:
            yield message
        offset = page.next_offset


def count_in_queues(url: str, prefix: str) -> dict[str, int]:
    """The number of messages of each transaction id in all topics with the prefix."""
    return asyncio.run(_count(url, prefix))


async def _count(url: str, prefix: str) -> dict[str, int]:
    http = HttpClient(url)
    workers: dict[str, HttpClient] = {}
    counts: Counter[str] = Counter()
    try:
        answer = await http.call("GET", "/v1/admin/topics", b"", 60, JSON)
        topics = msgspec.json.decode(answer, type=Topics).topics
        deadline = time.monotonic() + 600
        for topic in topics:
            if not topic.name.startswith(prefix):
                continue
            for queue in topic.queues:
                client = http
                if queue.worker:
                    client = workers.setdefault(queue.worker, HttpClient(f"{url}/{queue.worker}"))
                async for message in pulled(client, topic.name, queue.queue, queue.start):
                    counts[message.id.partition(".")[0]] += 1
                    if time.monotonic() > deadline:
                        break
    finally:
        for client in (http, *workers.values()):
            client.close()
    return dict(counts)


def missing_in_database(storage: str, acknowledged: set[str]) -> int:
    """How many acknowledged transactions are not COMMITTED in a server's database."""
    from notify.storage.sql.engines import open_engine
    from notify.storage.sql.tables import server_half_message

    columns = server_half_message.c
    query = sa.select(columns.transaction_id).where(columns.state == "COMMITTED", columns.message_no == 0)
    with open_engine(storage).connect() as connection:
        rows = connection.execution_options(stream_results=True).execute(query)
        return len(acknowledged - {str(row[0]) for row in rows})
