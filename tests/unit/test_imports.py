"""Commands, server and pytest plugin start without the drivers and libraries of the extras."""

from __future__ import annotations

import subprocess
import sys

from tests.support.clock import PATIENCE_SECONDS

OPTIONAL = ("alembic", "confluent_kafka", "psycopg", "pymysql", "pymysqlreplication")


def test_the_command_line_and_the_embedded_server_need_no_extras() -> None:
    lines = ["import sys", f"sys.modules.update(dict.fromkeys({OPTIONAL}))"]  # None: importing it fails
    lines += ["from notify.cli import main", "main.register()", "import notify.server.serve", "print('begun')"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "begun", done.stderr


def test_a_server_needs_no_more_than_its_extra() -> None:
    """`pip install 'notify-tx[server]'` installs none of these; a server, its console and its commands run without."""
    lines = ["import sys"]
    missing = ("alembic", "psycopg", "pymysql", "pymysqlreplication", "confluent_kafka", "pyspark", "pyarrow", "pytest",
               "opentelemetry.sdk", "aiosqlite", "greenlet", "requests", "yaml")  # fmt: skip
    lines += [f"sys.modules[{name!r}] = None" for name in missing]
    lines += [
        "import urllib.request",
        "from notify.cli import main",
        "from notify.testing import InMemoryServer",
        "import notify.server.serve",
        "main.register()",
        "server = InMemoryServer().start()",
        "for path in ('/', '/topics', '/settings', '/metrics', '/openapi.json', '/v1/admin/overview'):",
        "    assert urllib.request.urlopen(server.url + path).status == 200, path",
        "server.stop()",
        "print('served')",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS
    )
    assert done.stdout == "served\n", done.stderr[-2000:]


def test_the_pytest_plugin_needs_only_pytest() -> None:
    """pytest loads the plugin wherever this package is installed, also where only the SDK's libraries are."""
    missing = ("fastapi", "uvicorn", "numpy", "structlog", "typer", "notify.storage", "notify.server")
    lines = ["import sys", f"sys.modules.update(dict.fromkeys({missing}))"]
    lines += ["import notify.pytest_plugin, notify.client, notify.check, notify.tracing", "print('begun')"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "begun", done.stderr
