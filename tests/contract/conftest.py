"""Each scenario runs on memory, on the log, and on a log of tiny segments that is killed at each restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage.store import (
    Topic,
)
from tests.contract.stores import T0, Bench, Scenario, SqlBench
from tests.support.databases import DATABASES, empty_database


@pytest.fixture(params=["memory", "log", "small-segments"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], None]:
    return runner(request.param, tmp_path)


def runner(kind: str, tmp_path: Path) -> Callable[[Scenario], None]:
    def call(scenario: Scenario) -> None:
        async def whole() -> None:
            bench = Bench(kind, tmp_path / "log")
            await bench.store.open(T0)
            await bench.store.create_topic(Topic("t"))
            try:
                await scenario(bench)
            finally:
                await bench.store.close()

        asyncio.run(whole())

    return call


@pytest.fixture(params=["memory", "log", "small-segments", *DATABASES])
def transactions(
    request: pytest.FixtureRequest, tmp_path: Path, database_urls: dict[str, str]
) -> Iterator[Callable[[Scenario], None]]:
    """As `run`, and on every database: for what concerns transactions only."""
    if request.param not in DATABASES:
        yield runner(request.param, tmp_path)
        return
    with empty_database(request.param, database_urls, tmp_path) as url:

        def call(scenario: Scenario) -> None:
            async def whole() -> None:
                bench = SqlBench(request.param, tmp_path, url)
                await bench.open()
                bench.store.create_topic_soon(Topic("t"))
                try:
                    await scenario(bench)
                finally:
                    await bench.store.close()

            asyncio.run(whole())

        yield call
