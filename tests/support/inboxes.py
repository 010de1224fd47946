"""An inbox as handlers may have it: of threads or of coroutines, for single messages or for batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Inbox, ReceivedMessage
from tests.support.shop import make_async_engine


@dataclass(frozen=True)
class Way:
    """One of these ways."""

    name: str
    is_async: bool = False
    in_batches: bool = False

    def run(
        self,
        engine: sa.Engine,
        group: str,
        message: ReceivedMessage,
        handle: Callable[[ReceivedMessage, Session], object],
        **options: Any,
    ) -> bool:
        """Handle a message; whether that was done now. `options` are those of an engine for coroutines."""
        if self.is_async:
            return asyncio.run(self._run_async(engine, group, message, handle, options))
        if self.in_batches:
            return Inbox(engine).run_batch(group, [message], lambda given, session: handle(given[0], session)) == 1
        return Inbox(engine).run(group, message, handle)

    async def _run_async(
        self,
        engine: sa.Engine,
        group: str,
        message: ReceivedMessage,
        handle: Callable[[ReceivedMessage, Session], object],
        options: dict[str, Any],
    ) -> bool:
        async def handle_one(given: ReceivedMessage, session: Any) -> None:
            await session.run_sync(lambda session: handle(given, session))

        async def handle_batch(given: list[ReceivedMessage], session: Any) -> None:
            await handle_one(given[0], session)

        pool = make_async_engine(engine.url, **options)
        try:
            if self.in_batches:
                return await Inbox(pool).run_batch_async(group, [message], handle_batch) == 1
            return await Inbox(pool).run_async(group, message, handle_one)
        finally:
            await pool.dispose()


SINGLE, BATCH = Way("single"), Way("batch", in_batches=True)
ASYNC, ASYNC_BATCH = Way("coroutine", is_async=True), Way("batch of coroutines", is_async=True, in_batches=True)


def each_way(*ways: Way | Any) -> pytest.MarkDecorator:
    """Run a test with each of these as `way`."""
    return pytest.mark.parametrize("way", ways, ids=lambda way: way.name)
