"""The producer's conversation with the server, on one event loop: halves, outcomes, messages, each in batches."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from notify import ids
from notify.backoff import Backoff
from notify.client.batch import Later
from notify.client.choosing import Chooser, room_then_load
from notify.client.http import error_of, items_for, items_for_both, read_answer
from notify.client.lanes import Lanes, by_shard
from notify.client.login import Shown
from notify.client.packing import size_of_message
from notify.client.servers import Servers
from notify.errors import Closed, InvalidRequest, NotifyError, TransactionRefused, Unavailable
from notify.wire import (
    Item,
    OutcomeItem,
    Outcomes,
    PackedMessage,
    PackedMessages,
    PackedPublished,
    PackedTransaction,
    PackedTransactions,
    encode_msgpack,
)

HALF_SECONDS = 3.0
OUTCOME_SECONDS = 10.0
OUTCOME_TRIES = 5
OUTCOME_WAIT_SECONDS = 0.2
RETRY_SECONDS, RETRY_MAX_SECONDS = 0.05, 0.5
ITEM_WAIT_SECONDS = 0.1
"""Until one of a batch is sent again that the server could not take for the moment."""
HALVES, OUTCOMES = "/v1/transactions", "/v1/transactions/outcomes"
MOST_ITEMS, MOST_TOGETHER = 200, 100
"""Items of a request with halves or outcomes, and of one with both: in larger ones the request itself costs little, and
client and server work at the same time on two of half the size."""
Answers = Sequence[Item | Later | NotifyError]
"""One for each item of a request, in its order."""
NOT_NOW = (503, 421)
"""Statuses of an item that another attempt may change."""


def accepted(item: Item) -> Item:
    """The item, with id, shard and state, of a half that was stored.

    Raises TransactionRefused if the server refused it, Unavailable if it may take it later; where a rate or a backlog's
    bound is why, that is Backpressure and says when.
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
        check_after: float | None = None,
        token: Shown = None,
        tls: ssl.SSLContext | None = None,
        chooser: Chooser = room_then_load,
    ) -> None:
        self.http = Servers(url, "transactions", tls=tls, token=token, chooser=chooser)
        self.group = group
        self.instance = instance
        self.source = ""
        self._half_seconds = half_seconds
        self._check_after = check_after
        self._deadlines: dict[str, float] = {}
        """By id, the deadline (the loop's time) of each item that is to be sent again."""
        self._halves: Lanes[PackedTransaction, Item] = Lanes(
            self._send_halves,
            self._count_key_shards,
            size_of=_size,
            max_items=MOST_ITEMS if batching else 1,
            in_flight=8 if batching else 128,
        )
        self._outcomes: Lanes[OutcomeItem, Item] = Lanes(
            self._send_outcomes,
            self._count_key_shards,
            max_items=MOST_ITEMS,
            in_flight=4,
            may_go_along=self._may_go_along,
        )
        self._messages: Lanes[PackedPublished, Item] = Lanes(
            self._send_messages, self._count_key_shards, size_of=size_of_message
        )

    def _count_key_shards(self) -> int:
        """How many shards divide the keys."""
        return len(self.http.keys)

    # --- halves -----------------------------------------------------------------------------------------------

    async def half(self, messages: list[PackedMessage], *, check_after: float | None = None) -> Item:
        """Store a half and wait; see `half_soon`. Raises what `accepted` raises."""
        return accepted(await self.half_soon(ids.to_text(ids.new_id()), messages, check_after=check_after))

    def half_soon(
        self, transaction_id: str, messages: list[PackedMessage], *, check_after: float | None = None
    ) -> asyncio.Future[Item]:
        """Queue a half; its item says whether it was `accepted`.

        The future raises Unavailable or Timeout where that cannot be known.
        """
        half = self._half(transaction_id, messages, check_after)
        return self._halves.submit(half, self.http.shard_of(messages))

    def half_alone(self, transaction_id: str, messages: list[PackedMessage]) -> bytes | None:
        """The body of a request for one half, to be sent by the thread that has it; None while others are sent."""
        return self._body_of_halves([self._half(transaction_id, messages, None)]) if self._halves.is_idle else None

    def _half(self, transaction_id: str, messages: list[PackedMessage], after: float | None) -> PackedTransaction:
        after = self._check_after if after is None else after
        return PackedTransaction(id=transaction_id, messages=messages, check_after=after)

    def _body_of_halves(self, halves: list[PackedTransaction], outcomes: list[OutcomeItem] | None = None) -> bytes:
        return encode_msgpack(
            PackedTransactions(
                producer_group=self.group,
                transactions=halves,
                source=self.source or None,
                instance=self.instance,
                outcomes=outcomes or [],
            )
        )

    async def _send_halves(self, shard: str | None, halves: list[PackedTransaction]) -> Answers:
        if shard is not None:
            return await self._send_halves_to(shard, halves)
        await self.http.known()
        return await by_shard(halves, lambda half: self.http.shard_of(half.messages), self._send_halves_to)

    async def _send_halves_to(self, shard: str | None, halves: list[PackedTransaction]) -> Answers:
        shard = self._shard_for_all_attempts(shard, len(halves))
        names = [half.id for half in halves]
        if self.http.takes_outcomes and len(halves) < MOST_TOGETHER:
            lane = self._lane_of_outcomes(shard)
            with self._outcomes.along(lane, MOST_TOGETHER - len(halves)) as along:
                # The members may have become others since the outcomes were queued: then some may belong elsewhere.
                if along.items and all(self._lane_of_outcomes(o.shard) == lane for o in along.items):
                    decided = [outcome.id for outcome in along.items]

                    def items_of_both(answer: bytes) -> list[Item]:
                        items, along.results = items_for_both(names, decided, answer, self.http)
                        return items

                    try:
                        body = self._body_of_halves(halves, along.items)
                        return await self._items(HALVES, body, names, self._half_seconds, shard, items_of_both)
                    except InvalidRequest:
                        # A server of an earlier version, or something is wrong with one of the halves.
                        self.http.takes_outcomes = False
                        self.http.look_again()
        return await self._items(HALVES, self._body_of_halves(halves), names, self._half_seconds, shard)

    def _shard_for_all_attempts(self, shard: str | None, count: int) -> str | None:
        """The shard for a request of so many items. Where keys are divided, what has none goes to one shard in all
        attempts: another one would not know its ids."""
        return self.http.shard_for(count) if shard is None and self.http.keys else shard

    async def _items(
        self,
        path: str,
        body: bytes,
        names: list[str],
        seconds: float,
        shard: str | None,
        read: Callable[[bytes], list[Item]] | None = None,
    ) -> Answers:
        """The result for each id of `names`; Later for those that the server could not take for the moment.

        `read` takes the results from an answer that has more than these.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            items = await self._retried(path, body, seconds, shard, read or (lambda a: items_for(names, a, self.http)))
        except NotifyError:
            for name in names:
                self._deadlines.pop(name, None)
            raise
        return self._or_later(names, items, deadline)

    def _or_later(self, names: list[str], items: list[Item], deadline: float) -> Answers:
        """The items, and Later for those that may be taken in a moment: a shard is away, or a key moves.

        Also for a key that belongs elsewhere: the servers have divided the keys since the members were asked for.

        Until the deadline of the first attempt, which is kept by id. Where all were refused, the whole request was, and
        `_retried` has tried it again.
        """
        kept = self._deadlines
        if not kept and all(item.status not in NOT_NOW for item in items):
            return items
        if any(item.code == "wrong_shard" for item in items):
            self.http.look_again()
        now = asyncio.get_running_loop().time()
        found: list[Item | Later] = []
        for name, item in zip(names, items, strict=True):
            if _is_for_later(item) and now + ITEM_WAIT_SECONDS < kept.setdefault(name, deadline):
                found.append(Later(ITEM_WAIT_SECONDS))
            else:
                kept.pop(name, None)
                found.append(item)
        return found

    async def _retried(
        self, path: str, body: bytes, seconds: float, shard: str | None, read: Callable[[bytes], list[Item]]
    ) -> list[Item]:
        """Send again while the server is away, within the deadline: ids make that safe."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        while True:
            left = deadline - loop.time()
            try:
                return read(await self.http.call("POST", path, body, max(left, 0.001), shard=shard))
            except Unavailable as error:
                wait = backoff.next()
                if deadline - loop.time() <= wait or error.status == 507 or isinstance(error, Closed):
                    raise
            await asyncio.sleep(wait)

    # --- outcomes ---------------------------------------------------------------------------------------------

    def outcome_soon(self, transaction_id: str, shard: str | None, outcome: str) -> asyncio.Future[Item]:
        """Queue an outcome; it leaves with the next batch. The future may be dropped."""
        return self._submit_outcome(OutcomeItem(id=transaction_id, outcome=outcome, shard=shard))

    def outcome_alone(self, transaction_id: str, shard: str | None, outcome: str) -> bytes | None:
        """The body of a request for one outcome, as `half_alone`."""
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
        """Whether a request with halves is about to leave that may take along this shard's outcomes."""
        halves = self._halves
        return self.http.takes_outcomes and (halves.is_about_to_send(shard) or halves.is_about_to_send(None))

    def _lane_of_outcomes(self, shard: str | None) -> str | None:
        # Any server of a shared database takes the outcomes of all shards, but servers with a log each only their own.
        return shard if self.http.is_apart(shard) else None

    async def _send_outcomes(self, shard: str | None, outcomes: list[OutcomeItem]) -> Answers:
        if shard is not None:
            return await self._send_outcomes_of(shard, outcomes)
        return await by_shard(outcomes, lambda o: o.shard, self._send_outcomes_of)

    async def _send_outcomes_of(self, shard: str | None, outcomes: list[OutcomeItem]) -> Answers:
        body = encode_msgpack(Outcomes(producer_group=self.group, outcomes=outcomes))
        names = [outcome.id for outcome in outcomes]
        place = shard if self.http.is_apart(shard) else None
        for attempt in range(OUTCOME_TRIES):
            try:
                answer = await self.http.call("POST", OUTCOMES, body, OUTCOME_SECONDS, shard=place)
                return items_for(names, answer, self.http)
            except Unavailable:
                # Check-back asks for what stays lost.
                if attempt == OUTCOME_TRIES - 1:
                    raise
                await asyncio.sleep(OUTCOME_WAIT_SECONDS * 2**attempt)
        raise AssertionError("unreachable")

    # --- messages without a transaction -----------------------------------------------------------------------

    async def publish(self, message: PackedMessage) -> str:
        """Send a message without a transaction; its id. Raises InvalidRequest or Unavailable."""
        fields = {name: getattr(message, name) for name in message.__struct_fields__}
        published = PackedPublished(**fields, id=ids.message_id(ids.new_id(), 0))
        item = await self._messages.submit(published, self.http.shard_of((message,)))
        if item.status not in (200, 201):
            raise error_of(item.status, item.code or "refused", item.detail or "", item.retry_after)
        return item.id

    async def _send_messages(self, shard: str | None, messages: list[PackedPublished]) -> Answers:
        if shard is not None:
            return await self._send_messages_to(shard, messages)
        await self.http.known()
        return await by_shard(messages, lambda message: self.http.shard_of((message,)), self._send_messages_to)

    async def _send_messages_to(self, shard: str | None, messages: list[PackedPublished]) -> Answers:
        body = encode_msgpack(PackedMessages(messages=messages))
        names = [message.id or "" for message in messages]
        shard = self._shard_for_all_attempts(shard, len(names))
        return await self._items("/v1/messages", body, names, OUTCOME_SECONDS, shard)

    async def flush(self) -> None:
        """Wait until what was queued is answered, or given up."""
        await self._halves.drain()
        await self._messages.drain()
        await self._outcomes.drain()

    async def close(self, seconds: float = 5.0) -> None:
        """Flush what waits, for so long at most, then cut the connections."""
        with contextlib.suppress(TimeoutError, NotifyError):
            async with asyncio.timeout(seconds):
                await self.flush()
        await self.http.aclose()


def _is_for_later(item: Item) -> bool:
    return item.status == 503 or item.code == "wrong_shard"


def _size(half: PackedTransaction) -> int:
    return 64 + sum(map(size_of_message, half.messages))


async def call(
    http: Servers, path: str, request: Any, answer: type[Any], seconds: float, shard: str | None = None
) -> Any:
    """POST a struct and decode the answer as another; `shard`: to a server that has it. Raises NotifyError."""
    found = await http.call("POST", path, encode_msgpack(request), seconds, shard=shard)
    return read_answer(msgspec.msgpack.Decoder(answer).decode, found)
