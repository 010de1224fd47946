"""Bytes from elsewhere are compared with their announced size while they come, not afterwards: objects of a store,
files of a backup, answers of servers, compressed data."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from notify.binlog_bridge.binlog.compressed import inflated
from notify.binlog_bridge.errors import Unreadable
from notify.cli.backup import _fetch
from notify.client.transport.http import AnswerReader
from notify.errors import ObjectStoreFailed, Unavailable
from notify.kafka.progress import Progress
from notify.object_store.store import CHUNK, Store, digest_of
from tests.support.answering import Request, answering

SMALL = 100
LARGE = b"x" * (3 * CHUNK)


class Counting(io.BytesIO):
    """A file that notes how large it ever was."""

    largest = 0

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.largest = max(self.largest, self.tell())
        return written


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(f"file://{tmp_path}/store")
    made.put("segments/a", lambda sink: sink.write(LARGE))
    return made


def test_a_copy_takes_no_more_than_it_was_told(store: Store) -> None:
    sink = Counting()
    with pytest.raises(ObjectStoreFailed, match=f"more than {SMALL} bytes"):
        store.copy_to("segments/a", sink, SMALL)
    assert sink.largest <= SMALL
    for most in (len(LARGE), len(LARGE) + 1):
        sink = Counting()
        assert store.copy_to("segments/a", sink, most) == digest_of(LARGE) and sink.getvalue() == LARGE
    with pytest.raises(ObjectStoreFailed, match="more than"):
        store.copy_to("segments/a", sink, len(LARGE) - 1)


def test_hashed_and_read_bytes_are_bounded(store: Store) -> None:
    paced: list[int] = []
    watched = Store(store.url, pace=paced.append)
    with pytest.raises(ObjectStoreFailed, match="more than"):
        watched.digest("segments/a", SMALL)
    assert not paced, "not a byte of it was hashed"
    with pytest.raises(ObjectStoreFailed, match="larger than"):
        store.read_listed("segments/a", (SMALL, "0" * 64), 1 << 30)
    assert store.read_listed("segments/a", digest_of(LARGE), 1 << 30) == LARGE


@contextmanager
def announcing(body: bytes, *, chunked: bool) -> Iterator[str]:
    def answer(request: Request) -> None:
        request.protocol_version = "HTTP/1.1"
        request.send_response(200)
        request.send_header(*(("transfer-encoding", "chunked") if chunked else ("content-length", str(len(body)))))
        request.end_headers()
        with suppress(ConnectionError):  # who asked has seen enough
            for at in range(0, len(body), 1 << 20):
                part = body[at : at + (1 << 20)]
                request.wfile.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
        request.close_connection = True  # a chunked answer ends in its middle

    with answering(answer) as server:
        yield server.url


@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "in chunks"])
def test_a_file_of_a_backup_takes_no_more_than_was_announced(tmp_path: Path, chunked: bool) -> None:
    """Up to 8 MiB more were written; an answer that was cut short in its chunks ended the command with a traceback."""
    with announcing(LARGE, chunked=chunked) as url:
        with pytest.raises(Unavailable, match="has 100 bytes"):
            _fetch(url, "b", {"name": "log/a", "size": SMALL}, tmp_path, lambda count: None)
        assert (tmp_path / "log" / "a").stat().st_size <= SMALL
        if chunked:
            with pytest.raises(Unavailable, match="could not be fetched"):
                _fetch(url, "b", {"name": "log/b", "size": len(LARGE)}, tmp_path, lambda count: None)


class Reader(AnswerReader):
    """Notes the answers."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.answers: list[tuple[int, bytes]] = []

    def answered(self, status: int, body: bytes, is_kept: bool) -> None:
        self.answers.append((status, body))


ENDLESS = {
    "a body with a length": (b"HTTP/1.1 200 OK\r\ncontent-length: 9999999\r\n\r\n", b"x" * 1000),
    "chunks": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"64\r\n" + b"x" * 100 + b"\r\n"),
    "a body until the end": (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 1000),
    "a head": (b"HTTP/1.1 200 OK\r\n", b"x-a: y\r\n"),
    "informational answers": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_client_reads_no_endless_answer(kind: str) -> None:
    begin, part = ENDLESS[kind]
    reader = Reader(20_000)
    reader.expect()
    taken = 0
    with pytest.raises(Unavailable, match="more than 20,000 bytes"):
        reader.feed(begin or part)
        for _ in range(20_000):
            reader.feed(part)
            taken += len(part)
    assert taken <= 20_000 and sum(map(len, reader._body)) <= 20_000 and not reader.answers
    reader.expect()  # the bound is of one answer, not of the connection
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 15000\r\n\r\n" + b"y" * 15_000
    reader.feed(whole)
    assert reader.answers == [(200, b"y" * 15_000)]
    reader.expect()
    reader.feed(whole)
    assert len(reader.answers) == 2


def test_a_compressed_body_is_bounded_by_its_declared_size() -> None:
    """A bridge's event, and the bitmap beside a group's offset at Kafka."""
    bomb = zlib.compress(bytes(64 << 20), 9)
    with pytest.raises(Unreadable, match="does not have the 100 bytes"):
        inflated(b"\1\x64" + bomb)
    import base64
    import json

    metadata = json.dumps({"done": base64.b64encode(bomb).decode()})
    assert not Progress.of(7, metadata).done
