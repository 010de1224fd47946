"""Reader and AsyncReader: pull a queue with offsets of one's own. No group, no lease, nothing to acknowledge."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Iterator

import msgspec

from notify.client.login import Shown
from notify.client.loop import LoopThread
from notify.client.servers import Servers
from notify.errors import InvalidRequest, NotFound
from notify.limits import check_between, check_name
from notify.message import ReceivedMessage
from notify.wire import JSON, Pulled

BATCH = 500
CALL_SECONDS = 30.0
FOLLOW_SECONDS = 0.1


class _Bounds(msgspec.Struct):
    queue: int
    start: int
    end: int


class _Topic(msgspec.Struct):
    queues: list[_Bounds]


_decode_pulled = msgspec.msgpack.Decoder(Pulled).decode
_decode_topic = msgspec.json.Decoder(_Topic).decode


class AsyncReader:
    """Reads queues from any offset, any number of times. Belongs to one event loop; use it as `async with`."""

    def __init__(self, url: str, *, batch: int = BATCH, token: Shown = None, tls: ssl.SSLContext | None = None) -> None:
        """`batch`: messages a request, 1 to 10,000; `token`, `tls`: as a Consumer's."""
        check_between("batch", batch, 1, 10_000)
        self._http = Servers(url, "queue", tls=tls, token=token)
        self._batch = batch
        self._has_admin_routes_alone = False
        """The server is an older one, which has no route of readers to a topic's bounds."""

    async def read(
        self, topic: str, queue: int = 0, *, offset: int | str = "earliest", follow: bool = False
    ) -> AsyncGenerator[ReceivedMessage, None]:
        """The messages of a queue in order, from `earliest`, `latest` or an offset; `message.offset` says where it is.

        Ends at the last message, or with `follow` waits for more. Raises NotFound for a queue that is none, and
        InvalidRequest (`below_start`) for an offset that is no longer retained.
        """
        async for batch in self.batches(topic, queue, offset=offset, follow=follow):
            for message in batch:
                yield message

    async def batches(
        self, topic: str, queue: int = 0, *, offset: int | str = "earliest", follow: bool = False
    ) -> AsyncGenerator[list[ReceivedMessage], None]:
        """Like `read`, in the batches that the server answers with; with `follow` also empty ones, while it waits."""
        check_name("topic", topic)
        at = await self.position(topic, queue, offset) if isinstance(offset, str) else offset
        while True:
            path = f"/v1/topics/{topic}/queues/{queue}/messages?offset={at}&max={self._batch}"
            found = _decode_pulled(await self._http.call("GET", path, b"", CALL_SECONDS))
            yield [
                ReceivedMessage(
                    d.id, d.topic, d.queue, d.offset, d.body, d.key, d.tag, d.headers or {}, 1, d.committed_at
                )
                for d in found.messages
            ]
            if found.next_offset == at:
                if not follow:
                    return
                await asyncio.sleep(FOLLOW_SECONDS)
            at = found.next_offset

    async def position(self, topic: str, queue: int, where: str) -> int:
        """The first retained offset of a queue (`earliest`), or the one after its last message (`latest`)."""
        if where not in ("earliest", "latest"):
            raise InvalidRequest(f"offset {where[:40]!r} is not earliest, latest or a number", "invalid_start")
        start, end = (await self.queues(topic)).get(queue, (0, 0))  # the read says what is wrong with the queue
        return start if where == "earliest" else end

    async def queues(self, topic: str) -> dict[int, tuple[int, int]]:
        """The queues of a topic by number: the first retained offset, and the one after the last message.

        Raises NotFound for a topic that is none, InvalidRequest for what cannot be its name.
        """
        check_name("topic", topic)
        return {
            bounds.queue: (bounds.start, bounds.end) for bounds in _decode_topic(await self._described(topic)).queues
        }

    async def _described(self, topic: str) -> bytes:
        """A topic in JSON. A server up to 9c372b4 has it among the admin routes alone. Raises NotFound."""
        if not self._has_admin_routes_alone:
            with contextlib.suppress(NotFound):
                return await self._http.call("GET", f"/v1/topics/{topic}", b"", CALL_SECONDS, JSON)
        answer = await self._http.call("GET", f"/v1/admin/topics/{topic}", b"", CALL_SECONDS, JSON)
        self._has_admin_routes_alone = True
        return answer

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncReader:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class Reader:
    """The twin for threads: `for message in reader.read(topic)`."""

    def __init__(self, url: str, *, batch: int = BATCH) -> None:
        self._thread = LoopThread("notify-reader")
        try:
            self._reader = self._thread.run(self._make(url, batch))
        except BaseException:
            self._thread.close()
            raise

    async def _make(self, url: str, batch: int) -> AsyncReader:
        return AsyncReader(url, batch=batch)

    def read(
        self, topic: str, queue: int = 0, *, offset: int | str = "earliest", follow: bool = False
    ) -> Iterator[ReceivedMessage]:
        """See AsyncReader.read."""
        batches = self._reader.batches(topic, queue, offset=offset, follow=follow)
        try:
            while (batch := self._thread.run(self._next(batches))) is not None:
                yield from batch
        finally:
            self._thread.run(self._end(batches))

    async def _next(self, batches: AsyncGenerator[list[ReceivedMessage], None]) -> list[ReceivedMessage] | None:
        return await anext(batches, None)

    async def _end(self, batches: AsyncGenerator[list[ReceivedMessage], None]) -> None:
        await batches.aclose()

    def close(self) -> None:
        self._thread.run(self._reader.close())
        self._thread.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
