"""Appends of bridges: a source's committed transactions in the source's order, and the position after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from notify.errors import InvalidRequest, NotifyError, StorageFailed
from notify.protocol import ids
from notify.protocol.limits import BASE_CHARACTERS, LIMITS, POSITION_CHARACTERS, check_between, check_name
from notify.protocol.wire import Bridged, Item, JsonBridgeBatch, PackedBridgeBatch, instant
from notify.runtime import tracing
from notify.runtime.clock import Clock
from notify.server.core.admission import new_messages
from notify.server.topics import Topics
from notify.storage.bridged import BridgeState, IdsInUse, check_bridge
from notify.storage.queues import Store
from notify.storage.records import NewTransaction, Put
from notify.storage.topics import Topic

PREPARED_CHECK_US = 86_400_000_000
"""How long the stored parts of a large transaction wait for the bridge's commit before they are checked."""


@dataclass(slots=True)
class _Report:
    """A bridge's report of itself, which it sends with its batches."""

    lag_us: int = 0
    note: str = ""
    refused: int = 0
    retained: int | None = None
    retained_left: int | None = None
    slot_age: int | None = None


MOST_REPORTS = 10_000
"""The most sources with a report: one that only sends what is refused has no other trace."""
MOST_LAG_SECONDS = 1e12
"""Times from a source's wrong clock are shown unchanged, but a larger number is not a time."""


class Bridges:
    """The queue's side of bridges."""

    def __init__(self, store: Store, clock: Clock, topics: Topics, with_spans: bool = False) -> None:
        """`with_spans`: add spans to the traces that messages carry."""
        self._store = store
        self._clock = clock
        self._topics = topics
        self._reports: dict[str, _Report] = {}
        self._with_spans = with_spans

    def position(self, source: str) -> dict[str, Any]:
        """The last position and epoch of a source; an empty position and epoch 0 if nothing came from it yet.

        `base`: what the position refers to, if it is long.
        """
        check_name("source", source)
        state = self._state(source)
        base = self._store.bridge_base(source)
        return {"source": source, "epoch": state.epoch, "position": state.position, "rows": state.rows, "base": base}

    async def append(self, source: str, batch: JsonBridgeBatch | PackedBridgeBatch) -> Bridged:
        """Append a batch. The answer names the transactions that no queue could take; the others are stored.

        With `refuse_whole` a refusal stores nothing, so that the bridge can note it before it continues. Raises
        Conflict if another bridge writes for this source, Unavailable, StorageFailed if the storage takes nothing now.
        """
        check_name("source", source)
        _check_bounds(batch)
        now_us = self._clock()
        accepted: list[NewTransaction] = []
        refused: list[Item] = []
        has_topic = self._store.has_topic
        for t in batch.transactions:
            try:
                new = new_messages(t.messages, now_us, has_topic, self._make_topic)
                if not 0 < len(new) <= LIMITS.messages_per_transaction:
                    raise InvalidRequest(f"a transaction carries 1 to {LIMITS.messages_per_transaction} messages")
                if t.producer_group:  # empty for a message that was published without a transaction
                    check_name("producer_group", t.producer_group)
                accepted.append(
                    NewTransaction(
                        ids.from_text(t.id),
                        t.producer_group,
                        new,
                        source,
                        "",
                        PREPARED_CHECK_US,
                        committed=not batch.prepare,
                    )
                )
            except NotifyError as error:
                if error.retryable or isinstance(error, StorageFailed):
                    raise  # the disk is full or failed, which is not the transaction's fault
                refused.append(Item(t.id, error.status, code=error.code, detail=str(error)))
        for text in (*batch.commit, *batch.rollback):
            ids.from_text(text)
        if refused and batch.refuse_whole:
            return self._refuse_whole(source, batch, refused)
        began_us = self._clock()
        try:
            results = await self._store.append_from_bridge(source, batch, accepted, now_us)
        except IdsInUse as error:
            return self._refuse_whole(source, batch, [_in_use(name) for name in error.ids])
        if self._with_spans:
            for t in batch.transactions:
                for m in t.messages:
                    tracing.record("append", m.topic, m.headers, began_us, self._clock(), **{"notify.source": source})
        report = self._report(source)
        report.lag_us = report.lag_us if batch.lag is None else round(batch.lag * 1e6)
        report.note = (batch.note or "")[:500] if batch.note is not None else report.note
        if batch.retained is not None:
            report.retained, report.retained_left = batch.retained, batch.retained_left
            report.slot_age = batch.slot_age
        report.refused += len(refused)
        stored = sum([r.put is Put.STORED for r in results])
        already_stored = sum([r.put is Put.ALREADY for r in results])
        for transaction, result in zip(accepted, results, strict=True):
            if result.put is Put.IN_USE:
                refused.append(_in_use(transaction.id))
        return Bridged(batch.position, batch.epoch, stored, already_stored, refused)

    def _refuse_whole(self, source: str, batch: JsonBridgeBatch | PackedBridgeBatch, refused: list[Item]) -> Bridged:
        """The answer that stores nothing. Raises Conflict if another bridge writes for this source by now."""
        check_bridge(self._state(source), batch)
        self._report(source).refused += len(refused)
        return Bridged(batch.expected_position, batch.epoch, refused=refused)

    def _report(self, source: str) -> _Report:
        """The report about a source, which may not have stored anything yet; beyond MOST_REPORTS one is forgotten."""
        report = self._reports.get(source)
        if report is None:
            if len(self._reports) >= MOST_REPORTS:
                del self._reports[next(iter(self._reports))]
            report = self._reports[source] = _Report()
        return report

    def _state(self, source: str) -> BridgeState:
        return next((b for b in self._store.bridges() if b.source == source), BridgeState(source))

    def _make_topic(self, name: str) -> None:
        """Make a topic whatever `create_topics` says: its message is committed, and cannot be refused any more."""
        check_name("topic", name)
        self._topics.put_soon(Topic(name))

    def shown(self) -> list[dict[str, Any]]:
        """Every source, its position and its bridge's last report, for administrators."""
        now_us = self._clock()
        rows = []
        for b in self._store.bridges():
            report = self._reports.get(b.source, _Report())
            rows.append(
                {
                    "source": b.source,
                    "epoch": b.epoch,
                    "position": b.position,
                    "rows": b.rows,
                    "updated_at": instant(b.updated_us),
                    "silent_seconds": round((now_us - b.updated_us) / 1e6, 3),
                    "lag_seconds": report.lag_us / 1e6,
                    "refused": report.refused,
                    "note": report.note,
                    "retained_bytes": report.retained,
                    "retained_left_bytes": report.retained_left,
                    "slot_age_transactions": report.slot_age,
                }
            )
        return rows


def _check_bounds(batch: JsonBridgeBatch | PackedBridgeBatch) -> None:
    """Raises InvalidRequest."""
    if not 0 < batch.epoch < 1 << 62:
        raise InvalidRequest("epoch counts from 1", "out_of_bounds")
    if batch.lag is not None:
        check_between("lag", batch.lag, -MOST_LAG_SECONDS, MOST_LAG_SECONDS)
    if len(batch.position) > POSITION_CHARACTERS:
        what = f"position has more than {POSITION_CHARACTERS:,} characters: send its difference from a base"
        raise InvalidRequest(what, "out_of_bounds")
    if batch.base is not None and len(batch.base) > BASE_CHARACTERS:
        raise InvalidRequest(f"base has more than {BASE_CHARACTERS:,} characters", "out_of_bounds")


def _in_use(transaction_id: bytes) -> Item:
    detail = "the id belongs to another transaction: other content, or another producer group"
    return Item(ids.to_text(transaction_id), 409, code="id_in_use", detail=detail)
