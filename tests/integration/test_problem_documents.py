"""Every refusal of a server is a problem document of its own: a client takes whatever else it gets for a stranger's."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from notify.protocol.wire import PROBLEM, PROBLEM_TYPE
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.servers import stop_if_running

HOST = b"Host: a\r\n"
POST = b"POST /v1/messages HTTP/1.1\r\n" + HOST
ADMIN = b"PUT /v1/admin/topics/t HTTP/1.1\r\n" + HOST
REFUSED = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "not HTTP": b"hello\r\n\r\n",
    "HTTP/9": b"GET / HTTP/9.9\r\n\r\n",
    "a method that is none": b"BREW /v1/messages HTTP/1.1\r\n" + HOST + b"\r\n",
    "a route that is none": b"GET /v1/nothing HTTP/1.1\r\n" + HOST + b"\r\n",
    "HTTP/1.0": b"GET /v1/nothing HTTP/1.0\r\n\r\n",
    "another method": b"DELETE /v1/messages HTTP/1.1\r\n" + HOST + b"\r\n",
    "a probe with POST": b"POST /readyz HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\n\r\n",
    "OPTIONS": b"OPTIONS /v1/messages HTTP/1.1\r\n" + HOST + b"\r\n",
    "TRACE": b"TRACE /v1/messages HTTP/1.1\r\n" + HOST + b"\r\n",
    "CONNECT": b"CONNECT a:443 HTTP/1.1\r\n" + HOST + b"\r\n",
    "two slashes": b"GET //v1//members HTTP/1.1\r\n" + HOST + b"\r\n",
    "a slash at the end": b"GET /v1/members/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "a worker that is none": b"GET /worker-9/v1/members HTTP/1.1\r\n" + HOST + b"\r\n",
    "a whole address": b"GET http://other/v1/nothing HTTP/1.1\r\n" + HOST + b"\r\n",
    "bytes in a path": b"GET /v1/\xff%00%zz HTTP/1.1\r\n" + HOST + b"\r\n",
    "a large head": b"GET / HTTP/1.1\r\n" + HOST + b"x: " + b"y" * 70_000 + b"\r\n\r\n",
    "many fields": b"GET / HTTP/1.1\r\n" + HOST + b"".join(b"x%d: y\r\n" % n for n in range(200)) + b"\r\n",
    "a large body": POST + b"Content-Type: application/json\r\nContent-Length: 9000000\r\n\r\n" + b"x" * 9_000_000,
    "a length that is none": POST + b"Content-Length: ten\r\n\r\n",
    "two lengths": POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "length and chunks": POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a bad chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a kind that is none": POST + b"Content-Type: text/xml\r\nContent-Length: 1\r\n\r\nx",
    "an answer of a kind that is none": POST + b"Accept: text/xml\r\nContent-Length: 1\r\n\r\nx",
    "no body": POST + b"Content-Type: application/json\r\nContent-Length: 0\r\n\r\n",
    "broken JSON": POST + b"Content-Type: application/json\r\nContent-Length: 1\r\n\r\n{",
    "broken msgpack": POST + b"Content-Type: application/msgpack\r\nContent-Length: 1\r\n\r\n\x81",
    "an admin route that is none": b"GET /v1/admin/nothing HTTP/1.1\r\n" + HOST + b"\r\n",
    "another method of an admin route": b"PATCH /v1/admin/topics HTTP/1.1\r\n" + HOST + b"\r\n",
    "broken JSON for an admin route": ADMIN + b"Content-Type: application/json\r\nContent-Length: 1\r\n\r\n{",
    "fields that are none": ADMIN + b'Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{"x": []}',
    "a file that is none": b"GET /static/nothing.css HTTP/1.1\r\n" + HOST + b"\r\n",
    "a file outside": b"GET /static/..%2f..%2fapp.py HTTP/1.1\r\n" + HOST + b"\r\n",
    "a page that is none": b"GET /nothing HTTP/1.1\r\n" + HOST + b"\r\n",
    "another protocol": b"GET /v1/nothing HTTP/1.1\r\n" + HOST + b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n",
}


def answer_of(url: str, request: bytes) -> tuple[int, str, bytes]:
    """Status, content type and body of the first answer on a new connection."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), PATIENCE_SECONDS) as connection:
        reading = connection.makefile("rb")
        if request:
            connection.sendall(request)
        head = b""
        while line := reading.readline():
            head += line
            if line == b"\r\n":
                if not head.startswith(b"HTTP/1.1 1"):
                    break
                head = b""
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
        body = reading.read(int(fields.get(b"content-length", b"0")))
    return int(head.split(b" ")[1]), fields.get(b"content-type", b"").decode(), body


def check_own(status: int, kind: str, body: bytes) -> str:
    """The code of an answer, which has to be a server's own problem."""
    assert status >= 400 and kind == PROBLEM, (status, kind, body[:200])
    problem = json.loads(body)
    assert problem["type"] == PROBLEM_TYPE + problem["code"] and problem["status"] == status and problem["detail"]
    return str(problem["code"])


@pytest.mark.parametrize("request_bytes", REFUSED.values(), ids=REFUSED)
def test_a_refusal_is_a_problem_of_the_servers_own(server: ServerProcess, request_bytes: bytes) -> None:
    check_own(*answer_of(server.url, request_bytes))


@pytest.mark.long
def test_a_connection_without_room_for_it_gets_an_answer(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", environment={"NOTIFY_CONNECTIONS": "8"}).start()
    held: list[socket.socket] = []
    parts = urlsplit(server.url)

    def told() -> str:
        connection = socket.create_connection((parts.hostname or "", parts.port or 0), PATIENCE_SECONDS)
        held.append(connection)
        connection.sendall(b"POST /v1/messages HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\n")
        connection.settimeout(0.2)
        try:
            return connection.recv(65536).decode()
        except TimeoutError:
            return ""

    try:
        answer = eventually(told, "a connection to be turned away")
        head, _, body = answer.partition("\r\n\r\n")
        assert "503" in head and check_own(503, PROBLEM, body.encode()) == "too_many_connections"
    finally:
        for connection in held:
            connection.close()
        stop_if_running(server)
