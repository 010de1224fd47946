"""A consumer's work with one queue server: subscribe, receive under leases, renew them, run handlers, settle.

A session that is to end (the consumer stops, or its server left the registry) receives nothing more, and keeps its
connection until the handlers under way have returned and their messages are settled.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import msgspec

from notify.client.consumer.reply import runs_of
from notify.client.handling.banner import begun
from notify.client.handling.failure_log import FailureLog
from notify.client.handling.hand import Hand
from notify.client.handling.handlers import (
    CANCEL_SECONDS,
    DEATHS,
    Cancelled,
    Handler,
    LeaseOver,
    NotTried,
    reason_of,
    trace_of,
)
from notify.client.handling.runs import Run, Times, Waiting, by_run, ranges_of
from notify.client.transport.batch import Batcher, Later
from notify.client.transport.foreign_answers import PollTime, foreign_content
from notify.client.transport.http import HttpClient, read_answer
from notify.errors import DeadLetter, ForeignAnswer, InvalidRequest, NotFound, NotifyError, StaleReceipt
from notify.protocol.limits import OWNED
from notify.protocol.wire import (
    JSON,
    Leave,
    Receive,
    Received,
    Settle,
    SettledItem,
    SettledItems,
    SettleItem,
    encode_msgpack,
)
from notify.runtime.backoff import Backoff
from notify.runtime.clock import Clock, boot_clock
from notify.runtime.program_log import program_log
from notify.runtime.signals import done_before
from notify.runtime.visible import first_of

log = program_log("notify.consumer")
Held = TypeVar("Held", bound=Hashable)

CALL_SECONDS = 10.0
RETRY_SECONDS = 0.1
RETRY_MAX_SECONDS = 5.0
POLL_SECONDS = 20.0
LEAVE_SECONDS = 2.0
"""How long a consumer that stops waits for a server that it leaves."""
POLL_END_SECONDS = 1.0
"""How long a consumer that stops waits for the answer of its long poll, which the server ends."""
GIVE_BACK_SECONDS = 4.0
"""How long a message that this consumer gives back as it stops waits for the end of the long poll; at most half of a
lease."""
AGAIN = timedelta(minutes=10)
"""How long before the server's last answer a lost subscription begins again: requests wait, and clocks differ."""
NAMED_IN_LOG = 10
SEVERAL = "; do several servers answer at this address? Each needs an address of its own, which consumers reach"
GONE = "give_back", StaleReceipt.status
"""The answer to a message that is to be given back, and is not held any more: nothing is left to do."""
APART = (410, 422)
"""The answers to several messages together after which each is settled alone: one of them is not leased any more."""
TRACES_CHARACTERS = 1 << 18
"""The most characters of tracebacks in a request; the failures after them go without."""
SHARE = 3
"""A lease is renewed after this part of its time, so that a request may fail, or take long."""
TOGETHER = 6
"""Leases that are due within this part of their time are renewed together, in one request."""
LOG_SECONDS = 60.0
"""A blocked event loop is logged at most once in this time."""
_decode_fields = msgspec.json.Decoder(dict[str, Any]).decode
_decode_settled = msgspec.msgpack.Decoder(SettledItems).decode
_decode_answer = msgspec.msgpack.Decoder(Received).decode


class Renewals(Generic[Held]):
    """Renews the leases of messages that wait for their handlers or are with them, by one timer, and logs why that came
    too late. Another timer notes when its event loop was running. Belongs to that loop."""

    def __init__(self, lease: float, renew: Callable[[Held], None], clock: Clock = boot_clock) -> None:
        """`lease`: the seconds that a lease lasts; `renew` asks the server to renew a lease that is held; `clock`: the
        clock of leases, which continues while the machine sleeps."""
        self._lease = lease
        self._part_us = int(lease / SHARE * 1e6)
        self._renew = renew
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._due: OrderedDict[Held, float] = OrderedDict()
        """When each lease is renewed next. They all last equally long, so that the first one comes first."""
        self._timer: asyncio.TimerHandle | None = None
        self._warned_at = self._warned_of_expired_at = float("-inf")
        self._ran_us = clock()
        """When the loop was last noted to run."""
        self._stood_us = 0, 0
        """When its last standstill began and ended."""
        self._note_time()

    def begin(self, held: Held) -> None:
        """Renew a lease from now on, until `end`."""
        self._due[held] = self._loop.time() + self._lease / SHARE
        if self._timer is None:
            self._wait()

    def until_us(self, asked_us: int) -> int:
        """When a lease ends at the earliest that an answer has begun which comes now, to a request of this time
        (`clock`). The answer may have been there since before a standstill of this process."""
        now_us = self._look_at_clock()
        began_us, ended_us = self._stood_us
        return (began_us if asked_us < ended_us else now_us - self._part_us) + SHARE * self._part_us

    def look(self, held: Held) -> None:
        """A handler has returned: log if the renewal of its lease is so late that the lease has expired, because this
        loop did not run in the meantime."""
        due = self._due.get(held)
        now = self._loop.time()
        if due is None or now - due <= self._lease * (1 - 1 / SHARE) or now - self._warned_at < LOG_SECONDS:
            return
        self._warned_at = now
        log.warning(
            "the event loop was blocked for more than %.1f s, so that leases (of %g s) were not renewed: messages "
            "come again, also those whose handlers have returned. A handler blocks the loop, or the process was "
            "stopped: await what takes time, or use Consumer, which runs handlers in threads",
            now - due, self._lease,
        )  # fmt: skip

    def end(self, held: Held) -> None:
        """No message of this lease is open any more: do not renew it."""
        self._due.pop(held, None)

    def warn_of_expired(self, count: int) -> None:
        """Log that messages are not handled, because their leases ended while they waited."""
        now = self._loop.time()
        if now - self._warned_of_expired_at >= LOG_SECONDS:
            self._warned_of_expired_at = now
            log.warning(
                "%d messages are not handled here, because their leases (of %g s) ended while they waited: the process "
                "was stopped, or the server did not renew them; they are delivered again", count, self._lease,
            )  # fmt: skip

    def close(self) -> None:
        """Renew no lease any more."""
        self._due.clear()
        self._noting.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _note_time(self) -> None:
        self._look_at_clock()
        self._noting = self._loop.call_later(self._lease / TOGETHER, self._note_time)

    def _look_at_clock(self) -> int:
        before_us, self._ran_us = self._ran_us, self._clock()
        if self._ran_us - before_us > self._part_us:
            self._stood_us = before_us, self._ran_us
        return self._ran_us

    def _wait(self) -> None:
        self._timer = self._loop.call_at(next(iter(self._due.values())), self._renew_due)

    def _renew_due(self) -> None:
        self._timer = None
        now = self._loop.time()
        for held, due in list(self._due.items()):
            if due > now + self._lease / TOGETHER:
                break
            self.look(held)
            self._renew(held)
            del self._due[held]  # it is the last one now
            self._due[held] = now + self._lease / SHARE
        if self._due:
            self._wait()


@dataclass(slots=True)
class _Settling:
    """An item to settle. `until` (in the loop's time): when the message's lease ends, and repeating is pointless."""

    item: SettleItem
    until: float


class Settler:
    """Sends acks, retries and renewals of a group to one server in batches, and repeats them while it is unreachable.
    Belongs to one event loop."""

    def __init__(self, http: HttpClient, group: str, lease: float, times: Times, *, sends_traces: bool = True) -> None:
        """`lease`: the seconds for which an item is repeated that the server does not take. `times`: what the server is
        told with the items, at most once: if a request is lost, so is what it told. `sends_traces`: whether it gets the
        tracebacks of failures."""
        self._http = http
        self._times = times
        self._path = f"/v1/groups/{group}/settle"
        self._lease = lease
        self._batcher: Batcher[_Settling, SettledItem] = Batcher(self._settle, in_flight=2)
        self._backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        """The waits before items are sent again that the server did not take."""
        self._sends_traces = sends_traces
        self._room = TRACES_CHARACTERS
        """How many characters of tracebacks the next request still has room for: no more are written."""

    def trace(self, error: BaseException) -> str | None:
        """The traceback of an error; None if the next request would go without it."""
        if not self._sends_traces or self._room <= 0:
            return None
        trace = trace_of(error)
        self._room -= len(trace)
        return trace

    def submit(self, item: SettleItem) -> asyncio.Future[SettledItem]:
        """Queue an item and return the future of the server's answer, which raises NotifyError. Raises
        Unavailable if too many items wait."""
        return self._batcher.submit(_Settling(item, asyncio.get_running_loop().time() + self._lease))

    async def _settle(self, settlings: list[_Settling]) -> list[SettledItem | Later]:
        """Settle items on the server. Items that it cannot take now are sent again until their leases have ended."""
        now = asyncio.get_running_loop().time()
        self._room = TRACES_CHARACTERS
        room, has_traces = TRACES_CHARACTERS if self._sends_traces else 0, False
        for settling in settlings:
            if settling.item.trace is not None:
                room -= len(settling.item.trace)
                has_traces = has_traces or room >= 0
                settling.item.trace = settling.item.trace if room >= 0 else None
        body = encode_msgpack(Settle([settling.item for settling in settlings]))
        try:
            answer = await self._http.call("POST", self._path + self._times.taken(), body, CALL_SECONDS)
            results = read_answer(_decode_settled, answer).items
        except NotifyError as error:
            if has_traces and isinstance(error, ForeignAnswer):
                # A proxy may refuse texts such as a traceback: do not repeat them because of its answer.
                for settling in settlings:
                    settling.item.trace = None
                return await self._settle(settlings)
            if not is_away(error) or (isinstance(error, ForeignAnswer) and error.is_for_size and len(settlings) > 1):
                raise
            results = [
                SettledItem(settling.item.receipt, error.status, error.code, str(error)) for settling in settlings
            ]
        refused = next((settled for settled in results if _may_be_taken_later(settled)), None)
        wait = 0.0
        if refused is None:
            self._backoff.reset()
        else:
            wait = self._backoff.next()
            log.warning("the server does not settle, again in %.1f s: %s", wait, refused.detail or refused.code)
        return [
            Later(wait) if _may_be_taken_later(settled) and settling.until > now else settled
            for settling, settled in zip(settlings, results, strict=True)
        ]


def _may_be_taken_later(settled: SettledItem) -> bool:
    return settled.status == 429 or settled.status >= 500 or settled.code == "wrong_role"


def is_away(error: NotifyError) -> bool:
    """Whether the same request may succeed later. A server without queues may learn which server has them."""
    return error.retryable or error.code == "wrong_role"


async def _cancel_nothing(session: Session) -> None:
    """Cancel nothing."""


@dataclass(slots=True)
class Work:
    """State that the sessions of one consumer share."""

    group: str
    instance: str
    handlers: Mapping[str, Handler]
    hand: Hand
    """The messages in hand, from all servers."""
    lease: float
    drain: float
    announce: Callable[[str], None] = field(default=log.info)
    """Gets a sentence about the subscriptions once a session has made them."""
    cancel: Callable[[Session], Awaitable[None]] = field(default=_cancel_nothing)
    """Cancels the handlers of a session's messages, and waits for their end; a handler in a thread continues."""
    inbox_from: datetime | None = None
    """The time since which the consumer's inbox has every row; None if the consumer has no inbox."""
    tracebacks: bool = True
    """Whether failures are sent with their tracebacks."""


class Session:
    """Belongs to one event loop. `run` it once."""

    def __init__(self, work: Work, http: HttpClient) -> None:
        self._work = work
        self._http = http
        self.times = Times()
        self._settler = Settler(http, work.group, work.lease, self.times, sends_traces=work.tracebacks)
        self._runs: dict[Run, None] = {}
        """The runs with messages that are not settled."""
        self._settling = 0
        """The number of messages whose settling is on its way."""
        self._moved = asyncio.Event()
        """Set when messages were settled."""
        self._is_away = False
        """Whether the server was unreachable when this instance last announced its stop: the end does not wait for it
        again."""
        self._is_unreachable = False
        """Whether the last request to receive or to subscribe met no server."""
        self._is_stop_announced = False
        """Whether the server knows that this instance stops."""
        self._is_to_leave = True
        """Whether to announce the stop to the server once nothing is in hand any more."""
        self._gives_back = False
        """Whether messages whose handlers have not begun are given back: the consumer stops."""
        self._not_tried: list[Waiting] = []
        """Messages to give back that a caller of handlers had taken."""
        self._over = 0
        """How many of them had leases that were over."""
        self._giving_back: set[asyncio.Task[None]] = set()
        self._renewals = Renewals(work.lease, self._renew)
        self._failures = FailureLog()
        self._poll_time = PollTime(POLL_SECONDS)
        self._name, self._numbers = secrets.token_hex(6), itertools.count(1)
        self._polls: set[asyncio.Future[list[Run] | None]] = set()
        """The requests to receive whose answers nobody has read when the session ends."""
        self._ending = asyncio.Event()
        self._has_received = asyncio.Event()
        """Set once no request to receive is open or will follow."""
        self.is_subscribed = False
        """Whether the server knows the subscriptions, and since when the inbox is whole."""
        self._began = self._answered = datetime.now(UTC)
        """When the session began, and when the server last answered a request to receive."""
        self._subscribed_again = False
        """Whether the server has lost the subscriptions once before."""

    def end(self) -> None:
        """Receive nothing more; `run` returns when all messages in hand are settled."""
        self._ending.set()

    def give_back_waiting(self) -> None:
        """Give back the messages whose handlers have not begun, and those that an open request still brings: no attempt
        counts."""
        self._gives_back = True
        self._give_back(self._work.hand.let_go(self))

    async def run(self) -> None:
        """Work until `end`. Raises errors that a retry cannot mend, once all messages in hand are settled."""
        try:
            try:
                await done_before(self._ending, self._subscribe_all())
                try:
                    await self._receive_all()
                finally:
                    await self._end_polls()
            except NotifyError as error:
                # If the session ends while the server is unreachable, its caller does not need the error.
                if not (is_away(error) and self._ending.is_set()):
                    if self._runs:
                        log.error("nothing more is received from %s: %s", self._http.url, error)
                    await self._drain()
                    raise
            await self._drain()
        finally:
            await self._close()

    async def _end_polls(self) -> None:
        """Have the server end the open receive requests, and return the messages that they still bring. A server learns
        late that a client no longer waits for an answer, and its messages would wait for the end of their leases."""
        self._ending.set()
        try:
            if any(not poll.done() for poll in self._polls) and await self._leave():
                await asyncio.wait(self._polls, timeout=POLL_END_SECONDS)
        finally:
            for poll in self._polls:
                poll.cancel()
        answers = await asyncio.gather(*self._polls, return_exceptions=True)
        self._polls.clear()
        self._has_received.set()
        self._gives_back = True
        self._begin([run for answer in answers if isinstance(answer, list) for run in answer])

    async def _drain(self) -> None:
        """Wait at most `drain` seconds for the running handlers; their leases are renewed meanwhile."""
        announcing = asyncio.ensure_future(self._announce_stop())
        try:
            if await self._until_settled(self._work.drain, lambda: not self._runs):
                return
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
        message_ids = sorted([message.id for run in self._runs for message in run.messages if message is not None])
        log.warning(
            "stopped waiting for %d unsettled messages %g s after receiving stopped (setting drain); they will be "
            "redelivered: %s",
            len(message_ids), self._work.drain, first_of(message_ids, NAMED_IN_LOG),
        )  # fmt: skip

    async def _announce_stop(self) -> None:
        """Have the server know that this instance stops, while something is in hand: if the process is killed before
        the handlers have returned, that does not count as a death of their messages."""
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        while self._runs and not self._is_stop_announced:
            self._is_away = False
            if not await self._leave() and not self._is_away:
                return  # an older server, or nothing was received
            if self._is_away:
                await self._until_settled(backoff.next(), lambda: not self._runs)

    async def _until_settled(self, seconds: float, is_done: Callable[[], bool]) -> bool:
        """Wait at most `seconds` until something is so that changes when messages are settled; False if it is not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_done():
                    self._moved.clear()
                    await self._moved.wait()
        return is_done()

    async def _close(self) -> None:
        """End the session. A cancelled scope of anyio cancels each wait: what follows it is done all the same."""
        hand = self._work.hand
        try:
            try:
                await self._end_polls()
            finally:
                self._renewals.close()
                self._give_back(hand.let_go(self))
                await self._work.cancel(self)
            hand.collect()
            if self._giving_back:
                await asyncio.wait(self._giving_back, timeout=GIVE_BACK_SECONDS)
            await self._until_settled(CANCEL_SECONDS, lambda: not self._settling)
        finally:
            for task in self._giving_back:
                task.cancel()
            try:
                if self._is_to_leave:
                    await self._leave()
            finally:
                self._http.close()

    async def _leave(self) -> bool:
        """Have the server end this instance's requests to receive, give up the exclusive and failover topics that it
        owns and has no message of, so that another takes over immediately, and count no death if what it holds is not
        settled. Returns whether the server did so.

        If the request fails, or the server is an older one, another takes over when the lease of the topic expires.
        """
        if not self.is_subscribed or self._is_away:
            return False
        body = encode_msgpack(Leave(self._work.instance))
        is_owner = any(handler.mode in OWNED for handler in self._work.handlers.values())
        self._is_to_leave = is_owner and bool(self._runs)  # a topic stays owned while its messages are held
        try:
            await self._http.call("POST", f"/v1/groups/{self._work.group}/leave", body, LEAVE_SECONDS)
        except NotifyError as error:
            self._is_away = is_away(error)
            self._is_to_leave = True
            return False
        self._is_stop_announced = True
        return True

    # --- receiving --------------------------------------------------------------------------------------------

    async def _subscribe_all(self, *, again: bool = False) -> None:
        """Make the group's subscriptions on the server.

        `again`: the server's log was restored to a state without them, or an administrator has ended them. Messages
        sent since then are still to be delivered, so that a start at `latest` is AGAIN before the server's last answer,
        but not before this session began.
        """
        answers: dict[str, Any] = {}
        again_from = max(self._began, self._answered - AGAIN).isoformat()
        # Patterns come first, so that a topic with its own handler keeps this handler's settings.
        for handler in sorted(self._work.handlers.values(), key=lambda handler: "*" not in handler.topic):
            start = handler.start.isoformat() if isinstance(handler.start, datetime) else handler.start
            if again and start in (None, "latest"):
                start = again_from
            subscription = {
                "mode": handler.mode,
                "tags": list(handler.tags),
                "start": start,
                "max_attempts": handler.max_attempts,
                "filter": handler.filter,
                "retry_min": handler.retry_min,
                "retry_max": handler.retry_max,
            }
            if handler.max_deaths != DEATHS:
                subscription["max_deaths"] = handler.max_deaths
            if handler.on_exhausted != "dead_letter":
                subscription["on_exhausted"] = handler.on_exhausted
            if handler.fair_by:
                subscription["fair_by"] = handler.fair_by
            by = f"?instance={quote(self._work.instance, safe='')}"
            try:
                answer = await self._put(f"{quote(handler.topic)}{by}", subscription)
            except InvalidRequest:
                if subscription["start"] != again_from:
                    raise
                subscription["start"] = "latest"
                answer = await self._put(f"{quote(handler.topic)}{by}", subscription)
                log.warning(
                    "%s: begins again at the newest message, because to the server this machine's clock is ahead by "
                    "more than %d minutes: messages that were sent since the subscription was lost are missing",
                    handler.topic, AGAIN.total_seconds() / 60,
                )  # fmt: skip
            answers[handler.topic] = answer
        await self.report_inbox()
        self.is_subscribed = True
        work = self._work
        work.announce(begun(self._http.url, work.group, work.instance, work.handlers.values(), answers))

    async def report_inbox(self) -> None:
        """Tell the server since when the inbox is whole, before anything is received or purged.

        Raises Conflict (`before_inbox`) for a new subscription that starts before this time.
        """
        if self._work.inbox_from is None:
            return
        body = {"whole_from": self._work.inbox_from.isoformat()}
        for topic in self._work.handlers:
            await self._put(f"{quote(topic)}/inbox", body)

    async def _put(self, path: str, body: dict[str, Any]) -> Any:
        """PUT to a route under the group's subscriptions. Raises NotFound if the server has no such topic."""
        path = f"/v1/groups/{self._work.group}/subscriptions/{path}"
        return await self._until_served(functools.partial(self._ask, "PUT", path, body))

    async def _ask(self, method: str, path: str, body: dict[str, Any]) -> Any:
        answer = await self._http.call(method, path, msgspec.json.encode(body), CALL_SECONDS, JSON)
        fields = read_answer(_decode_fields, answer)
        if "group" not in fields:
            raise foreign_content("it is not about a subscription")
        return fields

    async def _until_served(self, request: Callable[[], Awaitable[Any]]) -> Any:
        """Repeat a request while the server is unreachable. Raises errors that a retry cannot mend, and the last
        failure once the session ends."""
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        while True:
            try:
                answer = await request()
                if self._is_unreachable and not self._ending.is_set():
                    self._is_unreachable = False
                    log.info("the server at %s answers again", self._http.url)
                return answer
            except NotifyError as error:
                if not is_away(error) or self._ending.is_set():
                    raise
                self._is_unreachable = True
                wait = backoff.next()
                log.warning("the server is unreachable, trying again in %.1f s: %s", wait, error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), wait)
                    raise  # the session has ended: no more requests

    async def _receive_all(self) -> None:
        """Receive until the session ends. Broadcast topics are received in separate requests."""
        handlers = self._work.handlers.values()
        broadcast = [handler.topic for handler in handlers if handler.mode == "broadcast"]
        rest = [handler.topic for handler in handlers if handler.mode != "broadcast"]
        loops = [asyncio.ensure_future(self._receive_until_ended(topics)) for topics in (broadcast, rest) if topics]
        try:
            await asyncio.wait(loops, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for loop in loops:
                loop.cancel()
            results = await asyncio.gather(*loops, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _receive_until_ended(self, topics: list[str]) -> None:
        hand = self._work.hand
        ended = asyncio.ensure_future(self._ending.wait())
        receiving: asyncio.Future[list[Run] | None] | None = None
        request_id = self._new_request_id()
        try:
            while not self._ending.is_set():
                room = hand.room()
                if not room:
                    hand.moved.clear()
                    await self._either(ended, asyncio.ensure_future(hand.moved.wait()))
                    continue
                receive = functools.partial(self._receive, topics, room, request_id)
                receiving = asyncio.ensure_future(self._until_served(receive))
                await asyncio.wait([receiving, ended], return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    return
                answer, receiving = receiving.result(), None
                if answer is not None:
                    request_id = self._new_request_id()
                    self._begin(answer)
        finally:
            ended.cancel()
            if receiving is not None:
                self._polls.add(receiving)

    def _new_request_id(self) -> str:
        """A name by which the server knows a request to receive if it comes again, because its answer was lost; and by
        its first part this consumer among those with the same name of an instance."""
        return f"{self._name}.{next(self._numbers)}"

    async def _receive(self, topics: list[str], room: int, request_id: str) -> list[Run] | None:
        """The messages of one answer; None if a proxy has cut the request off: what the server answered is lost."""
        if self._ending.is_set():
            # The session ended in the pause before a retry. Before Python 3.12 `wait_for` may swallow the cancellation.
            return []
        work = self._work
        wait = 0 if self._is_unreachable else self._poll_time.seconds  # whether it answers again is to be seen at once
        request = Receive(instance=work.instance, topics=topics, max=room, wait=wait, lease=work.lease)
        path = f"/v1/groups/{work.group}/receive?subscribe=no&runs=yes&request={request_id}"
        body = encode_msgpack(request)
        began, asked_us = asyncio.get_running_loop().time(), boot_clock()
        try:
            answer = await self._http.call("POST", path, body, POLL_SECONDS + 5)
            runs = read_answer(self._decode, answer)
            for run in runs:
                run.until_us = self._renewals.until_us(asked_us)
            self._answered = datetime.now(UTC)
            return runs
        except ForeignAnswer as error:
            if self._poll_time.was_cut(error, asyncio.get_running_loop().time() - began):
                return None
            raise
        except NotFound as error:
            if error.code != "not_subscribed":
                raise
            hint = SEVERAL if self._subscribed_again else ""
            self._subscribed_again = True
            log.warning("%s no longer knows the subscriptions; sending them again: %s%s", self._http.url, error, hint)
            await self._subscribe_all(again=True)
            return []

    def _decode(self, answer: bytes) -> list[Run]:
        return runs_of(self, self._work.handlers, _decode_answer(answer))

    @staticmethod
    async def _either(ended: asyncio.Future[Any], moved: asyncio.Future[Any]) -> None:
        """Wait for the end of the session, or until messages were settled."""
        try:
            await asyncio.wait([ended, moved], return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()

    # --- handling ---------------------------------------------------------------------------------------------

    def _begin(self, runs: list[Run]) -> None:
        self._is_to_leave |= bool(runs)
        for run in runs:
            self._runs[run] = None
            self._renewals.begin(run)
        self._work.hand.put(runs)
        if self._gives_back:
            self.give_back_waiting()

    def noted(self, run: Run, place: int, error: BaseException) -> None:
        """The handler of a message has raised an error: it is delivered again, a dead letter, or given back."""
        if isinstance(error, NotTried):
            self._not_tried.append((run, place))
            self._over += isinstance(error, LeaseOver)
            return
        places = range(place, place + 1)
        message = run.message(place)
        if isinstance(error, DeadLetter):
            self._failures.record(message.topic, message.id, message.attempt, error)
            reason = reason_of(error, named=False) or None
            self._settle(run, places, "dead_letter", reason, trace=self._settler.trace(error))
        elif isinstance(error, Cancelled):
            self._settle(run, places, "interrupted", "the consumer was cancelled")
        else:
            self._failures.record(message.topic, message.id, message.attempt, error)
            self._settle(run, places, "retry", reason_of(error), trace=self._settler.trace(error))

    def settle_noted(self, run: Run, returned: Sequence[range]) -> None:
        """Acknowledge the messages of a run whose handlers have returned, and give back those that no handler got."""
        self._renewals.look(run)
        if not any(run.is_open):
            self._renewals.end(run)
        not_tried, self._not_tried = self._not_tried, []
        if self._over:
            self._renewals.warn_of_expired(self._over)
            self._over = 0
        self._give_back(not_tried)
        for places in returned:
            self._settle(run, places, "ack")

    def _settle(
        self,
        run: Run,
        places: range,
        action: str,
        reason: str | None = None,
        delay: float | None = None,
        trace: str | None = None,
    ) -> None:
        """Have neighbours settled alike."""
        self._settling += len(places)
        item = SettleItem(receipt=run.receipt(places), action=action, delay=delay, reason=reason, trace=trace)
        try:
            settling = self._settler.submit(item)
        except NotifyError as error:
            self._ended(run, places, str(error))
        else:
            settling.add_done_callback(functools.partial(self._answered_to, run, places, item))

    def _answered_to(self, run: Run, places: range, item: SettleItem, settling: asyncio.Future[SettledItem]) -> None:
        if settling.cancelled():
            self._ended(run, places, "the session has ended")
        elif (error := settling.exception()) is not None:
            self._ended(run, places, str(error))
        elif (settled := settling.result()).status == 200 or (item.action, settled.status) == GONE:
            self._ended(run, places)
        elif len(places) > 1 and settled.status in APART:
            self._settling -= len(places)
            for place in places:
                self._settle(run, range(place, place + 1), item.action, item.reason, item.delay, item.trace)
        else:
            hint = SEVERAL if settled.status == StaleReceipt.status and self._was_leased(run, places[0]) else ""
            self._ended(run, places, f"{settled.detail or settled.code or ''}{hint}")

    @staticmethod
    def _was_leased(run: Run, place: int) -> bool:
        """Whether a message that came again is still leased to this consumer by its clock: a server that denies it,
        and has not restarted, did not send the message."""
        return run.message(place).attempt > 1 and boot_clock() < run.until_us

    def _ended(self, run: Run, places: range, why_not: str | None = None) -> None:
        """The settling of messages has ended. `why_not`: why the server did not settle them; None: it did."""
        self._settling -= len(places)
        if why_not is not None:
            more = f" and {len(places) - 1} behind it were" if len(places) > 1 else " was"
            log.warning("%s%s not settled, it may be delivered again: %s", run.message(places[0]).id, more, why_not)
        self._work.hand.settled(run, places)
        if not run.unsettled:
            self._runs.pop(run, None)
            self._renewals.end(run)
        self._moved.set()

    def _give_back(self, waiting: Iterable[Waiting]) -> None:
        by_lease = list(by_run(waiting))
        if not by_lease:
            return
        is_stopping = self._gives_back or self._work.hand.is_over
        for run, places in by_lease:
            for together in ranges_of(places):
                run.close(together)
                if not is_stopping:  # its leases, which nobody renews, may be short
                    self._settle(run, together, "give_back")
        if not is_stopping:
            return
        self._settling += sum([len(places) for _, places in by_lease])
        task = asyncio.ensure_future(self._give_back_when_received(by_lease))
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)

    async def _give_back_when_received(self, by_lease: Sequence[tuple[Run, list[int]]]) -> None:
        """Give messages back once this session's long poll is over: otherwise the long poll would get them again, and
        nobody would handle them before their leases expire."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(GIVE_BACK_SECONDS, self._work.lease / 2)):
                await self._has_received.wait()
        for run, waiting_places in by_lease:
            for places in ranges_of(waiting_places):
                self._settling -= len(places)
                self._settle(run, places, "give_back")

    def _renew(self, run: Run) -> None:
        """Renew the lease of the messages of a run whose handlers have not returned."""
        for places in ranges_of(run.open_places()):
            self._renew_together(run, places)

    def _renew_together(self, run: Run, places: range) -> None:
        since_us = boot_clock()
        item = SettleItem(receipt=run.receipt(places), action="renew", lease=self._work.lease)
        with contextlib.suppress(NotifyError):
            renewing = self._settler.submit(item)
            renewing.add_done_callback(functools.partial(self._renewed, run, places, since_us))

    def _renewed(self, run: Run, places: range, since_us: int, renewing: asyncio.Future[SettledItem]) -> None:
        """Note how long the leases last now. If the server has refused to renew messages together, because one was not
        leased any more, renew them one by one; no handler is called for that one."""
        if renewing.cancelled() or renewing.exception() is not None:
            return
        if (settled := renewing.result()).status == 200:
            run.until_us = max(run.until_us, since_us + int(self._work.lease * 1e6))
        elif len(places) == 1 and settled.status == StaleReceipt.status:
            run.close(places)
        elif settled.status in APART and len(places) > 1:
            for place in places:
                if run.is_open[place]:
                    self._renew_together(run, range(place, place + 1))
