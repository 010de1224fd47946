"""The examples of the documentation, run as they stand there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Consumer, Inbox, Message, TransactionProducer, create_tables, use_explicit_begin
from notify.errors import Backpressure
from notify.protocol.message import ReceivedMessage
from notify.testing import Crashed, InMemoryServer, crashing
from notify.testing.ports import free_port
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.databases import empty_database
from tests.support.groups import publish, subscribe
from tests.support.http import admin, ask

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The code of a page, fence by fence."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def replaced(code: str, by: Mapping[str, str]) -> str:
    """The code with one text in place of another."""
    for old, new in by.items():
        code = code.replace(old, new)
    return code


def run(code: str, directory: Path, **names: Any) -> dict[str, Any]:
    before = os.getcwd()
    os.chdir(directory)
    try:
        exec(compile(code, "a page of the documentation", "exec", dont_inherit=True), names)
    finally:
        os.chdir(before)
    return names


@pytest.mark.long
def test_a_service_is_tested(tmp_path: Path) -> None:
    first, _, real, _, typed = blocks("testing.md", "python")
    run(first, tmp_path)["engine"].dispose()
    run(real, tmp_path)["test_a_message_survives_the_server"](tmp_path)
    names = run(typed, tmp_path)
    received = ReceivedMessage("i", "t", 0, 0, b'{"item": "book", "price": 7}', None, None, {}, 1, "")
    assert names["on_placed"](received) == 7


@pytest.mark.long
def test_a_service_is_killed_at_each_step(tmp_path: Path) -> None:
    """The example as a file of tests, for pytest and for `explore`."""
    marked, *_, plain = blocks("crashes.md", "python")
    (tmp_path / "test_shop.py").write_text(marked)
    words = ["pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:schemathesis", "test_shop.py"]
    done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    (tmp_path / "shop.py").write_text(marked + plain)
    done = subprocess.run([sys.executable, "shop.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[-1:] == ["no findings in 19 runs of 15 steps"], done


def test_a_service_is_tested_on_a_real_database(
    database_urls: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_TEST_POSTGRESQL", database_urls["postgresql"])
    engine = run(blocks("testing.md", "python")[3], tmp_path, sa=sa)["engine"]
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1
    engine.dispose()


@pytest.mark.long
def test_a_fastapi_service(notify_server: InMemoryServer, tmp_path: Path) -> None:
    from fastapi.testclient import TestClient

    notify_server.freeze()
    admin(notify_server.url, "PUT", "limits", {"producer_groups": {"shop": 1}})
    code = framework("fastapi", "import Session")
    names = run(code, tmp_path, NOTIFY_URL=notify_server.url)
    with TestClient(names["app"]) as client:
        assert client.post("/orders?item=book").json() == {"ordered": "book"}
        (message,) = notify_server.wait_for("order.placed", 1)
        assert message.json() == {"item": "book"}
        # The client sees that the half was refused: the order was not placed.
        with pytest.raises(Backpressure, match="nothing is committed"):
            client.post("/orders?item=pen")
    names["engine"].dispose()


@pytest.mark.long
def test_a_fastapi_service_crashes(notify_server: InMemoryServer, tmp_path: Path) -> None:
    names = run(framework("fastapi", "import Session"), tmp_path, NOTIFY_URL=notify_server.url)
    run(blocks("testing.md", "python")[1], tmp_path)["test_crashes"](names["app"], notify_server)
    names["engine"].dispose()


def test_a_fastapi_service_with_async_sessions(
    notify_server: InMemoryServer, database_urls: Mapping[str, str], tmp_path: Path
) -> None:
    """Also a transaction that an earlier process left in doubt: the producer answers before it has sent anything."""
    from fastapi.testclient import TestClient

    url = database_urls["postgresql"]
    before = sa.create_engine(url)
    create_tables(before)
    with TransactionProducer(notify_server.url, group="shop", engine=before, answer_checks=False) as dying:
        with contextlib.suppress(Crashed), crashing("after_local_commit"), Session(before) as session, session.begin():
            dying.send(session, Message("order.placed", {"item": "lamp"}))
    code = framework("fastapi", "import AsyncSession")
    names = run(code, tmp_path, NOTIFY_URL=notify_server.url, DATABASE_URL=url)
    with TestClient(names["app"]) as client:
        notify_server.advance(10)
        notify_server.wait_until_decided()
        assert client.post("/orders?item=book").json() == {"ordered": "book"}
        lamp, book = notify_server.wait_for("order.placed", 2)
    assert (lamp.json(), book.json(), book.key) == ({"item": "lamp"}, {"item": "book"}, "1")
    with before.connect() as connection:
        assert connection.exec_driver_sql("SELECT item FROM orders").fetchall() == [("book",)]
    before.dispose()


def framework(name: str, also: str = "") -> str:
    """The block of docs/frameworks.md that imports this framework, and has this text besides."""
    (code,) = [block for block in blocks("frameworks.md", "python") if f"from {name}" in block and also in block]
    return code


def test_a_flask_service(notify_server: InMemoryServer, tmp_path: Path) -> None:
    pytest.importorskip("flask_sqlalchemy", reason="Flask-SQLAlchemy is not installed: `make install` has it")
    notify_server.freeze()
    admin(notify_server.url, "PUT", "limits", {"producer_groups": {"shop": 1}})
    names = run(framework("flask"), tmp_path, NOTIFY_URL=notify_server.url)
    names["app"].testing = True  # an error of a path function is raised here
    client = names["app"].test_client()
    assert client.post("/orders?item=book").json == {"ordered": "book"}
    (message,) = notify_server.wait_for("order.placed", 1)
    assert (message.json(), message.key) == ({"item": "book"}, "1")
    with pytest.raises(Backpressure, match="nothing is committed"):
        client.post("/orders?item=pen")
    with names["app"].app_context():
        assert [order.item for order in names["db"].session.scalars(sa.select(names["Order"]))] == ["book"]
        names["db"].session.remove()
        names["producer"].close()
        names["db"].engine.dispose()


DJANGO_PROJECT = {
    "manage.py": """
import os, sys
from django.core.management import execute_from_command_line
os.environ["DJANGO_SETTINGS_MODULE"] = "shop_project.settings"
execute_from_command_line(sys.argv)
""",
    "shop_project/settings.py": """
import os
from pathlib import Path
NOTIFY_URL = os.environ["NOTIFY_URL"]
NAME = Path(__file__).parent / "shop.db"
OPTIONS = {"timeout": 60, "transaction_mode": "IMMEDIATE"}
TEST = {"NAME": Path(__file__).parent / "test.db"}
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": NAME, "OPTIONS": OPTIONS, "TEST": TEST}}
ROOT_URLCONF = "shop_project.urls"
SECRET_KEY, USE_TZ, DEFAULT_AUTO_FIELD = "of tests", True, "django.db.models.BigAutoField"
ALLOWED_HOSTS = ["testserver"]
""",
    "shop_project/urls.py": """
from django.urls import path
from shop.views import place
urlpatterns = [path("orders", place)]
""",
    "shop/models.py": """
from django.db import models
class Order(models.Model):
    item = models.TextField()
class Points(models.Model):
    item = models.TextField()
    amount = models.IntegerField()
""",
    "shop/__init__.py": "",
    "shop_project/__init__.py": "",
    "order_and_die.py": """
import os, signal
os.environ["DJANGO_SETTINGS_MODULE"] = "shop_project.settings"
import django
django.setup()
from django.core.management import call_command
from django.test import Client
from notify.testing import crashing
call_command("migrate", run_syncdb=True)
with crashing("after_local_commit", die=lambda _: os.kill(os.getpid(), signal.SIGKILL)):
    Client().post("/orders", {"item": "book"})
""",
}
"""The files that a Django project has besides the page's code, each block of which says where it belongs."""


@pytest.mark.long
def test_a_django_project(server: ServerProcess, tmp_path: Path) -> None:
    """It is migrated, tested, and killed at each of its steps; then a process dies between its commit and the outcome,
    another one answers the check, and a consumer handles the message."""
    pytest.importorskip("django", reason="Django is not installed: `make install` has it")
    files = dict(DJANGO_PROJECT)
    for block in blocks("frameworks.md", "python") + blocks("crashes.md", "python"):
        first, _, code = block.partition("\n")
        if first.startswith("# shop") and "/" in first:
            files[first[2:]] = files.get(first[2:], "") + code
    for name, code in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    subscribe(server.url, "points", "order.placed")
    environment = os.environ | {"NOTIFY_URL": server.url, "PYTHONPATH": str(DOCS.parent), "PYTHONUNBUFFERED": "1"}
    manage = [sys.executable, "manage.py"]

    def done(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)

    tested = done(*manage, "test")
    assert tested.returncode == 0 and "Ran 3 tests" in tested.stderr, tested.stderr
    killed = done(sys.executable, "order_and_die.py")
    assert killed.returncode == -signal.SIGKILL and "Applying notify.0001_tables... OK" in killed.stdout, killed.stderr
    commands = (["notify_check"], ["notify_consume", "shop.handlers.consumer"])
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [subprocess.Popen([*manage, *c], cwd=tmp_path, env=environment, **pipes) for c in commands]
    try:
        with closing(sqlite3.connect(tmp_path / "shop_project" / "shop.db", timeout=60)) as database:
            effects = "SELECT item, amount FROM shop_points"
            assert eventually(lambda: database.execute(effects).fetchall(), "the effect") == [("book", 10)]
    finally:
        for process in running:
            process.send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert "answers checks of group shop" in outputs[0]
    assert "consumer of group points" in outputs[1]


@pytest.mark.long
def test_with_curl_alone(notify_server: InMemoryServer, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    notify_server.freeze()
    (script,) = blocks("http.md", "bash")
    script = script.replace("http://127.0.0.1:7400", notify_server.url)
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"body":"a book"' in done.stdout and '"status":200' in done.stdout.splitlines()[-1]
    if shutil.which("node") is None:
        pytest.skip("the curl example ran; Node.js is not installed for the other")
    (script,) = blocks("http.md", "javascript")
    (tmp_path / "send.mjs").write_text(script)
    done = subprocess.run(["node", str(tmp_path / "send.mjs"), notify_server.url], capture_output=True, text=True)
    assert re.fullmatch(r"[0-9a-f-]{36}\.0\n", done.stdout), done.stderr


MODELS = """
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, mapped_column, sessionmaker


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id = mapped_column(sa.Integer, primary_key=True)
    item = mapped_column(sa.Text)


class Points(Base):
    __tablename__ = "points"
    id = mapped_column(sa.Integer, primary_key=True)
    order = mapped_column(sa.Text)
    amount = mapped_column(sa.Integer)
"""
"""The service's own models, which the pages take for granted."""


def stop_after_one(consumer: Consumer) -> None:
    """Stop a consumer from another thread once it has handled its first message."""

    def stop() -> None:
        try:
            eventually(lambda: consumer.handled >= 1, "the first message to be handled")
        finally:
            consumer.stop()

    threading.Thread(target=stop, daemon=True).start()


def test_the_tutorial(server: ServerProcess, tmp_path: Path) -> None:
    """Its files, each in a process of its own: an order, one whose process dies, and their points. Only the address,
    the topic and the consumer group are others, because other tests use the server, too."""
    own = {"http://127.0.0.1:7400": server.url, "order.placed": "tutorial.placed", 'group="points"': 'group="tutorial"'}
    *files, reads = [replaced(block, own) for block in blocks("tutorial.md", "python")]
    for code in files:
        (tmp_path / code.partition("\n")[0].removeprefix("# ")).write_text(code)
    environment = os.environ | {"PYTHONPATH": str(DOCS.parent), "PYTHONUNBUFFERED": "1"}
    at: dict[str, Any] = {"cwd": tmp_path, "env": environment}
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    assert subprocess.run([sys.executable, "place.py", "book"], **at).returncode == 0
    assert subprocess.run([sys.executable, "die.py"], **at).returncode == -signal.SIGKILL
    check = ["-m", "notify", "check", "--dsn", "sqlite:///shop.db", "--group", "orders", "--url", server.url]
    running = [subprocess.Popen([sys.executable, *words], **at, **piped) for words in (["points.py"], check)]
    try:
        with closing(sqlite3.connect(tmp_path / "shop.db", timeout=60)) as database:
            points = "SELECT item, amount FROM points ORDER BY id"
            eventually(lambda: len(database.execute(points).fetchall()) == 2, "the points")
            assert database.execute(points).fetchall() == [("book", 10), ("lamp", 10)]
    finally:
        for process in running:
            process.send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in running]
    assert "10 points for lamp" in outputs[0] and "answers checks of group orders" in outputs[1], outputs
    done = subprocess.run([sys.executable, "-c", reads], **at, **piped)
    assert done.stdout.splitlines() == ['0 {"item":"book"}', '1 {"item":"lamp"}']


def test_the_first_transaction(notify_server: InMemoryServer, tmp_path: Path) -> None:
    """The README's two files run as they stand, on SQLite and a server in memory."""
    at: Any = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(DOCS.parent)}}
    for name, code in zip(("place.py", "points.py"), blocks("../README.md", "python"), strict=True):
        (tmp_path / name).write_text(code.replace("http://127.0.0.1:7400", notify_server.url))
    subprocess.run([sys.executable, "place.py"], **at, check=True)
    consumer = subprocess.Popen([sys.executable, "points.py"], **at)
    try:
        with closing(sqlite3.connect(tmp_path / "shop.db", timeout=60)) as database:

            def points() -> list[Any]:
                made = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'points'").fetchone() == (1,)
                return database.execute("SELECT item FROM points").fetchall() if made else []

            eventually(lambda: points() == [("book",)], "the points")
            assert database.execute("SELECT item FROM orders").fetchall() == [("book",)]
    finally:
        consumer.send_signal(signal.SIGTERM)
        consumer.wait(PATIENCE_SECONDS)


def test_handlers_of_each_kind(notify_server: InMemoryServer, tmp_path: Path) -> None:
    """Handlers of single messages, typed ones, and those of batches: each handles the same message once."""
    publish(notify_server.url, "order.placed", ['{"item": "book", "price": 10}'])
    single, typed, batch = blocks("consumers.md", "python")
    names = run(f"{MODELS}\nengine = sa.create_engine('sqlite:///{tmp_path}/shop.db')", tmp_path)
    engine = names["engine"]
    use_explicit_begin(engine)
    create_tables(engine)
    names["Base"].metadata.create_all(engine)
    single = single.replace("http://127.0.0.1:7400", notify_server.url)
    single = single.replace("consumer.run()", "stop_after_one(consumer)\nconsumer.run(signals=False)")
    names = run(single, tmp_path, **names, stop_after_one=stop_after_one)
    for code in (typed, batch):
        consumer = Consumer(notify_server.url, group=f"points-{code.count('batch')}", inbox=Inbox(engine))
        code = code.replace('("order.placed"', '("order.placed", start="earliest"')
        names = run(code, tmp_path, **names | {"consumer": consumer})
        stop_after_one(consumer)
        consumer.run(signals=False)
    with engine.connect() as connection:
        effects = connection.exec_driver_sql('SELECT "order", amount FROM points ORDER BY id').fetchall()
    assert [tuple(row) for row in effects] == [(None, 10), ("book", 10), ("book", 10)]
    engine.dispose()


@pytest.mark.long
@pytest.mark.parametrize("is_own_process", [True, False])
def test_fastapi_and_postgresql_in_production(
    notify_server: InMemoryServer, database_urls: Mapping[str, str], tmp_path: Path, is_own_process: bool
) -> None:
    """Its three files run as they stand: an order and its points; 503 while the server is unreachable; SIGTERM."""
    at: dict[str, Any] = {"cwd": tmp_path}
    for code in blocks("fastapi.md", "python"):
        (tmp_path / code.partition("\n")[0].removeprefix("# ")).write_text(code)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with empty_database("postgresql", database_urls, tmp_path) as database:
        at["env"] = os.environ | {
            "DATABASE_URL": database,
            "NOTIFY_URL": notify_server.url,
            "PYTHONPATH": str(DOCS.parent),
            **({} if is_own_process else {"WITH_CONSUMER": "1"}),
        }
        subprocess.run([sys.executable, "models.py"], **at, check=True)
        running = [subprocess.Popen([sys.executable, "-m", "uvicorn", "shop:app", "--port", str(port)], **at)]
        if is_own_process:
            running.append(subprocess.Popen([sys.executable, "points.py"], **at))
        engine = sa.create_engine(database)
        try:
            eventually(lambda: answer(url, "GET", "/livez") == 200, "the application to answer")
            assert answer(url, "POST", "/orders?item=book") == 201
            eventually(lambda: items(engine, "points") == ["book"], "the points")
            with notify_server.down():
                assert answer(url, "POST", "/orders?item=pen") == 503
            assert items(engine, "orders") == ["book"]
        finally:
            for process in running:
                process.send_signal(signal.SIGTERM)
            ended = [process.wait(PATIENCE_SECONDS) for process in running]
            engine.dispose()
    assert ended in ([0], [0, 0]) or (ended[:1] == [-signal.SIGTERM] and ended[1:] in ([], [0]))


def answer(url: str, method: str, path: str) -> int:
    """The status of a request; 0 while nothing listens."""
    try:
        return ask(url, method, path)[0]
    except OSError:
        return 0


def items(engine: sa.Engine, table: str) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(sa.text(f"SELECT item FROM {table}")).scalars())
