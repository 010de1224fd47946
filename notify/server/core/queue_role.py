"""The queue role: what a server has besides transactions if its storage has queues."""

from __future__ import annotations

from dataclasses import dataclass

from notify.runtime.clock import Clock
from notify.server.core.bridges import Bridges
from notify.server.core.subscriptions import Subscriptions
from notify.server.delivery import Delivery
from notify.server.metrics import Metrics
from notify.server.topics import Topics
from notify.storage.queues import Store, queues_of
from notify.storage.transactions import TransactionStore


@dataclass(frozen=True, slots=True)
class QueueRole:
    """The queues of a storage, and the parts of the server that work on them."""

    queues: Store
    delivery: Delivery
    bridges: Bridges
    subscriptions: Subscriptions


def queue_role_of(
    store: TransactionStore, clock: Clock, metrics: Metrics, topics: Topics, with_spans: bool
) -> QueueRole | None:
    """The queue role of a storage; None if it has no queues. `with_spans`: see Bridges."""
    queues = queues_of(store)
    if queues is None:
        return None
    delivery = Delivery(queues, clock, metrics, topics)
    return QueueRole(
        queues, delivery, Bridges(queues, clock, topics, with_spans), Subscriptions(queues, delivery, clock)
    )
