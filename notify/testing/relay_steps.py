"""The relay of a process in the crash explorer, and its steps: it sends a page of transactions, and marks them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from notify.movers.relay.relay import Relay
from notify.movers.relay.rows import Rows
from notify.movers.sinks.queue_server import QueueSink
from notify.testing.steps import HOOKS, Watched, at_place, meet, topics_of

INTERVAL_SECONDS = 0.05
"""The pause between two looks where no commit wakes the relay: each run of an exploration waits for it."""


async def relay(run: Watched, engine: Any, schema: str | None) -> None:
    """Move what waits in a database to the server of a run, until cancelled."""
    HOOKS.wrap(WRAPPED)
    await Relay(engine, run.url, schema=schema).run(interval=INTERVAL_SECONDS)


def _put(hooks: Any, original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def put(self: QueueSink, transactions: Sequence[Any], source: str = "") -> Any:
        run = hooks.run_of(self._http.url)
        if run is None:
            return await original(self, transactions, source)
        topics = topics_of([message for transaction in transactions for message in transaction.messages])
        meet(run, f"before the relay sends {topics}", run.relay_place)
        items = await original(self, transactions, source)
        meet(run, f"after the relay has sent {topics}", run.relay_place)
        return items

    return put


def _note(hooks: Any, original: Callable[..., None]) -> Callable[..., None]:
    def note(self: Rows, *given: Any) -> None:
        run = hooks.owner_of(self._engine.dialect)
        with at_place(None if run is None else run.relay_place):
            original(self, *given)

    return note


WRAPPED = ((QueueSink, "put", _put), (Rows, "note", _note))
