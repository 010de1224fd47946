"""The SDK's HTTP client: an answer belongs to its request, whatever a proxy puts before it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable

import pytest

from notify.client.transport.http import AnswerReader, HttpClient, _hint_of, error_of
from notify.errors import Closed, Timeout, Unavailable
from tests.support.clock import PATIENCE_SECONDS, eventually_async

HINTS = b"HTTP/1.1 103 Early Hints\r\nlink: </a.css>\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/msgpack\r\ncontent-length: 2\r\n\r\n"


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(lambda answer: [HINTS, answer], id="hints apart"),
        pytest.param(lambda answer: [HINTS + answer], id="hints together"),
        pytest.param(lambda answer: pieces(HINTS + answer, 30), id="hints and answer in pieces"),
        pytest.param(lambda answer: pieces(answer, 1), id="byte by byte"),
        pytest.param(lambda answer: [answer[:17], answer[17:]], id="after the status"),
    ],
)
async def test_an_answer_is_the_same_however_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, split: Callable[[bytes], list[bytes]]
) -> None:
    """Lines before it passed for it, and it for the answer to the next request on the connection. A head in several
    pieces was taken for another program's."""
    feed = AnswerReader.feed
    was_read = asyncio.Event()
    begun: list[asyncio.Task[None]] = []

    def noted(reader: AnswerReader, data: bytes) -> None:
        try:
            feed(reader, data)
        finally:
            was_read.set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                for part in split(ANSWER + head.split(b" ")[1]):
                    was_read.clear()
                    writer.write(part)
                    await was_read.wait()  # so that each part is read by itself
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.append(asyncio.ensure_future(serve(reader, writer)))

    monkeypatch.setattr(AnswerReader, "feed", noted)
    served = await asyncio.start_server(accept, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{served.sockets[0].getsockname()[1]}")
    try:
        assert [await client.call("GET", path, b"", 10) for path in ("/a", "/b")] == [b"/a", b"/b"]
    finally:
        client.close()
        served.close()
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


@pytest.mark.parametrize(("passed", "connections"), [(0, 1), (40, 2), (-3600, 2)])
def test_a_connection_that_was_idle_for_long_is_not_used_again(passed: float, connections: int) -> None:
    """A proxy in between may have forgotten it in silence. Once the clock on the wall was set back, it was used
    again however long it was idle."""

    async def run() -> int:
        served: list[asyncio.Task[None]] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while await reader.readuntil(b"\r\n\r\n"):
                    writer.write(ANSWER + b"ok")
            writer.close()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            served.append(asyncio.ensure_future(serve(reader, writer)))

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
            client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            assert await client.call("GET", "/a", b"", 30) == b"ok"
            (connection,) = client._idle
            connection.idle_since -= passed
            assert await client.call("GET", "/b", b"", 30) == b"ok"
            client.close()
            await asyncio.gather(*served)
        return len(served)

    assert asyncio.run(run()) == connections


@pytest.mark.parametrize("is_long", [False, True])
def test_the_head_of_an_answer_has_a_bound(is_long: bool) -> None:
    fields = b"".join(b"x-%d: %b\r\n" % (n, b"y" * 1000) for n in range(100 if is_long else 50))
    read: list[bytes] = []

    class Reader(AnswerReader):
        def answered(self, status: int, body: bytes, is_kept: bool) -> None:
            read.append(body)

    reader = Reader()
    reader.expect()
    answer = b"HTTP/1.1 200 OK\r\n" + fields + b"content-length: 2\r\n\r\n/a"
    with pytest.raises(Unavailable, match="head") if is_long else contextlib.nullcontext():
        for piece in pieces(answer, 1000):
            reader.feed(piece)
    assert read == ([] if is_long else [b"/a"])


def test_a_request_that_came_too_slowly_may_be_repeated() -> None:
    """Proxies say 408 to a connection that was silent: nothing was carried out, and it is not for what it contains."""
    assert error_of(408, "http_408", "").retryable


def test_an_outcome_that_another_server_knows_may_be_sent_again() -> None:
    """Its own server is unreachable, and the others of the registry refuse it: `commit()` raised InvalidRequest."""
    error = error_of(421, "wrong_shard", "this is shard b; send the outcome to a")
    assert (type(error), error.retryable, error.code, error.status) == (Unavailable, True, "wrong_shard", 421)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_not_the_servers_fault(number: int) -> None:
    """It was asked whether the server is started."""
    assert "ulimit -n" in _hint_of(OSError(number, "")) and "started" in _hint_of(ConnectionRefusedError())


@pytest.mark.parametrize(("method", "ending"), [("GET", "within 0.01 s"), ("POST", "it may have been carried out")])
async def test_only_a_write_without_an_answer_is_in_doubt(method: str, ending: str) -> None:
    is_over = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read()
        finally:
            writer.close()
            is_over.set()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        client = HttpClient(f"http://{host}:{port}")
        with pytest.raises(Timeout, match=f"{ending}$"):
            await client.call(method, "/v1/members", b"", 0.01)
        client.close()
        await is_over.wait()


@pytest.mark.parametrize("answers", [0, 1])
async def test_only_a_server_that_never_answered_may_speak_tls(answers: int) -> None:
    """A consumer whose server was killed logged that TLS may be the cause."""
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.readuntil(b"\r\n\r\n")
        asked += 1
        if asked <= answers:
            writer.write(ANSWER.replace(b"\r\n", b"\r\nconnection: close\r\n", 1) + b"/a")
        writer.close()

    served = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{served.sockets[0].getsockname()[1]}")
    try:
        for _ in range(answers):
            assert await client.call("GET", "/a", b"", 10) == b"/a"
        with pytest.raises(Unavailable, match="closed the connection") as raised:
            await client.call("GET", "/a", b"", 10)
    finally:
        client.close()
        served.close()
    assert ("TLS" in str(raised.value)) is (answers == 0)


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that answers each request, except those for `/held`."""
    with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while head := await reader.readuntil(b"\r\n\r\n"):
            if b"/held" not in head:
                writer.write(ANSWER + b"ok")


async def test_a_request_that_is_cancelled_after_its_answer_ends_no_other() -> None:
    """It closed the connection, which carried the next request already: this one was sent a second time."""
    async with await asyncio.start_server(answered, "127.0.0.1", 0) as server:
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        held = asyncio.ensure_future(client.call("GET", "/held", b"", PATIENCE_SECONDS))
        await eventually_async(lambda: any(c.used for c in client._open), "the request to be sent")
        (connection,) = client._open
        connection.data_received(ANSWER + b"ok")
        held.cancel()
        following = asyncio.ensure_future(client.call("GET", "/next", b"", PATIENCE_SECONDS))
        await asyncio.wait([held])
        assert held.cancelled() and await following == b"ok"
        assert client._open == {connection}
        client.close()


async def test_a_client_that_is_closed_while_it_connects_sends_nothing() -> None:
    """The connection was made, and the request sent, after the close, which had nothing to close."""
    async with await asyncio.start_server(answered, "127.0.0.1", 0) as server:
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        calling = asyncio.ensure_future(client.call("GET", "/a", b"", PATIENCE_SECONDS))
        await asyncio.sleep(0)  # it connects now
        client.close()
        with pytest.raises(Closed):
            await calling
        assert not client.is_open
