"""Reader and AsyncReader: read a queue with the caller's own offsets, without group, lease or acknowledgement.

Several servers with separate logs, such as the workers of one machine, have separate offsets. An offset then needs the
`shard` that it belongs to; `earliest` and `latest` may name all shards.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Iterator, Sequence

import msgspec

from notify.client.threads.loop import LoopThread, running_loop
from notify.client.transport.http import read_answer
from notify.client.transport.login import Shown
from notify.client.transport.servers import Servers, more_telling
from notify.errors import Closed, InvalidRequest, NotFound, NotifyError, Unavailable
from notify.protocol.limits import LIMITS, check_name, check_whole
from notify.protocol.message import ReceivedMessage
from notify.protocol.wire import JSON, MSGPACK, Delivered, Pulled
from notify.protocol.withdrawal import without_own
from notify.runtime.backoff import Backoff

BATCH = 500
CALL_SECONDS = 30.0
FOLLOW_SECONDS = 0.1
RETRY_SECONDS, RETRY_MAX_SECONDS = 0.1, 2.0


class QueueBounds(msgspec.Struct, frozen=True):
    """The offsets of a queue."""

    queue: int
    start: int
    """The first retained offset."""
    end: int
    """The offset after the last message."""
    gaps: Sequence[tuple[int, int]] = ()
    """The runs [first, end) of offsets that no message has, in order: a restore left them free."""

    def spans(self) -> list[tuple[int, int]]:
        """The runs [first, end) of retained offsets without the gaps, in order."""
        starts = [self.start, *(max(self.start, after) for _, after in self.gaps)]
        ends = [*(min(self.end, first) for first, _ in self.gaps), self.end]
        return [(first, end) for first, end in zip(starts, ends, strict=True) if first < end]


class _Topic(msgspec.Struct):
    queues: list[QueueBounds]


_decode_pulled = msgspec.msgpack.Decoder(Pulled).decode
_decode_topic = msgspec.json.Decoder(_Topic).decode


class AsyncReader:
    """Reads queues from any offset, any number of times. Belongs to one event loop; use it as `async with`."""

    def __init__(self, url: str, *, batch: int = BATCH, token: Shown = None, tls: ssl.SSLContext | None = None) -> None:
        """`batch`: messages in a request, 1 to 10,000; `token`, `tls`: see Consumer."""
        check_whole("batch", batch, 1, LIMITS.max_messages)
        self._http = Servers(url, "queue", tls=tls, token=token)
        self._batch = batch
        self._was_answered = False
        """Whether a server has answered: from then on one that is unreachable is asked again."""

    async def shards(self) -> Sequence[str]:
        """One shard name for each server with a separate log; empty if there is only one log. Raises Unavailable if no
        server answers."""
        running_loop()
        await self._http.known(CALL_SECONDS)
        return self._http.places()

    async def read(
        self,
        topic: str,
        queue: int = 0,
        *,
        offset: int | str = "earliest",
        follow: bool = False,
        shard: str | None = None,
    ) -> AsyncGenerator[ReceivedMessage, None]:
        """The messages of a queue in order, from `earliest`, `latest` or an offset; each message has its `offset`.

        Ends at the last message, or with `follow` waits for more. If several servers have separate logs, it reads the
        one named `shard`; without `shard` it reads all, one by one, or with `follow` in turns. Raises NotFound
        if the queue does not exist, and InvalidRequest for an offset whose message was deleted (`below_start`), for one
        beyond the end or of a former topic, which was deleted and made again (`beyond_end`), or for one without the
        `shard` that it needs.
        """
        async for batch in self.batches(topic, queue, offset=offset, follow=follow, shard=shard):
            for message in batch:
                yield message

    async def batches(
        self,
        topic: str,
        queue: int = 0,
        *,
        offset: int | str = "earliest",
        follow: bool = False,
        shard: str | None = None,
    ) -> AsyncGenerator[list[ReceivedMessage], None]:
        """Like `read`, in the batches of the server's answers; with `follow`, batches may be empty while it waits."""
        check_name("topic", topic)
        offsets: dict[str | None, int] = {}
        numbers: dict[str | None, int] = {}
        """The topic's number at each shard."""
        for name in await self._shards_to_read(offset, shard):
            offsets[name] = await self.position(topic, queue, offset, shard=name) if isinstance(offset, str) else offset
        while offsets:
            has_more = False
            for name in list(offsets):
                pulled = await self._pull(topic, queue, offsets[name], name)
                if pulled is not None:
                    if numbers.setdefault(name, pulled.topic_number) != pulled.topic_number:
                        raise InvalidRequest(
                            f"topic {topic!r} was deleted and made again: offset {offsets[name]} belongs to the former "
                            "one; read from earliest",
                            "beyond_end",
                            410,
                        )
                    yield [_received(delivered) for delivered in pulled.messages]
                if pulled is not None and pulled.next_offset != offsets[name]:
                    offsets[name], has_more = pulled.next_offset, True
                elif not follow:
                    del offsets[name]
            if not has_more and offsets:
                await asyncio.sleep(FOLLOW_SECONDS)

    async def _shards_to_read(self, offset: int | str, shard: str | None) -> Sequence[str | None]:
        """The shards to read; [None] if there is one log. Raises InvalidRequest for an offset without its shard."""
        shards = await self.shards()
        if shard is not None or not shards:
            return [shard]
        if not isinstance(offset, str):
            raise InvalidRequest(
                f"offset {offset} belongs to one log, and there are several, {', '.join(shards)}: name one with "
                f"shard={shards[0]!r}",
                "invalid_start",
            )
        return list(shards)

    async def _pull(self, topic: str, queue: int, offset: int, shard: str | None) -> Pulled | None:
        """The next messages of a queue; None if this one of several servers has no message of the topic yet."""
        path = f"/v1/topics/{topic}/queues/{queue}/messages?offset={offset}&max={self._batch}"
        try:
            return read_answer(_decode_pulled, await self._ask(path, MSGPACK, shard))
        except NotFound:
            if shard is None or not await self._is_at_another(topic, shard):
                raise
            return None

    async def _is_at_another(self, topic: str, shard: str) -> bool:
        """Whether the topic exists on another shard."""
        for other in self._http.places():
            if other != shard:
                with contextlib.suppress(NotFound):
                    await self._ask(f"/v1/topics/{topic}", JSON, other)
                    return True
        return False

    async def position(self, topic: str, queue: int, where: str, *, shard: str | None = None) -> int:
        """The first retained offset of a queue (`earliest`), or the offset after its last message (`latest`)."""
        if where not in ("earliest", "latest"):
            raise InvalidRequest(f"offset {where[:40]!r} is not earliest, latest or a number", "invalid_start")
        try:
            # If the queue does not exist, the read that follows raises NotFound.
            start, end = (await self.queues(topic, shard=shard)).get(queue, (0, 0))
        except NotFound:
            if shard is None or not await self._is_at_another(topic, shard):
                raise
            return 0
        return start if where == "earliest" else end

    async def queues(self, topic: str, *, shard: str | None = None) -> dict[int, tuple[int, int]]:
        """The queues of a topic, by number: the first retained offset, and the offset after the last message.

        `shard`: which of several servers with separate logs; None: any. Raises NotFound if the topic does not exist,
        InvalidRequest for an invalid name.
        """
        bounds = await self.bounds(topic, shard=shard)
        return {queue: (row.start, row.end) for queue, row in bounds.items()}

    async def bounds(self, topic: str, *, shard: str | None = None) -> dict[int, QueueBounds]:
        """The offsets of a topic's queues, by number, with the gaps that a restore left; see `queues`."""
        check_name("topic", topic)
        described = read_answer(_decode_topic, await self._ask(f"/v1/topics/{topic}", JSON, shard))
        return {row.queue: row for row in described.queues}

    async def _ask(self, path: str, kind: str, shard: str | None) -> bytes:
        """The body of an answer. A server that has answered before, and is unreachable now, is asked again for
        CALL_SECONDS. Raises NotifyError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CALL_SECONDS
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        failed: NotifyError | None = None
        while True:
            left = max(deadline - loop.time(), RETRY_SECONDS)
            try:
                answer = await self._http.call("GET", path, b"", left, kind, shard)
                self._was_answered = True
                return answer
            except Unavailable as error:
                failed = more_telling(error, failed, left)
                wait = backoff.next()
                if not (self._was_answered and error.retryable) or loop.time() + wait > deadline:
                    raise failed from None
            await asyncio.sleep(wait)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncReader:
        running_loop()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _received(delivered: Delivered) -> ReceivedMessage:
    return ReceivedMessage(
        delivered.id,
        delivered.topic,
        delivered.queue,
        delivered.offset,
        delivered.body,
        delivered.key,
        delivered.tag,
        without_own(delivered.headers or {}),
        1,
        delivered.committed_at,
    )


class Reader:
    """AsyncReader for threads: `for message in reader.read(topic)`."""

    def __init__(self, url: str, *, batch: int = BATCH) -> None:
        self._url, self._batch = url, batch
        self._begin()

    def _begin(self) -> None:
        self._thread = LoopThread("notify-reader")
        try:
            self._reader = self._thread.run(self._make(self._url, self._batch))
        except BaseException:
            self._thread.close()
            raise

    def _begin_after_fork(self) -> None:
        """Begin again in a forked child, or in threads that gevent or eventlet has replaced."""
        if not self._thread.is_at_home:
            self._left = self._thread, self._reader  # must not become garbage here: the sockets are the parent's
            self._begin()

    async def _make(self, url: str, batch: int) -> AsyncReader:
        return AsyncReader(url, batch=batch)

    def shards(self) -> Sequence[str]:
        """See AsyncReader.shards."""
        self._begin_after_fork()
        return self._thread.run(self._reader.shards())

    def read(
        self,
        topic: str,
        queue: int = 0,
        *,
        offset: int | str = "earliest",
        follow: bool = False,
        shard: str | None = None,
    ) -> Iterator[ReceivedMessage]:
        """See AsyncReader.read."""
        self._begin_after_fork()
        batches = self._reader.batches(topic, queue, offset=offset, follow=follow, shard=shard)
        try:
            while (batch := self._thread.run(self._next(batches))) is not None:
                yield from batch
        finally:
            with contextlib.suppress(Closed):  # the reader was closed before this iterator
                self._thread.run(self._end(batches))

    async def _next(self, batches: AsyncGenerator[list[ReceivedMessage], None]) -> list[ReceivedMessage] | None:
        return await anext(batches, None)

    async def _end(self, batches: AsyncGenerator[list[ReceivedMessage], None]) -> None:
        await batches.aclose()

    def close(self) -> None:
        if self._thread.is_at_home:
            self._thread.run(self._reader.close())
            self._thread.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
