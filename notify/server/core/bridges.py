"""Appends of bridges: committed transactions of a source in its order, with the position behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from notify import ids, tracing
from notify.clock import Clock
from notify.errors import InvalidRequest, NotifyError, StorageFailed
from notify.limits import LIMITS, check_name
from notify.server.core.admission import new_messages
from notify.server.topics import Topics
from notify.storage.bridged import BridgeState, IdsInUse, check_bridge
from notify.storage.queues import Store
from notify.storage.records import NewTransaction, Put
from notify.storage.topics import Topic
from notify.wire import Bridged, Item, JsonBridgeBatch, PackedBridgeBatch, instant

PREPARED_CHECK_US = 86_400_000_000
"""Parts of a large transaction wait so long for the bridge to go on before anybody asks about them."""


@dataclass(slots=True)
class _Told:
    """A bridge's report of itself, besides its batches."""

    lag_us: int = 0
    note: str = ""
    refused: int = 0


class Bridges:
    """The queue's side of bridges."""

    def __init__(self, store: Store, clock: Clock, topics: Topics, with_spans: bool = False) -> None:
        """`with_spans`: add spans to the traces that messages carry."""
        self._store = store
        self._clock = clock
        self._topics = topics
        self._told: dict[str, _Told] = {}
        self._with_spans = with_spans

    def position(self, source: str) -> dict[str, Any]:
        """Where a source stands; epoch 0 and an empty position where nothing came yet."""
        check_name("source", source)
        known = self._known(source)
        return {"source": source, "epoch": known.epoch, "position": known.position, "rows": known.rows}

    async def append(self, source: str, batch: JsonBridgeBatch | PackedBridgeBatch) -> Bridged:
        """Append a batch, or refuse all of it with a Conflict. What no queue could take is named, and left out.

        Raises Unavailable and StorageFailed where nothing can be stored now, whoever's it is.
        With `refuse_whole` nothing is stored then, so that the bridge can note what is named before its source goes on.
        """
        check_name("source", source)
        if not 0 < batch.epoch < 1 << 62:
            raise InvalidRequest("epoch counts from 1", "out_of_bounds")
        if len(batch.position) > 64 << 10:
            raise InvalidRequest("position has more than 65,536 characters", "out_of_bounds")
        now_us = self._clock()
        accepted: list[NewTransaction] = []
        refused: list[Item] = []
        has_topic = self._store.has_topic
        for t in batch.transactions:
            try:
                new = new_messages(t.messages, now_us, has_topic, self._make_topic)
                if not 0 < len(new) <= LIMITS.messages_per_transaction:
                    raise InvalidRequest(f"a transaction carries 1 to {LIMITS.messages_per_transaction} messages")
                if t.producer_group:  # what was published without a transaction has none, in parts, too
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
                    raise  # a full or failed disk says nothing of the transaction
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
        told = self._told.setdefault(source, _Told())
        told.lag_us = told.lag_us if batch.lag is None else round(batch.lag * 1e6)
        told.note = (batch.note or "")[:500] if batch.note is not None else told.note
        told.refused += len(refused)
        stored = sum([r.put is Put.STORED for r in results])
        known = sum([r.put is Put.ALREADY for r in results])
        for put, r in zip(accepted, results, strict=True):
            if r.put is Put.IN_USE:
                refused.append(_in_use(put.id))
        return Bridged(batch.position, batch.epoch, stored, known, refused)

    def _refuse_whole(self, source: str, batch: JsonBridgeBatch | PackedBridgeBatch, refused: list[Item]) -> Bridged:
        """Nothing is stored. Raises Conflict where another bridge writes for this source by now."""
        check_bridge(self._known(source), batch)
        self._told.setdefault(source, _Told()).refused += len(refused)
        return Bridged(batch.expected_position, batch.epoch, refused=refused)

    def _known(self, source: str) -> BridgeState:
        return next((b for b in self._store.bridges() if b.source == source), BridgeState(source))

    def _make_topic(self, name: str) -> None:
        """A committed message cannot be refused: its topic is made, whatever `create_topics` says."""
        check_name("topic", name)
        self._topics.put_soon(Topic(name))

    def shown(self) -> list[dict[str, Any]]:
        """For the administrator: every source, how far it is and when it was heard of."""
        now_us = self._clock()
        rows = []
        for b in self._store.bridges():
            told = self._told.get(b.source, _Told())
            rows.append(
                {
                    "source": b.source,
                    "epoch": b.epoch,
                    "position": b.position,
                    "rows": b.rows,
                    "updated_at": instant(b.updated_us),
                    "silent_seconds": round((now_us - b.updated_us) / 1e6, 3),
                    "lag_seconds": told.lag_us / 1e6,
                    "refused": told.refused,
                    "note": told.note,
                }
            )
        return rows


def _in_use(transaction_id: bytes) -> Item:
    detail = "the id belongs to another transaction: other content, or another producer group"
    return Item(ids.to_text(transaction_id), 409, code="id_in_use", detail=detail)
