"""Stores what producers send: halves, committed transactions of a relay, and messages without a transaction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from notify.errors import Backpressure, InvalidId, InvalidRequest, NotifyError, Unavailable
from notify.protocol import ids
from notify.protocol.keys import shard_of_key
from notify.protocol.limits import LIMITS, check_between, check_count, check_name, check_text
from notify.protocol.wire import (
    Item,
    JsonMessage,
    JsonMessages,
    JsonTransaction,
    JsonTransactions,
    PackedMessage,
    PackedMessages,
    PackedTransaction,
    PackedTransactions,
)
from notify.protocol.withdrawal import KAFKA_REFUSES, Dedupe, Wanted
from notify.runtime import tracing
from notify.runtime.clock import Clock
from notify.server.access.principal import Principal
from notify.server.core.admission import (
    check_place,
    check_sender,
    failed,
    keys_of,
    new_messages,
)
from notify.server.core.flow import HOLD_SECONDS, Flow
from notify.server.metrics import Metrics
from notify.server.topics import Topics
from notify.storage.bridged import UNNAMED
from notify.storage.queues import queues_of
from notify.storage.records import STATE_NAMES, NewMessage, NewTransaction, PartlyStored, Put, PutResult
from notify.storage.topics import Flush
from notify.storage.transactions import TransactionStore
from notify.storage.withdrawals import MOST_PENDING

HOLD_US = round(HOLD_SECONDS * 1_000_000)
CHECK_AFTER_US = 5_000_000
"""How long after a half its first check is due, if the producer does not say."""
NAMES_NO_KEY = (
    "this server has several workers, each with the delayed messages of its own keys: give the key of the message that "
    "is withdrawn; one without a key cannot be withdrawn here"
)
KEY_IS_ELSEWHERE = (
    "another worker has the messages of key {key!r}, because the first key of a transaction determines the worker: "
    "send this message in a transaction of its own, or make it the first one with a key"
)
_BEHIND = "an earlier message with the same key was refused for now"
_FLUSH = {flush: flush.name.lower() for flush in Flush}

_Accepted = tuple[list[Item | None], list[NewTransaction]]
"""(for each item of a request its refusal or None, the transactions of the items with None), in the request's order."""


class Transactions:
    """Stores transactions item by item, on any storage. All I/O is the storage's."""

    def __init__(
        self,
        store: TransactionStore,
        clock: Clock,
        topics: Topics,
        *,
        shard: str,
        metrics: Metrics,
        flow: Flow,
        with_spans: bool = False,
        key_shards: Sequence[str] = (),
        over_kafka: bool = False,
    ) -> None:
        """`with_spans`: add spans to the traces that messages carry. `key_shards`: the shards that divide the keys.
        `over_kafka`: whether the messages go to Kafka's topics."""
        self.shard = shard
        self._key_shards = key_shards
        self._store = store
        self._clock = clock
        self._topics = topics
        self._metrics = metrics
        self._flow = flow
        self._gates = flow.gates
        self._with_spans = with_spans
        self._queues = queues_of(store)
        self._no_withdrawals = KAFKA_REFUSES if over_kafka else NAMES_NO_KEY if key_shards else ""
        """Why withdrawals are refused, or where the keys are divided those without a key; "": all are taken."""

    async def put(
        self, request: JsonTransactions | PackedTransactions, principal: Principal | None = None
    ) -> list[Item]:
        """Store halves (or committed transactions) durably; the items are in the request's order.

        `check` has checked the request. `principal`: the sender, whose right to publish is checked; None: no right is
        checked.
        """
        now_us, waits = self._clock(), self._flow.waits
        refused, accepted = await self._accept(request, now_us, _bound(principal))
        detail = "the id belongs to another transaction: other content, or another producer group"
        item_ids = [t.id for t in request.transactions]
        if self._flow.waits != waits:
            accepted = self._without_deleted(item_ids, refused, accepted)
        items, stored = await self._store_all(item_ids, refused, accepted, now_us, detail)
        self._metrics.halves += stored
        if self._with_spans and accepted:
            self._trace(request, now_us)
        return items

    def check(self, request: JsonTransactions | PackedTransactions) -> None:
        """Check the fields of the whole request, before a half or an outcome is recorded. Raises InvalidRequest."""
        check_name("producer_group", request.producer_group)
        if request.source is not None:
            check_text("source", request.source)
        if request.instance is not None:
            check_text("instance", request.instance)
        check_count(request.transactions)
        if request.outcomes:
            check_count(request.outcomes)

    async def _accept(
        self, request: JsonTransactions | PackedTransactions, now_us: int, sender: Principal | None
    ) -> _Accepted:
        group, source = request.producer_group, request.source or ""
        instance = request.instance or (UNNAMED if source else "")
        refused: list[Item | None] = []
        accepted: list[NewTransaction] = []
        has_topic, make_topic = self._store.has_topic, self._topics.use
        is_limited = self._flow.has_rate(group)
        held_keys: set[tuple[str, str | None]] = set()
        transactions: Sequence[JsonTransaction | PackedTransaction] = request.transactions
        transaction_ids = ids.from_texts([t.id for t in transactions])
        for number, t in enumerate(transactions):
            try:
                if held_keys and t.committed and not held_keys.isdisjoint(keys := keys_of(t.messages)):
                    held_keys |= keys
                    raise Backpressure(_BEHIND, "behind_another")
                if not 0 < len(t.messages) <= LIMITS.messages_per_transaction:
                    raise InvalidRequest(
                        f"a transaction carries 1 to {LIMITS.messages_per_transaction} messages, not {len(t.messages)}",
                        "out_of_bounds",
                    )
                transaction_id = transaction_ids[number]
                if isinstance(transaction_id, InvalidId):
                    raise transaction_id
                check_after_us = CHECK_AFTER_US
                if t.check_after is not None:
                    check_between(
                        "check_after", t.check_after, LIMITS.check_after_min_seconds, LIMITS.check_after_max_seconds
                    )
                    check_after_us = round(t.check_after * 1_000_000)
                check_sender(sender, t.messages)
                if self._key_shards and not t.committed:  # a relay sends all keys to one shard, to keep their order
                    self.check_place(t.messages)
                if is_limited:
                    self._flow.check_group(group)
                new = new_messages(t.messages, now_us, has_topic, make_topic)
                for m in new:
                    if m.acts is not None:
                        self._check_acts(new, transaction_id, anywhere=t.committed)
                        break
                if self._gates:
                    await self._wait_for_room(new, now_us)
            except NotifyError as error:
                refused.append(failed(t.id, error))
                if error.retryable and t.committed:  # a relay's later messages of the key must not overtake it
                    held_keys |= keys_of(t.messages)
            else:
                accepted.append(
                    NewTransaction(transaction_id, group, new, source, instance, check_after_us, t.committed)
                )
                refused.append(None)
        return refused, accepted

    def check_place(self, messages: Sequence[JsonMessage | PackedMessage]) -> None:
        """Raises WrongShard if keys are divided among shards, and the messages of a transaction belong to another."""
        if self._key_shards:
            check_place(messages, self.shard, self._key_shards)

    async def publish(
        self, request: JsonMessages | PackedMessages, principal: Principal | None = None, *, anywhere: bool = False
    ) -> list[Item]:
        """Store messages without a transaction, committed from the start. `principal`: as in `put`.

        `anywhere`: also take a message whose key belongs to another shard, such as one whose half is here.
        """
        check_count(request.messages)
        now_us, waits = self._clock(), self._flow.waits
        sender = _bound(principal)
        refused: list[Item | None] = []
        accepted: list[NewTransaction] = []
        item_ids: list[str] = []
        has_topic, make_topic = self._store.has_topic, self._topics.use
        for m in request.messages:
            message_id = m.id or ""
            try:
                transaction_id, number = ids.parse_message_id(m.id) if m.id is not None else (ids.new_id(), 0)
                if number:
                    raise InvalidRequest("a message without a transaction has the number 0", "invalid_id")
                message_id = ids.message_id(transaction_id, 0)
                check_sender(sender, (m,))
                if not anywhere:
                    self.check_place((m,))
                new = new_messages((m,), now_us, has_topic, make_topic)
                if new[0].acts is not None:
                    self._check_acts(new, transaction_id, anywhere=anywhere)
                if self._gates:
                    await self._wait_for_room(new, now_us)
            except NotifyError as error:
                refused.append(failed(message_id, error))
            else:
                accepted.append(NewTransaction(transaction_id, "", new, committed=True))
                refused.append(None)
            item_ids.append(message_id)
        if self._flow.waits != waits:
            accepted = self._without_deleted(item_ids, refused, accepted)
        items, stored = await self._store_all(item_ids, refused, accepted, now_us, "the id is used already")
        self._metrics.published += stored
        return items

    def _check_acts(self, messages: Sequence[NewMessage], transaction_id: bytes, *, anywhere: bool) -> None:
        """Check the messages that withdraw others or have a dedupe key."""
        acting = [m for m in messages if m.acts is not None]
        if self._no_withdrawals:
            self._refuse_withdrawals(acting, transaction_id, anywhere=anywhere)
        self._check_keys(acting)

    def _refuse_withdrawals(self, messages: Sequence[NewMessage], transaction_id: bytes, *, anywhere: bool) -> None:
        """Raises InvalidRequest (`withdrawal_refused`) for withdrawals and dedupe keys that cannot work here.
        `anywhere`: their messages are here, whatever their keys: a relay sends all to one worker."""
        is_kafka = self._no_withdrawals is KAFKA_REFUSES
        for m in messages:
            if anywhere and not is_kafka:
                continue
            if is_kafka or m.key is None:
                raise InvalidRequest(self._no_withdrawals, "withdrawal_refused")
            is_elsewhere = shard_of_key(m.key, self._key_shards) != self.shard
            if is_elsewhere and not (isinstance(m.acts, Wanted) and self._is_here(m.acts, transaction_id)):
                raise InvalidRequest(KEY_IS_ELSEWHERE.format(key=m.key[:40]), "withdrawal_refused")

    def _is_here(self, wanted: Wanted, transaction_id: bytes) -> bool:
        """Whether a message is in this storage, or comes with the transaction that withdraws it."""
        if wanted.id == transaction_id:
            return True
        return self._queues is not None and self._queues.withdrawable(wanted.id, wanted.number) is not None

    def _check_keys(self, messages: Sequence[NewMessage]) -> None:
        """Raises Backpressure for a message with a dedupe key, while too many keys have a pending message. Only such a
        message asks, because the answer costs much then."""
        has_key = any(isinstance(m.acts, Dedupe) for m in messages)
        if has_key and self._queues is not None and self._queues.is_full_of_keys():
            raise Backpressure(
                f"{MOST_PENDING:,} dedupe keys have a pending message: send it again when some are delivered",
                "too_many_keys",
            )

    async def _wait_for_room(self, messages: list[NewMessage], now_us: int) -> None:
        """Raises Backpressure if a message's topic has a rate or a bounded backlog, and no room. A cancellation needs
        none: it is never delivered."""
        for m in messages:
            if isinstance(m.acts, Wanted) and not m.acts.replaces:
                continue
            gate = self._gates.get(m.topic)
            if gate is not None:
                await self._flow.check(gate, now_us + HOLD_US)

    def _without_deleted(
        self, item_ids: list[str], refused: list[Item | None], accepted: list[NewTransaction]
    ) -> list[NewTransaction]:
        """The accepted transactions without those, now refused, whose topic was deleted while another message of the
        request waited for room."""
        left: list[NewTransaction] = []
        held_keys: set[tuple[str, str | None]] = set()
        each = iter(accepted)
        for number, item in enumerate(refused):
            if item is not None:
                continue
            t = next(each)
            gone = next((m.topic for m in t.messages if not self._store.has_topic(m.topic)), None)
            keys = {(m.topic, m.key) for m in t.messages if m.key is not None} if t.committed else set()
            if gone is None and held_keys.isdisjoint(keys):
                left.append(t)
                continue
            held_keys |= keys
            error = _BEHIND if gone is None else f"topic {gone!r} was deleted a moment ago: send the message again"
            refused[number] = failed(item_ids[number], Unavailable(error))
        return left

    async def _store_all(
        self,
        item_ids: list[str],
        refused: list[Item | None],
        accepted: list[NewTransaction],
        now_us: int,
        in_use: str,
    ) -> tuple[list[Item], int]:
        """Store the accepted transactions: (the item for each of `item_ids`, how many are new in the storage).

        `in_use` is the detail for an id that another transaction has; the item does not tell that one's state.
        """
        if not accepted:
            return [item for item in refused if item is not None], 0
        results: Iterator[PutResult | NotifyError] = iter(await self._stored_or_refused(accepted, now_us))
        items: list[Item] = []
        stored = 0
        is_stored = Put.STORED
        for item_id, item in zip(item_ids, refused, strict=True):
            if item is None:
                result = next(results)
                if isinstance(result, NotifyError):
                    item = failed(item_id, result)
                elif result.put is is_stored:
                    stored += 1
                    item = self._item(item_id, 201, result)
                elif result.put is Put.IN_USE:
                    item = Item(item_id, 409, code="id_in_use", detail=in_use)
                else:
                    item = self._item(item_id, 200, result)
            items.append(item)
        return items, stored

    def _item(self, item_id: str, status: int, result: PutResult) -> Item:
        return Item(item_id, status, STATE_NAMES[result.state], result.shard or self.shard, _FLUSH[result.flush])

    async def _stored_or_refused(
        self, accepted: list[NewTransaction], now_us: int
    ) -> Sequence[PutResult | NotifyError]:
        """The storage's results; if it refuses all (its disk may be full), that error for each."""
        try:
            return await self._store.put(accepted, now_us)
        except PartlyStored as partly:
            return partly.results
        except NotifyError as error:
            return [error] * len(accepted)

    def _trace(self, request: JsonTransactions | PackedTransactions, now_us: int) -> None:
        """Add a span for each stored half to the traces that its messages carry."""
        for t in request.transactions:
            for m in t.messages:
                if m.headers is None or tracing.HEADER not in m.headers:
                    continue
                tracing.record("half", m.topic, m.headers, now_us, self._clock(), **{"notify.transaction": t.id})


def _bound(principal: Principal | None) -> Principal | None:
    """The principal; None if it may publish to every topic."""
    return None if principal is None or principal.rights is None else principal
