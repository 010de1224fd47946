"""Checker: answers checks, which the producer gets by a long poll, so that a business service needs no open port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any

from notify.check.listener import CheckMessageListener, CheckUnavailable, HalfMessage, Outcome
from notify.check.local import answer, is_async, out_of_reach
from notify.check.local import check as check_locally
from notify.check.sources import Sources
from notify.client.producer.transactions import TransactionClient, call
from notify.client.tables.background_connections import POOL_SECONDS, BackgroundConnections
from notify.client.transport.foreign_answers import PollTime
from notify.errors import ForeignAnswer, NotifyError
from notify.protocol.limits import LIMITS
from notify.protocol.wire import NO_DATABASE, Check, Checks, OutcomeItem, Poll
from notify.runtime import tracing
from notify.runtime.backoff import Backoff
from notify.runtime.green import start_thread
from notify.runtime.program_log import program_log
from notify.runtime.visible import one_line

log = program_log("notify.check")

POLL_SECONDS = 20.0
ANSWER_SECONDS = 8.0
UNDER_WAY = 256
"""The most checks that are being answered at a time; the next poll waits for one of them."""
THREADS = 8
"""The most checks that one listener, or the local table, answers at a time, each in a separate thread."""
WAITING = 64
"""The most checks that wait for such a thread; a further one is answered UNKNOWN, and the server sends it again."""
PLACES_SECONDS = 2.0
"""How often a checker looks whether servers with separate logs were added or removed."""
LOOK_SECONDS = 60.0
"""How often a checker looks for the schemas of its database, since another process may send from a new one."""
SHORT_POLL_SECONDS = 1.0
"""The least time of a poll, where one cannot name all sources."""
RETRY_SECONDS = 0.2
RETRY_MAX_SECONDS = 5.0


class _Room:
    """The threads that answer the checks of one listener, or of the local table.

    Each has a room of its own, so that a listener that hangs does not hold up the others.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._free = asyncio.Semaphore(THREADS)
        self._waiting = 0
        self.running: set[asyncio.Future[Any]] = set()
        """The futures of the threads, and of the coroutines, that have not ended."""

    async def _enter(self) -> None:
        if self._waiting >= WAITING:
            raise CheckUnavailable(f"{self._waiting} checks wait for {self._name} already")
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function in a thread and return its result. If the caller is cancelled, the thread keeps its place
        until it ends.

        Raises CheckUnavailable if too many checks wait for a place, RuntimeError if the system allows no more threads.
        """
        await self._enter()
        try:
            future = _in_thread(function, *arguments)
        except BaseException:
            self._free.release()
            raise
        return await self._to_its_end(future)

    async def on_loop(self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
        """As `in_thread`, for a coroutine. Cancelled within a statement, a connection to SQLite stayed open, and kept
        the lock of writers."""
        await self._enter()
        return await self._to_its_end(asyncio.ensure_future(function(*arguments)))

    async def _to_its_end(self, future: asyncio.Future[Any]) -> Any:
        self.running.add(future)
        future.add_done_callback(self._left)
        return await asyncio.shield(future)

    def _left(self, future: asyncio.Future[Any]) -> None:
        self.running.discard(future)
        self._free.release()
        if not future.cancelled():
            future.exception()  # retrieved, even if its caller was cancelled: asyncio would complain


def _in_thread(function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
    """Call a function in a new daemon thread, which cannot keep the process from ending if it hangs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = function(*arguments)
        except (StopIteration, StopAsyncIteration) as raised:  # a future cannot hold these
            error = _raised(raised)
        except Exception as raised:
            error = raised
        except BaseException as raised:  # SystemExit and KeyboardInterrupt would end the loop
            error = _raised(raised)
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop is closed, so nobody waits for the result

    start_thread(run, "notify-check")
    return future


def _raised(raised: BaseException) -> CheckUnavailable:
    """The error to use instead of one that a future cannot hold."""
    log.error("a check listener raised %s; the answer is UNKNOWN", type(raised).__name__, exc_info=raised)
    return CheckUnavailable(f"the listener raised {type(raised).__name__}")


async def _cancelled(asking: asyncio.Future[Any]) -> None:
    """Cancel a request, unless it is answered, and wait until its connection is free."""
    if not asking.done():
        asking.cancel()
        await asyncio.wait([asking])
    if not asking.cancelled():
        asking.exception()


class Checker:
    """Polls for checks of one producer group and answers them. Belongs to one event loop."""

    def __init__(
        self,
        client: TransactionClient,
        engine: Any,
        listeners: list[CheckMessageListener],
        sources: Sources | None = None,
        pool_seconds: float = POOL_SECONDS,
    ) -> None:
        self._client = client
        self._engine = engine
        self._connections = BackgroundConnections(engine, pool_seconds)
        self._listeners = listeners
        self._sources = Sources() if sources is None else sources
        self._permits = asyncio.Semaphore(UNDER_WAY)
        self._answers: set[asyncio.Task[None]] = set()
        self._local = _Room("the local table")
        self._rooms: dict[int, _Room] = {}
        """The room of each listener, by the listener's id()."""
        self._complaint = ""
        self._looking = asyncio.Lock()
        self._new_source: asyncio.Future[None] | None = None
        """Done once a transaction has met a source that the polls do not name."""
        self._poll_time = PollTime(POLL_SECONDS)
        self.answered = 0

    async def run(self) -> None:
        """Poll until cancelled: one server, or each server with a separate log, because only it knows its halves."""
        http = self._client.http
        loop, process = asyncio.get_running_loop(), os.getpid()
        self._new_source = loop.create_future()
        self._sources.on_change = lambda: self._notify_new_source(loop, process)
        polling: dict[str | None, asyncio.Task[None]] = {}
        try:
            await http.asked()
            while True:
                shards: set[str | None] = set(http.places()) or {None}
                for shard in polling.keys() - shards:
                    polling.pop(shard).cancel()
                for shard in shards - polling.keys():
                    polling[shard] = loop.create_task(self._keep_polling(shard))
                await asyncio.sleep(PLACES_SECONDS)
        finally:
            for task in polling.values():
                task.cancel()
            await asyncio.gather(*polling.values(), return_exceptions=True)

    def _notify_new_source(self, loop: asyncio.AbstractEventLoop, process: int) -> None:
        """Called in any thread; a fork's copy of this object says nothing to its parent's loop."""
        if process == os.getpid():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._restart_polls, loop)

    def _restart_polls(self, loop: asyncio.AbstractEventLoop) -> None:
        met, self._new_source = self._new_source, loop.create_future()
        if met is not None and not met.done():
            met.set_result(None)

    async def _keep_polling(self, shard: str | None) -> None:
        """Poll until cancelled; retry while the server or the database is unreachable."""
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        turn = 0
        while True:
            try:
                if self._engine is not None:
                    await self._look()
                turn += 1
                for check in await self._poll(shard, turn):
                    await self._permits.acquire()
                    task = asyncio.get_running_loop().create_task(self._answer(check))
                    self._answers.add(task)
                    task.add_done_callback(self._answered)
                backoff.reset()
                self._complaint = ""
            except Exception as error:
                wait = backoff.next()
                self._complain(error, wait)
                await asyncio.sleep(wait)

    def _answered(self, task: asyncio.Task[None]) -> None:
        """Called however the task ended, even if it was cancelled before it began."""
        self._answers.discard(task)
        self._permits.release()

    def _complain(self, error: Exception, wait: float) -> None:
        """Log why polling fails: as a warning, once, if a retry alone does not help; otherwise at level debug."""
        # The client's log tells of foreign answers, but for a 200.
        is_foreign_content = isinstance(error, ForeignAnswer) and error.answered == 200
        is_passing = isinstance(error, CheckUnavailable) or (
            isinstance(error, NotifyError) and error.retryable and not is_foreign_content
        )
        is_loud = not is_passing and str(error) != self._complaint
        if is_loud:
            self._complaint = str(error)
        log.log(
            logging.WARNING if is_loud else logging.DEBUG,
            "polling for checks failed, again in %.1f s; transactions in doubt wait for it: %s: %s",
            wait,
            type(error).__name__,
            error,
            exc_info=None if isinstance(error, NotifyError | CheckUnavailable) else error,
        )

    async def _poll(self, shard: str | None, turn: int) -> list[Check]:
        """One long poll, which ends early when a transaction meets a source that it does not name.

        `turn`: the number of the poll: if one cannot name all sources, they take turns.
        """
        topics = sources = None
        wait = self._poll_time.seconds
        if self._engine is not None:
            known = self._sources.ids
            if not known:
                raise CheckUnavailable(self._sources.unknown(""))
            parts = -(-len(known) // (LIMITS.topics - 1))
            # Only a listener knows the outcome of a transaction that is in no database.
            sources = [*known[turn % parts :: parts], *([NO_DATABASE] if self._listeners else [])]
            wait = min(wait, max(POLL_SECONDS / parts, SHORT_POLL_SECONDS))
        else:
            topics = [topic for listener in self._listeners for topic in listener.topics]
        poll = Poll(
            producer_group=self._client.group,
            instance=self._client.instance,
            sources=sources,
            topics=topics,
            wait=wait,
            max=100,
        )
        met = self._new_source
        began = asyncio.get_running_loop().time()
        asking = asyncio.ensure_future(call(self._client.http, "/v1/checks/poll", poll, Checks, wait + 5, shard))
        try:
            await asyncio.wait([asking] if met is None else [asking, met], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return []
            polled: Checks = asking.result()
            return polled.checks
        except ForeignAnswer as error:
            if self._poll_time.was_cut(error, asyncio.get_running_loop().time() - began):
                return []
            raise
        finally:
            await _cancelled(asking)

    async def _look(self) -> None:
        """Look for the schemas of the database, every LOOK_SECONDS; polls of several logs share a look."""
        async with self._looking:
            if self._sources.seconds_since_look() <= LOOK_SECONDS and self._sources.ids:
                return
            try:
                if is_async(self._engine):
                    await self._local.on_loop(self._on_connection, self._sources.look)
                else:
                    await self._local.in_thread(self._look_sync)
            except CheckUnavailable:
                raise
            except Exception as error:
                if self._sources.ids:
                    log.debug("looking for schemas failed, and the known ones are asked about", exc_info=error)
                    return
                raise out_of_reach(error) from error

    async def _on_connection(self, function: Callable[..., Any], *arguments: Any) -> Any:
        async with self._connections.one_async() as connection:
            return await connection.run_sync(function, *arguments)

    def _look_sync(self) -> None:
        with self._connections.one() as connection:
            self._sources.look(connection)

    async def _answer(self, check: Check) -> None:
        reason = None
        outcome = Outcome.UNKNOWN
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                outcome = await self._outcome_of(check)
        except CheckUnavailable as error:
            reason = str(error)
        except TimeoutError:
            reason = f"the listener took longer than {ANSWER_SECONDS:g} s"
        except Exception as error:
            log.exception("a check listener raised; the answer is UNKNOWN")
            reason = f"the listener raised {type(error).__name__}"
        item = OutcomeItem(
            id=check.id,
            outcome=outcome.value,
            shard=check.shard,
            check=check.token,
            unavailable=reason is not None,
            # The item shares a request with other outcomes, which would all be refused if this were invalid Unicode.
            reason=None if reason is None else reason[:500].encode(errors="replace").decode(),
        )
        try:
            await self._client.answer(item)
            self.answered += 1
            why = "" if reason is None else f" ({one_line(reason)})"
            log.info("transaction %s was in doubt; the answer to its check: %s%s", check.id, outcome.value, why)
        except NotifyError as error:
            log.debug("the answer to a check was lost, it will be asked again: %s", error)

    async def _outcome_of(self, check: Check) -> Outcome:
        half = HalfMessage(
            check.id, self._client.group, check.shard, check.source, check.attempt, tuple(check.messages)
        )
        # A server up to 0.1.0 sends no messages if the half was decided just before the server read them.
        headers = check.messages[0].headers if check.messages else None
        with tracing.continued("check", half.topic, headers) as note:
            outcome = await self._ask(half)
            note("notify.outcome", outcome.value)
        return outcome

    async def _ask(self, half: HalfMessage) -> Outcome:
        for listener in self._listeners:
            if half.topic in listener.topics:
                room = self._rooms.get(id(listener))
                if room is None:
                    room = self._rooms[id(listener)] = _Room(type(listener).__name__)
                outcome = await room.in_thread(listener.check, half)
                if not isinstance(outcome, Outcome):
                    raise CheckUnavailable(f"the listener answered {outcome!r}, which is not an Outcome")
                return outcome
        if self._engine is None:
            raise CheckUnavailable(f"no listener for topic {half.topic!r}")
        if is_async(self._engine):
            async_outcome: Outcome = await self._local.on_loop(self._on_connection, answer, half, self._sources)
            return async_outcome
        local_outcome: Outcome = await self._local.in_thread(check_locally, self._connections.one, half, self._sources)
        return local_outcome

    async def close(self) -> None:
        """Cancel the answers on their way, and wait at most ANSWER_SECONDS for those that use the database."""
        for task in list(self._answers):
            task.cancel()
        running = [future for room in (self._local, *self._rooms.values()) for future in room.running]
        if running:
            await asyncio.wait(running, timeout=ANSWER_SECONDS)
