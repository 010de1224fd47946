"""The examples of the documentation, as they stand there: the service with its migrations, its own tests and its
processes, which are killed; and those in other languages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from notify.client import create_tables, use_explicit_begin
from notify.errors import Unavailable
from notify.runtime.maven import fetched
from notify.testing import Exploration, InMemoryServer, Process, explore
from notify.testing.ports import free_port
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.databases import empty_database
from tests.support.groups import is_subscribed
from tests.support.http import admin, ask
from tests.support.pages import blocks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "example"


@pytest.fixture
def service(tmp_path: Path, database_urls: Mapping[str, str]) -> Iterator[tuple[Path, dict[str, str]]]:
    """A copy of the service, and its environment with an empty database."""
    directory = tmp_path / "example"
    shutil.copytree(EXAMPLE, directory)
    with empty_database("postgresql", database_urls, tmp_path) as url:
        yield directory, os.environ | {"SHOP_DATABASE": url, "PYTHONPATH": str(EXAMPLE.parents[1])}


def run(words: list[str], service: tuple[Path, dict[str, str]]) -> str:
    directory, environment = service
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_tests_pass(service: tuple[Path, dict[str, str]]) -> None:
    """Its settings of pytest alone hold there, as in a copy of a reader's own."""
    said = run(["pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:schemathesis"], service)
    assert "4 passed" in said


@pytest.mark.long
def test_points_are_booked_once_although_the_consumer_is_killed(
    service: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    directory, environment = service
    server = ServerProcess(tmp_path / "data").start()
    environment |= {"SHOP_NOTIFY": server.url}
    run(["alembic", "upgrade", "head"], service)
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def start(*words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", *words], cwd=directory, env=environment)

    def answers() -> bool:
        try:
            return bool(ask(url, "GET", "/points/7")[0] == 200)
        except OSError:
            return False

    api, consumer = start("uvicorn", "shop.api:app", "--port", str(port)), start("shop.points")
    try:
        eventually(answers, "the application to answer")
        eventually(lambda: is_subscribed(server.url, "points"), "the consumer to subscribe")
        for n in range(20):
            assert ask(url, "POST", "/orders?item=book&customer=7")[0] == 200
            if n == 10:
                consumer.kill()
                consumer.wait(PATIENCE_SECONDS)
        consumer = start("shop.points")
        eventually(lambda: ask(url, "GET", "/points/7")[1] == {"points": 200}, "the points of 20 orders")
    finally:
        for process in (api, consumer):
            process.terminate()
            process.wait(PATIENCE_SECONDS)
        server.stop()


# --- killed at each of their steps --------------------------------------------------------------------------------


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


# --- other languages: half, commit, check and consume without the SDK, each with its own toolchain ----------------


EXAMPLES = ROOT / "docs" / "languages"
ID_CHARACTERS = 36
"""Drafts of a file have longer names."""
STATES = {"COMMIT": "COMMITTED", "ROLLBACK": "ROLLED_BACK"}
JARS = ROOT / ".venv" / "gson"


def node(scratch: Path) -> list[str]:
    return ["node", str(EXAMPLES / "shop.mjs")]


def go(scratch: Path) -> list[str]:
    """It compiles Go's library as well, which takes 40 s of CPU on a new machine."""
    subprocess.run(
        ["go", "build", "-o", str(scratch / "shop"), str(EXAMPLES / "shop.go")],
        check=True, timeout=5 * PATIENCE_SECONDS,
        env=os.environ | {"GOCACHE": str(scratch / "cache"), "GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local"},
    )  # fmt: skip
    return [str(scratch / "shop")]


def java(scratch: Path) -> list[str]:
    try:
        jars = fetched(EXAMPLES / "pom.xml", JARS, "gson-*.jar", "Gson")
    except Unavailable as reason:
        pytest.skip(str(reason))
    return ["java", "-cp", f"{jars}/*", str(EXAMPLES / "Shop.java")]


@pytest.mark.long
@pytest.mark.parametrize(
    "program", [node, pytest.param(java, marks=pytest.mark.long), pytest.param(go, marks=pytest.mark.long)]
)
def test_half_commit_check_consume(program: Callable[[Path], list[str]], tmp_path: Path) -> None:
    """The outcome of one order is told; of the others one is committed and one rolled back, by answers to checks."""
    name = program.__name__
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    words = program(tmp_path)
    with InMemoryServer() as server:
        done = subprocess.run(
            [*words, server.url, str(tmp_path / "data")],
            capture_output=True, text=True, timeout=3 * PATIENCE_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.split("\n")) == ["", "points for book", "points for lamp"]
        transactions = sorted((tmp_path / "data" / "transactions").iterdir())
        decided = {row.name: row.read_text() for row in transactions if len(row.name) == ID_CHARACTERS}
        states = {row: admin(server.url, "GET", f"transactions/{row}")["state"] for row in decided}
    assert sorted(decided.values()) == ["COMMIT", "COMMIT", "ROLLBACK"]
    assert states == {row: STATES[outcome] for row, outcome in decided.items()}
