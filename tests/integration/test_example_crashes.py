"""The FastAPI services of the documentation, as they stand there, are killed at each of their steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import httpx  # type: ignore[attr-defined]

from notify.client import create_tables, use_explicit_begin
from notify.testing import Exploration, Process, explore
from tests.support.clock import PATIENCE_SECONDS
from tests.support.databases import empty_database
from tests.support.pages import blocks

EXAMPLE = Path(__file__).parents[2] / "docs" / "example"


async def order(app: Any, path: str) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://shop") as client:
        (await client.post(path)).raise_for_status()


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Process], None]:
    """The service of docs/fastapi.md."""
    for block in blocks("fastapi.md", "python"):
        name = block.partition("\n")[0].removeprefix("# ")
        # On a loaded machine a half may be stored late.
        (tmp_path / name).write_text(block.replace("half_timeout=2", f"half_timeout={PATIENCE_SECONDS}"))
    monkeypatch.syspath_prepend(str(tmp_path))

    def service(process: Process) -> None:
        monkeypatch.setenv("NOTIFY_URL", process.url)
        monkeypatch.setenv("DATABASE_URL", process.database.replace("sqlite:", "sqlite+aiosqlite:"))
        models, shop, points = (process.load(name) for name in ("models", "shop", "points"))
        if process.engine.dialect.name == "sqlite":
            use_explicit_begin(shop.engine)
            use_explicit_begin(points.engine)
        models.Base.metadata.create_all(process.engine)
        create_tables(process.engine)
        process.run(shop.producer, points.consumer)
        process.act(order, shop.app, "/orders?item=book")

    return service


def careful(explored: Exploration) -> None:
    """No finding, after all that a service goes through."""
    assert explored.findings == () and explored.missed == (), explored
    for what in (
        "before INSERT INTO orders", "before the half of", "after the half of", "before COMMIT", "after COMMIT",
        "before the outcome of", "before the handler of", "before INSERT INTO points", "before ack", "after ack",
    ):  # fmt: skip
        assert any(step.what.startswith(what) for step in explored.steps), (what, explored.steps)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def test_the_service_of_the_page(
    page: Callable[[Process], None], kind: str, database_urls: Mapping[str, str], tmp_path: Path
) -> None:
    """The page is about PostgreSQL. On SQLite each run has a file of its own, and only a BEGIN is added."""
    rows = {"causes": "SELECT item FROM orders", "effects": "SELECT item FROM points"}
    with empty_database(kind, database_urls, tmp_path) as url:
        database = None if kind == "sqlite" else url
        careful(explore(page, **rows, database=database, seconds=PATIENCE_SECONDS))  # type: ignore[arg-type]


@pytest.mark.long
def test_the_example_service(database_urls: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))

    def service(process: Process) -> None:
        monkeypatch.setenv("SHOP_NOTIFY", process.url)
        monkeypatch.setenv("SHOP_DATABASE", process.database)
        api, points = process.load("shop.api"), process.load("shop.points")
        sys.modules["shop.models"].Base.metadata.create_all(process.engine)
        create_tables(process.engine)
        process.run(api.producer, points.consumer)
        process.act(order, api.app, "/orders?item=book&customer=7")

    rows = {"causes": "SELECT customer FROM orders", "effects": "SELECT customer FROM points WHERE points = 10"}
    with empty_database("postgresql", database_urls, tmp_path) as url:
        careful(explore(service, **rows, database=url, seconds=PATIENCE_SECONDS))  # type: ignore[arg-type]
