"""The FastAPI services of the documentation, as they stand there, are killed at each of their steps."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from notify.client import create_tables, use_explicit_begin
from notify.testing import Exploration, Process, explore
from tests.support.clock import PATIENCE_SECONDS
from tests.support.databases import empty_database
from tests.support.pages import blocks

EXAMPLE = Path(__file__).parents[2] / "docs" / "example"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the service of docs/fastapi.md."""
    for block in blocks("fastapi.md", "python"):
        name = block.partition("\n")[0].removeprefix("# ")
        # On a loaded machine a half may be stored late.
        (tmp_path / name).write_text(block.replace("half_timeout=2", f"half_timeout={PATIENCE_SECONDS}"))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("DATABASE_URL", "NOTIFY_URL"):
        monkeypatch.setenv(name, "set by the test of the page")
    return tmp_path


def _test_of(code: str) -> Any:
    """The test of a page's code."""
    names: dict[str, Any] = {"use_explicit_begin": use_explicit_begin}
    exec(compile(code, "a page of the documentation", "exec", dont_inherit=True), names)
    return next(value for name, value in names.items() if name.startswith("test_"))


def careful(explored: Exploration) -> None:
    """No finding, after all that a service goes through."""
    assert explored.findings == () and explored.missed == (), explored
    for what in (
        "before INSERT INTO orders", "before the half of", "after the half of", "before COMMIT", "after COMMIT",
        "before the outcome of", "before the handler of", "before INSERT INTO points", "before ack", "after ack",
    ):  # fmt: skip
        assert any(step.what.startswith(what) for step in explored.steps), (what, explored.steps)


ON_SQLITE = {
    "notify_process.database,": 'notify_process.database.replace("sqlite:", "sqlite+aiosqlite:"),',
    "    models.Base": "    use_explicit_begin(shop.engine)\n    use_explicit_begin(points.engine)\n    models.Base",
}
"""The page is about PostgreSQL: on SQLite the engines need another driver, and an explicit BEGIN."""


@pytest.mark.long  # test_explorer.py and test_django_crashes.py kill services like it
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_the_service_of_the_page(page: Path, kind: str, database_urls: Mapping[str, str], tmp_path: Path) -> None:
    (code,) = [block for block in blocks("crashes.md", "python") if block.startswith("# test_crashes.py")]
    for old, new in ON_SQLITE.items() if kind == "sqlite" else ():
        assert code.count(old) == 1
        code = code.replace(old, new)
    test = _test_of(code)
    (mark,) = test.pytestmark
    with empty_database(kind, database_urls, tmp_path) as url:
        options = mark.kwargs | {"database": None if kind == "sqlite" else url, "seconds": PATIENCE_SECONDS}
        careful(explore(lambda process: test(process, url), **options))


async def order(app: Any) -> None:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://shop") as client:
        (await client.post("/orders?item=book&customer=7")).raise_for_status()


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
        process.act(order, api.app)

    rows = {"causes": "SELECT customer FROM orders", "effects": "SELECT customer FROM points WHERE points = 10"}
    with empty_database("postgresql", database_urls, tmp_path) as url:
        careful(explore(service, **rows, database=url, seconds=PATIENCE_SECONDS))  # type: ignore[arg-type]
