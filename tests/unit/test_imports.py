"""What is optional stays optional: commands and server begin without the drivers and libraries of their extras."""

from __future__ import annotations

import subprocess
import sys

OPTIONAL = ("alembic", "confluent_kafka", "psycopg", "pymysql", "pymysqlreplication")


def test_the_command_line_and_the_embedded_server_need_no_extras() -> None:
    lines = ["import sys", f"sys.modules.update(dict.fromkeys({OPTIONAL}))"]  # None: importing it fails
    lines += ["from notify.cli import main", "main._register()", "import notify.server.serve", "print('begun')"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "begun", done.stderr
