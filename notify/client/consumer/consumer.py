"""Consumer and AsyncConsumer: their subscriptions, and a session with each queue server.

Consumer, for threads, is a shell over the same asyncio code.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import signal
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import Any, ClassVar, NoReturn, SupportsIndex, TypeVar

from notify.client.bodies.reading import BODY_BYTES, BodyReader
from notify.client.consumer.inbox_maintenance import InboxMaintenance
from notify.client.consumer.session import Work
from notify.client.consumer.sessions import Sessions
from notify.client.handling.banner import announce, begun, warn_of_broadcasts
from notify.client.handling.batch import Batch
from notify.client.handling.hand import Call, Hand
from notify.client.handling.handlers import (
    CANCEL_SECONDS,
    DEATHS,
    Cancelled,
    Handler,
    NotTried,
    begin_in_own_context,
    call_to_the_end,
    check_callable,
    check_options,
    check_start,
    ends_process,
    is_cancelled,
    no_handler,
    refuse_unfinished,
)
from notify.client.handling.runs import Holder, Waiting, messages_of
from notify.client.inbox.inbox import Inbox, check_inbox
from notify.client.threads.handler_threads import HandlerThreads
from notify.client.threads.loop import LoopThread, instance_name, refuse_to_pickle, running_loop
from notify.client.transport.login import Shown, Token
from notify.errors import InboxUnavailable, InvalidRequest
from notify.kafka.records import SCHEME
from notify.protocol.large_bodies import APART, lies_outside
from notify.protocol.limits import LIMITS, Mode, OnExhausted, check_between, check_name, check_whole
from notify.protocol.message import ReceivedMessage, number_of_seconds
from notify.runtime import tracing
from notify.runtime.backoff import Backoff
from notify.runtime.green import patched_by
from notify.runtime.program_log import program_log
from notify.runtime.signals import heeding_signals

log = program_log("notify.consumer")
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

DRAIN_SECONDS = 300.0
MOST_CONCURRENT = 10_000
LEAST_IN_HAND = 32
PLAIN = frozenset((*APART, tracing.HEADER)).isdisjoint
"""Whether a message with these headers needs no more than a call of its handler: it has its body, and no trace."""
INBOX_SECONDS = 60.0
"""How long a message waits with this consumer for the inbox's database; then another instance may get it."""
INBOX_WAIT_SECONDS, INBOX_WAIT_MAX_SECONDS = 0.1, 1.0
"""Short waits: a consumer that stops waits for their end."""
INBOX_LOG_SECONDS = 10.0
"""A database that does not answer is logged at most once in this time."""


def begin_djangos_caches() -> None:
    """Make Django's caches of this context, if Django is there. They are context variables, which the copied context of
    each call would otherwise make again, each time with a new connection."""
    module: Any = sys.modules.get("django.core.cache")
    if module is not None:
        with contextlib.suppress(Exception):  # wrong settings fail where a handler uses a cache
            for alias in module.caches:
                with contextlib.suppress(module.InvalidCacheBackendError):
                    module.caches[alias]


def renew_djangos_connections() -> None:
    """Close the connections of this thread that are broken or have reached their CONN_MAX_AGE, as Django does between
    requests. Otherwise all messages would fail on a connection that the database has ended."""
    module: Any = sys.modules.get("django.db")
    if module is not None:
        with contextlib.suppress(Exception):  # wrong settings fail where a handler uses a database
            for wrapper in module.connections.all(initialized_only=True):
                if not wrapper.in_atomic_block:  # the transaction of a test case stays open
                    wrapper.close_if_unusable_or_obsolete()


class Waits:
    """The waits of one message for the inbox's database."""

    def __init__(self, hand: Hand) -> None:
        self.backoff = Backoff(INBOX_WAIT_SECONDS, INBOX_WAIT_MAX_SECONDS)
        self.until = hand.clock() + INBOX_SECONDS
        self.seconds = 0.0
        """How long to wait now."""


class _Consumer:
    """Base of both consumers: their settings, and the loop that keeps a session with each queue server."""

    _is_async: ClassVar[bool]

    def __init__(
        self,
        url: str,
        *,
        group: str,
        inbox: Inbox | None = None,
        concurrency: int = 16,
        lease: float = 30.0,
        batch: int | None = None,
        drain: float = DRAIN_SECONDS,
        instance: str | None = None,
        token: Shown = None,
        tls: ssl.SSLContext | None = None,
        store: str | Sequence[str] | None = None,
        body_bytes: int = BODY_BYTES,
        tracebacks: bool = True,
    ) -> None:
        """`instance` is this consumer's name in its group: with broadcast topics, keep it the same over restarts. In
        modes exclusive, failover and broadcast no two running consumers have the same name.

        `lease` (1 to 3,600 seconds): how long a message stays leased to this consumer without a renewal; the consumer
        renews it until the handler returns. `drain` (0 to 86,400 seconds): how long a consumer that stops waits for
        running handlers. `batch` (1 to 10,000): how many messages it holds; None: about as many as its handlers finish
        in a second, at most 1,000, and at least twice `concurrency`, 32, and two of the largest batches that a handler
        takes. `token`: the token to send; `tls`: the TLS context that verifies the server; None: both come from the
        environment (`NOTIFY_TOKEN` or `NOTIFY_TOKEN_FILE`, `NOTIFY_CA`). `token` may be a function that returns the
        current token without blocking: it is called every 10 s, and when a server refuses the previous token. `store`:
        the URL of the object store, or of several, that producers put large bodies into, letter by letter as they name
        it; a body in any other store is not read. `body_bytes` (1 to 268,435,456; default 67,108,864): the most bytes
        of a body that is stored or compressed; the message of a larger one becomes a dead letter. `tracebacks`: whether
        the server gets the traceback of each failure, for the message's page; over Kafka none is sent. Raises
        InvalidRequest.
        """
        check_name("group", group)
        check_whole("concurrency", concurrency, 1, MOST_CONCURRENT)
        lease, drain = number_of_seconds("lease", lease), number_of_seconds("drain", drain)
        check_between("lease", lease, LIMITS.lease_min_seconds, LIMITS.lease_max_seconds)
        check_between("drain", drain, 0, 86_400)
        if batch is not None:
            check_whole("batch", batch, 1, LIMITS.max_messages)
        if instance is not None and not (
            isinstance(instance, str) and 0 < len(instance) <= 255 and instance.isprintable()
        ):
            raise InvalidRequest("instance is 1 to 255 printable characters", "out_of_bounds")
        if inbox is not None:
            check_inbox(inbox, is_async=self._is_async)
        self.url = url
        self.group = group
        self.instance = instance or instance_name()
        self._is_named = instance is not None
        self._process = os.getpid()
        self._inbox = inbox
        self._concurrency = concurrency
        self._lease = lease
        self._batch = batch
        self._drain = drain
        self._token, self._tls = token, tls
        self._tracebacks = tracebacks
        self._bodies = BodyReader(store, body_bytes)
        self._handlers: dict[str, Handler] = {}
        self._stopping: asyncio.Event | None = None
        self._is_stopped = False
        self._hand: Hand | None = None
        """The messages in hand while this consumer runs."""
        self._announce = functools.partial(announce, log, is_seen=False)
        self._consuming: asyncio.Task[Any] | None = None
        self._is_cut = False
        """Whether a second signal ends the consumer: it no longer waits for handlers."""
        self._left: BaseException | None = None
        """SystemExit or KeyboardInterrupt that a handler raised: it ends the consumer."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runs_in = 0
        """The process in which this consumer runs; 0: it does not run."""
        self._inbox_logged_at = float("-inf")
        self.handled = 0
        self.failed = 0

    def subscribe(
        self,
        topic: str,
        *,
        tags: Sequence[str] = (),
        mode: Mode = "shared",
        start: str | int | datetime | None = None,
        max_attempts: int = 16,
        max_deaths: int = DEATHS,
        filter: str = "",
        retry_min: float = 1.0,
        retry_max: float = 300.0,
        batch: int | None = None,
        on_exhausted: OnExhausted = "dead_letter",
        fair_by: str = "",
    ) -> Callable[[F], F]:
        """Decorator: run the function (for AsyncConsumer: `async def`) for each message of a topic.

        The function gets the message, and a session of the inbox's database if the consumer has an `Inbox`. If it
        returns, the message is acknowledged. If it raises, the message is retried with back-off, and becomes a dead
        letter after `max_attempts` failures, or after the deaths of `max_deaths` consumers that held it (1 to 1,000
        each). If it raises DeadLetter, the message becomes a dead letter immediately. `start` counts for a new
        subscription: `latest` (default), `earliest`, an offset or an instant. `topic` may be a pattern with `*`: a
        matching topic that is created later is consumed from its first message on.

        With `batch` (1 to 10,000) the function gets a list of at most this many messages, and with an inbox all of
        them in one transaction. If the call fails, the two halves of the list are handled, and so on down to the
        messages that fail alone: only these use up an attempt, and they are retried one by one. A first parameter
        annotated with a dataclass, a msgspec struct, a TypedDict or a pydantic model (`list[Order]` with `batch`) gets
        the decoded bodies; a message whose body does not fit becomes a dead letter immediately.

        A message is delivered if it has one of the `tags` (no tags: any message) and `filter` is true. `filter` is a
        CEL expression over `headers`, `key`, `tag` and `topic`: `"region" in headers && headers.region == "eu"`. The
        wait before an attempt doubles from `retry_min` to `retry_max` seconds.

        `mode` says how the group shares the topic: `shared` (any instance, many messages at once), `ordered` (one
        message of a key at a time, keys in parallel), `exclusive` (one instance; a second one is refused), `failover`
        (one instance; another takes over when its lease expires), `broadcast` (every instance gets every message from
        its first request on).

        With `on_exhausted="hold"`, in mode `ordered`, a message that has used up its attempts does not become a dead
        letter: its key is held, and no later message of the key is delivered until somebody retries, skips or releases
        it (`notify held-key`); other keys continue. Messages without a key become dead letters as always, and so does
        a message whose handler raises DeadLetter. Over Kafka this is refused.

        With `fair_by="key"`, or `fair_by="header:tenant"` for the header of that name, in modes `shared` and `ordered`,
        tenants named by it take turns: ten messages of one do not wait behind a million of another. Messages without
        the key or header are one tenant. Over Kafka this is refused.

        Raises InvalidRequest for options that the server would refuse, for a function with the wrong parameters, and
        while the consumer runs.
        """
        if self._runs_in == os.getpid():
            raise InvalidRequest(
                f"the consumer is running: subscribe to {topic!r} before run(), or with another consumer"
            )
        check_start(start)
        check_options(
            topic, mode, tags, max_attempts, max_deaths, (retry_min, retry_max), batch, self._batch,
            on_exhausted, fair_by,
        )  # fmt: skip
        if topic in self._handlers:
            raise InvalidRequest(f"topic {topic!r} has a handler already")

        def decorate(function: F) -> F:
            has_session = self._inbox is not None and self._inbox.gives_session
            kind: Any = {"is_async": self._is_async, "has_session": has_session, "in_batches": batch is not None}
            read = check_callable(function, **kind)
            self._handlers[topic] = Handler(
                topic, function, mode, tuple(tags), start, max_attempts, filter, retry_min, retry_max, batch, read,
                max_deaths, on_exhausted, fair_by,
            )  # fmt: skip
            return function

        return decorate

    @property
    def _in_hand(self) -> int:
        """The most messages in hand: without `batch`, enough that the next batch arrives while one is handled."""
        if self._batch is not None:
            return self._batch
        largest = max([handler.batch or 1 for handler in self._handlers.values()], default=1)
        return min(max(self._concurrency * 2, LEAST_IN_HAND, largest * 2), LIMITS.max_messages)

    # --- the loop ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Raises InvalidRequest if this consumer runs already: two runs would mix up what they have in hand."""
        if self._runs_in == os.getpid():
            raise InvalidRequest(
                "this consumer is running already: for more handlers at a time give it a larger concurrency=, or make "
                "another consumer"
            )
        self._runs_in = os.getpid()
        self._is_cut, self._left = False, None  # a second signal may have come as an earlier run ended
        self._loop = None  # until the run begins on its loop, `stop` is noted for it
        try:
            yield
        finally:
            self._runs_in = 0

    async def _ask_inbox(self, inbox: Inbox, function: Callable[..., T], *arguments: Any) -> T:
        raise TypeError("a shell says how the inbox's database is asked")

    async def _consume(self) -> BaseException | None:
        """Consume until `stop`, then wait until the running handlers have finished and their messages are settled.

        Returns the SystemExit or KeyboardInterrupt that a handler raised: raised here, it would end the loop
        immediately.
        """
        if not self._handlers:
            raise InvalidRequest("subscribe to a topic before running the consumer")
        if (
            self._process != os.getpid() and not self._is_named
        ):  # made before a fork: its children are several instances
            self._process, self.instance = os.getpid(), instance_name()
        self._stopping = asyncio.Event()
        self._loop = running_loop()
        self._consuming = asyncio.current_task()
        hand = Hand(lambda: self._start_caller(hand), self._count, self._concurrency, self._in_hand, self._batch)
        self._hand = hand
        try:
            if self._is_stopped:  # `stop` was called before the loop ran
                return None
            if not self._is_named:
                warn_of_broadcasts(log, self._handlers.values(), self.instance)
            if self._inbox is not None:
                await InboxMaintenance(self._inbox, self._ask_inbox).until_good(self._stopping)
            if self.url.startswith(SCHEME):
                if patched_by():
                    raise InvalidRequest(
                        f"a consumer of a Kafka cluster cannot run under {patched_by()}, because Kafka's library "
                        "blocks all greenlets: run it in a process whose threads are not patched"
                    )
                from notify.client.kafka.loop import consume
                from notify.client.kafka.plan import Plan

                self._announce(begun("Kafka", self.group, self.instance, self._handlers.values(), {}))
                flags = (bool(self._token or self._tls), self._inbox is not None, self._announce, lambda: self._is_cut)
                bounds: Any = (self._concurrency, self._in_hand, self._lease, self._drain, *flags)
                names = (self.url, self.group, self.instance, self._handlers, hand, self._cancel)
                await consume(Plan(*names, lambda: self._is_stopped or self._left is not None, *bounds), self._stopping)
            else:
                await self._keep_sessions(hand, self._stopping)
        except asyncio.CancelledError:
            if not self._is_cut:
                raise
        finally:
            self._is_stopped, self._stopping, self._is_cut = False, None, False
            left, self._left = self._left, None
            hand.close()
            self._bodies.close()
            self._hand = None
        return left

    async def _keep_sessions(self, hand: Hand, stopping: asyncio.Event) -> None:
        bounds = self._lease, self._drain
        told = self._announce, self._cancel
        work = Work(self.group, self.instance, self._handlers, hand, *bounds, *told, tracebacks=self._tracebacks)
        inbox = None if self._inbox is None else InboxMaintenance(self._inbox, self._ask_inbox)
        await Sessions(work, self.url, Token(self._token), self._tls).run(inbox, stopping)

    def _start_caller(self, hand: Hand) -> None:
        raise TypeError("a shell says what calls handlers")

    async def _cancel(self, holder: Holder) -> None:
        """Cancel the handlers of a holder's messages, and wait for their end. A handler in a thread continues."""

    def _count(self, messages: int, error: BaseException | None) -> None:
        """Count messages whose handler has returned, or raised an error."""
        if error is None:
            self.handled += messages
        elif isinstance(error, NotTried):
            if ends_process(error.cause):
                self._leave(error.cause)
        else:
            self.failed += messages
            if ends_process(error):
                self._leave(error)

    def _waits_for_inbox(self, waits: Waits | None, error: InboxUnavailable) -> Waits:
        """The waits of a message, for which `seconds` are to pass before it is tried again: its handler was not called,
        because the inbox's database does not answer, and no attempt counts. `waits`: None: it has not waited yet.

        Raises NotTried, which gives the message back, after INBOX_SECONDS: another instance may reach the database; and
        once the consumer stops. Raises the error if a handler raised it, or the consumer has ended without it.
        """
        hand = self._hand
        if hand is None or error.is_of_handler:
            raise error
        waits = waits or Waits(hand)
        waits.seconds, now = waits.backoff.next(), hand.clock()
        if hand.is_over or now + waits.seconds > waits.until:
            raise NotTried(error) from error
        if now - self._inbox_logged_at >= INBOX_LOG_SECONDS:
            self._inbox_logged_at = now
            log.warning("messages wait, and no attempt counts: %s", error)
        return waits

    def _leave(self, error: BaseException) -> None:
        """A handler wants the process to end: stop, and have `run` raise `error` once all messages are settled."""
        if self._left is None:
            log.warning("a handler raised %s: the consumer stops", type(error).__name__)
            self._left = error
        if self._stopping is not None:
            self._stopping.set()

    def stop(self) -> None:
        """Stop receiving; `run` returns when all messages in hand are settled. Call it from any thread or a signal
        handler.

        A call before the first `run` makes that `run` return immediately; a call after a run has ended does nothing.
        """
        if self._loop is None or self._stopping is not None:
            self._is_stopped = True
        # A run that begins meanwhile sets these before it looks whether it is stopped.
        loop, stopping, hand = self._loop, self._stopping, self._hand
        if hand is not None:
            hand.end()
        if loop is not None and stopping is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(stopping.set)


class AsyncConsumer(_Consumer):
    """Runs coroutine handlers on the caller's event loop: `await consumer.run()`."""

    _is_async = True

    async def run(self) -> None:
        """Consume until `stop` is called or the task is cancelled.

        Raises errors that a retry cannot mend: Conflict (`mode_in_use`) if the group uses another mode or `fair_by`,
        Forbidden, InvalidRequest if the inbox cannot work in its database.
        """
        with self._running():
            self._callers: dict[asyncio.Task[None], frozenset[Holder]] = {}
            """The callers of handlers, and the holders of the messages of which each waits for the handler."""
            self._contexts: list[contextvars.Context] = []
            """The contexts of callers that have ended, for the next ones: Django's caches are in them."""
            left = await self._consume()
        if left is not None:
            raise left

    async def _ask_inbox(self, inbox: Inbox, function: Callable[..., T], *arguments: Any) -> T:
        return await inbox.call_async(function, *arguments)

    def _start_caller(self, hand: Hand) -> None:
        context = self._contexts.pop() if self._contexts else contextvars.copy_context()
        task = asyncio.get_running_loop().create_task(self._call_handlers(hand, context), context=context)
        self._callers[task] = frozenset()

    async def _call_handlers(self, hand: Hand, context: contextvars.Context) -> None:
        """Call handlers, one after the other, until nothing waits. `context`: this task's own."""
        task = asyncio.current_task()
        assert task is not None
        hand.began()
        begin_djangos_caches()
        try:
            while hand.has_waiting:
                for call in hand.calls():
                    if (rest := self._begin(hand, call)) is not None:
                        self._callers[task] = frozenset((call.run.holder,))
                        await self._finish(hand, call, rest)
                        self._callers[task] = frozenset()
                    # A handler that swallows a cancellation leaves it to its task. The next handler would be cancelled
                    # where it fails in a TaskGroup: another task calls it.
                    call.is_last = task.cancelling() > 0
                if task.cancelling():
                    return
                for lot in hand.lots():
                    self._callers[task] = frozenset(run.holder for run, _ in lot)
                    await self._handle_batch(hand, lot)
                    self._callers[task] = frozenset()
                    if task.cancelling():
                        return
                await asyncio.sleep(0)  # lets other tasks run
        finally:
            del self._callers[task]
            self._contexts.append(context)
            hand.left()

    def _begin(self, hand: Hand, call: Call) -> Awaitable[Any] | None:
        """Call the handler of one message, until it waits. Returns what gives its result when awaited; None if it has
        ended. Raises CancelledError only if this caller is cancelled."""
        handler, message = call.run.handler, call.run.messages[call.place]
        assert message is not None
        try:
            if handler is None:
                raise no_handler(message)
            if self._inbox is None and PLAIN(message.headers):
                return begin_in_own_context(handler.call if handler.read is None else handler.handle, message)
            if lies_outside(message.headers):
                return begin_in_own_context(self._read_and_call, handler, message)
            return begin_in_own_context(self._call, handler, message)
        except BaseException as error:
            self._failed(hand, call, error)
            return None

    async def _finish(self, hand: Hand, call: Call, rest: Awaitable[Any]) -> None:
        """Wait for the end of a message's handler. Raises CancelledError only if this caller is cancelled."""
        try:
            refuse_unfinished(await rest)
        except BaseException as error:
            self._failed(hand, call, error)

    def _failed(self, hand: Hand, call: Call, error: BaseException) -> None:
        """A handler has raised an error; raise it if it means that this caller is cancelled."""
        if is_cancelled(error):
            hand.note([(call.run, call.place)], Cancelled())
            raise error
        call.error = error

    async def _read_and_call(self, handler: Handler, message: ReceivedMessage) -> None:
        await self._call(handler, await self._bodies.read_soon(message))

    async def _handle_batch(self, hand: Hand, lot: list[Waiting]) -> None:
        try:
            read = await self._bodies.read_all_soon(messages_of(lot))
        except asyncio.CancelledError:
            hand.note(lot, Cancelled())
            raise
        batch = Batch(hand, lot, read)
        while batch.next():
            try:
                rest = begin_in_own_context(self._call_all, batch.messages, batch.function)
                if rest is not None:
                    await rest
            except BaseException as error:
                if is_cancelled(error):
                    batch.cut(Cancelled())
                    raise
                batch.failed(error)
            else:
                batch.succeeded()

    async def _cancel(self, holder: Holder) -> None:
        tasks = [task for task, holders in self._callers.items() if holders == {holder}]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_SECONDS)

    async def _call(self, handler: Handler, message: ReceivedMessage) -> None:
        with tracing.processing(self.group, message):
            if self._inbox is not None:
                await self._once_inbox_answers(self._inbox.run_async, message, handler.handle)
            else:
                refuse_unfinished(await handler.handle(message))

    async def _call_all(self, messages: Sequence[ReceivedMessage], function: Callable[..., Any]) -> None:
        with tracing.processing_batch(self.group, messages):
            if self._inbox is not None:
                await self._once_inbox_answers(self._inbox.run_batch_async, messages, function)
            else:
                refuse_unfinished(await function(messages))

    async def _once_inbox_answers(self, run: Callable[..., Awaitable[object]], *work: Any) -> None:
        """Have the inbox run a handler, and wait meanwhile if its database does not answer."""
        waits: Waits | None = None
        while True:
            try:
                await run(self.group, *work)
                return
            except InboxUnavailable as error:
                waits = self._waits_for_inbox(waits, error)
            await asyncio.sleep(waits.seconds)


class Consumer(_Consumer):
    """Runs handlers in a pool of threads: `consumer.run()` blocks until SIGTERM, SIGINT or `stop`."""

    _is_async = False

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_to_pickle(self)

    def run(self, *, signals: bool = True) -> None:
        """Consume until `stop` is called. With `signals`, and in the main thread, SIGTERM, SIGINT, and SIGHUP unless it
        has a meaning already, stop the consumer gracefully; a second signal ends it immediately, with SystemExit or
        KeyboardInterrupt, and messages that were not acknowledged are delivered again.

        Raises errors that a retry cannot mend: Conflict (`mode_in_use`) if the group uses another mode or `fair_by`,
        Forbidden, InvalidRequest if the inbox cannot work in its database.
        """
        heeding: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if signals and threading.current_thread() is threading.main_thread():
            heeding = heeding_signals(self.stop, self._cut)
            self._announce = functools.partial(announce, log, is_seen=True)
        with self._running(), heeding:
            thread = LoopThread(f"notify-consumer-{self.group}")
            self._pool = HandlerThreads(self._concurrency, "notify-handler", self._hit)
            self._asking = HandlerThreads(1, "notify-inbox")  # a turn among handlers may come late
            try:
                left = thread.run(self._consume())
            finally:
                # Handlers that outlast the drain are not waited for; the session has logged a warning about them.
                self._pool.shutdown()
                self._asking.shutdown()
                thread.close()
        if left is not None:
            raise left

    def _cut(self, number: int) -> None:
        self._end_at_once(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))

    def _hit(self, error: BaseException) -> None:
        """End because another thread has raised an exception in a thread of handlers while none ran there, as a time
        limit does that comes too late: nobody knows which message it has met, so that this would stay in hand."""
        if self._hand is None or self._is_cut:
            return
        hit = RuntimeError(
            f"another thread has raised {type(error).__name__} in a thread of handlers whose handler had returned, as "
            "libraries do that limit a thread's time: a message may be lost from sight, so the consumer ends, and what "
            "is not acknowledged is delivered again; let the handler itself keep its time"
        )
        hit.__cause__ = error
        self._end_at_once(hit)

    def _end_at_once(self, error: BaseException) -> None:
        """End although handlers are running: their messages are delivered again once their leases expire."""
        self._is_cut = True
        self._left = error
        if self._loop is not None and self._consuming is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the run is at its end
                self._loop.call_soon_threadsafe(self._consuming.cancel)

    async def _ask_inbox(self, inbox: Inbox, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._asking, inbox.call, function, *arguments)

    def _start_caller(self, hand: Hand) -> None:
        self._pool.submit(self._call_handlers, hand).add_done_callback(self._look)

    def _look(self, called: Future[Any]) -> None:
        """A caller of handlers has ended: errors of handlers do not end it."""
        if not called.cancelled() and (error := called.exception()) is not None:
            self._hit(error)

    def _call_handlers(self, hand: Hand) -> None:
        """Call handlers, one after the other, until nothing waits."""
        hand.began()
        begin_djangos_caches()
        is_green = bool(patched_by())
        try:
            while hand.has_waiting:
                for call in hand.calls():
                    self._handle(call)
                for lot in hand.lots():
                    self._handle_batch(hand, lot)
                if is_green:
                    time.sleep(0)  # lets other greenlets run
        finally:
            hand.left()

    def _handle(self, call: Call) -> None:
        """Call the handler of one message."""
        handler, message = call.run.handler, call.run.messages[call.place]
        assert message is not None
        renew_djangos_connections()
        try:
            if handler is None:
                raise no_handler(message)
            context = contextvars.copy_context()
            if self._inbox is None and PLAIN(message.headers):
                context.run(call_to_the_end, handler.call if handler.read is None else handler.handle, message)
            else:
                context.run(self._call, handler, self._bodies.read(message))
        except BaseException as error:
            call.error = error

    def _handle_batch(self, hand: Hand, lot: list[Waiting]) -> None:
        batch = Batch(hand, lot, self._bodies.read_all(messages_of(lot)))
        while batch.next():
            renew_djangos_connections()
            try:
                contextvars.copy_context().run(self._call_all, batch.messages, batch.function)
            except BaseException as error:
                batch.failed(error)
            else:
                batch.succeeded()

    def _call(self, handler: Handler, message: ReceivedMessage) -> None:
        if self._inbox is None:
            tracing.traced(call_to_the_end, self.group, message)(handler.handle, message)
        else:
            run = tracing.traced(self._inbox.run, self.group, message)
            self._once_inbox_answers(run, message, handler.handle)

    def _call_all(self, messages: Sequence[ReceivedMessage], function: Callable[..., Any]) -> None:
        with tracing.processing_batch(self.group, messages):
            if self._inbox is not None:
                self._once_inbox_answers(self._inbox.run_batch, messages, function)
            else:
                call_to_the_end(function, messages)

    def _once_inbox_answers(self, run: Callable[..., object], *work: Any) -> None:
        """Have the inbox run a handler, and wait meanwhile if its database does not answer."""
        waits: Waits | None = None
        while True:
            try:
                run(self.group, *work)
                return
            except InboxUnavailable as error:
                waits = self._waits_for_inbox(waits, error)
            time.sleep(waits.seconds)
