"""Reading HTTP answers off a connection, whoever waits for them: a loop or a thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import httptools

from notify.errors import Unavailable


class AnswerReader(ABC):
    """Base of connections with at most one request on its way: puts its answer together from the bytes that come."""

    def __init__(self) -> None:
        self._parser: Any = None
        self._body: list[bytes] = []

    def expect(self) -> None:
        """Note that a request is sent: what comes now is its answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._body = []

    def feed(self, data: bytes) -> None:
        """Take bytes that have come. Raises Unavailable for what is no HTTP answer, and for an answer to no request."""
        if self._parser is None:
            raise Unavailable("the server answers what nobody asked")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise Unavailable(f"the server's answer is not HTTP: {error}") from None

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return  # such as 103, of a proxy: the answer is still to come
        parser, self._parser = self._parser, None
        self.answered(status, b"".join(self._body), parser.should_keep_alive())

    @abstractmethod
    def answered(self, status: int, body: bytes, is_kept: bool) -> None:
        """Called once the answer is whole. `is_kept`: the connection may carry another request."""
