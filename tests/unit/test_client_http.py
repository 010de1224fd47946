"""The SDK's HTTP client: an answer belongs to its request, whatever a proxy puts before it."""

from __future__ import annotations

import asyncio

import pytest

from notify.client.transport.http import AnswerReader, HttpClient, error_of
from notify.errors import Timeout, Unavailable

HINTS = b"HTTP/1.1 103 Early Hints\r\nlink: </a.css>\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/msgpack\r\ncontent-length: 2\r\n\r\n"


def test_bytes_before_a_request_are_not_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passed for the answer, and the answer for that of the next request on the connection."""
    feed = AnswerReader.feed

    async def run() -> None:
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
                    for part in (HINTS, ANSWER + head.split(b" ")[1]):
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

    asyncio.run(run())


def test_a_request_that_came_too_slowly_may_be_repeated() -> None:
    """Proxies say 408 to a connection that was silent: nothing was carried out, and it is not for what it contains."""
    assert error_of(408, "http_408", "").retryable


def test_an_outcome_that_another_server_knows_may_be_sent_again() -> None:
    """Its own server is unreachable, and the others of the registry refuse it: `commit()` raised InvalidRequest."""
    error = error_of(421, "wrong_shard", "this is shard b; send the outcome to a")
    assert (type(error), error.retryable, error.code, error.status) == (Unavailable, True, "wrong_shard", 421)


@pytest.mark.parametrize(("method", "ending"), [("GET", "within 0.01 s"), ("POST", "it may have been carried out")])
def test_only_a_write_without_an_answer_is_in_doubt(method: str, ending: str) -> None:
    async def run() -> None:
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

    asyncio.run(run())
