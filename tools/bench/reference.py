"""The reference of the bars: how fast this machine is now at the least work that a durable transaction needs.

A timing on a shared machine means little by itself: an hour later the same commit may be half as fast. Therefore the
reference runs before each run that has a bar, and the bar is a ratio of the two. The reference does only what every
server of durable messages must do: a client sends requests over a socket to another process, which decodes their items,
writes a record with a checksum for each item, syncs the file, and answers each item. A transaction of the reference is
two items, as a half message and its outcome are: one item with a body, and one with only an id.

Run as `python -m tools.bench.reference` with the path of a file, this module is the server.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from notify.errors import NotifyError

BODY_BYTES = 256
ID_BYTES = 16
SECONDS = 1.0
ANSWER_SECONDS = 30.0
"""The longest time of one request."""
_LENGTH = struct.Struct("<I")


class _Record(msgspec.Struct, array_like=True):
    """One item of a request: an id and a body, which is empty if the item is an outcome."""

    id: bytes
    body: bytes


_decode_records = msgspec.msgpack.Decoder(list[_Record]).decode
_decode_ids = msgspec.msgpack.Decoder(list[bytes]).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Reference:
    """The figures that the reference reached with a number of callers."""

    callers: int
    transactions_per_second: float
    p50_ms: float
    """The median time of a transaction."""


def measure(callers: int, seconds: float = SECONDS) -> Reference:
    """Run the reference for `seconds`, with `callers` items in each request. Raises NotifyError if it cannot run."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-bench-")))
        client, server = socket.socketpair()
        stack.callback(client.close)
        client.settimeout(ANSWER_SECONDS)
        child = _start_server(server, directory / "records")
        stack.callback(_end, child)
        try:
            times = _exchange(_Line(client), callers, seconds)
        except OSError as error:
            raise NotifyError(f"the reference of the bench stopped: {error}") from None
    return Reference(callers, callers / statistics.fmean(times), 1000 * statistics.median(times))


def _start_server(server: socket.socket, records: Path) -> subprocess.Popen[str]:
    with server:
        return subprocess.Popen(
            [sys.executable, "-m", "tools.bench.reference", str(records), str(server.fileno())],
            pass_fds=[server.fileno()],
            text=True,
        )


def _end(child: subprocess.Popen[str]) -> None:
    """Kill the server."""
    child.kill()
    child.wait()


class _Line:
    """One side of the connection between the two processes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._incoming: BinaryIO = connection.makefile("rb")

    def send(self, content: bytes) -> None:
        """Send one request or answer. Raises OSError."""
        self._connection.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self) -> bytes | None:
        """The next request or answer; None at the end of the connection. Raises OSError."""
        head = self._incoming.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        return self._incoming.read(*_LENGTH.unpack(head))


def _exchange(line: _Line, callers: int, seconds: float) -> list[float]:
    """The seconds of each exchange of `callers` transactions; those in the first tenth of the time do not count."""
    bodies = [os.urandom(BODY_BYTES) for _ in range(callers)]
    times: list[float] = []
    begin = time.perf_counter() + 0.1 * seconds
    ended = 0.0
    while ended < begin + seconds or not times:
        started = time.perf_counter()
        ids = [os.urandom(ID_BYTES) for _ in bodies]
        _ask(line, [_Record(record_id, body) for record_id, body in zip(ids, bodies, strict=True)])
        _ask(line, [_Record(record_id, b"") for record_id in ids])
        ended = time.perf_counter()
        if started >= begin:
            times.append(ended - started)
    return times


def _ask(line: _Line, records: list[_Record]) -> None:
    """Send a request and read its answer. Raises OSError, also if the answer has other ids."""
    line.send(_encode(records))
    answer = line.receive()
    if answer is None or _decode_ids(answer) != [record.id for record in records]:
        raise OSError("its server sent a wrong answer")


def serve(path: Path, connection: socket.socket) -> None:
    """Answer the requests of one connection until it ends, and write their records to the file `path`."""
    line = _Line(connection)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        while (request := line.receive()) is not None:
            records = _decode_records(request)
            chunks: list[bytes] = []
            for record in records:
                content = record.id + record.body
                chunks.append(_LENGTH.pack(zlib.crc32(content)) + content)
            os.write(log, b"".join(chunks))
            os.fdatasync(log)
            line.send(_encode([record.id for record in records]))
    finally:
        os.close(log)


def main() -> None:
    """Serve the connection with the file descriptor in argv[2], with the file in argv[1]."""
    with socket.socket(fileno=int(sys.argv[2])) as connection:
        serve(Path(sys.argv[1]), connection)


if __name__ == "__main__":
    main()
