"""Reads topics from a server in threads, without a group or a lease, so that no other reader is affected."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from notify.client.threads.loop import LoopThread
from notify.client.transport.servers import Servers, more_telling
from notify.errors import Backpressure, InvalidRequest, NotFound, NotifyError
from notify.protocol.wire import JSON, MSGPACK, Delivered, Pulled
from notify.runtime.backoff import Backoff
from notify.spark.messages.options import Options

CALL_SECONDS = 30.0
MOST_PULLED = 2000
"""Messages a request: a server's reply has up to 8 MiB anyway."""


class _Bounds(msgspec.Struct):
    queue: int
    start: int
    end: int
    gaps: list[tuple[int, int]] = []


class _Topic(msgspec.Struct):
    queues: list[_Bounds]
    number: int = 0
    """0: an older server, which does not report it."""


_decode_topic = msgspec.json.Decoder(_Topic).decode
_decode_pulled = msgspec.msgpack.Decoder(Pulled).decode


@dataclass(frozen=True)
class TopicState:
    """A topic as a server has it at a moment."""

    number: int
    bounds: dict[int, tuple[int, int]]
    """For each queue its first and its next offset."""
    gaps: dict[int, list[tuple[int, int]]]
    """For each queue the runs [first, end) of offsets that a restore skipped, in order."""

    def spans(self, queue: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The runs of [first, end) that messages have, or had."""
        for gap, behind in self.gaps.get(queue, ()):
            if first < min(gap, end):
                yield first, min(gap, end)
            first = max(first, behind)
        if first < end:
            yield first, end


class Server:
    """The servers of a query. Close it at the end."""

    def __init__(self, options: Options) -> None:
        """Raises InvalidRequest for invalid addresses, tokens and files."""
        self._seconds = options.timeout_seconds
        self._thread = LoopThread("notify-spark")
        try:
            self._servers = Servers(options.servers, "queue", tls=options.tls(), token=options.shown())
        except BaseException:
            self._thread.close()
            raise

    def topic(self, name: str) -> TopicState:
        """The topic's state now. Raises NotFound for a topic that does not exist, and the server's refusals."""
        try:
            topic = _decode_topic(self._call(f"/v1/topics/{name}", JSON))
        except NotFound:
            raise NotFound(
                f"there is no topic {name!r} on {self._servers.urls()[0]}: make it with `notify topic create {name}`, "
                "or correct the option topics",
                "unknown_topic",
            ) from None
        return TopicState(
            topic.number,
            {b.queue: (b.start, b.end) for b in topic.queues},
            {b.queue: b.gaps for b in topic.queues if b.gaps},
        )

    def pull(self, topic: str, queue: int, offset: int, most: int) -> tuple[list[Delivered], int] | None:
        """Up to `most` messages from an offset on, and the offset after them; None: it is below what is retained."""
        path = f"/v1/topics/{topic}/queues/{queue}/messages?offset={offset}&max={min(most, MOST_PULLED)}"
        try:
            pulled = _decode_pulled(self._call(path, MSGPACK))
        except InvalidRequest as error:
            if error.code == "below_start":
                return None
            raise
        return pulled.messages, pulled.next_offset

    def _call(self, path: str, kind: str) -> bytes:
        return self._thread.run(self._patiently(path, kind))

    async def _patiently(self, path: str, kind: str) -> bytes:
        """One answer: a server that is unreachable or busy is asked again, until the option timeoutSeconds is over."""
        deadline = time.monotonic() + self._seconds
        wait = Backoff(0.1, 5.0)
        failed: NotifyError | None = None
        while True:
            left = max(0.1, min(CALL_SECONDS, deadline - time.monotonic()))
            try:
                await self._servers.known(left)
                if logs := self._servers.places():
                    raise InvalidRequest(
                        f"these servers have a log each ({', '.join(logs)}), and an offset is one log's: this source "
                        "reads one server with one log. Read them with AsyncReader and its shard, or from a store that "
                        "they ship to"
                    )
                left = max(0.1, min(CALL_SECONDS, deadline - time.monotonic()))
                return await self._servers.call("GET", path, b"", left, kind)
            except NotifyError as error:
                failed = more_telling(error, failed, left)
                pause = wait.next()
                if isinstance(error, Backpressure):
                    pause = max(pause, error.retry_after)
                if not error.retryable or time.monotonic() + pause > deadline:
                    raise failed from None
            await asyncio.sleep(pause)

    def close(self) -> None:
        """Cut the connections."""
        self._thread.run(self._end())
        self._thread.close()

    def _end(self) -> Coroutine[Any, Any, None]:
        return self._servers.aclose()
