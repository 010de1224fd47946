"""Calls by urllib that end in time: of an audit's alarms, and for the keys of an identity provider."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from notify.runtime.timed_call import _Deadline, answer_to
from tests.support.clock import PATIENCE_SECONDS

HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"


@contextmanager
def answering(first: bytes, then: bytes = b"") -> Iterator[str]:
    """The address of a server that answers with `first`, and continues with `then` byte by byte for as long as it is
    listened to."""
    served = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = served.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(first)
            try:
                while then:
                    connection.sendall(then)
                    time.sleep(0.01)  # the pause between two bytes
            except OSError:
                pass  # it is not listened to any more

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{served.getsockname()[1]}/"
    finally:
        served.close()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), "the connection is still open"


@pytest.mark.parametrize("first", [b"", HEAD + b"x: ", HEAD + b"\r\n"])
def test_an_answer_without_end_is_cut(first: bytes) -> None:
    """Each byte began the time again: an alarm's receiver that answered so held up the audit's watch for days."""
    with answering(first, b"x") as url:
        began = time.monotonic()
        with pytest.raises(OSError):
            answer_to(url, 0.3, 1 << 30)
        assert time.monotonic() - began < PATIENCE_SECONDS / 3


def test_a_handshake_without_end_is_cut() -> None:
    """The time of each read started over, and the connection was not looked after before the handshake's end."""
    record = b"\x16\x03\x03\x40\x00"  # the head of a handshake's record of 16 KiB
    with answering(record, b"x") as url:
        began = time.monotonic()
        with pytest.raises(OSError):
            answer_to(url.replace("http:", "https:"), 0.3, 10)
        assert time.monotonic() - began < PATIENCE_SECONDS / 3


def test_a_connection_that_is_made_too_late_is_closed_at_once() -> None:
    """It was never closed where it was made after the time: a second address, or a redirect."""
    deadline = _Deadline(PATIENCE_SECONDS)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        deadline.cut()
        deadline.watch(ours)
        theirs.settimeout(PATIENCE_SECONDS)
        assert theirs.recv(1) == b""
        deadline.end()


def test_no_more_is_read_than_is_wanted() -> None:
    with answering(HEAD + b"\r\n" + b"y" * 1000, b"x") as url:
        assert answer_to(url, PATIENCE_SECONDS, 10) == b"y" * 10


@pytest.mark.parametrize("answer", [b"SSH-2.0\r\n", b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n", b""])
def test_an_answer_that_is_not_http_is_an_error_of_the_network(answer: bytes) -> None:
    """For the server it counted as a fault of its own where an identity provider answered so."""
    with answering(answer) as url, pytest.raises(OSError):
        answer_to(url, PATIENCE_SECONDS, 10)


def test_a_redirect_is_an_error_where_none_is_followed() -> None:
    with (
        answering(b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n") as url,
        pytest.raises(urllib.error.HTTPError) as refused,
    ):
        answer_to(url, PATIENCE_SECONDS, 0, follow=False)
    assert refused.value.code == 302
    refused.value.close()
