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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from notify.client import create_tables
from notify.testing import InMemoryServer
from notify.testing.ports import free_port
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.shop import make_engine

ROOT = Path(__file__).parents[2]
SHOP = "tests.support.imported_shop"
TOPIC = "order.placed"


@pytest.fixture
def environment(frozen: InMemoryServer, tmp_path: Path) -> dict[str, str]:
    return shop_environment(frozen, f"sqlite:///{tmp_path}/shop.db")


def shop_environment(server: InMemoryServer, dsn: str) -> dict[str, str]:
    """The environment of a shop whose tables are made."""
    engine = make_engine(dsn)
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


USED = [server for server in SERVERS if server.values[0] is gunicorn]


def serve_orders(
    frozen: InMemoryServer, environment: dict[str, str], file: Path, program: Callable[..., list[str]], *options: str
) -> None:
    port, count = free_port(), 24
    with Program(program(port, *options), environment, file) as running:
        eventually(lambda: is_listening(port) or running.process.poll() is not None, "the server to listen")
        with ThreadPoolExecutor(4) as callers:
            answers = list(callers.map(lambda number: get(port, f"item{number}"), range(count)))
        assert [status for status, _ in answers] == [200] * count, (answers, running.output)
        wanted = {f"item{number}" for number in range(count)}
        eventually(lambda: {message.text for message in frozen.messages(TOPIC)} >= wanted, "the messages")
    sent = [message.id for message in frozen.messages(TOPIC)]
    assert len(set(sent)) == len(sent)


@pytest.mark.long
@pytest.mark.parametrize(("program", "options"), SERVERS)
def test_requests_commit_with_their_messages(
    frozen: InMemoryServer,
    environment: dict[str, str],
    tmp_path: Path,
    program: Callable[..., list[str]],
    options: tuple[str, ...],
) -> None:
    """Under uWSGI, whose forks call no hooks of Python's, no worker sent anything."""
    serve_orders(frozen, environment, tmp_path / "output", program, *options)


@pytest.mark.long
@pytest.mark.parametrize(("program", "options"), USED)
def test_a_producer_that_has_sent_before_the_fork_sends_after_it(
    frozen: InMemoryServer,
    environment: dict[str, str],
    tmp_path: Path,
    program: Callable[..., list[str]],
    options: tuple[str, ...],
) -> None:
    environment["SHOP_SENDS_AT_IMPORT"] = "1"
    serve_orders(frozen, environment, tmp_path / "output", program, *options)


@pytest.mark.long
def test_uwsgis_master_is_refused_in_one_sentence(environment: dict[str, str], tmp_path: Path) -> None:
    """It forks without Python's hooks: where a thread ran at that moment, now and then a worker hung for ever."""
    environment["SHOP_SENDS_AT_IMPORT"] = "1"
    with Program(uwsgi(free_port(), "--enable-threads"), environment, tmp_path / "output") as running:
        eventually(lambda: running.process.poll() is not None, "it to end")
    assert (
        "uWSGI forks its workers from this process, and a thread that runs at that moment may hang them: use the "
        "producer in the workers, or start uWSGI with lazy-apps = true" in running.output
    )


@pytest.mark.long
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


def run_green(server: InMemoryServer, tmp_path: Path, *words: str, dsn: str = "") -> dict[str, object]:
    installed(words[0])
    environment = shop_environment(server, dsn or f"sqlite:///{tmp_path}/shop.db")
    command = [sys.executable, "-m", "tests.support.green_shop", *words]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.long
@pytest.mark.parametrize("library", ["gevent", pytest.param("eventlet", marks=LONG)])
@pytest.mark.parametrize(
    ("when", "loop"),
    [
        ("before", "uvloop"),
        pytest.param("before", "asyncio", marks=LONG),
        pytest.param("after", "uvloop", marks=LONG),
        pytest.param("after", "asyncio", marks=LONG),
        pytest.param("made", "uvloop", marks=LONG),
    ],
)
def test_greenlets_send_consume_and_answer(tmp_path: Path, library: str, when: str, loop: str) -> None:
    if (library, when) == ("eventlet", "made"):
        pytest.skip("eventlet breaks the locks of SQLAlchemy's pool where they were made before")
    """With uvloop the first commit stopped all greenlets for ever, without it a consumer received nothing."""
    with InMemoryServer() as server:
        seen = run_green(server, tmp_path, library, when, loop)
    handled = seen["handled"]
    assert isinstance(handled, list) and sorted(handled) == sorted(f"{n}.{i}" for n in range(4) for i in range(3))
    assert seen["checked"] == "undecided"
    assert (seen["left"], seen["loops"], seen["is_consuming"]) == ([], [], False)
    assert seen["ticks"], "the other greenlets ran meanwhile"


def celery(*options: str) -> list[str]:
    installed("celery")
    return [
        *(sys.executable, "-m", "celery", "--quiet", "--app", f"{SHOP}:celery", "worker", "--loglevel", "WARNING"),
        *("--concurrency", "2", "--without-gossip", "--without-mingle", "--without-heartbeat", *options),
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "pool",
    [
        "prefork",
        pytest.param("threads", marks=LONG),
        pytest.param("gevent", marks=LONG),
        pytest.param("eventlet", marks=LONG),
        pytest.param("solo", marks=LONG),
    ],
)
def test_tasks_of_celery_commit_with_their_messages(
    frozen: InMemoryServer, environment: dict[str, str], tmp_path: Path, pool: str
) -> None:
    if pool in ("gevent", "eventlet"):
        installed(pool)
    queue = tmp_path / "queue"
    queue.mkdir()
    environment["SHOP_QUEUE"] = str(queue)
    words = celery("--pool", pool)
    call = f"from {SHOP} import order; [order.delay(f'item{{n}}') for n in range(12)]"
    subprocess.run([sys.executable, "-c", call], env=environment, cwd=ROOT, check=True, timeout=PATIENCE_SECONDS)
    wanted = {f"item{number}" for number in range(12)}
    with Program(words, environment, tmp_path / "output") as running:
        eventually(
            lambda: (
                {message.text for message in frozen.messages(TOPIC)} >= wanted or running.process.poll() is not None
            ),
            "the messages",
        )
        assert running.process.poll() is None, running.output
    assert len(frozen.messages(TOPIC)) == 12


FORKING = """
import multiprocessing, os, sys
from tests.support.imported_shop import place, producer

def work(name):
    for n in range(4):
        place(f"{name}.{n}")
    left = producer.flush(60)
    assert left == [], left

if __name__ == "__main__":
    how = sys.argv[1]
    place("before")
    if how == "os.fork":
        children = []
        for number in range(3):
            child = os.fork()
            if not child:
                work(number)
                os._exit(0)
            children.append(child)
        work("parent")
        codes = [os.waitpid(child, 0)[1] for child in children]
    else:
        context = multiprocessing.get_context(how)
        children = [context.Process(target=work, args=(number,)) for number in range(3)]
        for child in children:
            child.start()
        work("parent")
        for child in children:
            child.join()
        codes = [child.exitcode for child in children]
    assert codes == [0] * 3, codes
    os.posix_spawn("/bin/true", ["true"], {})
    work("after")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "how", ["os.fork", "fork", pytest.param("spawn", marks=LONG), pytest.param("forkserver", marks=LONG)]
)
def test_parent_and_children_send(
    frozen: InMemoryServer, environment: dict[str, str], tmp_path: Path, how: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FORKING)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(script), how]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    wanted = {f"{name}.{n}" for name in (0, 1, 2, "parent", "after") for n in range(4)}
    found = [message.text for message in frozen.messages(TOPIC) if message.text != "before"]
    assert sorted(found) == sorted(wanted)


SHARING = """
import os, sys, time
import sqlalchemy as sa
from tests.support.imported_shop import engine, place, producer

def session():
    name = "pg_backend_pid()" if engine.dialect.name == "postgresql" else "connection_id()"
    with engine.connect() as connection:
        return str(connection.scalar(sa.text(f"SELECT {name}")))

end = time.monotonic() + 60
while not engine.pool.checkedin() and time.monotonic() < end:
    time.sleep(0.01)  # until the producer's thread has left a connection in the pool
children = []
for number in range(2):
    reading, writing = os.pipe()
    if not (child := os.fork()):
        place(f"child {number}")
        os.write(writing, session().encode())
        producer.close()  # its outcome is sent
        os._exit(0)
    children.append((child, reading))
sessions = [session()] + [os.read(reading, 100).decode() for _, reading in children]
codes = [os.waitpid(child, 0)[1] for child, _ in children]
place("parent")
sessions.append(session())
print(codes, len(set(sessions[:3])), sessions[0] == sessions[3])
"""


@pytest.mark.long
@pytest.mark.parametrize("database", ["postgresql", "mysql"])
def test_children_do_not_get_the_connections_of_the_producers_threads(
    frozen: InMemoryServer, engine_url: str, tmp_path: Path
) -> None:
    """The service had not used its engine before the fork, but the producer's thread had: parent and children then had
    one session of the database."""
    environment = shop_environment(frozen, engine_url)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SHARING]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS
    )
    assert done.stdout == "[0, 0] 3 True\n", done.stdout + done.stderr
    frozen.wait_for(TOPIC, 3, PATIENCE_SECONDS)


@pytest.mark.long
@pytest.mark.parametrize("database", ["postgresql", "mysql"])
@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_greenlets_with_drivers_of_servers(engine_url: str, tmp_path: Path, library: str) -> None:
    with InMemoryServer() as server:
        seen = run_green(server, tmp_path, library, "before", "uvloop", dsn=engine_url)
    assert (seen["checked"], seen["left"], seen["loops"], seen["is_consuming"]) == ("undecided", [], [], False)


@pytest.mark.long
@pytest.mark.parametrize("database", ["postgresql", "mysql"])
@pytest.mark.parametrize(("program", "options"), SERVERS)
def test_requests_on_a_servers_database(
    frozen: InMemoryServer, engine_url: str, tmp_path: Path, program: Callable[..., list[str]], options: tuple[str, ...]
) -> None:
    serve_orders(frozen, shop_environment(frozen, engine_url), tmp_path / "output", program, *options)


@pytest.mark.long
@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=LONG), pytest.param("forkserver", marks=LONG)])
def test_a_child_that_ends_right_after_its_commit_sends_the_outcome(
    frozen: InMemoryServer, environment: dict[str, str], tmp_path: Path, how: str
) -> None:
    """A child of `multiprocessing` ends without the functions of atexit: its outcome was left to a check."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "from tests.support.imported_shop import place\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context(sys.argv[1])\n"
        "    for number in range(3):\n"
        "        child = context.Process(target=place, args=(str(number),))\n"
        "        child.start()\n"
        "        child.join()\n"
    )
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(script), how]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert sorted(message.text for message in frozen.messages(TOPIC)) == ["0", "1", "2"]


@pytest.mark.long
@pytest.mark.parametrize("made", ["TransactionProducer(url, group='g').publish(Message('t', 'x'))", "Reader(url)"])
def test_sockets_without_threads_are_refused_in_one_sentence(made: str) -> None:
    """A thread of the system would wait on sockets of another thread's greenlets."""
    installed("gevent")
    program = (
        "from gevent import monkey\n"
        "monkey.patch_all(thread=False)\n"
        "from notify.client import Message, Reader, TransactionProducer\n"
        "url = 'http://127.0.0.1:9'\n"
        f"{made}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert done.stderr.splitlines()[-1] == (
        "notify.errors.BindingRefused: gevent or eventlet has patched the sockets of this process, but not its "
        "threads: let it patch both"
    )
