"""The SDK's HTTP client: an answer belongs to its request, whatever a proxy puts before it."""

from __future__ import annotations

import asyncio

from notify.client.http import HttpClient

HINTS = b"HTTP/1.1 103 Early Hints\r\nlink: </a.css>\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


def test_what_is_said_before_an_answer_is_none() -> None:
    """It passed for the answer, and the answer for that of the next request on the connection."""

    async def run() -> None:
        ended = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while head := await reader.readuntil(b"\r\n\r\n"):
                    for part in (HINTS, ANSWER + head.split(b" ")[1]):
                        writer.write(part)
                        await writer.drain()
                        await asyncio.sleep(0.02)  # so that the hints are read before the answer
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()
                ended.set()

        served = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{served.sockets[0].getsockname()[1]}")
        try:
            assert [await client.call("GET", path, b"", 10) for path in ("/a", "/b")] == [b"/a", b"/b"]
        finally:
            client.close()
            await ended.wait()
            served.close()

    asyncio.run(run())
