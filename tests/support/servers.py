"""Servers for several tests: with access on, or several over one database."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from notify.storage.sql import schema
from notify.storage.sql.engines import opened
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.http import REASON, admin, call


class WithTokens:
    """A server with access on, at `url`; `admin` is its first token."""

    url: str
    admin: str

    def make(self, *rights: str, **fields: Any) -> str:
        """Make a token with these rights."""
        body = {"name": "t", "rights": list(rights), "reason": REASON} | fields
        return str(call(self.url, "POST", "/v1/admin/credentials", body, self.admin)["token"])


class GuardedInMemory(WithTokens):
    """A server in memory with access on, whose clock only the test moves; `with` stops it."""

    def __init__(self, **settings: Any) -> None:
        self.server = InMemoryServer(access=True, **settings).start()
        self.server.freeze()
        self.url, self.admin = self.server.url, self.server.admin_token

    def __enter__(self) -> GuardedInMemory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.stop()


class Guarded(WithTokens):
    """A server process with access on; makes tokens for it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server = ServerProcess(directory, environment={"NOTIFY_ACCESS": "1"}).start()
        self.url = self.server.url
        self.admin = (directory / "admin.token").read_text().strip()


def make_storage(url: str, shard: str = "main") -> None:
    """Make the server's tables in an empty database."""
    with opened(url) as engine:
        schema.upgrade(engine, shard)


class Started:
    """Servers over one database, stopped with the stack."""

    def __init__(self, storage: str, directory: Path, stack: ExitStack) -> None:
        """`storage`: the URL of a database with the server's tables."""
        self.storage, self._directory, self._stack = storage, directory, stack
        self.servers: list[ServerProcess] = []

    def add(self, *flags: str, **environment: str) -> ServerProcess:
        """Start one more server, which the test may kill or stop."""
        place = self._directory / f"s{len(self.servers)}"
        server = ServerProcess(place, environment=environment, flags=["--storage", self.storage, *flags])
        self._stack.callback(stop_if_running, server)
        self.servers.append(server.start())
        return server


def process_of(server: ServerProcess, worker: str) -> int:
    """The process of one of a server's workers, which has its log open (Linux)."""

    def has_log(pid: int) -> bool:
        try:
            return any(f"/{worker}/log/" in os.readlink(held) for held in Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            return False  # it has ended, or has closed the file meanwhile

    return eventually(lambda: next(filter(has_log, server.workers()), 0), f"the process of {worker}")


def stop_if_running(server: ServerProcess) -> None:
    """Stop a server if it runs, and close the pipe of one that was killed."""
    if server.process is not None:
        server.stop()


@contextmanager
def three_servers(storage: str, directory: Path) -> Iterator[list[ServerProcess]]:
    """Three servers of one registry in an empty database."""
    make_storage(storage)
    with ExitStack() as stack:
        started = Started(storage, directory, stack)
        for _ in range(3):
            started.add()
        yield started.servers


def settings_of(server: ServerProcess) -> dict[str, Any]:
    """The server's settings by name, and `revision`."""
    answer = admin(server.url, "GET", "settings")
    return {row["name"]: row["value"] for row in answer["settings"]} | {"revision": answer["revision"]}


def until_all(servers: Sequence[ServerProcess], name: str, value: Any) -> None:
    """Wait until every server has this value of a setting."""
    eventually(lambda: all(settings_of(server)[name] == value for server in servers), f"{name} {value} at every server")


def until_known(servers: Sequence[ServerProcess]) -> None:
    """Wait until each of these servers lists all of them."""
    urls = {server.url for server in servers}

    def knows_all(server: ServerProcess) -> bool:
        return urls <= {member["url"] for member in call(server.url, "GET", "/v1/members")["members"]}

    eventually(lambda: all(map(knows_all, servers)), "every server to know the others")
