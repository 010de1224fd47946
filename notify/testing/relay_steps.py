"""The relay of a process in the crash explorer, and its steps: it sends a page of transactions, and marks them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from notify.kafka.records import SCHEME
from notify.movers.relay.relay import Relay
from notify.movers.relay.rows import Rows
from notify.movers.sinks.queue_server import QueueSink
from notify.testing.hooks import HOOKS, topics_of
from notify.testing.step import Watched, at_place, meet

T = TypeVar("T")
INTERVAL_SECONDS = 0.05
"""The pause between two looks where no commit wakes the relay: each run of an exploration waits for it."""


_run: ContextVar[Watched | None] = ContextVar("run", default=None)
"""The run whose relay this task or thread is busy for."""


async def relay(run: Watched, engine: Any, url: str, schema: str | None) -> None:
    """Move what waits in a database to a server, or to Kafka, until cancelled."""
    HOOKS.wrap(WRAPPED)
    if url.startswith(SCHEME):
        from notify.movers.sinks.kafka import KafkaSink

        HOOKS.wrap(((KafkaSink, "append", _append),))
    _run.set(run)
    await Relay(engine, url, schema=schema).run(interval=INTERVAL_SECONDS)


async def _sending(transactions: Sequence[Any], send: Callable[[], Awaitable[T]]) -> T:
    run = _run.get()
    if run is None or not transactions:
        return await send()
    topics = topics_of([message for transaction in transactions for message in transaction.messages])
    meet(run, f"before the relay sends {topics}", run.relay_place)
    answer = await send()
    meet(run, f"after the relay has sent {topics}", run.relay_place)
    return answer


def _put(hooks: Any, original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def put(self: QueueSink, transactions: Sequence[Any], source: str = "") -> Any:
        return await _sending(transactions, lambda: original(self, transactions, source))

    return put


def _append(hooks: Any, original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def append(self: Any, source: str, batch: Any) -> Any:
        return await _sending(batch.transactions, lambda: original(self, source, batch))

    return append


def _note(hooks: Any, original: Callable[..., None]) -> Callable[..., None]:
    def note(self: Rows, *given: Any) -> None:
        run = _run.get()
        with at_place(None if run is None else run.relay_place):
            original(self, *given)

    return note


WRAPPED = ((QueueSink, "put", _put), (Rows, "note", _note))
