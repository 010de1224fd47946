"""The record of running parts exists from start to stop; a start that fails half-way leaves nothing open."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from notify.errors import NotifyError, Unavailable
from notify.server.app import App
from notify.server.data.request import PROBES, Request
from notify.settings import Settings
from notify.storage.memory import MemoryStore


class Watched:
    """A store in memory that notes whether it is open, and whether it ever was."""

    is_open = was_open = False

    def __init__(self) -> None:
        self._store = MemoryStore()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def open(self, now_us: int) -> None:
        await self._store.open(now_us)
        self.is_open = self.was_open = True

    async def close(self) -> None:
        self.is_open = False
        await self._store.close()


async def status(app: App, path: str) -> int:
    request = Request("GET", path, b"", [])
    return (app.probed(request) if path in PROBES else await app.data.answer(request)).status


def test_what_runs_is_there_between_start_and_stop(tmp_path: Path) -> None:
    async def run() -> None:
        store = Watched()
        app = App(Settings(data_dir=str(tmp_path)), lambda: store)

        async def check_nothing_runs() -> None:
            with pytest.raises(Unavailable, match="starting or stopping"):
                app.running()
            assert app.running_or_none() is None and app.access is None
            assert await status(app, "/v1/members") == 503
            assert [await status(app, path) for path in PROBES] == [200, 503]

        await check_nothing_runs()
        await app.start()
        assert store.is_open and app.running().core.store is store
        assert app.access is app.running().administration.access
        assert [await status(app, path) for path in PROBES] == [200, 200]
        tasks = asyncio.all_tasks()
        assert len(tasks) > 1
        await app.stop()
        await check_nothing_runs()
        assert not store.is_open and asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


@pytest.mark.parametrize(
    "given", [{"registry": "sqlite:///{0}/no-registry.db"}, {"data_dir": "{0}/no-directory"}], ids=["registry", "data"]
)
def test_a_start_that_fails_half_way_stops_what_had_started(tmp_path: Path, given: dict[str, str]) -> None:
    async def run() -> None:
        store = Watched()
        filled = {name: text.format(tmp_path) for name, text in given.items()}
        app = App(Settings(**{"data_dir": str(tmp_path)} | filled), lambda: store)  # type: ignore[arg-type]
        with pytest.raises((NotifyError, OSError)):
            await app.start()
        assert store.was_open and not store.is_open and app.running_or_none() is None
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await app.stop()

    asyncio.run(run())
