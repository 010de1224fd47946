"""A producer that is made at import, in the real programs that import it, fork, and replace threads by greenlets."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from notify.client import create_tables
from notify.testing import InMemoryServer
from notify.testing.ports import free_port
from tests.support.clock import PATIENCE_SECONDS, eventually

ROOT = Path(__file__).parents[2]
SHOP = "tests.support.imported_shop"
TOPIC = "order.placed"


@pytest.fixture
def frozen() -> Iterator[InMemoryServer]:
    """A server whose clock stands still, so that no check finds an outcome that was not sent."""
    with InMemoryServer() as server:
        server.freeze()
        yield server


@pytest.fixture
def environment(frozen: InMemoryServer, tmp_path: Path) -> dict[str, str]:
    return shop_environment(frozen, f"sqlite:///{tmp_path}/shop.db")


def shop_environment(server: InMemoryServer, dsn: str) -> dict[str, str]:
    """The environment of a shop whose tables are made."""
    engine = sa.create_engine(dsn)
    create_tables(engine)
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE IF EXISTS orders"))
        connection.execute(sa.text("CREATE TABLE orders (item VARCHAR(40))"))
    engine.dispose()
    return {**os.environ, "PYTHONPATH": str(ROOT), "SHOP_SERVER": server.url, "SHOP_DATABASE": dsn}


class Program:
    """A program that runs until the end of the context; `output` is what it has said."""

    def __init__(self, words: Sequence[str], environment: dict[str, str], file: Path) -> None:
        self._words, self._environment, self._file = words, environment, file

    @property
    def output(self) -> str:
        return self._file.read_text(errors="replace")

    def __enter__(self) -> Program:
        with self._file.open("wb") as out:
            self.process = subprocess.Popen(
                self._words, env=self._environment, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
            )
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()


def installed(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def get(port: int, item: str) -> tuple[int, str]:
    """Status and body of the answer to an order."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/?{item}", timeout=PATIENCE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False


def items(server: InMemoryServer, count: int) -> list[str]:
    return sorted(message.text for message in server.wait_for(TOPIC, count, PATIENCE_SECONDS))


def gunicorn(port: int, *options: str) -> list[str]:
    installed("gunicorn")
    return [
        *(sys.executable, "-m", "gunicorn", f"{SHOP}:application", "--bind", f"127.0.0.1:{port}"),
        *("--workers", "2", "--worker-tmp-dir", "/dev/shm", *options),
    ]


def uwsgi(port: int, *options: str) -> list[str]:
    installed("pyuwsgi")
    return [
        *(sys.executable, "-c", "import pyuwsgi; pyuwsgi.run()", "--http-socket", f"127.0.0.1:{port}", "--master"),
        *("--need-app", "--die-on-term", "--processes", "2", "--module", f"{SHOP}:application", *options),
    ]


LONG = pytest.mark.long
SERVERS = [
    pytest.param(gunicorn, (), id="gunicorn", marks=LONG),
    pytest.param(gunicorn, ("--preload",), id="gunicorn preload"),
    pytest.param(gunicorn, ("--preload", "-k", "gthread", "--threads", "4"), id="gunicorn gthread", marks=LONG),
    pytest.param(gunicorn, ("-k", "gevent"), id="gunicorn gevent", marks=LONG),
    pytest.param(gunicorn, ("--preload", "-k", "gevent"), id="gunicorn gevent preload"),
    pytest.param(uwsgi, ("--enable-threads",), id="uwsgi"),
    pytest.param(uwsgi, ("--enable-threads", "--lazy-apps"), id="uwsgi lazy-apps", marks=LONG),
    pytest.param(uwsgi, ("--threads", "4"), id="uwsgi threads", marks=LONG),
    pytest.param(uwsgi, ("--enable-threads", "--py-call-osafterfork"), id="uwsgi osafterfork", marks=LONG),
    pytest.param(uwsgi, ("--enable-threads", "--py-call-uwsgi-fork-hooks"), id="uwsgi fork hooks", marks=LONG),
]


@pytest.mark.parametrize(("program", "options"), SERVERS)
@pytest.mark.parametrize("at_import", [pytest.param(False, id="made"), pytest.param(True, id="used", marks=LONG)])
def test_requests_commit_with_their_messages(
    frozen: InMemoryServer,
    environment: dict[str, str],
    tmp_path: Path,
    program: Callable[..., list[str]],
    options: tuple[str, ...],
    at_import: bool,
) -> None:
    """Under uWSGI, whose forks call no hooks of Python's, no worker sent anything."""
    port, count = free_port(), 24
    if at_import:
        environment["SHOP_SENDS_AT_IMPORT"] = "1"
    with Program(program(port, *options), environment, tmp_path / "output") as running:
        eventually(lambda: is_listening(port) or running.process.poll() is not None, "the server to listen")
        with ThreadPoolExecutor(4) as callers:
            answers = list(callers.map(lambda number: get(port, f"item {number}".replace(" ", "")), range(count)))
        assert [status for status, _ in answers] == [200] * count, (answers, running.output)
        frozen.wait_for(TOPIC, count, PATIENCE_SECONDS)
    found = {message.text for message in frozen.messages(TOPIC)}
    assert found >= {f"item{number}" for number in range(count)}, running.output
    assert len(frozen.messages(TOPIC)) == len({message.id for message in frozen.messages(TOPIC)})


def test_uwsgi_without_threads_is_refused_in_one_sentence(environment: dict[str, str], tmp_path: Path) -> None:
    """Its threads run only during a request: outcomes waited for the next one, and no check was answered."""
    port = free_port()
    with Program(uwsgi(port), environment, tmp_path / "output") as running:
        eventually(lambda: is_listening(port) or running.process.poll() is not None, "the server to listen")
        status, said = get(port, "book")
    assert status == 500 and said == (
        "TransactionRefused: the half message was not stored, so nothing is committed: uWSGI stops Python's threads "
        "between requests: start it with enable-threads = true"
    )


def run_green(server: InMemoryServer, tmp_path: Path, *words: str) -> dict[str, object]:
    installed(words[0])
    environment = shop_environment(server, f"sqlite:///{tmp_path}/shop.db")
    command = [sys.executable, "-m", "tests.support.green_shop", *words]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
@pytest.mark.parametrize(
    ("when", "loop"),
    [
        ("before", "uvloop"),
        pytest.param("before", "asyncio", marks=LONG),
        pytest.param("after", "uvloop", marks=LONG),
        pytest.param("after", "asyncio", marks=LONG),
        pytest.param("made", "uvloop", marks=LONG),
        pytest.param("made", "asyncio", marks=LONG),
    ],
)
def test_greenlets_send_consume_and_answer(tmp_path: Path, library: str, when: str, loop: str) -> None:
    """With uvloop the first commit stopped all greenlets for ever, without it a consumer received nothing."""
    with InMemoryServer() as server:
        seen = run_green(server, tmp_path, library, when, loop)
    handled = seen["handled"]
    assert isinstance(handled, list) and sorted(handled) == sorted(f"{n}.{i}" for n in range(4) for i in range(3))
    assert seen["checked"] == "undecided"
    assert (seen["left"], seen["loops"], seen["is_consuming"]) == ([], [], False)
    assert seen["ticks"], "the other greenlets ran meanwhile"
