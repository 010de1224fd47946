"""A store in a database, and two databases of which each is a shard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

from notify.runtime.clock import wall_clock
from notify.storage.sql.store import SqlStore
from tests.support.databases import empty_database
from tests.support.servers import make_storage


def use(url: str, scenario: Callable[[SqlStore], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a scenario with a store that is open, and close the store."""

    async def whole() -> None:
        store = SqlStore(url, **options)
        await store.open(wall_clock())
        try:
            await scenario(store)
        finally:
            await store.close()

    asyncio.run(whole())


@contextlib.contextmanager
def two_shards(database_urls: Mapping[str, str], directory: Path) -> Iterator[tuple[str, str]]:
    """The URLs of the shards `a`, on PostgreSQL, and `b`, on MariaDB, both empty."""
    with (
        empty_database("postgresql", database_urls, directory) as a,
        empty_database("mariadb", database_urls, directory) as b,
    ):
        make_storage(a, "a")
        make_storage(b, "b")
        yield a, b
