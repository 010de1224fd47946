"""Answering checks: a long poll of the producer's own, so that a business service needs no inbound port."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from notify import tracing
from notify.check.listener import CheckMessageListener, CheckUnavailable, HalfMessage, Outcome
from notify.check.local import LocalTransactionCheck, answer, is_async
from notify.check.question import read_source
from notify.client.transactions import TransactionClient, call
from notify.errors import NotifyError
from notify.wire import Check, Checks, OutcomeItem, Poll

log = logging.getLogger("notify.check")

POLL_SECONDS = 20.0
ANSWER_SECONDS = 8.0
CONCURRENT_ANSWERS = 16
RETRY_SECONDS = 0.2
RETRY_MAX_SECONDS = 5.0


class Checker:
    """Polls for checks of one producer group and answers them. Belongs to one event loop."""

    def __init__(self, client: TransactionClient, engine: Any, listeners: list[CheckMessageListener]) -> None:
        self._client = client
        self._engine = engine
        self._listeners = listeners
        self._room = asyncio.Semaphore(CONCURRENT_ANSWERS)
        self._answers: set[asyncio.Task[None]] = set()
        self._threads: set[asyncio.Future[Any]] = set()
        self.source = ""
        self.answered = 0

    async def run(self) -> None:
        """Poll until cancelled; an unreachable server or database is tried again."""
        wait = RETRY_SECONDS
        while True:
            try:
                if self._engine is not None and not self.source:
                    self.source = await self._read_source()
                for check in await self._poll():
                    await self._room.acquire()
                    task = asyncio.get_running_loop().create_task(self._answer(check))
                    self._answers.add(task)
                    task.add_done_callback(self._answers.discard)
                wait = RETRY_SECONDS
            except (NotifyError, CheckUnavailable) as error:
                log.debug("polling for checks failed, again in %.1f s: %s", wait, error)
                await asyncio.sleep(wait * (1 + 0.2 * random.random()))
                wait = min(wait * 2, RETRY_MAX_SECONDS)

    async def _poll(self) -> list[Check]:
        topics = None
        if self._engine is None:
            topics = [topic for listener in self._listeners for topic in listener.topics]
        poll = Poll(
            producer_group=self._client.group,
            instance=self._client.instance,
            sources=[self.source] if self.source else None,
            topics=topics,
            wait=POLL_SECONDS,
            max=100,
        )
        found: Checks = await call(self._client.http, "/v1/checks/poll", poll, Checks, POLL_SECONDS + 5)
        return found.checks

    async def _read_source(self) -> str:
        try:
            if is_async(self._engine):
                async with self._engine.connect() as connection:
                    return str((await connection.run_sync(read_source))[0])
            return str(await self._in_thread(self._read_source_sync))
        except CheckUnavailable:
            raise
        except Exception as error:
            raise CheckUnavailable(f"the database is out of reach: {type(error).__name__}") from error

    def _read_source_sync(self) -> str:
        with self._engine.connect() as connection:
            return read_source(connection)[0]

    async def _answer(self, check: Check) -> None:
        half = HalfMessage(
            check.id, self._client.group, check.shard, check.source, check.attempt, tuple(check.messages)
        )
        reason = None
        outcome = Outcome.UNKNOWN
        first = check.messages[0]
        try:
            with tracing.continued("check", first.topic, first.headers) as note:
                async with asyncio.timeout(ANSWER_SECONDS):
                    outcome = await self._ask(half)
                note("notify.outcome", outcome.value)
        except CheckUnavailable as error:
            reason = str(error)
        except TimeoutError:
            reason = f"the listener took longer than {ANSWER_SECONDS:g} s"
        except Exception as error:
            log.exception("a check listener raised; the answer is UNKNOWN")
            reason = f"the listener raised {type(error).__name__}"
        finally:
            self._room.release()
        item = OutcomeItem(
            id=check.id,
            outcome=outcome.value,
            shard=check.shard,
            check=check.token,
            unavailable=reason is not None,
            reason=None if reason is None else reason[:500],
        )
        try:
            await self._client.answer(item)
            self.answered += 1
        except NotifyError as error:
            log.debug("the answer to a check was lost, it will be asked again: %s", error)

    async def _ask(self, half: HalfMessage) -> Outcome:
        for listener in self._listeners:
            if half.topic in listener.topics:
                outcome = await self._in_thread(listener.check, half)
                if not isinstance(outcome, Outcome):
                    raise CheckUnavailable(f"the listener answered {outcome!r}, which is no Outcome")
                return outcome
        if self._engine is None:
            raise CheckUnavailable(f"no listener for topic {half.topic!r}")
        if is_async(self._engine):
            async with self._engine.connect() as connection:
                found: Outcome = await connection.run_sync(answer, half)
                return found
        local: Outcome = await self._in_thread(LocalTransactionCheck(self._engine).check, half)
        return local

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run in a thread. A cancelled wait leaves the thread running: `close` waits for it."""
        running = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
        self._threads.add(running)
        running.add_done_callback(self._threads.discard)
        return await asyncio.shield(running)

    async def close(self) -> None:
        """End answers that are under way, and wait for the threads that use the database."""
        for task in list(self._answers):
            task.cancel()
        if self._threads:
            await asyncio.wait(list(self._threads), timeout=ANSWER_SECONDS)
