"""The protocols of a sink, the target to which a bridge or relay moves transactions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from notify.kafka.records import SCHEME
from notify.movers.sinks.queue_server import QueueSink
from notify.protocol.wire import Bridged, BridgedTransaction, Item, PackedBridgeBatch, RefusedReport

TRAILER_SECONDS = 10.0
"""How often a mover writes its position while nothing happens, so that the target shows that it runs."""


class Sink(Protocol):
    """A target. It stores a source's position, which becomes durable together with the messages before it."""

    async def claim(self, source: str, *, take_back: bool = True) -> tuple[int, str]:
        """Become the only writer for a source; the epoch, and the position to continue from ("": none yet).

        Without `take_back`, raises Conflict (`stale_epoch`) if another writer has claimed the source since this sink
        did.
        """
        ...

    async def position(self, source: str) -> str:
        """A source's position, "" if there is none yet; no writer is fenced."""
        ...

    async def append(self, source: str, batch: PackedBridgeBatch) -> Bridged:
        """Store a batch and its position, both or neither.

        If the answer has `refused` transactions, which will never be accepted, nothing is stored: the caller lists them
        and appends the rest. Raises Conflict if another writer has taken over, Unavailable if it is unknown whether the
        batch was stored.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class PutsById(Protocol):
    """A target that recognises ids: several movers may put the same transactions, and each one is stored once."""

    async def put(self, transactions: Sequence[BridgedTransaction], source: str = "") -> list[Item]:
        """Store committed transactions, each as a whole and once; an item for each transaction, in order.

        `source`: the id of the database that they come from, "" if it has none; it is stored with them.
        Status 200 or 201: it is stored. 429 or 5xx: put it again later; later transactions with one of its keys were
        not stored either. Another 4xx: it will never be accepted. Requests are cut to fit the target's bounds. Raises
        Unavailable if nothing is known of any transaction, Unauthorized or Forbidden.
        """
        ...


@runtime_checkable
class MayLackQueues(Protocol):
    """A target that may have no queues, and store messages in a database from which they have to be moved again."""

    async def check_queues(self) -> None:
        """Raises WrongRole if the target has no queues, Unavailable if it does not answer."""
        ...


@runtime_checkable
class ShowsRefused(Protocol):
    """A target that shows operators how many refused messages of a source wait for a decision."""

    async def show_refused(self, source: str, report: RefusedReport) -> None:
        """Raises Forbidden if this mover may not report for the source, and the errors of any request."""
        ...


@runtime_checkable
class HasPace(Protocol):
    """A target that may take only little at a time."""

    most_bytes: int
    """How many bytes of messages a batch should have at most. It changes."""


def pace_of(sink: Sink, most: int) -> Callable[[], int]:
    """Tells how many bytes of messages a batch for this target should have now. `most`: the most in any case."""
    return (lambda: min(most, sink.most_bytes)) if isinstance(sink, HasPace) else lambda: most


def is_server(url: str) -> bool:
    """Whether a target is a Notify server, which also keeps halves, and tells which ids it has."""
    return not url.startswith(SCHEME)


def running_beside(url: str) -> contextlib.AbstractContextManager[None]:
    """Run the background work of a target, while bridges and relays of this process move messages to it."""
    if not is_server(url):
        from notify.movers.sinks.delays.releaser import releasing

        return releasing(url)
    return contextlib.nullcontext()


def open_sink(url: str) -> Sink:
    """The target of a URL: `http://…` for a queue server, `kafka://host:port,…` for Kafka's brokers."""
    if not is_server(url):
        from notify.movers.sinks import kafka

        return kafka.KafkaSink(url)
    return QueueSink(url)
