"""AnswerReader: reads HTTP answers from a connection, for an event loop and for a thread."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

import httptools

from notify.errors import Unavailable

_DECLARED = re.compile(rb"\r\n(content-length|transfer-encoding):", re.IGNORECASE)


ANSWER_BYTES = 256 << 20
"""The most bytes of an answer, with its head. The largest of a server are lists of a million topics, which an
administrator asks for; what sends more is no server, or not ours."""


class AnswerReader(ABC):
    """Base of connections with at most one request on its way; assembles the answer from the received bytes."""

    def __init__(self, most: int = ANSWER_BYTES) -> None:
        """`most`: bytes of an answer; one with more is refused."""
        self._most = most
        self._parser: Any = None
        self._body: list[bytes] = []
        self.head = b""
        """The first bytes of the answer, usually with its whole head."""
        self._is_interim = False
        """Whether `head` is that of an informational response."""
        self._size = 0

    def expect(self) -> None:
        """Call this when a request is sent: the next bytes are its answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._body = []
        self.head = b""
        self._size = 0

    def feed(self, data: bytes) -> None:
        """Take received bytes. Raises Unavailable if they are not an HTTP answer, or if there was no request."""
        if self._parser is None:
            raise Unavailable("the server sent an answer without a request")
        self._size += len(data)
        if self._size > self._most:
            self._parser, self._body = None, []
            raise Unavailable(f"the server's answer has more than {self._most:,} bytes: ask for less, page by page")
        if not self.head or self._is_interim:
            self.head, self._is_interim = data, False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise Unavailable(f"the server's answer is not HTTP: {error}") from None

    def ended(self) -> None:
        """The peer has closed the connection: complete an answer that declares no length. Proxies send such pages."""
        head, found, _ = self.head.partition(b"\r\n\r\n")
        if self._parser is None or not found or _DECLARED.search(head) is not None:
            return
        parser, self._parser = self._parser, None
        self.answered(parser.get_status_code(), b"".join(self._body), False)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._is_interim = True
            return  # an informational response, such as a proxy's 103: the answer is still to come
        parser, self._parser = self._parser, None
        self.answered(status, b"".join(self._body), parser.should_keep_alive())

    @abstractmethod
    def answered(self, status: int, body: bytes, is_kept: bool) -> None:
        """Called once the answer is complete. `is_kept`: whether the connection may carry another request."""
