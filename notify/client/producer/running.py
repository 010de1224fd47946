"""Running: the client, the checker and the purge of a producer, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable

from notify.check.listener import Outcome
from notify.client.producer.checker import Checker
from notify.client.producer.left_behind import LeftBehind
from notify.client.producer.left_sender import LeftSender
from notify.client.producer.options import ProducerPlan
from notify.client.producer.transactions import HALF_SECONDS, MOST_TOGETHER, NOT_NOW, TransactionClient
from notify.client.tables.database_calls import DatabaseCalls
from notify.client.tables.purge import RowPurge
from notify.client.threads.loop import LoopThread
from notify.client.transport.http import error_of
from notify.errors import NotifyError, Unavailable
from notify.protocol.wire import Item
from notify.runtime.log_output import LogRate
from notify.runtime.program_log import program_log

log = program_log("notify.client")

SWEEP_AT = 256
"""The number of outcomes that are remembered at least before those that the server has answered are forgotten."""
MOST_LOST = 10_000
"""The most outcomes that the server did not take and that `flush` sends again; check-back finds the older ones."""
AGAIN_SECONDS = 0.1
"""The pause of `flush` before it sends outcomes again."""
NO_ROOM = (429, 507)
"""The server could not store an outcome for want of room."""
REFUSALS_A_SECOND = 5
"""So many refused outcomes are logged per second."""


class Running:
    """A producer's client, its checker and its purge. Make it on the event loop that it belongs to."""

    def __init__(self, plan: ProducerPlan) -> None:
        self._plan = plan
        self.client = self._make_client()
        self._outcomes: dict[str, tuple[str | None, str, asyncio.Future[Item] | None]] = {}
        """For the last transactions: shard, outcome, and the future of the server's answer (None: too many waited)."""
        self.handed_over: deque[tuple[str, str | None, str]] = deque()
        """Outcomes that other threads have left to the loop, which has not queued them yet."""
        self.has_lost = False
        """Whether an outcome did not reach the server, in mode auto: those after it wait for `send_again`."""
        self._sweep_at = SWEEP_AT
        self._checker: Checker | None = None
        self._purging: RowPurge | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._left_sender: LeftSender | None = None
        self.finish_direct: Callable[[], None] | None = None
        """Lets the loop send the last outcome that a thread has sent itself, if it is not answered."""
        self._left_behind = plan.left_behind
        self._may_log = LogRate(REFUSALS_A_SECOND).may
        if self._left_behind is not None:
            self._left_sender = self._send_left_behind(self._left_behind)
        self.answer_checks()

    def _make_client(self, half_seconds: float = 0.0) -> TransactionClient:
        """A client; `half_seconds`: how long its halves may take at least."""
        plan = self._plan
        return TransactionClient(
            plan.url,
            plan.group,
            instance=plan.instance,
            batching=plan.batching,
            half_seconds=max(plan.half_timeout, half_seconds),
            # The sender of what was left behind tries again, and sends lost outcomes before it.
            leaves_behind=plan.mode == "auto" and not half_seconds,
            check_after=plan.check_after,
            token=plan.token,
            tls=plan.tls,
            chooser=plan.chooser,
        )

    def _send_left_behind(self, left_behind: LeftBehind) -> LeftSender:
        plan = self._plan
        database = DatabaseCalls(plan.engine, plan.sources)
        schemas, client = (lambda: plan.sources.schemas), (lambda: self._make_client(HALF_SECONDS))
        sender = LeftSender(plan.group, left_behind, database, schemas, self, client)
        self._tasks.append(asyncio.get_running_loop().create_task(sender.run()))
        return sender

    def answer_checks(self) -> None:
        """From now on, answer checks and purge old rows, if the producer has an engine or a listener."""
        plan = self._plan
        if self._checker is not None or not plan.answer_checks or (plan.engine is None and not plan.listeners):
            return
        loop = asyncio.get_running_loop()
        self._checker = Checker(self.client, plan.engine, plan.listeners, plan.sources)
        self._tasks.append(loop.create_task(self._checker.run()))
        if plan.engine is not None and plan.purge_after is not None:
            self._purging = RowPurge(self.client.http, plan.group, plan.engine, plan.purge_after, plan.sources)
            self._tasks.append(loop.create_task(self._purging.run()))

    def hand_over(self, thread: LoopThread, transaction_id: str, shard: str | None, outcome: str) -> None:
        """Let the loop queue an outcome. Any thread may call this; no thread sends one itself before that is done."""
        self.handed_over.append((transaction_id, shard, outcome))
        thread.call(self._take_over)

    def _take_over(self) -> None:
        try:
            self.queue_outcome(*self.handed_over[0])
        finally:
            self.handed_over.popleft()

    def queue_outcome(self, transaction_id: str, shard: str | None, outcome: str) -> None:
        """Queue an outcome. If too many wait already, `flush` sends it, or check-back asks for it."""
        if self.has_lost:
            self._note_outcome(transaction_id, shard, outcome)
        else:
            self._queue(transaction_id, shard, outcome)

    def _queue(self, transaction_id: str, shard: str | None, outcome: str) -> None:
        with contextlib.suppress(Unavailable):
            self.send_outcome(transaction_id, shard, outcome)

    def _note_outcome(self, transaction_id: str, shard: str | None, outcome: str) -> None:
        self._outcomes[transaction_id] = shard, outcome, None
        if len(self._outcomes) > self._sweep_at:
            self._forget_answered()

    def send_outcome(self, transaction_id: str, shard: str | None, outcome: str) -> asyncio.Future[Item]:
        """Queue an outcome and return the future of the server's answer. Raises Unavailable if too many wait already.

        Do not cancel the future: the outcome would not be sent.
        """
        self._note_outcome(transaction_id, shard, outcome)
        future = self.client.outcome_soon(transaction_id, shard, outcome)
        future.add_done_callback(functools.partial(self._note_answer, outcome))
        self._outcomes[transaction_id] = shard, outcome, future
        return future

    def _note_answer(self, outcome: str, future: asyncio.Future[Item]) -> None:
        if _has_reached(future):
            self.heed(outcome, future.result())
        else:
            self.outcome_was_lost()
            if self.has_lost:
                self.client.refuse_outcomes(Unavailable("an earlier outcome has not reached the server"))

    def heed(self, outcome: str, item: Item) -> None:
        """Log that the server has refused an outcome for ever: what the database did and what is delivered differ. Any
        thread may call this.

        A ROLLBACK may come for a half that has never arrived.
        """
        if item.status == 200 or (item.status == 404 and outcome == "ROLLBACK") or not self._may_log():
            return
        if item.status == 404:
            why = (
                f"{self._plan.url} does not know it any more: the server has lost its data, or several servers that "
                "share no registry answer at this address"
            )
        else:
            why = f"{item.detail} ({item.code})"
        harm = "are not delivered" if outcome == "COMMIT" else "may be delivered"
        log.error("transaction %s: the server refuses its %s, so that its messages %s: %s", item.id, outcome, harm, why)

    def outcome_was_lost(self) -> None:
        """An outcome did not reach the server. In mode auto, what commits from now on must not overtake it. Any thread
        may call this."""
        if self._left_behind is not None:
            self.has_lost = True
            self._left_behind.away()

    async def send_again(self) -> bool:
        """Send the outcomes that have not reached the server, in order; whether all have reached it then."""
        if self.finish_direct is not None:
            self.finish_direct()
            await asyncio.sleep(0)
        while unsent := self.unsent()[:MOST_TOGETHER]:
            answers = await self._answered(unsent)
            if len(answers) < len(unsent) or not all(map(_has_reached, answers)):
                return False
        self.has_lost = False
        return True

    async def _answered(self, transaction_ids: list[str]) -> list[asyncio.Future[Item]]:
        """Queue the outcomes of these transactions that are not on their way, wait until all are answered, and return
        the answers; none for an outcome for which too many waited already."""
        answers = []
        for transaction_id in transaction_ids:
            shard, outcome, future = self._outcomes[transaction_id]
            if future is None or future.done():
                self._queue(transaction_id, shard, outcome)
            if (answer := self._outcomes[transaction_id][2]) is not None:
                answers.append(answer)
        if answers:
            await asyncio.wait(answers)
        return answers

    async def stored(self, transaction_id: str, shard: str | None, outcome: str, seconds: float) -> str:
        """Send an outcome and wait until the server has stored it; why it is not stored after `seconds`, or empty."""
        if self.has_lost:
            self._note_outcome(transaction_id, shard, outcome)
            return "an earlier one has not reached the server"
        try:
            async with asyncio.timeout(seconds):
                item = await asyncio.shield(self.send_outcome(transaction_id, shard, outcome))
        except TimeoutError:
            return f"no answer within {seconds:g} s"
        except NotifyError as error:
            return str(error)
        return "" if is_taken(item) else f"{item.detail} ({item.status})"

    def unsent(self) -> list[str]:
        """The transactions whose outcomes have not reached the server, in order."""
        return [transaction_id for transaction_id, (_, _, future) in self._outcomes.items() if not _has_reached(future)]

    def _forget_answered(self) -> None:
        for transaction_id in self._outcomes.keys() - dict.fromkeys(self.unsent()[-MOST_LOST:]).keys():
            del self._outcomes[transaction_id]
        self._sweep_at = max(SWEEP_AT, 2 * len(self._outcomes))

    async def flush(self, seconds: float) -> list[str]:
        """Wait at most `seconds` until all that was queued before has reached the server; outcomes that it did not take
        earlier are sent again. Returns the transactions whose outcomes have not reached it."""
        wanted = dict.fromkeys(self.unsent())
        left_before = frozenset(self._left_ids())
        with contextlib.suppress(TimeoutError, NotifyError):
            async with asyncio.timeout(seconds):
                while left := self._unsent_of(wanted):
                    await self._answered(left)
                    if self._unsent_of(wanted):
                        await asyncio.sleep(AGAIN_SECONDS)
                await self.client.published()
                while not left_before.isdisjoint(self._left_ids()):
                    if self._left_sender is not None:
                        self._left_sender.wake()
                    await asyncio.sleep(AGAIN_SECONDS)
        return [*self._unsent_of(wanted), *(name for name in self._left_ids() if name in left_before)]

    def _left_ids(self) -> list[str]:
        return [] if self._left_behind is None else self._left_behind.ids()

    def _unsent_of(self, wanted: dict[str, None]) -> list[str]:
        return [transaction_id for transaction_id in self.unsent() if transaction_id in wanted]

    async def resolve(self, transaction_id: str, shard: str | None, outcome: Outcome) -> str:
        """Record the outcome of a prepared half and return the transaction's state.

        Raises OutcomeConflict, IdInUse, and other errors of the server.
        """
        item = await self.client.outcome_soon(transaction_id, shard, outcome.value)
        if item.status != 200:
            raise error_of(item.status, item.code or "refused", item.detail or "")
        return item.state or ""

    async def close(self) -> None:
        """Stop answering checks, send the outcomes that wait, and close the connections, even if this is cancelled."""
        for task in self._tasks:
            task.cancel()
        try:
            if self._tasks:  # `gather` would raise their cancellation, in which anyio does not see its own
                await asyncio.wait(self._tasks)
            if self._checker is not None:
                await self._checker.close()
            if self._purging is not None:
                await self._purging.close()
            if self._left_sender is not None:
                await self._left_sender.close()
            await self.client.close()
        finally:
            self.client.close_now()
            if self._left_sender is not None:
                self._left_sender.close_now()


def _has_reached(future: asyncio.Future[Item] | None) -> bool:
    """Whether the server has answered an outcome, and not that it cannot take it at the moment."""
    if future is None or not future.done() or future.cancelled() or future.exception() is not None:
        return False
    return is_taken(future.result())


def is_taken(item: Item) -> bool:
    """Whether the server has stored an outcome, or refuses it for ever; otherwise it may take it later."""
    return item.status not in NOT_NOW and item.status not in NO_ROOM
