"""The example service of the documentation, as it is: its migrations, its own tests, and its processes, one killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from notify.testing.ports import free_port
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.databases import empty_database
from tests.support.groups import is_subscribed
from tests.support.http import ask

EXAMPLE = Path(__file__).parents[2] / "docs" / "example"


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
