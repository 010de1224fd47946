"""Reader and AsyncReader: pull a queue with offsets of one's own. No group, no lease, nothing to acknowledge.

Servers that have a log each, such as the workers of one machine, have offsets each: what is read is of one of them, the
`shard`, or the earliest or latest of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Iterator, Sequence

import msgspec

from notify.client.http import read_answer
from notify.client.login import Shown
from notify.client.loop import LoopThread
from notify.client.servers import Servers
from notify.errors import InvalidRequest, NotFound
from notify.limits import check_between, check_name
from notify.message import ReceivedMessage
from notify.wire import JSON, Delivered, Pulled

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

    async def shards(self) -> Sequence[str]:
        """The names of the servers that have a log each; empty where there is one log."""
        await self._http.known()
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
        """The messages of a queue in order, from `earliest`, `latest` or an offset; `message.offset` says where it is.

        Ends at the last message, or with `follow` waits for more. Of several servers with a log each it reads the one
        named `shard`; without it all, one after the other, and with `follow` in turns. Raises NotFound for a queue that
        is none, InvalidRequest (`below_start`) for an offset that is no longer retained, and for one without a `shard`.
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
        """Like `read`, in the batches that the server answers with; with `follow` also empty ones, while it waits."""
        check_name("topic", topic)
        shards = await self._shards_to_read(offset, shard)
        at: dict[str | None, int] = {}
        for one in shards:
            at[one] = await self.position(topic, queue, offset, shard=one) if isinstance(offset, str) else offset
        while at:
            is_more = False
            for one in list(at):
                found = await self._pull(topic, queue, at[one], one)
                if found is not None:
                    yield [_received(d) for d in found.messages]
                if found is not None and found.next_offset != at[one]:
                    at[one], is_more = found.next_offset, True
                elif not follow:
                    del at[one]
            if not is_more and at:
                await asyncio.sleep(FOLLOW_SECONDS)

    async def _shards_to_read(self, offset: int | str, shard: str | None) -> Sequence[str | None]:
        """Raises InvalidRequest for an offset that is no shard's."""
        shards = await self.shards()
        if shard is not None or not shards:
            return [shard]
        if not isinstance(offset, str):
            raise InvalidRequest(
                f"offset {offset} is one log's, and there are several, {', '.join(shards)}: say which with "
                f"shard={shards[0]!r}",
                "invalid_start",
            )
        return list(shards)

    async def _pull(self, topic: str, queue: int, offset: int, shard: str | None) -> Pulled | None:
        """None where one of several servers does not have the topic (yet): no message for it has come there."""
        path = f"/v1/topics/{topic}/queues/{queue}/messages?offset={offset}&max={self._batch}"
        try:
            return read_answer(_decode_pulled, await self._http.call("GET", path, b"", CALL_SECONDS, shard=shard))
        except NotFound:
            if shard is None or not await self._is_at_another(topic, shard):
                raise
            return None

    async def _is_at_another(self, topic: str, shard: str) -> bool:
        """Whether another server than this has the topic."""
        for other in self._http.places():
            if other != shard:
                with contextlib.suppress(NotFound):
                    await self._described(topic, other)
                    return True
        return False

    async def position(self, topic: str, queue: int, where: str, *, shard: str | None = None) -> int:
        """The first retained offset of a queue (`earliest`), or the one after its last message (`latest`)."""
        if where not in ("earliest", "latest"):
            raise InvalidRequest(f"offset {where[:40]!r} is not earliest, latest or a number", "invalid_start")
        try:
            start, end = (await self.queues(topic, shard=shard)).get(
                queue, (0, 0)
            )  # the read says what is wrong with it
        except NotFound:
            if shard is None or not await self._is_at_another(topic, shard):
                raise
            return 0
        return start if where == "earliest" else end

    async def queues(self, topic: str, *, shard: str | None = None) -> dict[int, tuple[int, int]]:
        """The queues of a topic by number: the first retained offset, and the one after the last message.

        `shard`: of which of several servers with a log each; None: of any. Raises NotFound for a topic that is none,
        InvalidRequest for what cannot be its name.
        """
        check_name("topic", topic)
        described = read_answer(_decode_topic, await self._described(topic, shard))
        return {bounds.queue: (bounds.start, bounds.end) for bounds in described.queues}

    async def _described(self, topic: str, shard: str | None) -> bytes:
        """A topic in JSON. A server up to 9c372b4 has it among the admin routes alone. Raises NotFound."""
        if not self._has_admin_routes_alone:
            with contextlib.suppress(NotFound):
                return await self._http.call("GET", f"/v1/topics/{topic}", b"", CALL_SECONDS, JSON, shard)
        answer = await self._http.call("GET", f"/v1/admin/topics/{topic}", b"", CALL_SECONDS, JSON, shard)
        self._has_admin_routes_alone = not self._http.places()
        return answer

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncReader:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _received(d: Delivered) -> ReceivedMessage:
    return ReceivedMessage(d.id, d.topic, d.queue, d.offset, d.body, d.key, d.tag, d.headers or {}, 1, d.committed_at)


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

    def shards(self) -> Sequence[str]:
        """See AsyncReader.shards."""
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
        batches = self._reader.batches(topic, queue, offset=offset, follow=follow, shard=shard)
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
