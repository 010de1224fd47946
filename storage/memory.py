"""A storage in memory, for tests and for `notify.testing`: the contract in its plainest form, nothing survives."""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from notify.clock import Clock, wall_clock
from notify.errors import InvalidRequest, NotFound
from notify.storage.bridged import BridgeBatch, BridgeState, check_bridge, is_prepared_by, refuse_foreign
from notify.storage.checks import CheckAnswer, Checking, Due, new_token
from notify.storage.groups import Priorities, SettleKind, Settlement, Subscription
from notify.storage.hashing import key_hash, tag_hash
from notify.storage.names import dead_letter_topic
from notify.storage.progress import QueueProgress
from notify.storage.records import (
    Decided,
    InDoubt,
    NewMessage,
    NewTransaction,
    Put,
    PutResult,
    State,
    StoredMessage,
    Transaction,
)
from notify.storage.topics import Topic, with_growth
from notify.storage.transactions import NO_SHARDS, NO_TOKENS, counted

SETTLEMENTS = 100_000
"""How many are remembered, to tell a message's timeline."""


@dataclass(slots=True)
class _Record:
    new: NewTransaction
    stored_us: int
    state: State
    decided_us: int = 0
    attempts: int = 0
    next_check_us: int = 0
    token: int = 0
    placed: list[StoredMessage] = field(default_factory=list)
    number: int = 0
    forced: bool = False


@dataclass(slots=True)
class _Queue:
    messages: list[StoredMessage] = field(default_factory=list)
    start: int = 0


class MemoryStore:
    """Dictionaries and lists. Same methods and same answers as every storage."""

    def __init__(self, clock: Clock = wall_clock) -> None:
        """`clock` gives the time that settlements carry (microseconds since 1970)."""
        self._clock = clock
        self._records: dict[bytes, _Record] = {}
        self._topics: dict[str, Topic] = {}
        self._paused: set[str] = set()
        self._bridges: dict[str, BridgeState] = {}
        self._queues: dict[tuple[str, int], _Queue] = {}
        self._turns: dict[str, int] = {}
        self._delayed: list[tuple[int, int, int, int, bytes]] = []
        """Heap of (due, number of the transaction, number of the message, queue, transaction id)."""
        self._patterns: dict[tuple[str, str], Subscription] = {}
        self._priorities: dict[str, Priorities] = {}
        self._subscriptions: dict[tuple[str, str], Subscription] = {}
        self._progress: dict[tuple[str, str, int], QueueProgress] = {}
        self._settlements: deque[tuple[str, int, int, int, Settlement]] = deque(maxlen=SETTLEMENTS)
        """(topic, queue, first offset, count, what was done)."""
        self._visible: list[Callable[[set[str]], None]] = []

    async def open(self, now_us: int) -> None:
        """Nothing is there to be read back."""

    async def close(self) -> None:
        """Everything here is gone with the object; listeners hear of no more messages."""
        self._visible.clear()

    async def sync(self) -> None:
        """Memory is as durable as it gets."""

    def on_visible(self, callback: Callable[[set[str]], None]) -> None:
        self._visible.append(callback)

    # --- transactions -----------------------------------------------------------------------------------------

    async def put(self, transactions: Sequence[NewTransaction], now_us: int) -> list[PutResult]:
        results = []
        touched: set[str] = set()
        flush = max(self._topics[m.topic].flush for t in transactions for m in t.messages)
        for t in transactions:
            known = self._records.get(t.id)
            if known is not None:
                same = known.new.messages == t.messages and known.new.producer_group == t.producer_group
                same = same and not (t.committed and known.state == State.PREPARED)
                results.append(PutResult(Put.ALREADY if same else Put.IN_USE, known.state, flush))
                continue
            number = len(self._records)
            record = _Record(t, now_us, State.PREPARED, next_check_us=now_us + t.check_after_us, number=number)
            self._records[t.id] = record
            if t.committed:
                self._commit(record, now_us, touched)
            results.append(PutResult(Put.STORED, record.state, flush))
        self._tell(touched)
        return results

    def _commit(self, record: _Record, now_us: int, touched: set[str]) -> None:
        record.state = State.COMMITTED
        record.decided_us = now_us
        for number, m in enumerate(record.new.messages):
            queue = self._queue_for(m)
            due_us = now_us + m.delay_us if m.delay_us else m.deliver_at_us
            if due_us > now_us:
                heapq.heappush(self._delayed, (due_us, record.number, number, queue, record.new.id))
            else:
                self._enqueue(m, queue, record.new.id, number, now_us)
                touched.add(m.topic)

    def _queue_for(self, m: NewMessage) -> int:
        count = self._topics[m.topic].queues
        if m.key is not None:
            return key_hash(m.key) % count
        self._turns[m.topic] = (self._turns.get(m.topic, 0) + 1) % count
        return self._turns[m.topic]

    def _enqueue(self, m: NewMessage, queue: int, transaction_id: bytes, number: int, now_us: int) -> None:
        messages = self._queues[(m.topic, queue)].messages
        stored = StoredMessage(
            m.topic,
            queue,
            len(messages),
            transaction_id,
            number,
            now_us,
            m.payload,
            tag_hash(m.tag),
            key_hash=key_hash(m.key),
            expires_us=now_us + m.ttl_us if m.ttl_us else 0,
        )
        messages.append(stored)
        self._records[transaction_id].placed.append(stored)

    def _tell(self, topics: set[str]) -> None:
        if topics:
            for callback in self._visible:
                callback(topics)

    async def decide(
        self,
        outcomes: Sequence[tuple[bytes, str | None, State]],
        now_us: int,
        forced: bool = False,
        tokens: Mapping[bytes, int] = NO_TOKENS,
        shards: Mapping[bytes, str] = NO_SHARDS,
    ) -> list[Decided]:
        results = []
        touched: set[str] = set()
        for transaction_id, group, outcome in outcomes:
            record = self._records.get(transaction_id)
            if record is None:
                results.append(Decided(False))
            elif group is not None and (record.new.producer_group or group) != group:
                results.append(Decided(True, record.state, foreign=True))
            elif record.state not in (State.PREPARED, State.PARKED):
                results.append(Decided(True, record.state, False))
            elif record.token != tokens.get(transaction_id, record.token):
                results.append(Decided(True, record.state, stale=True))
            else:
                if outcome == State.COMMITTED:
                    self._commit(record, now_us, touched)
                else:
                    record.state, record.decided_us = State.ROLLED_BACK, now_us
                record.forced = forced
                results.append(Decided(True, outcome, True))
        self._tell(touched)
        return results

    async def states(self, ids: Sequence[bytes]) -> list[State | None]:
        return [self._records[i].state if i in self._records else None for i in ids]

    async def producer_groups(self, ids: Sequence[bytes]) -> list[str | None]:
        return [self._records[i].new.producer_group or None if i in self._records else None for i in ids]

    def _open(self, transaction_id: bytes) -> _Record | None:
        record = self._records.get(transaction_id)
        return record if record is not None and record.state in (State.PREPARED, State.PARKED) else None

    async def claim_checks(self, producer_group: str, now_us: int, limit: int, answer_within_us: int) -> list[Due]:
        due: list[Due] = []
        for record in sorted(self._undecided(producer_group), key=lambda r: r.next_check_us):
            if record.next_check_us > now_us or len(due) >= limit:
                break
            record.token = new_token()
            record.next_check_us = now_us + answer_within_us
            new = record.new
            topics = tuple({m.topic: None for m in new.messages})
            due.append(Due(new.id, record.token, new.source, new.instance, record.attempts, topics))
        return due

    def _undecided(self, producer_group: str | None) -> list[_Record]:
        return [
            r
            for r in self._records.values()
            if r.state in (State.PREPARED, State.PARKED) and producer_group in (None, r.new.producer_group)
        ]

    async def release_checks(self, claimed: Sequence[Due], due_us: int) -> None:
        for due in claimed:
            record = self._open(due.id)
            if record is not None and record.token == due.token:
                record.token, record.next_check_us = 0, due_us

    async def answer_check(self, answer: CheckAnswer) -> bool:
        record = self._open(answer.id)
        if record is None or not answer.token or record.token != answer.token:
            return False
        record.token, record.attempts, record.next_check_us = 0, answer.attempts, answer.next_check_us
        record.state = State.PARKED if answer.park else State.PREPARED
        return True

    async def resume_checks(self, transaction_id: bytes, now_us: int, *, anew: bool) -> bool:
        record = self._open(transaction_id)
        if record is None:
            return False
        record.token, record.next_check_us = 0, now_us
        if anew:
            record.state, record.attempts = State.PREPARED, 0
        return True

    async def checking(self, transaction_id: bytes, shard: str | None = None) -> Checking | None:
        record = self._open(transaction_id)
        if record is None:
            return None
        return Checking(record.token, record.attempts, record.state == State.PARKED, record.new.producer_group)

    async def half_payloads(self, claimed: Sequence[Due]) -> list[list[bytes]]:
        records = [self._open(due.id) for due in claimed]
        return [[m.payload for m in record.new.messages] if record is not None else [] for record in records]

    def next_check_us(self, producer_group: str) -> int | None:
        return min((r.next_check_us for r in self._undecided(producer_group)), default=None)

    async def transaction(self, transaction_id: bytes) -> Transaction | None:
        return self._transaction(transaction_id)

    def _transaction(self, transaction_id: bytes) -> Transaction | None:
        record = self._records.get(transaction_id)
        if record is None:
            return None
        new = record.new
        shown = record.placed or [
            StoredMessage(m.topic, 0, 0, new.id, n, record.stored_us, m.payload, tag_hash(m.tag))
            for n, m in enumerate(new.messages)
        ]
        return Transaction(
            new.id,
            new.producer_group,
            record.state,
            record.stored_us,
            record.decided_us,
            new.source,
            new.instance,
            record.attempts,
            record.next_check_us,
            list(shown),
            forced=record.forced,
        )

    async def in_doubt(self) -> InDoubt:
        return await counted(self)

    async def undecided(
        self, state: State | None, producer_group: str | None, older_than_us: int | None, limit: int
    ) -> list[Transaction]:
        found = [
            r
            for r in self._undecided(producer_group)
            if state in (None, r.state) and (older_than_us is None or r.stored_us <= older_than_us)
        ]
        shown = [self._transaction(r.new.id) for r in found[:limit]]
        return [t for t in shown if t is not None]

    # --- from a bridge ----------------------------------------------------------------------------------------

    def bridges(self) -> list[BridgeState]:
        return list(self._bridges.values())

    async def append_from_bridge(self, batch: BridgeBatch, now_us: int) -> list[PutResult]:
        known = self._bridges.get(batch.source) or BridgeState(batch.source)
        check_bridge(known, batch)

        def is_ours(transaction_id: bytes) -> bool:
            half = self._records[transaction_id].new
            return is_prepared_by(batch.source, half.source, half.instance)

        refuse_foreign(batch, [i for i in batch.commit if self._open(i) is not None and not is_ours(i)])
        halves = [t.id for t in batch.transactions if t.committed and self._open(t.id) is not None and is_ours(t.id)]
        await self.decide([(i, None, State.COMMITTED) for i in (*batch.commit, *halves)], now_us)
        results = await self.put(batch.transactions, now_us) if batch.transactions else []
        rows = known.rows + sum(r.put is Put.STORED for r in results)
        self._bridges[batch.source] = BridgeState(
            batch.source, batch.epoch, batch.position, rows, now_us, known.position
        )
        return results

    # --- queues -----------------------------------------------------------------------------------------------

    def topics(self) -> list[Topic]:
        return list(self._topics.values())

    def topic(self, name: str) -> Topic | None:
        return self._topics.get(name)

    def has_topic(self, name: str) -> bool:
        return name in self._topics

    async def create_topic(self, topic: Topic) -> Topic:
        self.create_topic_soon(topic)
        return topic

    def create_topic_soon(self, topic: Topic, followed_by: Sequence[Subscription] = ()) -> None:
        known = self._topics.get(topic.name)
        if known is not None and topic.queues < known.queues:
            raise InvalidRequest(f"topic {topic.name!r} has {known.queues} queues; the number can grow, not shrink")
        grown = known.grown if known is not None else ()
        if known is not None and topic.queues > known.queues:
            ends = tuple(len(self._queues[(topic.name, number)].messages) for number in range(known.queues))
            starts = [self._queues[(topic.name, number)].start for number in range(known.queues)]
            grown = with_growth(topic.name, grown, ends, starts)
        self._topics[topic.name] = dataclasses.replace(topic, grown=grown)
        for number in range(topic.queues):
            self._queues.setdefault((topic.name, number), _Queue())
        for subscription in followed_by:
            self.subscribe_soon(subscription, [0] * topic.queues)

    async def delete_topic(self, name: str) -> None:
        if self._topics.pop(name, None) is None:
            raise NotFound(f"there is no topic {name!r}")
        for key in [key for key in self._queues if key[0] == name]:
            del self._queues[key]
        for group, topic in list(self._subscriptions):
            if topic == name:
                await self.unsubscribe(group, topic)

    def _queue(self, topic: str, queue: int) -> _Queue:
        found = self._queues.get((topic, queue))
        if found is None:
            raise NotFound(f"there is no queue {queue} of topic {topic!r}")
        return found

    def bounds(self, topic: str, queue: int) -> tuple[int, int]:
        found = self._queue(topic, queue)
        return found.start, len(found.messages)

    def read(self, topic: str, queue: int, offset: int, limit: int, max_bytes: int) -> list[StoredMessage]:
        found: list[StoredMessage] = []
        size = 0
        of_queue = self._queue(topic, queue)
        first = max(offset, of_queue.start)
        ttl_us = self._topics[topic].ttl_us
        for message in of_queue.messages[first : first + limit]:
            size += len(message.payload)
            if found and size > max_bytes:
                break
            if ttl_us:
                message = msgspec.structs.replace(message)
                expires_us = message.committed_us + ttl_us
                message.expires_us = min(message.expires_us or expires_us, expires_us)
            found.append(message)
        return found

    def read_tagged(
        self, topic: str, queue: int, offset: int, limit: int, max_bytes: int, tags: frozenset[int]
    ) -> tuple[list[StoredMessage], int]:
        found: list[StoredMessage] = []
        size, end = 0, offset
        for message in self.read(topic, queue, offset, limit, 1 << 62):
            if message.tag_hash in tags:
                size += len(message.payload)
                if found and size > max_bytes:
                    return found, found[-1].offset + 1
                found.append(message)
            end = message.offset + 1
        return found, end

    def keyed(self, key: str, topic: str | None, from_us: int, until_us: int, limit: int) -> list[StoredMessage]:
        wanted = key_hash(key)
        names = [topic] if topic is not None else list(self._topics)
        found = [
            m
            for name, number in self._queues
            if name in names
            for m in self.read(name, number, 0, 1 << 62, 1 << 62)
            if m.key_hash == wanted and from_us <= m.committed_us < until_us
        ]
        return sorted(found, key=lambda m: (m.committed_us, m.offset))[:limit]

    def trim(self, topic: str, queue: int, offset: int) -> None:
        found = self._queue(topic, queue)
        found.start = max(found.start, min(offset, len(found.messages)))

    def delayed(self) -> int:
        return len(self._delayed)

    def offset_at(self, topic: str, queue: int, time_us: int) -> int:
        messages = self._queue(topic, queue).messages
        start = self._queue(topic, queue).start
        return next((m.offset for m in messages[start:] if m.committed_us >= time_us), len(messages))

    def release_due(self, now_us: int, limit: int) -> int:
        released = 0
        touched: set[str] = set()
        while self._delayed and self._delayed[0][0] <= now_us and released < limit:
            _, _, number, queue, transaction_id = heapq.heappop(self._delayed)
            message = self._records[transaction_id].new.messages[number]
            if message.topic in self._topics:
                queue = queue if message.key is None else self._queue_for(message)
                self._enqueue(message, queue, transaction_id, number, now_us)
                touched.add(message.topic)
            released += 1
        self._tell(touched)
        return released

    def next_due_us(self) -> int | None:
        return self._delayed[0][0] if self._delayed else None

    def subscriptions(self) -> list[Subscription]:
        return list(self._subscriptions.values())

    def subscription(self, group: str, topic: str) -> Subscription | None:
        return self._subscriptions.get((group, topic))

    def subscribe_soon(self, subscription: Subscription, offsets: Sequence[int] | None) -> None:
        if subscription.topic not in self._topics:
            raise NotFound(f"there is no topic {subscription.topic!r}")
        self._subscriptions[(subscription.group, subscription.topic)] = subscription
        for queue, offset in enumerate(offsets or ()):
            self._progress[(subscription.group, subscription.topic, queue)] = QueueProgress(offset)

    async def subscribe(self, subscription: Subscription, offsets: Sequence[int] | None) -> Subscription:
        self.subscribe_soon(subscription, offsets)
        return subscription

    async def unsubscribe(self, group: str, topic: str) -> None:
        if self._subscriptions.pop((group, topic), None) is None:
            raise NotFound(f"group {group!r} has no subscription to {topic!r}")
        if not any(key[0] == group for key in self._subscriptions):
            self._paused.discard(group)
        for key in [key for key in self._progress if key[:2] == (group, topic)]:
            del self._progress[key]

    def patterns(self) -> list[Subscription]:
        return list(self._patterns.values())

    async def set_pattern(self, subscription: Subscription) -> None:
        self._patterns[(subscription.group, subscription.topic)] = subscription

    async def drop_pattern(self, group: str, pattern: str) -> None:
        if self._patterns.pop((group, pattern), None) is None:
            raise NotFound(f"group {group!r} does not subscribe to {pattern!r}")

    def priorities(self, group: str) -> Priorities | None:
        return self._priorities.get(group)

    async def set_priorities(self, group: str, priorities: Priorities) -> None:
        self._priorities[group] = priorities

    async def pause(self, group: str, paused: bool) -> None:
        if paused:
            self._paused.add(group)
        else:
            self._paused.discard(group)

    def paused(self) -> frozenset[str]:
        return frozenset(self._paused)

    def progress(self, group: str, topic: str, queue: int) -> QueueProgress:
        self._queue(topic, queue)
        return self._progress.setdefault((group, topic, queue), QueueProgress())

    async def settle(
        self, group: str, topic: str, queue: int, runs: Iterable[tuple[int, int]], kind: SettleKind, now_us: int
    ) -> None:
        self.settle_soon(group, topic, queue, list(runs), kind)

    def settle_soon(self, group: str, topic: str, queue: int, runs: list[tuple[int, int]], kind: SettleKind) -> None:
        now_us = self._clock()
        for first, count in runs:
            self.progress(group, topic, queue).settle(first, count)
            self._settlements.append((topic, queue, first, count, Settlement(group, kind, now_us)))

    def attempted(self, group: str, topic: str, queue: int, offsets: Sequence[tuple[int, int, int]]) -> None:
        now_us = self._clock()
        self.progress(group, topic, queue).again(offsets)
        for offset, attempts, *_ in offsets:
            self._settlements.append((topic, queue, offset, 1, Settlement(group, None, now_us, attempts)))

    async def settlements(self, topic: str, queue: int, offset: int) -> tuple[list[Settlement], bool]:
        mine = [
            done
            for its_topic, its_queue, first, count, done in self._settlements
            if (its_topic, its_queue) == (topic, queue) and first <= offset < first + count
        ]
        return mine, len(self._settlements) < SETTLEMENTS

    def dead_letter_soon(self, group: str, messages: Sequence[tuple[StoredMessage, bytes]], now_us: int) -> None:
        name = dead_letter_topic(group)
        if name not in self._topics:
            self.create_topic_soon(Topic(name))
        for message, payload in messages:
            self.settle_soon(group, message.topic, message.queue, [(message.offset, 1)], SettleKind.DEAD_LETTER)
            dead = NewMessage(name, payload)
            self._enqueue(dead, 0, message.transaction_id, message.message_no, now_us)
        self._tell({name})

    def messages(self, transaction_id: bytes) -> list[StoredMessage]:
        record = self._records.get(transaction_id)
        return list(record.placed) if record is not None else []
