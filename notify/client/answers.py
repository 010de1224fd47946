"""AnswerReader: reads HTTP answers from a connection, for an event loop and for a thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import httptools

from notify.errors import Unavailable


class AnswerReader(ABC):
    """Base of connections with at most one request on its way; assembles the answer from the received bytes."""

    def __init__(self) -> None:
        self._parser: Any = None
        self._body: list[bytes] = []

    def expect(self) -> None:
        """Call this when a request is sent: the next bytes are its answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._body = []

    def feed(self, data: bytes) -> None:
        """Take received bytes. Raises Unavailable if they are not an HTTP answer, or if there was no request."""
        if self._parser is None:
            raise Unavailable("the server sent an answer without a request")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise Unavailable(f"the server's answer is not HTTP: {error}") from None

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return  # an informational response, such as a proxy's 103: the answer is still to come
        parser, self._parser = self._parser, None
        self.answered(status, b"".join(self._body), parser.should_keep_alive())

    @abstractmethod
    def answered(self, status: int, body: bytes, is_kept: bool) -> None:
        """Called once the answer is complete. `is_kept`: whether the connection may carry another request."""
