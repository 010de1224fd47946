"""Each request is answered once, on real connections: refused ones with bad bodies, pipelined ones, over TLS."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from notify.testing.process import ServerProcess
from tests.support.authority import Authority
from tests.support.clock import PATIENCE_SECONDS

NOBODY, UNKNOWN, KNOWN = "", "authorization: Bearer nt_unknown\r\n", "authorization: Bearer {token}\r\n"
"""Who sends: a sender without a token is refused at once, one with an unknown token once the server has looked."""
BAD_CHUNK, LONG_EXTENSION = "no size\r\n", "2;" + "x" * (70 << 10)


def begun(sender: str) -> str:
    """A request whose body is not complete."""
    return f"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\n{sender}transfer-encoding: chunked\r\n\r\n"


def whole(sender: str) -> str:
    return f"GET /v1/members HTTP/1.1\r\nhost: localhost\r\n{sender}\r\n"


SCENES: dict[str, tuple[list[str], Sequence[set[int]]]] = {
    "refused, a bad chunk": ([begun(NOBODY) + BAD_CHUNK], [{401}]),
    "refused, a bad chunk later": ([begun(NOBODY), BAD_CHUNK], [{401}]),
    "refused, a long extension": ([begun(NOBODY) + LONG_EXTENSION], [{401}]),
    "refused, a long extension later": ([begun(NOBODY), LONG_EXTENSION], [{401}]),
    "refused, another request behind a bad chunk": ([begun(NOBODY) + BAD_CHUNK, whole(KNOWN)], [{401}]),
    "looked up, a bad chunk": ([begun(UNKNOWN) + BAD_CHUNK], [{400, 401}]),
    "looked up, a bad chunk later": ([begun(UNKNOWN), BAD_CHUNK], [{400, 401}]),
    "behind one that is answered": ([whole(KNOWN) + begun(NOBODY) + BAD_CHUNK], [{200}, {400, 401}]),
    "behind one that is refused": ([whole(NOBODY) + begun(UNKNOWN) + BAD_CHUNK], [{401}]),
    "behind one that is looked up": ([whole(UNKNOWN) + begun(NOBODY) + BAD_CHUNK], [{401}]),
    "let in, a bad chunk": ([begun(KNOWN) + BAD_CHUNK], [{400}]),
    "let in, behind another": ([whole(KNOWN) + begun(KNOWN) + BAD_CHUNK + whole(KNOWN)], [{200}, {400}]),
    "let in, no request behind another": ([whole(KNOWN) * 2 + "no request\r\n\r\n"], [{200}, {200}, {400}]),
}
"""The bytes, part by part, and the statuses of all answers before the server ends the connection. It
ends behind a refusal of the sender."""


def answers(connection: socket.socket) -> list[int]:
    """The statuses of the answers up to the end of the connection."""
    data = b""
    while part := _received(connection):
        data += part
    statuses = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        found = re.match(rb"HTTP/1.1 (\d+) ", head)
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        assert found and length, f"no answer: {data[:200]!r}"
        statuses.append(int(found[1]))
        data = rest[int(length[1]) :]
        assert (b"connection: close" in head.lower()) == (not data), "the last answer says that it is the last"
    return statuses


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except (ConnectionResetError, ssl.SSLEOFError):  # the server closed before it had read everything
        return b""


@pytest.fixture(scope="module", params=["plain", "tls", pytest.param("workers", marks=pytest.mark.long)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that asks for tokens; with TLS, or with two workers and TLS."""
    directory = tmp_path_factory.mktemp(request.param)
    environment, ca = {"NOTIFY_ACCESS": "1"}, None
    if request.param != "plain":
        authority = Authority(directory, "authority")
        environment["NOTIFY_TLS_CERTIFICATE"], ca = str(authority.issue("server")), authority.file
    flags = ["--workers", "2"] if request.param == "workers" else []
    server = ServerProcess(directory / "data", environment=environment, flags=flags, ca=ca).start()
    yield server
    server.stop()


@pytest.mark.parametrize("scene", SCENES)
def test_each_request_is_answered_once(served: ServerProcess, scene: str) -> None:
    token = (served.data_dir / "admin.token").read_text().strip()
    parts, expected = SCENES[scene]
    address = urlsplit(served.url)
    with ExitStack() as stack:
        connection = stack.enter_context(
            socket.create_connection((address.hostname or "", address.port or 0), PATIENCE_SECONDS)
        )
        if address.scheme == "https":
            context = ssl.create_default_context(cafile=str(served.data_dir.parent / "authority.pem"))
            connection = stack.enter_context(context.wrap_socket(connection, server_hostname="127.0.0.1"))
        for part in parts:
            try:
                connection.sendall(part.replace("{token}", token).encode())
            except (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
                break  # the server has answered, and reads no more
        statuses = answers(connection)
    assert len(statuses) == len(expected) and all(
        status in those for status, those in zip(statuses, expected, strict=True)
    ), statuses


def test_no_request_was_a_fault_of_the_server(served: ServerProcess) -> None:
    """The last one: nothing above was a fault of the server's own."""
    assert not [line for line in served.output if "Traceback" in line or "rror in" in line]
