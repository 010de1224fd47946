"""Settling: what becomes of leased messages, because their consumer says so or because their lease ran out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from notify.errors import NotifyError
from notify.server.delivery.cursor import Cursor
from notify.server.delivery.dead_letters import dead_payload
from notify.server.delivery.instances import Instance
from notify.server.delivery.leases import Lease, Leases
from notify.server.delivery.owners import Owners
from notify.server.delivery.plan import Acked, Attempt, Dead, Plan
from notify.server.delivery.recent import REASON_CHARACTERS, Failed, Held, Recent
from notify.server.delivery.retries import Retries
from notify.server.delivery.turns import Turns
from notify.server.metrics import Metrics
from notify.storage.groups import SettleKind
from notify.storage.progress import to_runs
from notify.storage.queues import Store
from notify.storage.records import StoredMessage
from notify.wire import SettledItem, SettleItem

READ_BYTES = 8 << 20


class Settling:
    """Ends leases of one group: what is settled, tried again, or dead, in the storage first and then in memory."""

    def __init__(
        self,
        group: str,
        store: Store,
        metrics: Metrics,
        leases: Leases,
        owners: Owners,
        turns: Turns,
        retries: Retries,
        recent: Recent,
    ) -> None:
        self._group = group
        self._store = store
        self._metrics = metrics
        self._leases = leases
        self._owners = owners
        self._turns = turns
        self._retries = retries
        self._recent = recent

    async def settle(
        self, items: list[SettleItem], now_us: int, may: Callable[[str], bool] | None = None
    ) -> list[SettledItem]:
        """Carry out what a consumer says of its messages; durable when it returns.

        `may`: whether who asks may settle messages of a topic; None: of every one. Raises what the storage refuses
        with where it refuses all of them. An item that it refused may be sent again: its lease goes on.
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
        """Append what is planned, and change what is in memory as far as that succeeds; else why, by the item."""
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
                for of_lease in acked.values():
                    refused.update(dict.fromkeys(of_lease.items, refusal))
        for cursor, again in plan.again.items():
            try:
                self._try_again(cursor, again, now_us)
            except NotifyError as refusal:
                refused.update(dict.fromkeys([attempt.item for attempt in again], refusal))
        for cursor, dead in plan.dead.items():
            try:
                self._bury(cursor, dead, now_us)
            except NotifyError as refusal:
                refused.update(dict.fromkeys([message.item for message in dead], refusal))
        return refused

    def _ack(self, cursor: Cursor, acked: dict[Lease, Acked], now_us: int) -> None:
        offsets = [lease.offsets[place] for lease, of_lease in acked.items() for place in of_lease.places]
        offsets.sort()
        runs = to_runs(offsets)
        self._store.settle_soon(self._group, cursor.topic, cursor.queue, runs, SettleKind.ACK)
        held = _held(acked)
        self._recent.acknowledged((self._group, cursor.topic, cursor.queue, runs, held, now_us))
        for lease, of_lease in acked.items():
            lease.instance.finish(cursor.serves, len(of_lease.places), now_us)
            self._leases.close(lease, of_lease.places)
        self._metrics.acked += len(offsets)
        if cursor.keeps_order:
            cursor.finished(offsets)
        if not cursor.is_awake:
            self._turns.wake(cursor)

    def _try_again(
        self, cursor: Cursor, again: list[Attempt], now_us: int, expired: Counter[tuple[Instance, str]] | None = None
    ) -> None:
        """These attempts failed: another follows when it is due. `expired` counts those whose lease ran out."""
        if not again:
            return
        attempts = [(a.lease.offsets[a.place], a.attempts, a.due_us) for a in again]
        self._store.attempted(self._group, cursor.topic, cursor.queue, attempts)
        for a in again:
            self._fail(a.lease, a.place, a.attempts, a.reason, now_us)
            self._end(a.lease, a.place, now_us, expired)
            cursor.come_back(a.lease.offsets[a.place], a.due_us or now_us)
            if a.due_us:
                self._retries.add(cursor, a.due_us)
            else:
                self._turns.wake(cursor)

    def _bury(
        self, cursor: Cursor, dead: list[Dead], now_us: int, expired: Counter[tuple[Instance, str]] | None = None
    ) -> None:
        """Move messages to the dead letters; damaged ones and those that are not retained are only settled."""
        letters: list[tuple[StoredMessage, bytes]] = []
        gone: list[tuple[int, SettleKind]] = []
        for d in dead:
            offset = d.lease.offsets[d.place]
            read = self._store.read(cursor.topic, cursor.queue, offset, 1, READ_BYTES)
            if read and read[0].offset == offset and not read[0].corrupt:
                attempts = cursor.attempts(offset) + 1
                letter = dead_payload(self._group, read[0], attempts, d.reason, cursor.subscription.replay)
                letters.append((read[0], letter))
            else:
                is_corrupt = bool(read) and read[0].offset == offset
                gone.append((offset, SettleKind.CORRUPT if is_corrupt else SettleKind.EXPIRED))
        for offset, kind in gone:
            self._store.settle_soon(self._group, cursor.topic, cursor.queue, [(offset, 1)], kind)
        if letters:
            self._store.dead_letter_soon(self._group, letters, now_us)
            self._metrics.dead_lettered += len(letters)
        for d in dead:
            self._fail(d.lease, d.place, cursor.attempts(d.lease.offsets[d.place]) + 1, d.reason, now_us)
            self._end(d.lease, d.place, now_us, expired)
            cursor.finished((d.lease.offsets[d.place],))
            self._turns.wake(cursor)

    def _fail(self, lease: Lease, place: int, attempt: int, reason: str, now_us: int) -> None:
        cursor, handed_us = lease.cursor, lease.deadline_us - lease.length_us
        place_of = (self._group, cursor.topic, cursor.queue, lease.offsets[place])
        self._recent.failed(
            Failed(*place_of, attempt, lease.instance.name, handed_us, now_us, reason[:REASON_CHARACTERS])
        )

    def _end(self, lease: Lease, index: int, now_us: int, expired: Counter[tuple[Instance, str]] | None) -> None:
        """One message of a lease is no longer with its instance."""
        if expired is None:
            lease.instance.finish(lease.cursor.serves, 1, now_us)
        else:
            expired[(lease.instance, lease.cursor.serves)] += 1
        self._leases.close(lease, (index,))

    def give_back(self, lease: Lease, now_us: int, places: Collection[int] | None = None) -> None:
        """Messages of a lease that nobody has tried are available at once; it was no attempt. None: all of them."""
        cursor, places = lease.cursor, sorted(lease.open if places is None else places)
        self._leases.close(lease, places)
        lease.instance.drop(cursor.serves, len(places))
        for place in places:
            cursor.come_back(lease.offsets[place], now_us)
        self._turns.wake(cursor)

    def come_back(self, ended: list[tuple[Lease, int]], now_us: int) -> None:
        """Leases of these messages have ended unsettled: they are available at once, or dead after their last attempt.

        Raises what the storage refuses with; the messages that it did not record stay leased.
        """
        by_cursor: dict[Cursor, list[tuple[Lease, int]]] = {}
        for lease, index in ended:
            by_cursor.setdefault(lease.cursor, []).append((lease, index))
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
        for cursor, ended in by_cursor.items():
            again: list[Attempt] = []
            dead: list[Dead] = []
            for lease, index in ended:
                offset = lease.offsets[index]
                attempts = cursor.attempts(offset) + 1
                if attempts >= cursor.subscription.max_attempts:
                    dead.append(Dead(lease, index, f"{attempts} attempts, the last one's lease ran out"))
                else:
                    again.append(Attempt(lease, index, attempts, 0, reason="its lease ran out"))
            self._try_again(cursor, again, now_us, expired)
            self._bury(cursor, dead, now_us, expired)

    def _keep_owners(self, plan: Plan, now_us: int) -> None:
        """An owner that settles keeps its topic for as long as its leases were; one that renews, as long as it asks."""
        for lease in plan.settled:
            self._owners.prolong(lease.cursor.topic, lease.instance.name, now_us + lease.length_us)
        for lease, _, until_us in plan.renewed:
            self._owners.prolong(lease.cursor.topic, lease.instance.name, until_us)


def _held(acked: dict[Lease, Acked]) -> list[Held]:
    """The leases that acknowledged messages were under, by the first and last that their consumer named.

    Offsets of a lease rise, but for retries among them: see `Recent.holders_of`.
    """
    held: list[Held] = []
    for lease, of_lease in acked.items():
        offsets, places = lease.offsets, of_lease.places
        held.append((offsets[places[0]], offsets[places[-1]], lease.instance.name, lease.deadline_us - lease.length_us))
    return held
