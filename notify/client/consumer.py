"""Consumer and AsyncConsumer: receive under leases, run handlers, settle. Threads are a thin shell over asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import signal
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from notify import tracing
from notify.client.batch import Batcher
from notify.client.http import HttpClient
from notify.client.inbox import Inbox
from notify.client.loop import LoopThread
from notify.client.producer import instance_name
from notify.client.servers import Servers
from notify.errors import DeadLetter, InvalidRequest, NotifyError
from notify.kafka_records import SCHEME
from notify.limits import MODES, check_between, check_name
from notify.message import ReceivedMessage
from notify.wire import (
    JSON,
    Delivered,
    Receive,
    Received,
    Settle,
    SettledItem,
    SettledItems,
    SettleItem,
    encode_msgpack,
)

log = logging.getLogger("notify.consumer")
F = TypeVar("F", bound=Callable[..., Any])

MEMBERS_SECONDS = 2.0
"""How often a consumer looks whether queue servers were added or removed."""
POLL_SECONDS = 20.0
CALL_SECONDS = 10.0
RETRY_SECONDS = 0.1
RETRY_MAX_SECONDS = 5.0
_decode_received = msgspec.msgpack.Decoder(Received).decode
_decode_settled = msgspec.msgpack.Decoder(SettledItems).decode


@dataclass(slots=True)
class _Handler:
    topic: str
    call: Callable[..., Any]
    mode: str
    tags: tuple[str, ...]
    start: str | int | datetime | None
    max_attempts: int
    filter: str
    retry_min: float
    retry_max: float


class _Consumer:
    """What both consumers share: the loop that receives, runs and settles."""

    def __init__(
        self,
        url: str,
        *,
        group: str,
        inbox: Inbox | None = None,
        concurrency: int = 16,
        lease: float = 30.0,
        batch: int | None = None,
        instance: str | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`instance` names this consumer in its group: give one that stays the same where topics are broadcast.

        `token`, `tls`: what to show and to believe; None: what the environment says (`NOTIFY_TOKEN`, `NOTIFY_CA`).
        """
        check_name("group", group)
        check_between("concurrency", concurrency, 1, 10_000)
        check_between("lease", lease, 1, 3600)
        self.url = url
        self.group = group
        self.instance = instance or instance_name()
        self._inbox = inbox
        self._concurrency = concurrency
        self._lease = lease
        self._batch = batch or max(concurrency * 2, 32)
        self._token, self._tls = token, tls
        self._handlers: dict[str, _Handler] = {}
        self._renewals: dict[str, asyncio.TimerHandle] = {}
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.handled = 0
        self.failed = 0

    def subscribe(
        self,
        topic: str,
        *,
        tags: Sequence[str] = (),
        mode: str = "shared",
        start: str | int | datetime | None = None,
        max_attempts: int = 16,
        filter: str = "",
        retry_min: float = 1.0,
        retry_max: float = 300.0,
    ) -> Callable[[F], F]:
        """Decorator: run the function for each message of a topic.

        It is called with the message, and with a session of the inbox's database if the consumer has an inbox. It
        returns: ack. It raises: retry with back-off. It raises DeadLetter: to the dead-letter queue. `start` counts
        for a new subscription: `latest` (default), `earliest`, an offset or an instant. `topic` may be a pattern with
        `*`: topics of such names that are made later are consumed from their first message on.

        Of messages with one of the `tags` (none: of all) those are delivered that `filter` is true for, an expression
        of CEL over `headers`, `key`, `tag` and `topic`: `"region" in headers && headers.region == "eu"`. The wait
        before an attempt doubles from `retry_min` to `retry_max` seconds.

        `mode` is the group's for the topic: `shared` (any instance, many at once), `ordered` (of each key one at a
        time, keys in parallel), `exclusive` (one instance; a second is refused), `failover` (one instance, another
        takes over when its lease is over), `broadcast` (every instance gets every message from when it first asks).
        """
        check_name("topic", topic.replace("*", "x"))
        if mode not in MODES:
            raise InvalidRequest(f"there is no mode {mode!r}; there are {', '.join(MODES)}")
        if mode == "broadcast" and "*" in topic:
            raise InvalidRequest("a pattern cannot be broadcast: subscribe to its topics by name")
        if topic in self._handlers:
            raise InvalidRequest(f"topic {topic!r} has a handler already")

        def decorate(function: F) -> F:
            self._handlers[topic] = _Handler(
                topic, function, mode, tuple(tags), start, max_attempts, filter, retry_min, retry_max
            )
            return function

        return decorate

    async def _call_handler(self, handler: _Handler, message: ReceivedMessage) -> None:
        raise TypeError("a shell says how handlers are called")

    # --- the loop ---------------------------------------------------------------------------------------------

    async def _consume(self) -> None:
        """Until `stop`: then what is under way is finished and settled."""
        if not self._handlers:
            raise InvalidRequest("subscribe to a topic before running the consumer")
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        if self.url.startswith(SCHEME):
            from notify.client.kafka import KafkaLoop

            handlers = list(self._handlers.values())
            await KafkaLoop(self.url, self.group, self.instance, handlers, self._call_counted, self._batch).run(
                self._stopping
            )
            return
        servers = Servers(self.url, "queue", tls=self._tls, token=self._token)
        sessions: dict[str, asyncio.Task[None]] = {}
        working: set[asyncio.Task[None]] = set()
        stopped = asyncio.ensure_future(self._stopping.wait())
        try:
            while not self._stopping.is_set():
                with contextlib.suppress(NotifyError):  # a session says more clearly that nobody answers
                    await servers.refresh()
                for url in servers.urls():
                    if url not in sessions:
                        sessions[url] = asyncio.ensure_future(self._consume_from(url, working))
                for url in [url for url in sessions if url not in servers.urls()]:
                    sessions.pop(url).cancel()
                await asyncio.wait(
                    [stopped, *sessions.values()], timeout=MEMBERS_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                for session in sessions.values():
                    if session.done():
                        session.result()  # raises what cannot be mended by trying again
            if sessions:
                await asyncio.wait(sessions.values())
        finally:
            stopped.cancel()
            for task in [*working, *sessions.values()]:
                task.cancel()
            await servers.aclose()
        for session in sessions.values():
            if not session.cancelled():
                session.result()

    async def _call_counted(self, handler: _Handler, message: ReceivedMessage) -> None:
        try:
            await self._call_handler(handler, message)
        except BaseException:
            self.failed += 1
            raise
        self.handled += 1

    async def _consume_from(self, url: str, working: set[asyncio.Task[None]]) -> None:
        """Receive from one queue server until stopped; `working` is shared by all of them."""
        http = HttpClient(url, tls=self._tls, token=self._token)
        settler: Batcher[SettleItem, SettledItem] = Batcher(lambda items: self._settle(http, items), in_flight=2)
        try:
            try:
                await self._subscribe_all(http)
                await self._receive_all(http, settler, working)
            except NotifyError as error:
                # Stopped while the server is away: nobody waits for its answer any more.
                if not _is_away(error) or self._stopping is None or not self._stopping.is_set():
                    raise
            if working:
                await asyncio.wait(working, timeout=self._lease)
            await settler.drain()
        finally:
            http.close()

    async def _subscribe_all(self, http: HttpClient) -> None:
        for handler in self._handlers.values():
            start = handler.start.isoformat() if isinstance(handler.start, datetime) else handler.start
            body = msgspec.json.encode(
                {
                    "mode": handler.mode,
                    "tags": list(handler.tags),
                    "start": start,
                    "max_attempts": handler.max_attempts,
                    "filter": handler.filter,
                    "retry_min": handler.retry_min,
                    "retry_max": handler.retry_max,
                    "reason": "subscribed by a consumer",
                }
            )
            path = f"/v1/admin/groups/{self.group}/subscriptions/{quote(handler.topic)}"
            await self._until_served(functools.partial(http.call, "PUT", path, body, CALL_SECONDS, JSON))

    async def _until_served(self, request: Callable[[], Any]) -> Any:
        """Repeat a request while the server is away. Raises what cannot succeed, or the last failure when stopped."""
        wait = RETRY_SECONDS
        assert self._stopping is not None
        while True:
            try:
                return await request()
            except NotifyError as error:
                if not _is_away(error) or self._stopping.is_set():
                    raise
                log.warning("the server is away, again in %.1f s: %s", wait, error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait)
            wait = min(wait * 2, RETRY_MAX_SECONDS)

    async def _receive_all(
        self, http: HttpClient, settler: Batcher[SettleItem, SettledItem], working: set[asyncio.Task[None]]
    ) -> None:
        """Until stopped. What is broadcast is received in requests of its own."""
        broadcast: list[str] | None = [h.topic for h in self._handlers.values() if h.mode == "broadcast"]
        rest: list[str] | None = [h.topic for h in self._handlers.values() if h.mode != "broadcast"]
        if any("*" in topic for topic in self._handlers):
            # What the patterns stand for is known to the server: all that the group subscribes to.
            broadcast, rest = [], None
        loops = [
            asyncio.ensure_future(self._receive_until_stopped(http, settler, working, topics))
            for topics in (broadcast, rest)
            if topics is None or topics
        ]
        try:
            await asyncio.wait(loops, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for loop in loops:
                loop.cancel()
        for result in await asyncio.gather(*loops, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _receive_until_stopped(
        self,
        http: HttpClient,
        settler: Batcher[SettleItem, SettledItem],
        working: set[asyncio.Task[None]],
        topics: list[str] | None,
    ) -> None:
        assert self._stopping is not None
        stopped = asyncio.ensure_future(self._stopping.wait())
        try:
            while not self._stopping.is_set():
                room = self._batch - len(working)
                if room < self._batch // 2 or room < 1:
                    await asyncio.wait([*working, stopped], return_when=asyncio.FIRST_COMPLETED)
                    continue
                receiving = asyncio.ensure_future(
                    self._until_served(functools.partial(self._receive, http, topics, room))
                )
                await asyncio.wait([receiving, stopped], return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    # Stopped during the long poll: what it may still bring comes back when its lease runs out.
                    receiving.cancel()
                    with contextlib.suppress(asyncio.CancelledError, NotifyError):
                        await receiving
                    return
                self._begin(receiving.result(), settler, working)
        finally:
            stopped.cancel()

    async def _receive(self, http: HttpClient, topics: list[str] | None, room: int) -> list[Delivered]:
        if self._stopping is not None and self._stopping.is_set():
            # Stopped in the pause before another try. Before Python 3.12 `wait_for` may swallow the cancellation.
            return []
        request = Receive(instance=self.instance, topics=topics, max=room, wait=POLL_SECONDS, lease=self._lease)
        path = f"/v1/groups/{self.group}/receive"
        return _decode_received(await http.call("POST", path, encode_msgpack(request), POLL_SECONDS + 5)).messages

    def _begin(
        self,
        delivered: list[Delivered],
        settler: Batcher[SettleItem, SettledItem],
        working: set[asyncio.Task[None]],
    ) -> None:
        loop = asyncio.get_running_loop()
        for d in delivered:
            task = loop.create_task(self._handle(d, settler))
            working.add(task)
            task.add_done_callback(working.discard)

    def _handler_of(self, topic: str) -> _Handler | None:
        """The handler subscribed to a topic by name, else the first one by a pattern."""
        found = self._handlers.get(topic)
        return found or next((h for pattern, h in self._handlers.items() if fnmatchcase(topic, pattern)), None)

    async def _handle(self, d: Delivered, settler: Batcher[SettleItem, SettledItem]) -> None:
        handler = self._handler_of(d.topic)
        message = ReceivedMessage(
            d.id, d.topic, d.queue, d.offset, d.body, d.key, d.tag, d.headers or {}, d.attempt, d.committed_at
        )
        self._renew_later(d.receipt, settler)
        try:
            if handler is None:
                raise InvalidRequest(f"this consumer has no handler for topic {d.topic!r}; another of its group may")
            await self._call_handler(handler, message)
            item = SettleItem(receipt=d.receipt, action="ack")
            self.handled += 1
        except DeadLetter as error:
            item = SettleItem(receipt=d.receipt, action="dead_letter", reason=str(error)[:500] or None)
            self.failed += 1
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            log.warning("handler of %s failed on %s (attempt %d)", d.topic, d.id, d.attempt, exc_info=True)
            item = SettleItem(receipt=d.receipt, action="retry", reason=f"{type(error).__name__}: {error}"[:500])
            self.failed += 1
        finally:
            self._renewals.pop(d.receipt).cancel()
        try:
            await settler.submit(item)
        except NotifyError as error:
            log.warning("settling %s failed, it may be delivered again: %s", d.id, error)

    def _renew_later(self, receipt: str, settler: Batcher[SettleItem, SettledItem]) -> None:
        loop = asyncio.get_running_loop()
        self._renewals[receipt] = loop.call_later(self._lease / 3, self._renew, receipt, settler)

    def _renew(self, receipt: str, settler: Batcher[SettleItem, SettledItem]) -> None:
        """The handler takes long: keep its lease."""
        with contextlib.suppress(NotifyError):
            settler.submit(SettleItem(receipt=receipt, action="renew", lease=self._lease))
        self._renew_later(receipt, settler)

    async def _settle(self, http: HttpClient, items: list[SettleItem]) -> list[SettledItem]:
        path = f"/v1/groups/{self.group}/settle"
        body = encode_msgpack(Settle(items))
        return _decode_settled(await self._until_served(lambda: http.call("POST", path, body, CALL_SECONDS))).items

    def stop(self) -> None:
        """Stop receiving; `run` returns when what is under way is settled. From any thread or a signal handler."""
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stopping.set)


def _is_away(error: NotifyError) -> bool:
    """Whether the same request may succeed later. A server without queues may learn who has them."""
    return error.retryable or error.code == "wrong_role"


class AsyncConsumer(_Consumer):
    """Runs coroutine handlers on the caller's event loop: `await consumer.run()`."""

    async def run(self) -> None:
        """Consume until `stop` is called or the task is cancelled."""
        self._room = asyncio.Semaphore(self._concurrency)
        await self._consume()

    async def _call_handler(self, handler: _Handler, message: ReceivedMessage) -> None:
        async with self._room:
            with tracing.processing(self.group, message):
                if self._inbox is not None:
                    await self._inbox.run_async(self.group, message, handler.call)
                else:
                    await handler.call(message)


class Consumer(_Consumer):
    """Runs handlers in a pool of threads: `consumer.run()` blocks until SIGTERM, SIGINT or `stop`."""

    def run(self, *, signals: bool = True) -> None:
        """Consume. With `signals` (in the main thread) SIGTERM and SIGINT stop it gracefully."""
        previous = {}
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                previous[number] = signal.signal(number, lambda *_: self.stop())
        thread = LoopThread(f"notify-consumer-{self.group}")
        try:
            with concurrent.futures.ThreadPoolExecutor(self._concurrency, "notify-handler") as self._pool:
                thread.run(self._consume())
        finally:
            thread.close()
            for number, handler in previous.items():
                signal.signal(number, handler)

    async def _call_handler(self, handler: _Handler, message: ReceivedMessage) -> None:
        loop = asyncio.get_running_loop()
        if self._inbox is not None:
            run = tracing.traced(self._inbox.run, self.group, message)
            await loop.run_in_executor(self._pool, run, self.group, message, handler.call)
        else:
            run = tracing.traced(handler.call, self.group, message)
            await loop.run_in_executor(self._pool, run, message)
