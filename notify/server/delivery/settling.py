"""Settling: ends leases because the consumer settles their messages, or because the leases expired."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection
from itertools import chain

from notify.errors import NotifyError
from notify.protocol.message import DEAD_LETTER_REASON, REPLAY
from notify.protocol.wire import Payload, SettledItem, SettleItem, decode_payload, encode_msgpack
from notify.runtime import tracing
from notify.server.delivery.ack_memory import REASON_CHARACTERS, TRACE_CHARACTERS, AckMemory, Failed, Held
from notify.server.delivery.cursor import Cursor
from notify.server.delivery.instances import Instance
from notify.server.delivery.leases import Lease, Leases
from notify.server.delivery.ordered import OrderedCursor
from notify.server.delivery.owners import Owners
from notify.server.delivery.plan import Acked, Attempt, Dead, Plan, Tally, ended
from notify.server.delivery.retries import Retries
from notify.server.delivery.turns import Turns
from notify.server.metrics import Metrics
from notify.storage.groups import SettleKind
from notify.storage.progress import to_runs
from notify.storage.queues import Store
from notify.storage.records import StoredMessage


def dead_payload(group: str, message: StoredMessage, attempts: int, reason: str, replay: int, deaths: int = 0) -> bytes:
    """The payload of a group's dead letter. `attempts`: all attempts at it, of which `deaths` ended with a lease that
    ran out. `replay`: which run of the topic's messages it is for an inbox, or 0."""
    payload = decode_payload(message.payload)
    headers = dict(payload.headers or {})
    headers["notify-dead-letter-group"] = group
    headers["notify-dead-letter-topic"] = payload.topic
    headers["notify-dead-letter-queue"] = str(message.queue)
    headers["notify-dead-letter-offset"] = str(message.offset)
    headers["notify-dead-letter-attempts"] = str(attempts)
    headers["notify-dead-letter-deaths"] = str(deaths)
    headers[DEAD_LETTER_REASON] = reason[:LETTER_REASON_CHARACTERS]
    if replay:
        headers[REPLAY] = str(replay)
    return encode_msgpack(Payload(payload.topic, payload.body, payload.key, payload.tag, headers))


def trace_of(message: StoredMessage) -> str:
    """The id of the sampled trace that a message belongs to; "" if it has none."""
    return "" if message.corrupt else tracing.trace_id(decode_payload(message.payload).headers)


READ_BYTES = 8 << 20
LETTER_REASON_CHARACTERS = 500
"""The most characters of a reason that are kept with a dead letter, or with a held key."""


class Settling:
    """Ends leases of one group: it settles, retries or dead-letters messages, in the storage first, then in memory."""

    def __init__(
        self,
        group: str,
        store: Store,
        metrics: Metrics,
        leases: Leases,
        owners: Owners,
        turns: Turns,
        retries: Retries,
        recent: AckMemory,
    ) -> None:
        self._group = group
        self._store = store
        self._metrics = metrics
        self._leases = leases
        self._owners = owners
        self._turns = turns
        self._retries = retries
        self._recent = recent
        self._to_ack = metrics.latencies["commit_to_ack"].of(group.partition("@")[0])

    async def settle(
        self, items: list[SettleItem], now_us: int, may: Callable[[str], bool] | None = None
    ) -> list[SettledItem]:
        """Carry out a consumer's items: acknowledge, retry, dead-letter, return or renew. Durable when it returns.

        `may`: whether the consumer may settle messages of a topic; None: of every topic. Raises the storage's error if
        it refuses all items. A refused item may be sent again: its lease still holds.
        """
        plan = Plan(items, self._leases.by_id, now_us, may)
        refused = self._carry_out(plan, now_us)
        if refused and len(refused) == len(items):
            raise next(iter(refused.values()))
        await self._store.sync()
        refused |= plan.refused
        return [
            SettledItem(item.receipt, 200)
            if (error := refused.get(number)) is None
            else SettledItem(item.receipt, error.status, error.code, str(error))
            for number, item in enumerate(items)
        ]

    def _carry_out(self, plan: Plan, now_us: int) -> dict[int, NotifyError]:
        """Append the planned changes, and apply those that succeed; returns the errors of the others by item number."""
        refused: dict[int, NotifyError] = {}
        for lease, places, until_us in plan.renewed:
            lease.extended.update(dict.fromkeys(places, until_us))
            lease.instance.seen_us = now_us
        if self._owners.by_topic:
            self._keep_owners(plan, now_us)
        for lease, places in plan.returned:
            self.give_back(lease, now_us, places)
        for cursor, acked in plan.acked.items():
            try:
                self._ack(cursor, acked, now_us)
            except NotifyError as refusal:
                for lease_acked in acked.values():
                    refused.update(dict.fromkeys(lease_acked.items, refusal))
        for cursor, again in plan.again.items():
            try:
                self._try_again(cursor, again, now_us)
            except NotifyError as refusal:
                refused.update(dict.fromkeys([attempt.item for attempt in again], refusal))
        for cursor, exhausted in plan.dead.items():
            holding, dead = _holding(cursor, exhausted)
            for messages, give_up in ((holding, self._hold), (dead, self._bury)):
                try:
                    give_up(cursor, messages, now_us)
                except NotifyError as refusal:
                    refused.update(dict.fromkeys([message.item for message in messages], refusal))
        return refused

    def _ack(self, cursor: Cursor, acked: dict[Lease, Acked], now_us: int) -> None:
        runs = _runs(acked)
        self._store.settle_soon(self._group, cursor.topic, cursor.queue, runs, SettleKind.ACK)
        held = _held(acked)
        self._recent.acknowledged((self._group, cursor.topic, cursor.queue, runs, held, now_us))
        for lease, lease_acked in acked.items():
            for places in lease_acked.places:
                lease.instance.finish(cursor.serves, len(places), now_us)
                self._to_ack.add_ages(now_us, *lease.times.of(places))
                self._leases.close(lease, places)
        self._metrics.acked += sum([count for _, count in runs])
        if cursor.keeps_order:
            for first, count in runs:
                cursor.finished(range(first, first + count))
        if not cursor.is_awake:
            self._turns.wake(cursor)
        if self._to_ack.exemplars is not None:  # last: the messages are settled, whatever it finds
            for lease, lease_acked in acked.items():
                for places in lease_acked.places:
                    self._exemplify(lease, places[0], now_us)

    def _exemplify(self, lease: Lease, place: int, now_us: int) -> None:
        """Note the trace of an acknowledged message, if one is wanted."""

        def find_trace() -> str:
            cursor, offset = lease.cursor, lease.offsets[place]
            with contextlib.suppress(NotifyError, OSError):  # the message is settled, whether it can be read or not
                stored = self._store.read(cursor.topic, cursor.queue, offset, 1, READ_BYTES)
                if stored and stored[0].offset == offset:
                    return trace_of(stored[0])
            return ""

        self._to_ack.exemplify(now_us - lease.times.each[place], now_us, find_trace)

    def _try_again(
        self, cursor: Cursor, again: list[Attempt], now_us: int, expired: Counter[tuple[Instance, str]] | None = None
    ) -> None:
        """Record attempts that did not settle, and schedule the next ones. `expired`, if given, counts them as expired
        leases."""
        if not again:
            return
        attempts = [_recorded(a) for a in again]
        self._store.attempted(self._group, cursor.topic, cursor.queue, attempts)
        for a in again:
            if a.is_interruption:
                self._metrics.interrupted += 1
            self._fail(a, now_us)
            self._end(a.lease, a.place, now_us, expired)
            cursor.come_back(a.lease.offsets[a.place], a.due_us or now_us)
            if a.due_us:
                self._retries.add(cursor, a.due_us)
            else:
                self._turns.wake(cursor)

    def _bury(
        self, cursor: Cursor, dead: list[Dead], now_us: int, expired: Counter[tuple[Instance, str]] | None = None
    ) -> None:
        """Move messages to the dead letters; damaged and no longer retained ones are only settled."""
        self._write_letters(cursor, [(d.lease.offsets[d.place], d.tally, d.reason) for d in dead], now_us)
        for d in dead:
            self._fail(d, now_us)
            self._end(d.lease, d.place, now_us, expired)
            cursor.finished((d.lease.offsets[d.place],))
            self._turns.wake(cursor)

    def _write_letters(self, cursor: Cursor, dead: list[tuple[int, Tally, str]], now_us: int) -> None:
        """Settle the messages at these offsets as dead letters, each with its tally and the reason."""
        letters: list[tuple[StoredMessage, bytes]] = []
        without_letter: list[tuple[int, SettleKind]] = []
        for offset, tally, reason in dead:
            stored = self._store.read(cursor.topic, cursor.queue, offset, 1, READ_BYTES)
            if stored and stored[0].offset == offset and not stored[0].corrupt:
                replay = cursor.subscription.replay
                letter = dead_payload(self._group, stored[0], tally.attempts, reason, replay, tally.deaths)
                letters.append((stored[0], letter))
            else:
                is_corrupt = bool(stored) and stored[0].offset == offset
                without_letter.append((offset, SettleKind.CORRUPT if is_corrupt else SettleKind.EXPIRED))
        for offset, kind in without_letter:
            self._store.settle_soon(self._group, cursor.topic, cursor.queue, [(offset, 1)], kind)
        if letters:
            self._store.dead_letter_soon(self._group, letters, now_us)
            self._metrics.dead_lettered += len(letters)

    def skip(self, cursor: OrderedCursor, offset: int, reason: str, now_us: int) -> None:
        """Make a message that holds its key a dead letter: the key's next message may be delivered."""
        self._write_letters(cursor, [(offset, Tally.at(cursor, offset), reason)], now_us)
        cursor.finished((offset,))
        self._turns.wake(cursor)

    def release(self, cursor: OrderedCursor, offset: int, how: int, now_us: int) -> None:
        """Deliver a message that holds its key again; `how`: HOLD_RETRIED or HOLD_RELEASED."""
        tally = Tally.at(cursor, offset)
        again = (offset, tally.attempts, 0, tally.deaths, tally.interruptions, how)
        self._store.attempted(self._group, cursor.topic, cursor.queue, [again])
        cursor.release(offset, now_us)
        self._turns.wake(cursor)

    def _hold(
        self, cursor: Cursor, holding: list[Dead], now_us: int, expired: Counter[tuple[Instance, str]] | None = None
    ) -> None:
        """Record that these messages have used up their attempts, and hold their keys."""
        if not holding:
            return
        held = [
            (d.lease.offsets[d.place], d.tally.attempts, 0, d.tally.deaths, d.tally.interruptions, now_us)
            for d in holding
        ]
        reasons = [d.reason[:LETTER_REASON_CHARACTERS] for d in holding]
        self._store.hold(self._group, cursor.topic, cursor.queue, held, reasons)
        self._metrics.held += len(holding)
        for d in holding:
            self._fail(d, now_us)
            self._end(d.lease, d.place, now_us, expired)
            cursor.hold(d.lease.offsets[d.place])
        self._turns.wake(cursor)

    def _fail(self, message: Attempt | Dead, now_us: int) -> None:
        lease, tally = message.lease, message.tally
        cursor, handed_us = lease.cursor, lease.deadline_us - lease.length_us
        reason = message.reason[:REASON_CHARACTERS]
        trace = message.trace[-TRACE_CHARACTERS:]
        where = (self._group, cursor.topic, cursor.queue, lease.offsets[message.place], tally.attempts)
        self._recent.failed(Failed(*where, lease.instance.name, handed_us, now_us, reason, tally.interruptions, trace))

    def _end(self, lease: Lease, index: int, now_us: int, expired: Counter[tuple[Instance, str]] | None) -> None:
        """End the lease of one message, as finished or, with `expired`, as expired."""
        if expired is None:
            lease.instance.finish(lease.cursor.serves, 1, now_us)
        else:
            expired[(lease.instance, lease.cursor.serves)] += 1
        self._leases.close(lease, (index,))

    def give_back(self, lease: Lease, now_us: int, places: Collection[int] | None = None) -> None:
        """Return untried messages of a lease (`places` None: all): they are available now, and no attempt counts."""
        cursor, places = lease.cursor, sorted(lease.open if places is None else places)
        self._leases.close(lease, places)
        lease.instance.drop(cursor.serves, len(places))
        for place in places:
            cursor.come_back(lease.offsets[place], now_us)
        self._turns.wake(cursor)

    def come_back(self, out: list[tuple[Lease, int]], now_us: int) -> None:
        """End expired leases of messages: they are available now, or become dead letters after the last death.

        Raises the storage's error; messages that it did not record stay leased.
        """
        by_cursor: dict[Cursor, list[tuple[Lease, int]]] = {}
        for lease, place in out:
            by_cursor.setdefault(lease.cursor, []).append((lease, place))
        expired: Counter[tuple[Instance, str]] = Counter()
        try:
            self._end_all(by_cursor, now_us, expired)
        finally:
            is_new = any(topic not in instance.bounds for instance, topic in expired)
            still_held = self._leases.held() if is_new else Counter[tuple[Instance, str]]()
            for (instance, topic), count in expired.items():
                instance.expire(topic, count, count + still_held[(instance, topic)])
                self._metrics.leases_expired += count

    def _end_all(
        self, by_cursor: dict[Cursor, list[tuple[Lease, int]]], now_us: int, expired: Counter[tuple[Instance, str]]
    ) -> None:
        for cursor, out in by_cursor.items():
            again: list[Attempt] = []
            dead: list[Dead] = []
            for lease, place in out:
                message = ended(lease, place, "its lease ran out", is_interrupted=lease.is_interrupted)
                if isinstance(message, Dead):
                    dead.append(message)
                else:
                    again.append(message)
            self._try_again(cursor, again, now_us, expired)
            holding, dead = _holding(cursor, dead)
            self._hold(cursor, holding, now_us, expired)
            self._bury(cursor, dead, now_us, expired)

    def _keep_owners(self, plan: Plan, now_us: int) -> None:
        """Extend ownerships: by the length of the lease if the owner settles, until the new deadline if it renews."""
        for lease in plan.settled:
            self._owners.prolong(lease.cursor.topic, lease.instance.name, now_us + lease.length_us)
        for lease, _, until_us in plan.renewed:
            self._owners.prolong(lease.cursor.topic, lease.instance.name, until_us)


def _recorded(attempt: Attempt) -> tuple[int, ...]:
    """An attempt as the storage takes it, without zeros at its end."""
    tally = attempt.tally
    plain = (attempt.lease.offsets[attempt.place], tally.attempts, attempt.due_us)
    return (*plain, tally.deaths, tally.interruptions) if tally.deaths or tally.interruptions else plain


def _holding(cursor: Cursor, dead: list[Dead]) -> tuple[list[Dead], list[Dead]]:
    """(messages that hold their keys, messages that become dead letters)."""
    if not cursor.keeps_order:
        return [], dead
    holding: list[Dead] = []
    passed: list[Dead] = []
    for d in dead:
        holds = d.is_exhausted and cursor.holds(d.lease.offsets[d.place])
        (holding if holds else passed).append(d)
    return holding, passed


def _runs(acked: dict[Lease, Acked]) -> list[tuple[int, int]]:
    """The runs of the acknowledged offsets."""
    parts = [lease.offsets[places.start : places.stop] for lease, each in acked.items() for places in each.places]
    if len(parts) == 1 and isinstance(parts[0], range):
        return [(parts[0].start, len(parts[0]))]
    return to_runs(sorted(chain.from_iterable(parts)))


def _held(acked: dict[Lease, Acked]) -> list[Held]:
    """The leases of acknowledged messages, each with the first and last offset that the consumer named.

    The offsets of a lease rise, except for retries among them: see `AckMemory.holders_of`.
    """
    held: list[Held] = []
    for lease, lease_acked in acked.items():
        offsets, places = lease.offsets, lease_acked.places
        ends = offsets[places[0].start], offsets[places[-1].stop - 1]
        if lease.cursor.looks_ahead:  # in the order of turns
            settled = [offset for each in places for offset in offsets[each.start : each.stop]]
            ends = min(settled), max(settled)
        held.append((*ends, lease.instance.name, lease.deadline_us - lease.length_us))
    return held
