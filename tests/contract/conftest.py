"""Each scenario runs on memory, on the log, and on a log of tiny segments that is killed at each restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.store import (
    Topic,
)
from tests.contract.stores import T0, Bench, Scenario


@pytest.fixture(params=["memory", "log", "small-segments"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], None]:
    def call(scenario: Scenario) -> None:
        async def whole() -> None:
            bench = Bench(request.param, tmp_path / "log")
            await bench.store.open(T0)
            await bench.store.create_topic(Topic("t"))
            try:
                await scenario(bench)
            finally:
                await bench.store.close()

        asyncio.run(whole())

    return call
