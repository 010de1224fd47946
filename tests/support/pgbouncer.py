"""The real PgBouncer before a PostgreSQL server."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from notify.testing.guardian import register
from notify.testing.ports import free_port
from notify.testing.reachable import NotAvailable, wait_for


@contextmanager
def pgbouncer(url: str, mode: str, directory: Path) -> Iterator[str]:
    """The URL of the same database through PgBouncer in this pool mode. Raises NotAvailable where it is not installed.

    `directory`: for its configuration.
    """
    program = shutil.which("pgbouncer", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if program is None:
        raise NotAvailable("no PgBouncer: Debian's package pgbouncer has it")
    behind = sa.make_url(url)
    port = free_port()
    file = directory / f"pgbouncer-{mode}.ini"
    password = f" password={behind.password}" if behind.password else ""
    file.write_text(
        f"[databases]\n* = host={behind.host} port={behind.port} user={behind.username}{password}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        f"pool_mode = {mode}\ndefault_pool_size = 20\nmax_client_conn = 500\n"
    )
    # PgBouncer refuses to run as root, and reads its configuration as the user that it runs as.
    user = "nobody" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
    file.chmod(0o644)
    with file.open() as configuration:
        command = [program, "-q", "/dev/stdin"]
        process = subprocess.Popen(command, stdin=configuration, stderr=subprocess.DEVNULL, user=user)
    register(process.pid)
    try:
        through = behind.set(host="127.0.0.1", port=port, password=None)
        through_text = through.render_as_string(hide_password=False)
        wait_for(through_text)
        yield through_text
    finally:
        process.terminate()
        process.wait(30)
