"""A consumer's work with one queue server: subscribe, receive under leases, run handlers, settle.

A session that is to end (the consumer stops, or its server left the registry) receives nothing more, and keeps its
connection until the handlers under way have returned and their messages are settled.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import msgspec

from notify.backoff import Backoff
from notify.client.banner import begun
from notify.client.failure_log import FailureLog
from notify.client.foreign import PollTime, foreign_content
from notify.client.handlers import DEATHS, Handler, NotTried, handler_of, is_cancelled, reason_of
from notify.client.http import HttpClient, read_answer
from notify.client.renewals import Renewals
from notify.client.settler import CALL_SECONDS, RETRY_MAX_SECONDS, RETRY_SECONDS, Settler, is_away
from notify.errors import DeadLetter, ForeignAnswer, InvalidRequest, NotFound, NotifyError
from notify.message import ReceivedMessage
from notify.wire import (
    JSON,
    Delivered,
    Leave,
    Receive,
    Received,
    SettleItem,
    encode_msgpack,
)

log = logging.getLogger("notify.consumer")

POLL_SECONDS = 20.0
LEAVE_SECONDS = 2.0
"""How long a consumer that stops waits for a server that it leaves."""
GIVE_BACK_SECONDS = 1.0
"""How long a message that this consumer gives back waits for the end of the long poll."""
CANCEL_SECONDS = 1.0
"""How long cancelled coroutines may take to end."""
AGAIN = timedelta(minutes=10)
"""How long before the server's last answer a lost subscription begins again: requests wait, and clocks differ."""
NAMED_IN_LOG = 10
CAUTIOUS = 32
"""The most messages in hand of a consumer of batches, at its start and while most deliveries are repeated ones. If the
process dies, each message in hand has used up an attempt, and one of them may be what kills the process."""
_SUBSCRIBED = {"group", "result"}
"""The answers about subscriptions have one of these fields, the second one in the admin routes."""
_decode_fields = msgspec.json.Decoder(dict[str, Any]).decode
_decode_received = msgspec.msgpack.Decoder(Received).decode


@dataclass(slots=True)
class Work:
    """State that the sessions of one consumer share."""

    group: str
    instance: str
    handlers: Mapping[str, Handler]
    call: Callable[[Handler, ReceivedMessage], Awaitable[None]]
    lease: float
    batch: int
    drain: float
    announce: Callable[[str], None] = field(default=log.info)
    """Gets a sentence about the subscriptions once a session has made them."""
    ends_when_cancelled: bool = False
    """Whether a handler ends when its task is cancelled; a handler in a thread goes on."""
    inbox_from: datetime | None = None
    """The time since which the consumer's inbox has every row; None if the consumer has no inbox."""
    in_hand: set[asyncio.Task[None]] = field(default_factory=set)
    """The task of each message that was received and is not settled yet."""


class Session:
    """Belongs to one event loop. `run` it once."""

    def __init__(self, work: Work, http: HttpClient) -> None:
        self._work = work
        self._http = http
        self._settler = Settler(http, work.group, work.lease)
        self._in_hand: dict[asyncio.Task[None], str] = {}
        """The tasks of this session's messages, and the messages' ids."""
        self._renewals = Renewals(work.lease, self._renew)
        self._failures = FailureLog()
        self._poll_time = PollTime(POLL_SECONDS)
        self._ending = asyncio.Event()
        self._has_received = asyncio.Event()
        """Set once no request to receive is open or will follow."""
        self.is_subscribed = False
        """Whether the server knows the subscriptions, and since when the inbox is whole."""
        self._began = self._answered = datetime.now(UTC)
        """When the session began, and when the server last answered a request to receive."""
        self._has_only_admin_routes = False
        """Whether the server is an older one, where only an admin route makes subscriptions."""
        self._is_cautious = self._takes_batches = any(h.batch is not None for h in work.handlers.values())

    def end(self) -> None:
        """Receive nothing more; `run` returns when all messages in hand are settled."""
        self._ending.set()

    async def run(self) -> None:
        """Work until `end`. Raises errors that a retry cannot mend, once all messages in hand are settled."""
        try:
            try:
                await self._subscribe_all()
                await self._receive_all()
            except NotifyError as error:
                # If the session ends while the server is away, its caller does not need the error.
                if not (is_away(error) and self._ending.is_set()):
                    if self._in_hand:
                        log.error("nothing more is received from %s: %s", self._http.url, error)
                    await self._drain()
                    raise
            await self._drain()
        finally:
            self._has_received.set()
            await self._close()

    async def _drain(self) -> None:
        """Wait at most `drain` seconds for the running handlers; their leases are renewed meanwhile."""
        telling = asyncio.ensure_future(self._tell_stopping())
        try:
            async with asyncio.timeout(self._work.drain):
                while self._in_hand:
                    await asyncio.wait(self._in_hand)
        except TimeoutError:
            ids = sorted(self._in_hand.values())
            more = f" and {len(ids) - NAMED_IN_LOG} more" if len(ids) > NAMED_IN_LOG else ""
            log.warning(
                "%d messages are not settled %g s after the end of receiving (the setting drain); they are not waited "
                "for any more, and will be delivered again: %s%s",
                len(ids), self._work.drain, ", ".join(ids[:NAMED_IN_LOG]), more,
            )  # fmt: skip
        finally:
            telling.cancel()

    async def _tell_stopping(self) -> None:
        """Tell the server that this instance stops: what it holds now then counts no attempt if the process is killed
        before its handlers have returned. Repeated until the server has taken it."""
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        while self._in_hand:
            if await self._tell_leave():
                return
            await asyncio.wait(self._in_hand, timeout=backoff.next(), return_when=asyncio.ALL_COMPLETED)

    async def _close(self) -> None:
        self._renewals.close()
        for task in self._in_hand:
            task.cancel()
        if self._in_hand:
            await asyncio.wait(self._in_hand, timeout=CANCEL_SECONDS)
        try:
            await self._leave()
        finally:
            self._http.close()

    async def _leave(self) -> None:
        """Give up the exclusive and failover topics that this instance owns, so that another takes over immediately.

        If the request fails, or the server is an older one, another takes over when the lease of the topic expires.
        """
        if self.is_subscribed:
            await self._tell_leave()

    async def _tell_leave(self) -> bool:
        """Whether the server has taken that this instance leaves, or never will."""
        body = encode_msgpack(Leave(self._work.instance))
        try:
            await self._http.call("POST", f"/v1/groups/{self._work.group}/leave", body, LEAVE_SECONDS)
        except NotifyError as error:
            return not is_away(error)
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
            reason = {"reason": "subscribed by a consumer"}
            try:
                answer = await self._put(quote(handler.topic), subscription, subscription | reason)
            except InvalidRequest:
                if subscription["start"] != again_from:
                    raise
                subscription["start"] = "latest"  # this machine's clock is ahead of the server's
                answer = await self._put(quote(handler.topic), subscription, subscription | reason)
            answers[handler.topic] = answer
        await self.tell_inbox()
        self.is_subscribed = True
        work = self._work
        work.announce(begun(self._http.url, work.group, work.instance, work.handlers.values(), answers))

    async def tell_inbox(self) -> None:
        """Tell the server since when the inbox is whole, before anything is received or purged.

        An older server, without the route, does not need to know. Raises Conflict (`before_inbox`) for a new
        subscription that starts before this time.
        """
        if self._work.inbox_from is None:
            return
        body = {"whole_from": self._work.inbox_from.isoformat()}
        for topic in self._work.handlers:
            with contextlib.suppress(NotFound):
                await self._put(f"{quote(topic)}/inbox", body, body)

    async def _put(self, path: str, body: dict[str, Any], admin_body: dict[str, Any]) -> Any:
        """PUT to a route under the group's subscriptions. A server up to 9c372b4 has it only as an admin route.

        Raises NotFound if the server has neither route.
        """
        under = f"groups/{self._work.group}/subscriptions/{path}"
        if not self._has_only_admin_routes:
            with contextlib.suppress(NotFound):
                return await self._until_served(functools.partial(self._ask, "PUT", f"/v1/{under}", body))
        answer = await self._until_served(functools.partial(self._ask, "PUT", f"/v1/admin/{under}", admin_body))
        self._has_only_admin_routes = True
        return answer

    async def _ask(self, method: str, path: str, body: dict[str, Any]) -> Any:
        answer = await self._http.call(method, path, msgspec.json.encode(body), CALL_SECONDS, JSON)
        fields = read_answer(_decode_fields, answer)
        if not fields.keys() & _SUBSCRIBED:
            raise foreign_content("it is not about a subscription")
        return fields

    async def _until_served(self, request: Callable[[], Awaitable[Any]]) -> Any:
        """Repeat a request while the server is away. Raises errors that a retry cannot mend, and the last failure once
        the session ends."""
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        while True:
            try:
                return await request()
            except NotifyError as error:
                if not is_away(error) or self._ending.is_set():
                    raise
                wait = backoff.next()
                log.warning("the server is away, again in %.1f s: %s", wait, error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), wait)
                    raise  # the session has ended: no more requests

    async def _receive_all(self) -> None:
        """Receive until the session ends. Broadcast topics are received in separate requests."""
        handlers = self._work.handlers
        broadcast: list[str] | None = [h.topic for h in handlers.values() if h.mode == "broadcast"]
        rest: list[str] | None = [h.topic for h in handlers.values() if h.mode != "broadcast"]
        if any("*" in topic for topic in handlers):
            # The server knows which topics match the patterns: receive all that the group subscribes to.
            broadcast, rest = [], None
        loops = [
            asyncio.ensure_future(self._receive_until_ended(topics))
            for topics in (broadcast, rest)
            if topics is None or topics
        ]
        try:
            await asyncio.wait(loops, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for loop in loops:
                loop.cancel()
        results = await asyncio.gather(*loops, return_exceptions=True)
        self._has_received.set()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _receive_until_ended(self, topics: list[str] | None) -> None:
        in_hand = self._work.in_hand
        ended = asyncio.ensure_future(self._ending.wait())
        receiving: asyncio.Future[list[Delivered]] | None = None
        try:
            while not self._ending.is_set():
                most = min(self._work.batch, CAUTIOUS) if self._is_cautious else self._work.batch
                room = most - len(in_hand)
                if room < most // 2 or room < 1:
                    await asyncio.wait([*in_hand, ended], return_when=asyncio.FIRST_COMPLETED)
                    continue
                receiving = asyncio.ensure_future(self._until_served(functools.partial(self._receive, topics, room)))
                await asyncio.wait([receiving, ended], return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    return  # ended during the long poll: messages it still brings are redelivered after their lease
                delivered = receiving.result()
                self._begin(delivered)
                if delivered and self._takes_batches:
                    repeated = sum([message.attempt > 1 for message in delivered])
                    self._is_cautious = 2 * repeated > len(delivered)
        finally:
            ended.cancel()
            if receiving is not None and not receiving.done():
                receiving.cancel()
                with contextlib.suppress(asyncio.CancelledError, NotifyError):
                    await receiving

    async def _receive(self, topics: list[str] | None, room: int) -> list[Delivered]:
        if self._ending.is_set():
            # The session ended in the pause before a retry. Before Python 3.12 `wait_for` may swallow the cancellation.
            return []
        work = self._work
        wait = self._poll_time.seconds
        request = Receive(instance=work.instance, topics=topics, max=room, wait=wait, lease=work.lease)
        path = f"/v1/groups/{work.group}/receive?subscribe=no"
        body = encode_msgpack(request)
        began = asyncio.get_running_loop().time()
        try:
            answer = await self._http.call("POST", path, body, POLL_SECONDS + 5)
            messages = read_answer(_decode_received, answer).messages
            self._answered = datetime.now(UTC)
            return messages
        except ForeignAnswer as error:
            if self._poll_time.was_cut(error, asyncio.get_running_loop().time() - began):
                return []
            raise
        except NotFound as error:
            if error.code != "not_subscribed":
                raise
            log.warning("%s does not know the subscriptions any more, and is told again: %s", self._http.url, error)
            await self._subscribe_all(again=True)
            return []

    # --- handling ---------------------------------------------------------------------------------------------

    def _begin(self, delivered: list[Delivered]) -> None:
        loop = asyncio.get_running_loop()
        for delivery in delivered:
            task = loop.create_task(self._handle(delivery))
            self._work.in_hand.add(task)
            self._in_hand[task] = delivery.id
            task.add_done_callback(self._put_down)

    def _put_down(self, task: asyncio.Task[None]) -> None:
        self._work.in_hand.discard(task)
        del self._in_hand[task]

    async def _handle(self, delivery: Delivered) -> None:
        handler = handler_of(self._work.handlers, delivery.topic)
        message = ReceivedMessage(
            delivery.id,
            delivery.topic,
            delivery.queue,
            delivery.offset,
            delivery.body,
            delivery.key,
            delivery.tag,
            delivery.headers or {},
            delivery.attempt,
            delivery.committed_at,
            delivery.replay,
        )
        self._renewals.begin(delivery.receipt)
        try:
            if handler is None:
                raise InvalidRequest(
                    f"this consumer has no handler for topic {delivery.topic!r}; another of its group may"
                )
            await self._work.call(handler, message)
            item = SettleItem(receipt=delivery.receipt, action="ack")
        except NotTried:
            await self._until_received()
            item = SettleItem(receipt=delivery.receipt, action="give_back")
        except DeadLetter as error:
            item = SettleItem(
                receipt=delivery.receipt, action="dead_letter", reason=reason_of(error, named=False) or None
            )
        except BaseException as error:
            if is_cancelled(error):
                if not self._work.ends_when_cancelled:
                    raise
                item = SettleItem(receipt=delivery.receipt, action="interrupted", reason="the consumer was cancelled")
            else:
                self._failures.tell(delivery.topic, delivery.id, delivery.attempt, error)
                item = SettleItem(receipt=delivery.receipt, action="retry", reason=reason_of(error))
        finally:
            self._renewals.end(delivery.receipt)
        try:
            settled = await self._settler.submit(item)
            if settled.code == "invalid_action":  # an older server
                item = SettleItem(receipt=item.receipt, action="retry", delay=0, reason=item.reason)
                settled = await self._settler.submit(item)
        except NotifyError as error:
            log.warning("settling %s failed, it may be delivered again: %s", delivery.id, error)
        else:
            if settled.status != 200:
                log.warning(
                    "%s was not settled, it may be delivered again: %s", delivery.id, settled.detail or settled.code
                )

    async def _until_received(self) -> None:
        """Wait until this session's long poll is over, before a message is given back: otherwise the long poll would
        get the message again, and nobody would handle it before its lease expires."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GIVE_BACK_SECONDS):
                await self._has_received.wait()

    def _renew(self, receipt: str) -> None:
        """Renew the lease of a message whose handler is still running."""
        with contextlib.suppress(NotifyError):
            self._settler.submit(SettleItem(receipt=receipt, action="renew", lease=self._work.lease))
