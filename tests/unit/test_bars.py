"""The bars of the benches: ratios to a reference that runs just before."""

from __future__ import annotations

import socket
import threading
import zlib
from pathlib import Path

import msgspec
import pytest

from notify.errors import NotifyError
from tools.bench import reference
from tools.bench.bars.judged import judge


def test_a_timing_is_judged_by_its_ratio_to_the_reference() -> None:
    lines: list[str] = []
    assert judge(lines.append, "rate", [50, 90, 60], 0.5, references=[100, 200, 100]) == []
    assert judge(lines.append, "rate", [50, 90, 40], 0.5, references=[100, 200, 100]) == ["rate"]
    assert judge(lines.append, "p50", [6.0], 3, at_most=True, references=[2.0]) == []
    assert judge(lines.append, "p50", [6.2], 3, at_most=True, references=[2.0]) == ["p50"]
    assert lines == [
        "rate: 60 (50 to 90), by the reference 0.5 (0.45 to 0.6), bar ≥ 0.5: met",
        "rate: 50 (40 to 90), by the reference 0.45 (0.4 to 0.5), bar ≥ 0.5: MISSED",
        "p50: 6, by the reference 3, bar ≤ 3: met",
        "p50: 6.2, by the reference 3.1, bar ≤ 3: MISSED",
    ]


def test_other_figures_are_judged_by_themselves() -> None:
    lines: list[str] = []
    assert judge(lines.append, "memory in MB", [380], 400, at_most=True) == []
    assert judge(lines.append, "memory in MB", [420], 400, at_most=True) == ["memory in MB"]
    assert lines == ["memory in MB: 380, bar ≤ 400: met", "memory in MB: 420, bar ≤ 400: MISSED"]


def test_the_reference_counts_transactions() -> None:
    measured = reference.measure(callers=3, seconds=0.05)
    assert measured.callers == 3
    assert measured.transactions_per_second > 0
    assert measured.p50_ms > 0


def test_the_server_of_the_reference_writes_each_item_with_its_checksum(tmp_path: Path) -> None:
    client, server = socket.socketpair()
    with client, server:
        thread = threading.Thread(target=reference.serve, args=(tmp_path / "records", server))
        thread.start()
        request = msgspec.msgpack.encode([(b"i" * 16, b"body"), (b"j" * 16, b"")])
        client.sendall(len(request).to_bytes(4, "little") + request)
        client.shutdown(socket.SHUT_WR)
        thread.join()
        answer = msgspec.msgpack.encode([b"i" * 16, b"j" * 16])
        assert client.recv(1 << 16) == len(answer).to_bytes(4, "little") + answer
    records = [b"i" * 16 + b"body", b"j" * 16]
    written = b"".join(zlib.crc32(record).to_bytes(4, "little") + record for record in records)
    assert (tmp_path / "records").read_bytes() == written


def test_a_reference_whose_server_answers_something_else_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_another(server: socket.socket, *_: object) -> threading.Thread:
        thread = threading.Thread(target=_answer_nothing, args=(server,))
        thread.start()
        threads.append(thread)
        return thread

    threads: list[threading.Thread] = []
    monkeypatch.setattr(reference, "_start_server", start_another)
    monkeypatch.setattr(reference, "_end", lambda child: None)
    with pytest.raises(NotifyError, match="sent a wrong answer"):
        reference.measure(callers=1, seconds=0.05)
    threads[0].join()


def _answer_nothing(server: socket.socket) -> None:
    with server:
        server.recv(1 << 16)
        server.sendall(b"\1\0\0\0\x90")  # an answer without items
