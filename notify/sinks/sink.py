"""Where a bridge or relay puts transactions: a queue server, or Apache Kafka."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from notify.kafka.records import SCHEME
from notify.sinks.queue_server import QueueSink
from notify.wire import Bridged, BridgedTransaction, Item, PackedBridgeBatch, RefusedReport


class Sink(Protocol):
    """One destination. A source's position is kept there, durable together with the messages before it."""

    async def claim(self, source: str, *, take_back: bool = True) -> tuple[int, str]:
        """Become the one that writes for a source; the epoch, and the position to go on from ("": none yet).

        Without `take_back`, raises Conflict (`stale_epoch`) where another has claimed it since this sink did.
        """
        ...

    async def position(self, source: str) -> str:
        """Where a source stands; "" where nothing came yet. Nobody is fenced."""
        ...

    async def append(self, source: str, batch: PackedBridgeBatch) -> Bridged:
        """Store a batch and its position, both or neither.

        Where the answer's `refused` names any, which are never taken as they are, nothing of the batch is stored: the
        caller notes them and appends the rest. Raises Conflict where another has taken over, Unavailable where it is
        not known whether the batch was stored.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class PutsById(Protocol):
    """A destination that knows transactions by their ids: several movers may put the same ones, each is there once."""

    async def put(self, transactions: Sequence[BridgedTransaction]) -> list[Item]:
        """Store committed transactions, each whole and once; an item for each, in their order.

        Status 200 or 201: it is there. 429 or from 500 on: put it again later; what is behind it and has a key of its
        own was not stored either. Another from 400 on: it is never taken as it is. Requests keep within the target's
        bounds by themselves. Raises Unavailable where nothing is known of any, Unauthorized or Forbidden.
        """
        ...


@runtime_checkable
class MayLackQueues(Protocol):
    """A destination that may keep what it gets in a database, from where somebody has to move it on."""

    async def check_queues(self) -> None:
        """Raises WrongRole where it has no queues, Unavailable where it does not answer."""
        ...


@runtime_checkable
class ShowsRefused(Protocol):
    """A destination that shows people how many refused messages wait beside a source."""

    async def show_refused(self, source: str, report: RefusedReport) -> None:
        """Raises Forbidden where this mover may not say so, and whatever a request may raise."""
        ...


def running_beside(url: str) -> contextlib.AbstractContextManager[None]:
    """While bridges and relays of this process move to a destination, run beside them whatever it needs."""
    if url.startswith(SCHEME):
        from notify.sinks.delays.background import releasing

        return releasing(url)
    return contextlib.nullcontext()


def open_sink(url: str) -> Sink:
    """The destination of a URL: `http://…` of a queue server, `kafka://host:port,…` of brokers."""
    if url.startswith(SCHEME):
        from notify.sinks import kafka

        return kafka.KafkaSink(url)
    return QueueSink(url)
