"""KafkaLoop: runs a consumer over Apache Kafka, from the first call to the brokers to the last commit; and `consume`,
which keeps it running while brokers refuse it."""

from __future__ import annotations

import asyncio
import contextlib
import time

from notify.client.handling.banner import stopping_text
from notify.client.kafka.assignment import Assignment, Resets
from notify.client.kafka.control import Orders
from notify.client.kafka.feed import LEAVE_SECONDS, Feed, PollSize
from notify.client.kafka.handling import NAMED_IN_LOG, AttemptNotes, Handling
from notify.client.kafka.membership import Membership
from notify.client.kafka.modes import OtherModes
from notify.client.kafka.ownership import Ownership
from notify.client.kafka.partitions import Partitions
from notify.client.kafka.plan import Plan
from notify.client.kafka.settling import Settling
from notify.client.kafka.starting import Starts
from notify.client.kafka.topics import Topics
from notify.client.threads.handler_threads import HandlerThreads
from notify.errors import Forbidden, InvalidRequest, NotifyError, Unauthorized, Unavailable
from notify.kafka.cluster import REFUSED_SETTINGS, Cluster
from notify.kafka.diagnosis import BROKER_SETTING, why_unreachable
from notify.kafka.subscriptions import Subscriptions
from notify.kafka.topic_ids import TopicIds
from notify.runtime.backoff import Backoff
from notify.runtime.program_log import program_log
from notify.runtime.signals import done_before

log = program_log("notify.consumer")

POLL_SECONDS = 0.2
WINDOW_RECORDS = 4_000
"""A partition is paused when it has this many waiting records. After a pause its records are fetched again, so that a
small bound would be slow."""
ROOM_SECONDS = 1.0
"""If handlers leave no room for this time, they count as slow: fetching pauses, but the group is still polled."""
LAST_TRIES = 50
"""How often a consumer that stops tries to commit if the brokers refuse; otherwise its messages are redelivered."""
STOP_SECONDS, REST_SECONDS = 1.0, 5.0
"""How long a consumer that stops waits for the current call: within its start, and without a partition. Abandoning the
call loses nothing. A consumer with partitions gives them back first."""
CUT_SECONDS = 1.0
"""How long a consumer that ends immediately tries to leave its group; nothing is lost if the brokers do not answer."""
PROVEN_SECONDS = 30.0
"""Rights that the consumer lacks from the beginning are noticed within this time."""
RENEW_SECONDS = 3600.0
"""How often all progress is committed and noted again, so that Kafka does not forget it while nothing happens."""
TOPICS_SECONDS = 5.0
"""How often the consumer looks for new topics that match its patterns, and for new partitions."""
OTHERS_SECONDS = 30.0
"""How often the consumer looks whether programs other than Notify have joined its group."""

AGAIN_SECONDS, AGAIN_MAX_SECONDS = 1.0, 30.0
"""The waits before the brokers are tried again that have refused a consumer."""


class KafkaLoop:
    """Receives for one instance of a consumer group. Belongs to one event loop; `run` it once."""

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        """Raises InvalidRequest for invalid settings and filters."""
        self._plan = plan
        self._cluster = cluster
        self._partitions = Partitions(max(plan.batch, WINDOW_RECORDS))
        self._feed = Feed(self._cluster, plan.kafka_group, plan.instance, self._partitions)
        self._threads = HandlerThreads(4, "notify-kafka-call")
        """The threads for commits, claims and notes. A call that hangs there does not keep the process from ending."""
        self._settling = Settling(plan, self._cluster, self._feed, self._partitions, self._threads)
        self._poll_size = PollSize(plan.batch)
        self._handling = Handling(plan, self._partitions, self._settling, self._poll_size)
        self._noting = AttemptNotes(self._partitions, self._settling, self._handling)
        self._orders = Orders(self._cluster, plan.group)
        self._topics = Topics(plan, self._feed.consumer, self._cluster)
        noted = None if plan.sharing == "broadcast" else Subscriptions(self._cluster, plan.group)
        ids = TopicIds(self._cluster)
        self._starts = Starts(plan, self._feed.consumer, self._cluster, self._orders, noted, ids)
        parts = (self._partitions, self._handling, self._settling, self._orders)
        self._assignment = Assignment(plan, *parts, noted, ids, self._threads)
        self._resets = Resets(self._feed, self._starts, self._assignment, self._partitions, self._orders, ids)
        self._modes = OtherModes(plan, self._cluster)
        self._sharing: Membership | Ownership
        if plan.sharing == "owner":
            self._sharing = Ownership(plan, self._cluster, self._feed, self._starts, self._settling, self._assignment)
        else:
            self._sharing = Membership(self._feed, self._starts, self._assignment, lambda: self._is_stopping)
        self._ordered = asyncio.Event()
        self._is_stopping = False
        self._started_at = float("inf")
        self._has_received = False

    @property
    def has_worked(self) -> bool:
        """Whether records have come, or nothing was refused for PROVEN_SECONDS."""
        return self._has_received or time.monotonic() - self._started_at > PROVEN_SECONDS

    async def run(self, stopping: asyncio.Event) -> None:
        """Receive until `stopping`, and then until all messages in hand are settled.

        Raises Unavailable if the brokers cannot be reached at the start; Unauthorized, Forbidden and InvalidRequest if
        they refuse; Conflict if an exclusive group has another instance, or the group has consumers of another mode.
        """
        stopped = asyncio.create_task(_wait(stopping))
        tasks = [stopped]
        try:
            # A call that the start waits for, such as to brokers that do not answer, is abandoned to its thread.
            if not await done_before(stopping, self._start()):
                return
            self._started_at = time.monotonic()
            tasks += [
                asyncio.create_task(run())
                for run in (
                    self._poll, self._settling.run, self._noting.run, self._follow_orders, self._follow_topics,
                    self._renew,
                )
            ]  # fmt: skip
            tasks.append(asyncio.create_task(self._orders.run(self._ordered.set)))
            if isinstance(self._sharing, Ownership):
                tasks.append(asyncio.create_task(self._sharing.run()))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            failed = [error for task in tasks if task.done() and (error := task.exception()) is not None]
            await self._drain()
            if failed:
                raise failed[0]
        finally:
            await self._close(tasks)

    async def _start(self) -> None:
        await self._feed.call(self._feed.look)
        await self._feed.call(self._topics.make)
        # It runs concurrently with the next steps, because it mostly waits for a coordinator.
        refusing = asyncio.create_task(self._modes.refuse())
        try:
            topics = await self._look()
            await refusing
        finally:
            refusing.cancel()
            await asyncio.gather(refusing, return_exceptions=True)
        if isinstance(self._sharing, Membership):
            await self._sharing.begin(topics)
        await self._sharing.subscribe(topics)

    async def _look(self) -> dict[str, int]:
        """Read the orders of operators. Returns the topics to read, each with its number of partitions."""
        await self._orders.catch_up()
        topics = await self._feed.call_patiently(self._topics.subscribed)
        await self._feed.call_patiently(self._starts.look, topics)
        self._obey()
        return topics

    # --- fetching ---------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        """Fetch while few items are ready, and always poll the group, which takes a silent member for dead."""
        is_holding = False
        while True:
            self._handling.begin()
            is_held = self._handling.is_held
            wants = not is_held and self._handling.is_low
            if not (wants or is_holding or is_held):
                self._handling.moved.clear()
                if await self._moved(ROOM_SECONDS):
                    continue
            is_holding = not wants
            await self._pause_and_resume(is_holding)
            # A partition that is assigned while nothing is wanted is fetched until it is paused: one record at a time.
            most = self._poll_size.next(time.monotonic()) if wants else 1
            # While the client's thread waits for records, it cannot commit. If attempts are noted by commits, do not
            # wait there, but for handlers.
            is_noting = self._partitions.has_to_note
            self._handling.moved.clear()
            count = await self._feed.poll(most, 0.0 if is_noting else POLL_SECONDS)
            self._poll_size.came(time.monotonic(), count)
            self._has_received = self._has_received or count > 0
            if is_noting and not count:
                await self._moved(POLL_SECONDS)

    async def _moved(self, seconds: float) -> bool:
        """Wait at most `seconds` until a handler has returned and few items are ready; False after a timeout."""
        try:
            await asyncio.wait_for(self._handling.moved.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _pause_and_resume(self, is_holding: bool) -> None:
        to_pause = self._partitions.to_pause(all_of_them=is_holding)
        to_resume = [] if is_holding else self._partitions.to_resume()
        if to_pause:
            self._partitions.paused.update(to_pause)
            await self._feed.pause(to_pause)
        if to_resume:
            self._partitions.paused.difference_update(to_resume)
            await self._feed.resume(to_resume)

    # --- following --------------------------------------------------------------------------------------------

    async def _follow_orders(self) -> None:
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            self._obey()
            await self._resets.carry_out()

    def _obey(self) -> None:
        is_held = self._orders.control.paused or self._is_stopping
        if is_held != self._handling.is_held:
            log.info("group %s is %s", self._plan.group, "paused" if is_held else "resumed")
        self._handling.hold(is_held)

    async def _follow_topics(self) -> None:
        """Look for new topics of patterns, recreated topics, new partitions of an owner, and resets that came with a
        rebalance.

        Also look once for consumers of another mode that started at the same time: by now they see each other; and each
        time for one with the name of this instance of a broadcast group.
        """
        is_alone = self._plan.sharing == "broadcast"
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(TOPICS_SECONDS)
            try:
                if not is_alone:
                    await self._modes.refuse()
                    is_alone = True
                if self._plan.sharing == "broadcast":
                    await self._feed.call(self._modes.check_mark, self._feed.consumer)
                topics = await self._feed.call(self._topics.subscribed)
                if self._topics.lacks:
                    log.warning(
                        "topics of this consumer were deleted, and are recreated: %s", ", ".join(self._topics.lacks)
                    )
                    await self._feed.call(self._topics.make)
                await self._sharing.subscribe(topics)
                if jumps := self._partitions.take_jumps():
                    await self._feed.call(self._starts.look_behind, jumps)
                await self._feed.look_at_ends()
                await self._orders.look()
                await self._resets.begin_anew()
                await self._resets.carry_out()
                if time.monotonic() - looked_at > OTHERS_SECONDS:
                    looked_at = time.monotonic()
                    await self._modes.tell_others(topics)
            except Unavailable as error:
                log.warning("the topics could not be looked for, again in %g s: %s", TOPICS_SECONDS, error)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            await self._assignment.renew()

    # --- the end ----------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Wait at most `drain` seconds for the running handlers, while the group is still polled."""
        self._is_stopping = True
        self._handling.hold(True)
        deadline = time.monotonic() + self._plan.drain
        if self._handling.under_way:
            self._plan.announce(stopping_text(self._plan.drain, self._handling.under_way))
        unfinished = await self._handling.finished(self._plan.drain)
        if unfinished:
            log.warning(
                "stopped waiting for %d unsettled messages %g s after receiving stopped (setting drain); they will be "
                "redelivered: %s",
                len(unfinished), self._plan.drain, ", ".join(unfinished[:NAMED_IN_LOG]),
            )  # fmt: skip
        for _, window in self._partitions.items():
            window.stop()
        for _ in range(LAST_TRIES):
            if await self._settling.settle() or time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_SECONDS)

    async def _close(self, tasks: list[asyncio.Task[None]]) -> None:
        await self._handling.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self._end()
        finally:
            self._modes.close()
            if isinstance(self._sharing, Ownership):
                self._sharing.leave_to_itself()
            self._threads.shutdown()

    async def _end(self) -> None:
        """Wait for the last commit and close the clients; if the process ends immediately, for CUT_SECONDS at most."""
        if self._plan.is_cut():
            await asyncio.gather(self._feed.close(CUT_SECONDS), self._orders.close(CUT_SECONDS))
            return
        await self._settling.finished()
        if self._partitions.items():
            seconds = LEAVE_SECONDS
        else:
            seconds = STOP_SECONDS if self._started_at == float("inf") else REST_SECONDS
        closing = [self._feed.close(seconds), self._orders.close(STOP_SECONDS), self._settling.close(STOP_SECONDS)]
        if isinstance(self._sharing, Ownership):
            closing.append(self._sharing.close())  # concurrently with the others: another instance waits for this
        await asyncio.gather(*closing)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def consume(plan: Plan, stopping: asyncio.Event) -> None:
    """Receive until `stopping`. Until the loop has worked once, its errors are raised: see KafkaLoop.run.

    After that, a refusal, or brokers that do not answer, end only the current clients, because a right or password that
    was withdrawn may be granted again. New clients, with the current
    file of settings, are tried until the brokers accept one. Nothing is lost meanwhile: messages that were not
    committed are delivered again.
    """
    backoff = Backoff(AGAIN_SECONDS, AGAIN_MAX_SECONDS)
    has_worked = False
    cluster = Cluster.of(plan.url)
    while not stopping.is_set():
        loop: KafkaLoop | None = None
        try:
            loop = KafkaLoop(plan, cluster)
            await loop.run(stopping)
            return
        except (Unauthorized, Forbidden, Unavailable, InvalidRequest) as error:
            if loop is not None and loop.has_worked:
                has_worked = True
                backoff.reset()
            told = await _explained(error, cluster, stopping)
            is_refusal = not isinstance(told, InvalidRequest) or told.code in (
                "no_topic",
                REFUSED_SETTINGS,
                BROKER_SETTING,
            )
            if not has_worked or not is_refusal:
                raise told from (error if told is not error else None)
            wait = backoff.next()
            log.warning("group %s receives nothing, again in %.1f s: %s", plan.group, wait, told)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), wait)
        cluster = cluster.again()


async def _explained(error: NotifyError, cluster: Cluster, stopping: asyncio.Event) -> NotifyError:
    """The reason for brokers that do not answer, also at the addresses that they direct clients to; `error` if they do,
    or if the consumer is told to stop meanwhile."""
    if not isinstance(error, Unavailable):
        return error
    threads = HandlerThreads(1, "notify-kafka-why")
    stopped = asyncio.create_task(_wait(stopping))
    looking = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(threads, why_unreachable, cluster))
    try:
        await asyncio.wait((looking, stopped), return_when=asyncio.FIRST_COMPLETED)
        return (looking.result() if looking.done() else None) or error
    finally:
        stopped.cancel()
        looking.cancel()
        threads.shutdown()
