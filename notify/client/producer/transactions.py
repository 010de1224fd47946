"""TransactionClient: a producer's requests to the server, with halves, outcomes and messages in batches."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from operator import attrgetter, itemgetter
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from notify.client.producer.packing import size_of_message
from notify.client.transport.batch import Later, ShardBatchers, by_shard
from notify.client.transport.http import error_of, items_for, items_for_both, read_answer
from notify.client.transport.login import Shown
from notify.client.transport.servers import Chooser, Servers, more_telling, room_then_load
from notify.errors import (
    Backpressure,
    Closed,
    ForeignAnswer,
    InvalidRequest,
    NotFound,
    NotifyError,
    TransactionRefused,
    Unavailable,
)
from notify.protocol import ids
from notify.protocol.limits import check_name
from notify.protocol.wire import (
    NO_DATABASE,
    Item,
    LeftBehindReport,
    OutcomeItem,
    Outcomes,
    PackedMessage,
    PackedMessages,
    PackedPublished,
    PackedSchedule,
    PackedTransaction,
    PackedTransactions,
    ScheduleDeclared,
    ScheduleDeleted,
    WithdrawalState,
    encode_msgpack,
)
from notify.runtime.backoff import Backoff

T = TypeVar("T")
_decode_withdrawal = msgspec.msgpack.Decoder(WithdrawalState).decode
HALF_SECONDS = 3.0
OUTCOME_SECONDS = 10.0
OUTCOME_TRIES = 5
OUTCOME_WAIT_SECONDS = 0.2
RETRY_SECONDS, RETRY_MAX_SECONDS = 0.05, 0.5
ITEM_WAIT_SECONDS = 0.1
"""The wait before an item of a batch is sent again that the server could not take at the moment."""
FORGET_SECONDS = 60.0
"""How long after its deadline an item is remembered that was not sent again."""
HALVES, OUTCOMES = "/v1/transactions", "/v1/transactions/outcomes"
LEFT_BEHIND = "/v1/transactions/left-behind"
MOST_ITEMS, MOST_TOGETHER = 200, 100
"""The most items of a request with halves or outcomes, and of a request with both. In a request of this size the items
cost far more than the request itself, and with two smaller requests client and server work at the same time."""
Answers = Sequence[Item | Later | NotifyError]
"""The answer for each item of a request, in the order of the items."""
NOT_NOW = frozenset((500, 503, 421))
"""Statuses of an item that may succeed in another attempt."""


def accepted(item: Item) -> Item:
    """The item, with id, shard and state, if the half was stored.

    Raises TransactionRefused if the server refused the half, Unavailable if the server may take it later, and
    Backpressure, with the seconds to wait, if a rate or the bound of a backlog is the reason.
    """
    if item.status not in (200, 201):
        error = error_of(item.status, item.code or "refused", item.detail or "", item.retry_after)
        if error.retryable:
            raise error
        refused = TransactionRefused(f"the server refused the half: {error} ({error.code})")
        refused.code, refused.status = error.code, error.status
        raise refused
    return item


class TransactionClient:
    """Halves, outcomes and messages of one producer group. Belongs to one event loop."""

    def __init__(
        self,
        url: str,
        group: str,
        *,
        instance: str,
        batching: bool = True,
        half_seconds: float = HALF_SECONDS,
        leaves_behind: bool = False,
        check_after: float | None = None,
        token: Shown = None,
        tls: ssl.SSLContext | None = None,
        chooser: Chooser = room_then_load,
    ) -> None:
        """`leaves_behind`: what does not reach the server is left behind (mode `auto`), so that a half or an outcome
        is not tried again."""
        self.http = Servers(url, "transactions", tls=tls, token=token, chooser=chooser)
        self._queues = functools.partial(Servers, url, "queue", tls=tls, token=token, chooser=chooser)
        self._queue_servers: Servers | None = None
        """The servers with queues, once a withdrawal was asked for."""
        self.group = group
        self.instance = instance
        self._half_seconds = half_seconds
        self._leaves_behind = leaves_behind
        self._check_after = check_after
        self._deadlines: dict[str, float] = {}
        """The deadline (in the loop's time) of each item that will be sent again, by id."""
        self._halves: ShardBatchers[tuple[PackedTransaction, str], Item] = ShardBatchers(
            self._send_halves,
            self._count_key_shards,
            size_of=_size,
            max_items=MOST_ITEMS if batching else 1,
            in_flight=8 if batching else 128,
        )
        """Halves with the source of each."""
        self._outcomes: ShardBatchers[OutcomeItem, Item] = ShardBatchers(
            self._send_outcomes,
            self._count_key_shards,
            max_items=MOST_ITEMS,
            in_order=True,
            may_go_along=self._may_go_along,
        )
        """An outcome that leaves while an earlier one with its key is on its way could overtake it."""
        self._messages: ShardBatchers[PackedPublished, Item] = ShardBatchers(
            self._send_messages, self._count_key_shards, size_of=size_of_message
        )

    def _count_key_shards(self) -> int:
        """The number of shards that the keys are divided among."""
        return len(self.http.keys)

    # --- halves -----------------------------------------------------------------------------------------------

    async def half(self, messages: list[PackedMessage], *, check_after: float | None = None) -> Item:
        """Store a half and wait for the result; see `half_soon`. Raises the errors of `accepted`."""
        return accepted(await self.half_soon(ids.to_text(ids.new_id()), messages, check_after=check_after))

    async def prepare(self, messages: list[PackedMessage], check_after: float | None) -> Item:
        """Store the half of a transaction that is in no database. Raises the errors of `accepted`."""
        loop, transaction_id = asyncio.get_running_loop(), ids.to_text(ids.new_id())
        deadline, backoff = loop.time() + self._half_seconds, Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        while True:
            try:
                return accepted(await self.half_soon(transaction_id, messages, NO_DATABASE, check_after=check_after))
            except Unavailable as error:
                # It has no row that could be left behind.
                wait = backoff.next()
                is_tried_again = self._leaves_behind and not isinstance(error, (Backpressure, Closed))
                if not is_tried_again or deadline - loop.time() <= wait:
                    raise
            await asyncio.sleep(wait)

    def half_soon(
        self, transaction_id: str, messages: list[PackedMessage], source: str = "", *, check_after: float | None = None
    ) -> asyncio.Future[Item]:
        """Queue a half. The future's item says whether the half was `accepted`.

        `source`: the id of the schema that has the local transaction. The future raises Unavailable or Timeout if the
        result is unknown.
        """
        half = self._half(transaction_id, messages, check_after)
        return self._halves.submit((half, source), self.http.shard_of(messages))

    def single_half(self, transaction_id: str, messages: list[PackedMessage], source: str) -> bytes | None:
        """The body of a request for one half that the calling thread sends itself; None while other halves are sent."""
        if not self._halves.is_idle:
            return None
        return self._body_of_halves([self._half(transaction_id, messages, None)], source)

    def _half(self, transaction_id: str, messages: list[PackedMessage], after: float | None) -> PackedTransaction:
        after = self._check_after if after is None else after
        return PackedTransaction(id=transaction_id, messages=messages, check_after=after)

    def _body_of_halves(
        self, halves: list[PackedTransaction], source: str, outcomes: list[OutcomeItem] | None = None
    ) -> bytes:
        return encode_msgpack(
            PackedTransactions(
                producer_group=self.group,
                transactions=halves,
                source=source or None,
                instance=self.instance,
                outcomes=outcomes or [],
            )
        )

    async def _send_halves(self, shard: str | None, halves: list[tuple[PackedTransaction, str]]) -> Answers:
        """Send halves in a request for each source, because a request has one."""

        async def send(source: str | None, its_halves: list[tuple[PackedTransaction, str]]) -> Answers:
            to = functools.partial(self._send_halves_to, source=source or "")
            return await self._send_to_shards(shard, [half for half, _ in its_halves], _messages_of, to)

        return await by_shard(halves, _source_of, send)

    async def _send_halves_to(self, shard: str | None, halves: list[PackedTransaction], source: str) -> Answers:
        shard = self._shard_for_all_attempts(shard, len(halves))
        half_ids = [half.id for half in halves]
        send = functools.partial(self._items, HALVES, once=self._leaves_behind)
        if self.http.takes_outcomes and len(halves) < MOST_TOGETHER:
            lane = self._lane_of_outcomes(shard)
            with self._outcomes.along(lane, MOST_TOGETHER - len(halves)) as along:
                # If the servers changed after the outcomes were queued, some outcomes may belong to another lane now.
                if along.items and all(self._lane_of_outcomes(outcome.shard) == lane for outcome in along.items):
                    outcome_ids = [outcome.id for outcome in along.items]

                    def items_of_both(answer: bytes) -> list[Item]:
                        items, along.results = items_for_both(half_ids, outcome_ids, answer, self.http)
                        return items

                    try:
                        body = self._body_of_halves(halves, source, along.items)
                        return await send(body, half_ids, self._half_seconds, shard, items_of_both)
                    except ForeignAnswer as error:
                        if not error.is_for_size:
                            raise
                    except InvalidRequest:
                        # The server is an older version, or one of the halves is invalid.
                        self.http.takes_outcomes = False
                        self.http.look_again()
        return await send(self._body_of_halves(halves, source), half_ids, self._half_seconds, shard)

    async def _send_to_shards(
        self,
        shard: str | None,
        items: list[T],
        messages_of: Callable[[T], Sequence[PackedMessage]],
        send: Callable[[str | None, list[T]], Awaitable[Answers]],
    ) -> Answers:
        """Send the items of one lane; those of the lane None to the shards of their messages' keys."""
        if shard is not None:
            return await send(shard, items)
        await self.http.asked()
        if not self.http.keys:
            return await send(None, items)
        return await by_shard(items, lambda item: self.http.shard_of(messages_of(item)), send)

    def _shard_for_all_attempts(self, shard: str | None, count: int) -> str | None:
        """The shard for a request of `count` items.

        If keys are divided among shards, a request without a shard uses the same one in all attempts, because another
        shard would not know the ids.
        """
        return self.http.shard_for(count) if shard is None and self.http.keys else shard

    async def _items(
        self,
        path: str,
        body: bytes,
        item_ids: list[str],
        seconds: float,
        shard: str | None,
        read: Callable[[bytes], list[Item]] | None = None,
        *,
        once: bool = False,
    ) -> Answers:
        """The result for each of `item_ids`; Later for an item that the server could not take at the moment.

        `read` extracts these results from an answer that has those of outcomes, too. `once`: see `_retried`.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        if self._deadlines:
            # A request that was too large for a proxy is sent in parts, which have no more time than the whole.
            deadline = max(self._deadlines.get(item_id, deadline) for item_id in item_ids)
        count = len(item_ids) + (read is not None)
        read = read or (lambda answer: items_for(item_ids, answer, self.http))
        try:
            items = await self._retried(path, body, deadline, shard, read, is_one=count == 1, once=once)
        except NotifyError as error:
            for item_id in item_ids:
                if _may_be_smaller(error, count):
                    self._deadlines.setdefault(item_id, deadline)
                else:
                    self._deadlines.pop(item_id, None)
            raise
        return self._or_later(item_ids, items, deadline)

    def _or_later(self, item_ids: list[str], items: list[Item], deadline: float) -> Answers:
        """The items, with Later in place of those that the server may take in a moment.

        These are items whose shard is unreachable, whose storage failed, whose key is moving, or whose key belongs to
        another shard because the keys were divided after the servers were listed. The deadline of an item's first
        attempt holds for all its attempts. A request that is refused as a whole does not come here: `_retried` sends it
        again.
        """
        deadlines = self._deadlines
        if not deadlines and NOT_NOW.isdisjoint([item.status for item in items]):
            return items
        if any(item.code == "wrong_shard" for item in items):
            self.http.look_again()
        now = asyncio.get_running_loop().time()
        answers: list[Item | Later] = []
        for item_id, item in zip(item_ids, items, strict=True):
            if _is_for_later(item) and now + ITEM_WAIT_SECONDS < deadlines.setdefault(item_id, deadline):
                answers.append(Later(ITEM_WAIT_SECONDS))
            else:
                deadlines.pop(item_id, None)
                answers.append(item)
        # An item whose caller waits no longer is not sent again, so that nothing else removes its deadline.
        for item_id in [item_id for item_id, until in deadlines.items() if until + FORGET_SECONDS <= now]:
            del deadlines[item_id]
        return answers

    async def _retried(
        self,
        path: str,
        body: bytes,
        deadline: float,
        shard: str | None,
        read: Callable[[bytes], T],
        *,
        is_one: bool,
        once: bool = False,
        method: str = "POST",
    ) -> T:
        """Send a request, and repeat it while the server is unreachable, up to the deadline (the loop's time): the ids
        make repeating safe. `is_one`: it has one item, so that a smaller request would not help. `once`: do not repeat
        it: in mode `auto` the row is left behind instead."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        failed: NotifyError | None = None
        while True:
            remaining = max(deadline - loop.time(), 0.001)
            try:
                return read(await self.http.call(method, path, body, remaining, shard=shard))
            except Unavailable as error:
                failed = more_telling(error, failed, remaining)
                of_size = error if isinstance(error, ForeignAnswer) and error.is_for_size else None
                wait = backoff.next()
                if once or deadline - loop.time() <= wait or error.status == 507 or isinstance(error, Closed):
                    raise failed from None
                if of_size is not None and (of_size.answered or not is_one):
                    raise
            await asyncio.sleep(wait)

    # --- outcomes ---------------------------------------------------------------------------------------------

    def outcome_soon(self, transaction_id: str, shard: str | None, outcome: str) -> asyncio.Future[Item]:
        """Queue an outcome, which leaves with the next batch. The caller may ignore the future."""
        return self._submit_outcome(OutcomeItem(id=transaction_id, outcome=outcome, shard=shard))

    def refuse_outcomes(self, error: NotifyError) -> None:
        """Give up the outcomes that wait; their futures get this error."""
        self._outcomes.refuse_waiting(error)

    def single_outcome(self, transaction_id: str, shard: str | None, outcome: str) -> bytes | None:
        """The body of a request for one outcome that the calling thread sends itself; None while others are sent."""
        if not self._outcomes.is_idle:
            return None
        item = OutcomeItem(id=transaction_id, outcome=outcome, shard=shard)
        return encode_msgpack(Outcomes(producer_group=self.group, outcomes=[item]))

    async def answer(self, item: OutcomeItem) -> Item:
        """Send the answer to a check."""
        return await self._submit_outcome(item)

    def _submit_outcome(self, item: OutcomeItem) -> asyncio.Future[Item]:
        return self._outcomes.submit(item, self._lane_of_outcomes(item.shard))

    def _may_go_along(self, shard: str | None) -> bool:
        """Whether a request with halves is about to leave that can include this shard's outcomes."""
        halves = self._halves
        return self.http.takes_outcomes and (halves.is_about_to_send(shard) or halves.is_about_to_send(None))

    def _lane_of_outcomes(self, shard: str | None) -> str | None:
        # A server of a shared database takes the outcomes of all shards; a server with its own log takes only its own.
        return shard if self.http.is_apart(shard) else None

    async def _send_outcomes(self, shard: str | None, outcomes: list[OutcomeItem]) -> Answers:
        if shard is not None:
            return await self._send_outcomes_of(shard, outcomes)
        return await by_shard(outcomes, _shard_of, self._send_outcomes_of)

    async def _send_outcomes_of(self, shard: str | None, outcomes: list[OutcomeItem]) -> Answers:
        body = encode_msgpack(Outcomes(producer_group=self.group, outcomes=outcomes))
        outcome_ids = [outcome.id for outcome in outcomes]
        target = self._lane_of_outcomes(shard)
        tries = 1 if self._leaves_behind else OUTCOME_TRIES
        for attempt in range(tries):
            try:
                answer = await self.http.call("POST", OUTCOMES, body, OUTCOME_SECONDS, shard=target)
                return items_for(outcome_ids, answer, self.http)
            except Unavailable as error:
                # Check-back recovers outcomes that stay lost.
                if attempt == tries - 1 or _may_be_smaller(error, len(outcomes)):
                    raise
                await asyncio.sleep(OUTCOME_WAIT_SECONDS * 2**attempt)
        raise AssertionError("unreachable")

    # --- reports ----------------------------------------------------------------------------------------------

    async def report_left_behind(self, report: LeftBehindReport, seconds: float) -> None:
        """Report what the group has left behind. Of servers with a log each, the same one gets every report."""
        places = self.http.places()
        body = encode_msgpack(report)
        await self.http.call("POST", LEFT_BEHIND, body, seconds, shard=places[0] if places else None)

    # --- messages without a transaction -----------------------------------------------------------------------

    async def publish(self, message: PackedMessage) -> str:
        """Send a message without a transaction and return its id. Raises InvalidRequest or Unavailable."""
        fields = {name: getattr(message, name) for name in message.__struct_fields__}
        published = PackedPublished(**fields, id=ids.message_id(ids.new_id(), 0))
        item = await self._messages.submit(published, self.http.shard_of((message,)))
        if item.status not in (200, 201):
            raise error_of(item.status, item.code or "refused", item.detail or "", item.retry_after)
        return item.id

    async def _send_messages(self, shard: str | None, messages: list[PackedPublished]) -> Answers:
        return await self._send_to_shards(shard, messages, lambda message: (message,), self._send_messages_to)

    async def _send_messages_to(self, shard: str | None, messages: list[PackedPublished]) -> Answers:
        body = encode_msgpack(PackedMessages(messages=messages))
        message_ids = [message.id or "" for message in messages]
        shard = self._shard_for_all_attempts(shard, len(message_ids))
        return await self._items("/v1/messages", body, message_ids, OUTCOME_SECONDS, shard)

    async def schedule(self, name: str, schedule: PackedSchedule) -> list[datetime]:
        """Declare a schedule and return its next instants. Raises InvalidRequest, Conflict or Unavailable."""
        declared = await self._about_schedule("PUT", name, encode_msgpack(schedule), ScheduleDeclared)
        return declared.next

    async def unschedule(self, name: str) -> bool:
        """Delete a schedule; whether there was one. Raises InvalidRequest or Unavailable."""
        return (await self._about_schedule("DELETE", name, b"", ScheduleDeleted)).deleted

    async def _about_schedule(self, method: str, name: str, body: bytes, answer: type[T]) -> T:
        check_name("schedule", name)
        deadline = asyncio.get_running_loop().time() + OUTCOME_SECONDS
        await self.http.known(OUTCOME_SECONDS)
        if self.http.are_apart:
            raise InvalidRequest(
                "several addresses are given, and no registry connects their servers: each would send a schedule's "
                "messages. Give the servers a registry (`notify serve --registry`), or declare the schedule with a "
                "producer that has one address",
                "no_registry",
            )
        path = f"/v1/schedules/{name}?instance={quote(self.instance, safe='')}"
        decode = msgspec.msgpack.Decoder(answer).decode
        read = functools.partial(read_answer, decode)
        return await self._retried(path, body, deadline, None, read, is_one=True, method=method)

    def asking_for(self, message_id: str, shard: str | None) -> Callable[[float], Awaitable[WithdrawalState]]:
        """A function that asks once, within some seconds, what became of a withdrawal."""
        path = f"/v1/withdrawals/{message_id}"

        async def ask(seconds: float) -> WithdrawalState:
            if self._queue_servers is None:
                self._queue_servers = self._queues()
            servers = self._queue_servers
            await servers.asked()  # the server at the address may have no queues, but knows those that have
            places: Sequence[str | None] = servers.places() or (None,)
            lanes = [shard] if shard is not None and servers.is_apart(shard) else places
            unknown = NotFound(f"no server knows the withdrawal {message_id}", "unknown_withdrawal")
            for lane in lanes:  # without the shard, each log may be the one that has it
                try:
                    return read_answer(_decode_withdrawal, await servers.call("GET", path, b"", seconds, shard=lane))
                except NotFound as error:
                    unknown = error
            raise unknown

        return ask

    async def published(self) -> None:
        """Wait until all queued messages without a transaction are answered or have failed."""
        await self._messages.drain()

    async def flush(self) -> None:
        """Wait until all queued items are answered or have failed."""
        await self._halves.drain()
        await self._messages.drain()
        await self._outcomes.drain()

    async def close(self, seconds: float = 5.0) -> None:
        """Flush the queued items, for at most `seconds`, then close the connections."""
        try:
            with contextlib.suppress(TimeoutError, NotifyError):
                async with asyncio.timeout(seconds):
                    await self.flush()
        finally:
            self.close_now()
        await self.http.aclose()
        if self._queue_servers is not None:
            await self._queue_servers.aclose()

    def close_now(self) -> None:
        """Cut the connections, without waiting."""
        self.http.close()
        if self._queue_servers is not None:
            self._queue_servers.close()


def _may_be_smaller(error: NotifyError, items: int) -> bool:
    """Whether a request with this many items is sent in parts because it may be too large for a proxy."""
    return isinstance(error, ForeignAnswer) and error.is_for_size and items > 1


def _is_for_later(item: Item) -> bool:
    return item.status in (500, 503) or item.code == "wrong_shard"


_source_of, _messages_of, _shard_of = itemgetter(1), attrgetter("messages"), attrgetter("shard")


def _size(half: tuple[PackedTransaction, str]) -> int:
    messages = half[0].messages
    if len(messages) == 1:  # half the time of a sum
        return 64 + size_of_message(messages[0])
    return 64 + sum(map(size_of_message, messages))


async def call(
    http: Servers, path: str, request: Any, answer: type[Any], seconds: float, shard: str | None = None
) -> Any:
    """POST a struct and decode the answer as a struct of type `answer`. Raises NotifyError.

    With `shard`, the request goes to a server that has this shard.
    """
    body = await http.call("POST", path, encode_msgpack(request), seconds, shard=shard)
    return read_answer(msgspec.msgpack.Decoder(answer).decode, body)
