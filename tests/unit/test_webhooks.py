"""Webhook calls: one deadline for the whole call, and nothing else waits for a slow receiver."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from notify.errors import InvalidRequest, Unavailable
from notify.server import webhooks
from notify.server.settings import Settings
from tests.support.authority import Authority
from tests.support.clock import PATIENCE_SECONDS

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def posted(
    serve: Serve, calls: int = 1, path: str = "/hook?x=1", tls: ssl.SSLContext | None = None, scheme: str = "http"
) -> list[bytes | BaseException]:
    """The results of so many `calls` at once to a receiver that does `serve` with each connection."""
    loop = asyncio.get_running_loop()
    begun: list[asyncio.Task[None]] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.append(loop.create_task(_served(serve, reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = Settings(webhook_hosts=place, webhook_secret="s")
    try:
        results = [webhooks.post(f"{scheme}://{place}{path}", b"{}", settings) for _ in range(calls)]
        return list(await asyncio.gather(*results, return_exceptions=True))
    finally:
        server.close()
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


async def _served(serve: Serve, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await reader.readuntil(b"\r\n\r\n")
        await serve(reader, writer)
        await writer.drain()
    except ConnectionError:
        pass  # the caller has given up
    finally:
        writer.close()


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a byte now and then, so that no single read takes long."""
    writer.write(b"HTTP/1.1 200 OK\r\nx-never-ends: ")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)  # the pause between two bytes


async def test_a_dripping_receiver_is_given_up_and_holds_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call ends at its deadline. Each byte began the time again, in a thread of the pool that admin reads share."""
    monkeypatch.setattr(webhooks, "SECONDS", 2.0)  # all calls have to be connected by then, also on a loaded machine
    loop = asyncio.get_running_loop()
    calls = asyncio.ensure_future(posted(drip, calls=40))
    async with asyncio.timeout(PATIENCE_SECONDS):
        # More calls than a pool has threads: other work in threads continues beside them.
        assert await loop.run_in_executor(None, lambda: "done") == "done"
        results = await calls
    assert [type(result) for result in results] == [Unavailable] * 40
    assert all("no answer within" in str(result) for result in results)


def test_the_system_may_take_its_time_to_find_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the name server does not answer, look-ups occupy threads of their own, and calls end in time."""
    monkeypatch.setattr(webhooks, "SECONDS", 0.2)
    released = threading.Event()

    def never(*_: object, **__: object) -> list[object]:
        released.wait(PATIENCE_SECONDS)
        raise socket.gaierror("no answer")

    monkeypatch.setattr(webhooks.socket, "getaddrinfo", never)

    async def run() -> None:
        settings = Settings(webhook_hosts="slow.example:80", webhook_secret="s")
        calls = [webhooks.post("http://slow.example/", b"{}", settings) for _ in range(50)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [webhooks.Unreachable] * 50
        assert await asyncio.get_running_loop().run_in_executor(None, lambda: "done") == "done"

    try:
        asyncio.run(run())
    finally:
        released.set()


def test_a_name_whose_server_hangs_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call looked its name up, two at a time: the calls of one webhook kept all the others waiting."""
    monkeypatch.setattr(webhooks, "SECONDS", PATIENCE_SECONDS)
    released, looked = threading.Event(), Counter[str]()
    found = socket.getaddrinfo

    def look(name: str, *given: Any, **named: Any) -> list[Any]:
        looked[name] += 1
        if name == "slow.example":
            released.wait(PATIENCE_SECONDS)
            raise socket.gaierror("no answer")
        return found(name, *given, **named)

    monkeypatch.setattr(webhooks.socket, "getaddrinfo", look)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def run() -> None:
        served = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = served.sockets[0].getsockname()[1]
        settings = Settings(webhook_hosts=f"slow.example:80,localhost:{port}", webhook_secret="s")
        hanging = [asyncio.ensure_future(webhooks.post("http://slow.example/", b"{}", settings)) for _ in range(50)]
        for _ in range(2):
            assert await webhooks.post(f"http://localhost:{port}/", b"{}", settings) == b"{}"
        hanging[0].cancel()  # the others keep waiting for what it looked up
        released.set()
        results = await asyncio.gather(*hanging[1:], return_exceptions=True)
        served.close()
        assert [type(result) for result in results] == [webhooks.Unreachable] * 49
        assert looked == {"slow.example": 1, "localhost": 1}

    try:
        asyncio.run(run())
    finally:
        released.set()


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", b"{}"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n", b"{}"),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", b"{}"),
        (b"HTTP/1.1 200 OK\r\nupgrade: h2\r\nconnection: upgrade\r\ncontent-length: 2\r\n\r\n{}", b"{}"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}and something behind it", b"{}"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 500 No\r\ncontent-length: 1\r\n\r\nx", b"{}"),
        (b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", "another protocol"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n", "closed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n{}", "closed"),
        (b"HTTP/1.1 200 OK\r\n", "closed"),
        (b"", "closed"),
        (b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n", "answered 500"),
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1/\r\ncontent-length: 0\r\n\r\n", "answered 302"),
        (b"SSH-2.0-OpenSSH\r\n", "webhook"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5000000\r\n\r\n" + b"x" * 3_000_000, "more than"),
        (b"HTTP/1.1 200 OK\r\n" + b"x-y: z\r\n" * 300_000, "more than"),
    ],
)
def test_a_webhook_answer_decides_retry_or_dead_letter(answer: bytes, result: bytes | str) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    (posted_request,) = asyncio.run(posted(say))
    if isinstance(result, bytes):
        assert posted_request == result
    else:
        assert isinstance(posted_request, Unavailable) and result in str(posted_request)


@pytest.mark.parametrize("first", [b"100 Continue", b"102 Processing", b"103 Early Hints\r\nlink: </a.css>"])
def test_bytes_before_a_webhooks_answer_are_not_an_answer(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy may send hints first. They passed for the answer where it came later: a failure, and an attempt."""

    was_read = asyncio.Event()
    read = asyncio.StreamReader.read

    async def noted(reader: asyncio.StreamReader, most: int = -1) -> bytes:
        part = await read(reader, most)
        was_read.set()
        return part

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in (b"HTTP/1.1 " + first + b"\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"):
            was_read.clear()
            writer.write(part)
            await was_read.wait()  # so that each part is read by itself

    monkeypatch.setattr(asyncio.StreamReader, "read", noted)

    assert asyncio.run(posted(say)) == [b"{}"]


@pytest.mark.parametrize("url", ["http://127.0.0.1\uff1a9/", "http://[::1/", "http://127.0.0.1:9/ x", "http://\u2100/"])
def test_a_malformed_address_of_a_webhook_is_refused(url: str) -> None:
    """An invalid address is refused with a 4xx. Python's parser raises ValueError for some: that was a 500."""
    with pytest.raises(InvalidRequest, match="not an address"):
        webhooks.check_address(url, Settings(webhook_hosts="127.0.0.1:9", webhook_secret="s"))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nlocation: http://h/s3cret\r\ncontent-length: 0\r\n\r\n",
        b"",
        b"no HTTP s3cret",
    ],
)
def test_an_error_of_a_webhook_hides_the_path(answer: bytes) -> None:
    """An address such as a chat's lets in whoever knows its path: that was in the log, and in dead letters."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    (failed,) = asyncio.run(posted(say, path="/hooks/s3cret?key=s3cret"))
    assert isinstance(failed, Unavailable)
    assert "s3cret" not in str(failed) and "http://127.0.0.1:" in str(failed)


@pytest.mark.parametrize("path", ["/a/s3cret", "/a/s3cret?x=s3cret", "/%61/s3cr%65t"])
def test_an_answer_that_repeats_the_path_is_told_without_it(path: str) -> None:
    for repeated in (path, path.partition("?")[0], unquote(path)):
        told = webhooks.said(f"http://h:1{path}", f"Cannot POST {repeated}".encode() + b"\xff" * 1000, 100)
        assert "s3cret" not in told and told.startswith("Cannot POST /***") and len(told) <= 100
    assert webhooks.said("http://h:1/", b" no / here ", 100) == "no / here"


@pytest.mark.parametrize(
    ("issued", "told"),
    [
        ({}, ""),
        ({"days": -1}, "certificate has expired: renew the certificate"),
        ({"addresses": "127.0.0.2"}, "give the address by a name that is in the certificate"),
        (None, "SSL_CERT_FILE"),
    ],
)
def test_a_certificate_that_is_refused_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, issued: dict[str, Any] | None, told: str
) -> None:
    """The receiver has seen nothing: that counts as away, and uses up no attempt."""
    authority, other = Authority(tmp_path, "authority"), Authority(tmp_path, "other")
    trusting = ssl.create_default_context(cafile=str(authority.file))
    monkeypatch.setattr(webhooks, "_tls", lambda: trusting)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(other.issue("hooks") if issued is None else authority.issue("hooks", **issued))

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    (answer,) = asyncio.run(posted(say, tls=tls, scheme="https"))
    if told:
        assert isinstance(answer, webhooks.Unreachable) and told in str(answer)
    else:
        assert answer == b"{}"


@pytest.mark.long
def test_a_receiver_without_tls_is_told_apart_from_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first says what to do; neither handshake outlasts the call."""
    (plain,) = asyncio.run(answered_at_once(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
    assert isinstance(plain, webhooks.Unreachable) and "is it an http:// address?" in str(plain)
    monkeypatch.setattr(webhooks, "SECONDS", 0.2)
    (hanging,) = asyncio.run(answered_at_once(b""))
    assert isinstance(hanging, webhooks.Unreachable) and "no connection within 0.2 s" in str(hanging)


async def answered_at_once(answer: bytes) -> list[bytes | BaseException]:
    """The result of a call by TLS to a receiver that says this, and then nothing."""
    ended = asyncio.Event()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await ended.wait()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = Settings(webhook_hosts=place, webhook_secret="s")
    try:
        return await asyncio.gather(webhooks.post(f"https://{place}/", b"{}", settings), return_exceptions=True)
    finally:
        ended.set()
        server.close()
