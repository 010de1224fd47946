"""Commands, server and pytest plugin start without the drivers and libraries of the extras."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from notify.runtime.extras import EXTRA_OF
from tests.release import extras

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_server_needs_no_more_than_its_extra() -> None:
    """`pip install 'notify-tx[server]'` installs none of these; a server, its console and its commands run without."""
    lines = ["import sys"]
    missing = ("alembic", "psycopg", "pymysql", "pymysqlreplication", "confluent_kafka", "pyspark", "pyarrow", "pytest",
               "opentelemetry.sdk", "aiosqlite", "greenlet", "requests", "yaml")  # fmt: skip
    lines += [f"sys.modules[{name!r}] = None" for name in missing]  # importing it fails
    lines += [
        "import urllib.request",
        "from notify.cli import main",
        "from notify.testing import InMemoryServer",
        "import notify.server.serve",
        "main.command()",
        "server = InMemoryServer().start()",
        "for path in ('/', '/topics', '/settings', '/metrics', '/openapi.json', '/v1/admin/overview'):",
        "    assert urllib.request.urlopen(server.url + path).status == 200, path",
        "server.stop()",
        "print('served')",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    # A line of the server's log may come first: on a loaded machine one of its looks may be late.
    assert done.stdout.splitlines()[-1:] == ["served"], done.stderr[-2000:]


def without(modules: tuple[str, ...], *words: str) -> subprocess.CompletedProcess[str]:
    """`python` with these arguments where importing the modules fails."""
    lines = ["import runpy, sys", f"sys.modules.update(dict.fromkeys({modules}))", f"sys.argv = {list(words)}"]
    lines += ["runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"]
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)


OF_THE_SERVER = ("fastapi", "google_crc32c", "jinja2", "jwt", "numpy", "prometheus_client", "starlette", "structlog",
                 "uvicorn", "uvloop")  # fmt: skip


@pytest.mark.long
def test_commands_need_no_more_than_their_extra() -> None:
    """`pip install 'notify-tx[cli]'` installs none of these: every command but --help failed for want of structlog."""
    done = without(OF_THE_SERVER, "notify", "topic", "list", "--url", "http://127.0.0.1:9")
    assert done.stderr.startswith("notify: no server at http://127.0.0.1:9") and done.returncode == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("missing", "words", "extra"),
    [
        (("typer",), ("--help",), "cli"),
        (("uvicorn", "fastapi"), ("serve",), "server"),
        (("psycopg",), ("doctor", "--dsn", "postgresql+psycopg://127.0.0.1:9/x"), "postgresql"),
    ],
)
def test_a_missing_extra_is_one_sentence(missing: tuple[str, ...], words: tuple[str, ...], extra: str) -> None:
    done = without(missing, "notify", *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"pip install 'notify-tx[{extra}]'" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_the_fixture_without_the_server_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(notify_server): pass\n")
    done = without(("uvicorn",), "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", str(tmp_path))
    assert "pip install 'notify-tx[server]'" in done.stdout and "Traceback" not in done.stdout


def test_each_extra_that_a_sentence_names_brings_the_module() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    guide = (ROOT / "docs" / "reference.md").read_text()
    for name in set(extras) - {"dev"}:
        assert f"| `{name}` |" in guide, f"docs/reference.md does not say what the extra {name} is for"
    assert set(EXTRA_OF.values()) <= set(extras)


def names_behind(package: str, folders: Sequence[str]) -> set[str]:
    """The names that the files of these folders import of a package: `module.name`."""
    found = set()
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        text = path.read_text()
        if package not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
                found |= {f"{node.module}.{name.name}" for name in node.names}
            elif isinstance(node, ast.Import):
                found |= {name.name for name in node.names if name.name.partition(".")[0] == package}
    return found


def test_mysql_replication_still_has_the_parts_that_are_used() -> None:
    """The bridge speaks the protocol itself (ADR 47). Tests compare with the package, in the versions they know."""
    assert names_behind("pymysqlreplication", ["notify", "storage", "spark"]) == set()
    assert names_behind("pymysqlreplication", ["tests"]) == {
        "pymysqlreplication.BinLogStreamReader",
        "pymysqlreplication.constants.BINLOG",
        "pymysqlreplication.row_event.UpdateRowsEvent",
        "pymysqlreplication.row_event.WriteRowsEvent",
    }
    assert any(line.startswith("mysql-replication") and "<1.1" in line for line in project_requires("bridge"))


def test_pymysql_still_has_the_private_parts_that_are_used() -> None:
    import pymysql

    source = (ROOT / "notify" / "binlog_bridge" / "binlog" / "stream.py").read_text()
    assert set(re.findall(r"connection\.(_\w+)", source)) == {"_execute_command", "_sock"}
    assert callable(pymysql.connections.Connection._execute_command)
    assert "_sock" in vars(pymysql.connections.Connection(defer_connect=True))
    assert any(line.startswith("pymysql") and "<1.3" in line for line in project_requires("bridge"))


def project_requires(extra: str) -> list[str]:
    """The requirements as pyproject.toml has them now: the installed metadata may be older."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["optional-dependencies"][extra] if extra else project["dependencies"])


def brought_by(extra: str) -> set[str]:
    """The distributions that come with an extra, and with the SDK, as far as they are installed here."""
    brought: set[str] = set()
    waiting = [("notify-tx", extra), ("notify-tx", "")]
    asked: set[tuple[str, str]] = set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in asked:
            continue
        asked.add((name, wanted))
        try:
            lines = project_requires(wanted) if name == "notify-tx" else requires(name) or []
        except PackageNotFoundError:
            continue
        brought.add(name)
        for line in map(Requirement, lines):
            if line.marker is None or line.marker.evaluate({"extra": wanted}):
                waiting += [(canonicalize_name(line.name), of) for of in ("", *line.extras)]
    return brought


QUICK = ("", "cli", "ship", "sql", "bridge", "filters")
EXTRAS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.long)
    for name in extras.USES
    if name != "connect"  # its library is not among those of tests
]


@pytest.mark.long
@pytest.mark.parametrize("extra", EXTRAS)
def test_each_extra_is_enough_for_its_purpose(extra: str) -> None:
    """As `make release` shows it in an environment of its own: here whatever else is installed cannot be imported."""
    brought = brought_by(extra)
    missing = [
        module
        for module, distributions in packages_distributions().items()
        if not {canonicalize_name(name) for name in distributions} & brought and module.isidentifier()
    ]
    assert "pytest" in missing and "notify" not in missing
    lines = f"import sys\nsys.modules.update(dict.fromkeys({missing}))\n" + extras.USES[extra]
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.long
def test_the_pytest_plugin_needs_only_pytest() -> None:
    """pytest loads the plugin wherever this package is installed, also where only the SDK's libraries are."""
    missing = ("fastapi", "uvicorn", "numpy", "structlog", "typer", "notify.storage", "notify.server")
    lines = ["import sys", f"sys.modules.update(dict.fromkeys({missing}))"]
    lines += ["import notify.pytest_plugin, notify.client, notify.check, notify.runtime.tracing", "print('begun')"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "begun", done.stderr


def loaded_by(program: str) -> set[str]:
    """The modules that a new interpreter has imported after a program."""
    code = f"{program}\nimport sys\nsys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stderr.split())


HEAVY = {"sqlalchemy", "numpy", "fastapi", "uvicorn", "pyspark", "confluent_kafka", "alembic"}
"""Not pydantic: where it is installed, typer itself loads it to read flags."""


def command(*words: str) -> str:
    """A program that runs `notify` with these words, to the end."""
    lines = ["import sys", "from notify.cli import main", f"sys.argv = {['notify', *words]}"]
    return "\n".join([*lines, "try: main.main()", "except SystemExit as ended: assert not ended.code, ended.code"])


NOT_NEEDED_AT_START = {
    "alembic", "cel", "confluent_kafka", "cronsim", "cryptography", "fastapi", "fsspec", "jinja2", "jwt",
    "opentelemetry.sdk", "prometheus_client", "psycopg", "pyarrow", "pymysql", "sqlalchemy.dialects.postgresql",
    "starlette.requests",
    "notify.admin_api.writes", "notify.client.consumer", "notify.client.producer", "notify.kafka",
    "notify.server.admin", "notify.server.cluster.membership", "notify.server.console", "notify.server.management",
    "notify.server.schedules.timetable", "notify.server.spread", "notify.server.workers", "notify.storage.memory",
    "notify.storage.sql.registry", "notify.storage.sql.shards",
}  # fmt: skip


def test_a_server_is_ready_before_it_has_loaded_what_operators_need(tmp_path: Path) -> None:
    """It was ready after 3 s of CPU, most of it for imports that no producer or consumer needs."""
    lines = [
        "import os, signal, sys",
        "from notify.cli import main",
        "from notify.cli import serve",
        "serve.is_terminal = lambda: True",
        "def greeting(*_):",
        "    sys.stderr.write(' '.join(sys.modules))",
        "    os.kill(os.getpid(), signal.SIGTERM)",
        "    return 'ready'",
        "serve.greeting = greeting",
        f"sys.argv = ['notify', 'serve', '--port', '0', '--data-dir', {str(tmp_path / 'data')!r}]",
        "main.main()",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, cwd=ROOT)
    loaded = set(done.stderr.split())
    assert "notify.storage.log" in loaded, done.stdout + done.stderr
    assert sorted(loaded & NOT_NEEDED_AT_START) == []


@pytest.mark.long
@pytest.mark.parametrize("words", [("--version",), ("--help",), ("group", "--help"), ("topic", "tail", "--help")])
def test_a_command_that_asks_nobody_loads_no_command_but_its_own(words: tuple[str, ...]) -> None:
    """`notify --version` imported every command, SQLAlchemy and the client."""
    loaded = loaded_by(command(*words))
    assert loaded & HEAVY == set()
    others = {f"notify.cli.{name}" for name in ("audit", "database", "demo", "doctor", "serve", "backup")}
    assert loaded & (others | {"notify.server.app", "notify.client.producer", "notify.storage.log"}) == set()


def test_each_command_is_listed_with_its_panel_and_loads() -> None:
    """The list of `notify --help` is made without the commands; what it says must be there."""
    from notify.cli.commands import COMMANDS, load

    assert {listed.panel for listed in COMMANDS.values()} == {"Run", "Look", "Data", "Operate", "Prove"}
    for name, listed in COMMANDS.items():
        assert load(name).name == name and listed.text.endswith("."), name


@pytest.mark.long
def test_the_sdk_loads_a_name_when_it_is_used() -> None:
    assert loaded_by("import notify.client") & {*HEAVY, "asyncio", "notify.client.producer"} == set()
    loaded = loaded_by("from notify.client import TransactionProducer, Message")
    assert "notify.client.producer" in loaded
    assert loaded & {"notify.client.consumer.reader", "zoneinfo"} == set()


def test_the_sdk_shows_only_what_is_public() -> None:
    import notify.client

    assert dir(notify.client) == sorted(notify.client.__all__)
    for name in notify.client.__all__:
        assert getattr(notify.client, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'table_of_secrets'"):
        notify.client.table_of_secrets  # noqa: B018
