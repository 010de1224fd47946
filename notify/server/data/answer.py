"""An answer to a data route, errors included: one status, one body."""

from __future__ import annotations

import math
from http import HTTPStatus

from notify.errors import NotifyError, StorageFailed
from notify.protocol.wire import PROBLEM, PROBLEM_TYPE, Problem, encode_json
from notify.runtime import faults
from notify.server.core.flow import retry_after


def fault_of(event: str, method: str, path: str) -> NotifyError:
    """The error to answer if the server itself failed; logs the traceback, so call it in the `except` block."""
    faults.unexpected(event, method=method, path=path[:200])
    return StorageFailed("the server failed on this request; its log says why")


NO_STORE = b"cache-control: no-store\r\n"
"""No cache of a proxy may keep an answer: a reader would not see new messages, and others what they may not see."""


class Answer:
    """An answer: one status, one body."""

    __slots__ = ("fields", "is_shared", "kind", "parts", "retry_after", "size", "status")

    def __init__(
        self,
        status: int,
        kind: str,
        body: bytes | list[bytes],
        retry_after: int = 0,
        fields: bytes = b"",
        is_shared: bool = False,
    ) -> None:
        """`body`: all of it, or its parts. `retry_after`: seconds; 0: the answer has no such header. `fields`: lines of
        further headers, which say how it may be cached. `is_shared`: the server keeps the body for other answers."""
        self.fields = fields
        self.is_shared = is_shared
        self.status = status
        self.kind = kind
        self.parts = [body] if isinstance(body, bytes) else body
        self.size = len(body) if isinstance(body, bytes) else sum([len(part) for part in body])
        self.retry_after = retry_after

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @classmethod
    def problem(cls, error: NotifyError) -> Answer:
        """An error as a problem of RFC 9457."""
        return cls(error.status, PROBLEM, problem(error), math.ceil(retry_after(error) or 0))

    def encoded(self, headers: list[tuple[bytes, bytes]], keep_alive: bool, with_body: bool) -> bytes:
        """The bytes of the answer in HTTP/1.1; `headers` are added to each answer."""
        head = _HEADS.get((self.status, self.kind))
        if head is None:
            phrase = HTTPStatus(self.status).phrase
            head = f"HTTP/1.1 {self.status} {phrase}\r\ncontent-type: {self.kind}\r\n".encode()
            _HEADS[(self.status, self.kind)] = head
        chunks = [head, b"content-length: %d\r\n" % self.size]
        chunks += [b"%b: %b\r\n" % header for header in headers]
        if self.status == 401:
            chunks.append(b"www-authenticate: Bearer\r\n")
        if self.retry_after:
            chunks.append(b"retry-after: %d\r\n" % self.retry_after)
        chunks.append(self.fields or NO_STORE)
        chunks.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
        if with_body:
            chunks += self.parts
        return b"".join(chunks)


_HEADS: dict[tuple[int, str], bytes] = {}


def problem(error: NotifyError) -> bytes:
    """An error as the body of a problem of RFC 9457."""
    title = type(error).__name__
    kind = f"{PROBLEM_TYPE}{error.code}"
    return encode_json(Problem(kind, title, error.status, str(error), error.code, error.retryable, retry_after(error)))
