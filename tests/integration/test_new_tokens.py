"""Tokens that another server made a moment ago; and the server's work for strangers until it knows who they are."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa

from notify.runtime.clock import wall_clock
from notify.server.access import tokens
from notify.server.access.credential import Credential
from notify.server.configuration.follow import Administration
from notify.server.configuration.records import Records
from notify.server.settings import Settings
from notify.storage.sql.engines import open_engine
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.databases import empty_database
from tests.support.http import REASON, ask, call
from tests.support.proxy import Proxy, send_what_is_taken
from tests.support.servers import Guarded, make_storage, stop_if_running

TIMES = 20
MEMBERS = "/v1/members"
"""A data route for every known token, which asks no database."""


@pytest.fixture(params=("postgresql", pytest.param("mariadb", marks=pytest.mark.long)))
def shared(request: pytest.FixtureRequest, database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[str]:
    """The URL of a database with the server's tables, for several servers."""
    with empty_database(request.param, database_urls, tmp_path) as url:
        make_storage(url)
        yield url


@pytest.fixture
def postgresql(database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[str]:
    """The URL of a PostgreSQL database with the server's tables."""
    with empty_database("postgresql", database_urls, tmp_path) as url:
        make_storage(url)
        yield url


def server_on(url: str, directory: Path, stack: ExitStack) -> ServerProcess:
    """A server of this registry that is not started yet, with access on."""
    server = ServerProcess(directory, environment={"NOTIFY_ACCESS": "1"}, flags=["--storage", url])
    stack.callback(stop_if_running, server)
    return server


def made_at(server: ServerProcess, admin: str, *rights: str) -> str:
    """A new token."""
    body = {"name": "t", "rights": list(rights), "reason": REASON}
    return str(call(server.url, "POST", "/v1/admin/credentials", body, admin)["token"])


def stranger() -> str:
    """A well-formed token that no server made."""
    return tokens.new_token(tokens.new_id())[0]


def status(server: ServerProcess, path: str, token: str) -> int:
    """The status of a GET, which is sent again after a 503, as the SDK does."""

    def answered() -> int:
        code = ask(server.url, "GET", path, token=token)[0]
        return 0 if code == 503 else code

    return eventually(answered)


# --- what was made at another server --------------------------------------------------------------------------


@pytest.mark.long
def test_a_token_works_at_once_at_every_server_of_a_registry(shared: str, tmp_path: Path) -> None:
    """Promise: no server answers a token that an administrator was given with a final 401."""
    with ExitStack() as stack:
        first, second = (server_on(shared, tmp_path / name, stack).start() for name in "ab")
        admin = (tmp_path / "a" / "admin.token").read_text().strip()
        for _ in range(TIMES):
            assert status(second, MEMBERS, made_at(first, admin, "publish:*")) == 200
            assert status(second, "/v1/admin/settings", made_at(first, admin, "view")) == 200
            assert status(first, MEMBERS, made_at(second, admin, "publish:*")) == 200
        # A stranger's token is refused for good, and so is a revoked one.
        assert status(second, MEMBERS, stranger()) == 401
        assert status(second, "/v1/admin/settings", stranger()) == 401
        token = made_at(first, admin, "view")
        assert status(second, "/v1/admin/settings", token) == 200
        number = token.split("_")[1]
        call(first.url, "POST", f"/v1/admin/credentials/{number}/revoke", {"reason": REASON}, admin)
        assert status(first, "/v1/admin/settings", token) == 401
        eventually(lambda: status(second, "/v1/admin/settings", token) == 401)


@pytest.mark.long
def test_an_unknown_token_waits_for_a_database_that_is_away(postgresql: str, tmp_path: Path) -> None:
    """Such a token may be good: it is answered with 503 in time, never with 401. Known tokens are let in meanwhile."""
    target = sa.make_url(postgresql)
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(target.host or "", target.port or 0))
        through = target.set(port=proxy.port).render_as_string(hide_password=False)
        server = server_on(through, tmp_path / "a", stack).start()
        other = server_on(postgresql, tmp_path / "b", stack).start()
        admin = (tmp_path / "a" / "admin.token").read_text().strip()
        assert status(server, MEMBERS, admin) == 200

        def answers(token: str, path: str = MEMBERS) -> tuple[int, Any]:
            code, problem = ask(server.url, "GET", path, token=token)
            return code, problem.get("code")

        proxy.drop_answers = True  # the database hangs
        token = made_at(other, admin, "view")
        for shown in (token, stranger()):
            assert answers(shown) == (503, "unavailable")
            assert answers(shown, "/v1/admin/settings") == (503, "unavailable")
        assert answers(admin)[0] == 200
        assert ask(server.url, "GET", "/livez", token=token)[0] == 200  # probes need no known token
        proxy.close()  # the database is unreachable
        proxy.drop_answers = False
        assert answers(token) == (503, "unavailable")
        assert answers(admin)[0] == 200
        proxy.reopen()
        assert status(server, MEMBERS, token) == 200
        assert status(server, MEMBERS, stranger()) == 401


# --- the first token ------------------------------------------------------------------------------------------


class AtOnce(Records):
    """Records whose first look for credentials waits until the other servers have looked, too."""

    def __init__(self, engine: sa.Engine, barrier: threading.Barrier) -> None:
        super().__init__(engine)
        self._barrier: threading.Barrier | None = barrier

    def credentials(self) -> list[Credential]:
        rows = super().credentials()
        barrier, self._barrier = self._barrier, None
        if barrier is not None:
            barrier.wait(PATIENCE_SECONDS)
        return rows


def test_of_servers_that_start_at_once_one_makes_the_first_token(engine_url: str, tmp_path: Path) -> None:
    make_storage(engine_url)
    directories = [tmp_path / str(n) for n in range(3)]
    barrier = threading.Barrier(len(directories))

    def start(directory: Path) -> None:
        directory.mkdir()
        engine = open_engine(engine_url)

        async def run() -> None:
            administration = Administration(Settings(access=True), engine, wall_clock)
            administration.records = AtOnce(engine, barrier)
            await administration.start(str(directory))
            await administration.stop()

        asyncio.run(run())
        engine.dispose()

    with ThreadPoolExecutor() as starting:
        list(starting.map(start, directories))
    engine = open_engine(engine_url)
    credentials = Records(engine).credentials()
    assert [c.name for c in credentials] == ["admin"]
    assert [action["what"] for action in Records(engine).actions(10)] == ["credential.add"]
    engine.dispose()
    left = [path for directory in directories for path in directory.iterdir()]
    assert [path.name for path in left] == ["admin.token"]
    assert tokens.is_proved(left[0].read_bytes().strip(), credentials[0].proof)
    assert left[0].stat().st_mode & 0o777 == 0o600


@pytest.mark.long
def test_two_new_servers_share_one_first_token(shared: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = [server_on(shared, tmp_path / name, stack) for name in "ab"]
        with ThreadPoolExecutor() as starting:
            assert list(starting.map(ServerProcess.start, servers)) == servers
        (left,) = tmp_path.glob("*/admin.token")
        for server in servers:
            assert status(server, "/v1/admin/settings", left.read_text().strip()) == 200


# --- the bodies of strangers ----------------------------------------------------------------------------------

CONNECTIONS = 100
BODY_BYTES = 2 << 20
STILL_SECONDS = 2.0
"""Seconds; a server that has read nothing for so long reads no more: it has no other connections."""


@contextlib.contextmanager
def silent_provider() -> Iterator[tuple[str, threading.Event]]:
    """The address of an identity provider that does not answer, and the event that makes it hang up."""
    released = threading.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    threading.Thread(target=end, args=(connection,), daemon=True).start()

        def end(connection: socket.socket) -> None:
            with connection:
                released.wait(PATIENCE_SECONDS)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", released
        finally:
            released.set()
            listening.shutdown(socket.SHUT_RDWR)


def made_up(issuer: str) -> str:
    """A token that names this issuer, with a made-up signature."""
    claims = {"iss": issuer, "aud": "notify", "sub": "x", "exp": 1 << 35}
    parts = [json.dumps(part).encode() for part in ({"alg": "RS256", "kid": "unknown"}, claims)]
    return ".".join([*(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts), "c2lnbmVk"])


def test_a_body_is_not_held_while_its_token_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a stranger with a made-up token cannot fill the memory of a server whose provider is slow."""
    with ExitStack() as stack:
        issuer, released = stack.enter_context(silent_provider())
        monkeypatch.setenv("NOTIFY_OIDC_ISSUER", issuer)
        guarded = Guarded(tmp_path / "data")
        stack.callback(guarded.server.stop)
        address = urlsplit(guarded.url)
        assert ask(guarded.url, "GET", MEMBERS, token=guarded.admin)[0] == 200
        before = guarded.server.anonymous_bytes()
        connections = [
            stack.enter_context(socket.create_connection((address.hostname or "", address.port or 0)))
            for _ in range(CONNECTIONS)
        ]
        head = (
            f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {made_up(issuer)}\r\n"
            f"content-length: {BODY_BYTES}\r\n"
            "content-type: application/json\r\n\r\n"
        )
        send_what_is_taken(dict.fromkeys(connections, head.encode() + b"x" * BODY_BYTES), STILL_SECONDS)
        for _ in range(TIMES):  # the server has read all that it will: answers and reads take turns
            assert ask(guarded.url, "GET", MEMBERS, token=guarded.admin)[0] == 200
        assert guarded.server.anonymous_bytes() - before < CONNECTIONS * BODY_BYTES / 2
        released.set()
        for connection in connections:
            connection.settimeout(PATIENCE_SECONDS)
            with contextlib.suppress(ConnectionError):  # the server closed: this client was too slow
                assert connection.recv(4096).split(b" ")[1] == b"503"
