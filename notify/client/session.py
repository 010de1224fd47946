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
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import msgspec

from notify.backoff import Backoff
from notify.client.banner import begun
from notify.client.failure_log import FailureLog
from notify.client.handlers import Handler, NotTried, handler_of, is_cancelled, reason_of
from notify.client.http import HttpClient, read_answer
from notify.client.settler import CALL_SECONDS, RETRY_MAX_SECONDS, RETRY_SECONDS, Settler, is_away
from notify.errors import DeadLetter, InvalidRequest, NotFound, NotifyError
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
"""How long a message that is given back waits for the end of the long poll."""
CANCEL_SECONDS = 1.0
"""How long coroutines that are cancelled may take to end."""
NAMED_IN_LOG = 10
CAUTIOUS = 32
"""Messages in hand, at most, of a consumer of batches at its start, and while most come again: each message in hand
counts an attempt where its process dies, and one of those may be what ends it."""
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
    """Is given what a session has subscribed to, once it has."""
    ends_when_cancelled: bool = False
    """Whether a handler whose task is cancelled has ended with it; a thread goes on."""
    inbox_from: datetime | None = None
    """From when on the consumer's inbox is whole; None where it has none."""
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
        self._renewals: dict[str, asyncio.TimerHandle] = {}
        self._failures = FailureLog()
        self._ending = asyncio.Event()
        self._has_received = asyncio.Event()
        """Set once nothing is asked for any more."""
        self.is_subscribed = False
        """Whether the server knows the subscriptions, and from when on the inbox is whole."""
        self._began = datetime.now(UTC).isoformat()
        """When it began: what was sent since, is its own, also where it subscribed to the latest."""
        self._has_admin_routes_alone = False
        """The server is an older one, which has no route of consumers to subscribe."""
        self._is_cautious = self._takes_batches = any(h.batch is not None for h in work.handlers.values())

    def end(self) -> None:
        """Receive nothing more; `run` returns when what is under way is settled."""
        self._ending.set()

    async def run(self) -> None:
        """Until `end`. Raises what cannot be mended by trying again, once what is under way is settled."""
        try:
            try:
                await self._subscribe_all()
                await self._receive_all()
            except NotifyError as error:
                # Ended while the server is away: nobody waits for its answer any more.
                if not (is_away(error) and self._ending.is_set()):
                    if self._in_hand:
                        log.error("nothing more is received from %s: %s", self._http.url, error)
                    await self._drain()
                    raise
            await self._drain()
        finally:
            self._has_received.set()
            await self._let_go()

    async def _drain(self) -> None:
        """Wait for the handlers under way, whose leases are renewed meanwhile, at most `drain` seconds."""
        try:
            async with asyncio.timeout(self._work.drain):
                while self._in_hand:
                    await asyncio.wait(self._in_hand)
        except TimeoutError:
            names = sorted(self._in_hand.values())
            more = f" and {len(names) - NAMED_IN_LOG} more" if len(names) > NAMED_IN_LOG else ""
            log.warning(
                "%d messages are not settled %g s after the end of receiving (the setting drain); they are not waited "
                "for any more, and will be delivered again: %s%s",
                len(names), self._work.drain, ", ".join(names[:NAMED_IN_LOG]), more,
            )  # fmt: skip

    async def _let_go(self) -> None:
        for renewal in self._renewals.values():
            renewal.cancel()
        for task in self._in_hand:
            task.cancel()
        if self._in_hand:
            await asyncio.wait(self._in_hand, timeout=CANCEL_SECONDS)
        try:
            await self._leave()
        finally:
            self._http.close()

    async def _leave(self) -> None:
        """Have what this instance has to itself go to another at once: exclusive and failover topics.

        Where the server does not hear of it, or is an older one, that goes when its lease is over.
        """
        if self.is_subscribed:
            body = encode_msgpack(Leave(self._work.instance))
            with contextlib.suppress(NotifyError):
                await self._http.call("POST", f"/v1/groups/{self._work.group}/leave", body, LEAVE_SECONDS)

    # --- receiving --------------------------------------------------------------------------------------------

    async def _subscribe_all(self, *, again: bool = False) -> None:
        """Tell the server what the group subscribes to; `again`: its log was restored without that, so what was sent
        since is still to come."""
        answers: dict[str, Any] = {}
        # Patterns first: a topic that has a handler of its own keeps that one's settings.
        for handler in sorted(self._work.handlers.values(), key=lambda handler: "*" not in handler.topic):
            start = handler.start.isoformat() if isinstance(handler.start, datetime) else handler.start
            if again and start in (None, "latest"):
                start = self._began
            wanted = {
                "mode": handler.mode,
                "tags": list(handler.tags),
                "start": start,
                "max_attempts": handler.max_attempts,
                "filter": handler.filter,
                "retry_min": handler.retry_min,
                "retry_max": handler.retry_max,
            }
            reason = {"reason": "subscribed by a consumer"}
            try:
                answer = await self._put(quote(handler.topic), wanted, wanted | reason)
            except InvalidRequest:
                if wanted["start"] != self._began:
                    raise
                wanted["start"] = "latest"  # this machine's clock is ahead of the server's
                answer = await self._put(quote(handler.topic), wanted, wanted | reason)
            answers[handler.topic] = answer
        await self.tell_inbox()
        self.is_subscribed = True
        work = self._work
        work.announce(begun(self._http.url, work.group, work.instance, work.handlers.values(), answers))

    async def tell_inbox(self) -> None:
        """Say from when on the inbox is whole, before anything is received or purged; an older server need not know.

        Raises Conflict (`before_inbox`) for a new subscription that starts before that.
        """
        if self._work.inbox_from is None:
            return
        told = {"whole_from": self._work.inbox_from.isoformat()}
        for topic in self._work.handlers:
            with contextlib.suppress(NotFound):
                await self._put(f"{quote(topic)}/inbox", told, told)

    async def _put(self, path: str, body: dict[str, Any], admin_body: dict[str, Any]) -> Any:
        """PUT to a route under the group's subscriptions. A server up to 9c372b4 has it among the admin routes alone.

        Raises NotFound where neither is there.
        """
        under = f"groups/{self._work.group}/subscriptions/{path}"
        if not self._has_admin_routes_alone:
            with contextlib.suppress(NotFound):
                return await self._until_served(functools.partial(self._ask, "PUT", f"/v1/{under}", body))
        answer = await self._until_served(functools.partial(self._ask, "PUT", f"/v1/admin/{under}", admin_body))
        self._has_admin_routes_alone = True
        return answer

    async def _ask(self, method: str, path: str, body: dict[str, Any]) -> Any:
        answer = await self._http.call(method, path, msgspec.json.encode(body), CALL_SECONDS, JSON)
        return read_answer(msgspec.json.decode, answer)

    async def _until_served(self, request: Callable[[], Awaitable[Any]]) -> Any:
        """Repeat a request while the server is away. Raises what cannot succeed, or the last failure at the end."""
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
                    raise  # it has ended: nothing more is asked

    async def _receive_all(self) -> None:
        """Until the end. What is broadcast is received in requests of its own."""
        handlers = self._work.handlers
        broadcast: list[str] | None = [h.topic for h in handlers.values() if h.mode == "broadcast"]
        rest: list[str] | None = [h.topic for h in handlers.values() if h.mode != "broadcast"]
        if any("*" in topic for topic in handlers):
            # The server knows the topics that the patterns stand for: all that the group subscribes to.
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
                    return  # ended during the long poll: what it may still bring comes back when its lease runs out
                delivered = receiving.result()
                self._begin(delivered)
                if delivered and self._takes_batches:
                    again = sum([d.attempt > 1 for d in delivered])
                    self._is_cautious = 2 * again > len(delivered)
        finally:
            ended.cancel()
            if receiving is not None and not receiving.done():
                receiving.cancel()
                with contextlib.suppress(asyncio.CancelledError, NotifyError):
                    await receiving

    async def _receive(self, topics: list[str] | None, room: int) -> list[Delivered]:
        if self._ending.is_set():
            # Ended in the pause before another try. Before Python 3.12 `wait_for` may swallow the cancellation.
            return []
        work = self._work
        request = Receive(instance=work.instance, topics=topics, max=room, wait=POLL_SECONDS, lease=work.lease)
        path = f"/v1/groups/{work.group}/receive?subscribe=no"
        body = encode_msgpack(request)
        try:
            answer = await self._http.call("POST", path, body, POLL_SECONDS + 5)
            return read_answer(_decode_received, answer).messages
        except NotFound as error:
            if error.code != "not_subscribed":
                raise
            log.warning("%s does not know the subscriptions any more, and is told again: %s", self._http.url, error)
            await self._subscribe_all(again=True)
            return []

    # --- handling ---------------------------------------------------------------------------------------------

    def _begin(self, delivered: list[Delivered]) -> None:
        loop = asyncio.get_running_loop()
        for d in delivered:
            task = loop.create_task(self._handle(d))
            self._work.in_hand.add(task)
            self._in_hand[task] = d.id
            task.add_done_callback(self._put_down)

    def _put_down(self, task: asyncio.Task[None]) -> None:
        self._work.in_hand.discard(task)
        del self._in_hand[task]

    async def _handle(self, d: Delivered) -> None:
        handler = handler_of(self._work.handlers, d.topic)
        message = ReceivedMessage(
            d.id,
            d.topic,
            d.queue,
            d.offset,
            d.body,
            d.key,
            d.tag,
            d.headers or {},
            d.attempt,
            d.committed_at,
            d.replay,
        )
        self._renew_later(d.receipt)
        try:
            if handler is None:
                raise InvalidRequest(f"this consumer has no handler for topic {d.topic!r}; another of its group may")
            await self._work.call(handler, message)
            item = SettleItem(receipt=d.receipt, action="ack")
        except NotTried:
            await self._until_received()
            item = SettleItem(receipt=d.receipt, action="give_back")
        except DeadLetter as error:
            item = SettleItem(receipt=d.receipt, action="dead_letter", reason=reason_of(error, named=False) or None)
        except BaseException as error:
            if is_cancelled(error):
                if not self._work.ends_when_cancelled:
                    raise
                item = SettleItem(receipt=d.receipt, action="retry", delay=0, reason="the consumer was cancelled")
            else:
                self._failures.tell(d.topic, d.id, d.attempt, error)
                item = SettleItem(receipt=d.receipt, action="retry", reason=reason_of(error))
        finally:
            self._renewals.pop(d.receipt).cancel()
        try:
            settled = await self._settler.submit(item)
        except NotifyError as error:
            log.warning("settling %s failed, it may be delivered again: %s", d.id, error)
        else:
            if settled.status != 200:
                log.warning("%s was not settled, it may be delivered again: %s", d.id, settled.detail or settled.code)

    async def _until_received(self) -> None:
        """Wait, before a message is given back, until this session's long poll is over: it would get the message, and
        nobody would handle it before its lease runs out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GIVE_BACK_SECONDS):
                await self._has_received.wait()

    def _renew_later(self, receipt: str) -> None:
        loop = asyncio.get_running_loop()
        self._renewals[receipt] = loop.call_later(self._work.lease / 3, self._renew, receipt)

    def _renew(self, receipt: str) -> None:
        """The handler takes long: keep its lease."""
        with contextlib.suppress(NotifyError):
            self._settler.submit(SettleItem(receipt=receipt, action="renew", lease=self._work.lease))
        self._renew_later(receipt)
