"""HttpClient: a small HTTP/1.1 client for the data routes, with asyncio, httptools and persistent connections.

A request of a general client costs more than a whole transaction (aiohttp was the limit at 10,000 requests/s; this
client is not the limit; see docs/adr). Requests are msgpack and carry a length; answers are read whole.
"""

from __future__ import annotations

import asyncio
import errno
import re
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import httptools
import msgspec

from notify.client.transport.foreign_answers import Foreign, foreign_content
from notify.client.transport.login import EXCHANGES, Shown, TlsFiles, Token, tls_files_from_environment
from notify.errors import (
    Backpressure,
    Closed,
    Conflict,
    DiskFull,
    Forbidden,
    ForeignAnswer,
    IdInUse,
    InvalidRequest,
    NotFound,
    NotifyError,
    OutcomeConflict,
    StaleReceipt,
    Timeout,
    TooLarge,
    Unauthorized,
    Unavailable,
    WrongShard,
)
from notify.protocol.wire import MSGPACK, PROBLEM_TYPE, UNDECODABLE, Item, Items, Problem
from notify.runtime.addresses import addresses_of, first_connection
from notify.runtime.urls import server_address

T = TypeVar("T")
CLOSED = "this client is closed"
CONNECTIONS = 256
CONNECT_SECONDS = 3.0
CLOSE_ROUNDS = 1000
"""How often a close looks whether connections are still open, a millisecond or more apart."""
LARGE_BYTES = 64 << 10
"""If a connection is cut in the middle of a request with more bytes, these may be too many for a proxy."""
IDLE_SECONDS = 30.0
"""A connection that was idle for longer is not used again: what lies in between may have forgotten it in silence."""
ANSWER_BYTES = 256 << 20
"""The most bytes of an answer, with its head. The largest of a server are lists of a million topics, which an
administrator asks for; a longer one does not come from a Notify server."""
HEAD_BYTES = 64 << 10
"""The most bytes of an answer's head."""
_DECLARED = re.compile(rb"\r\n(content-length|transfer-encoding):", re.IGNORECASE)
Reply = tuple[int, bytes, bytes]
"""Status and body of an answer, and its first bytes."""


class AnswerReader(ABC):
    """Base of connections with at most one request on its way, on an event loop or in a thread (`blocking.py`);
    assembles the answer from the received bytes."""

    def __init__(self, most: int = ANSWER_BYTES) -> None:
        """`most`: bytes of an answer; one with more is refused."""
        self._most = most
        self._parser: Any = None
        self._body: list[bytes] = []
        self.head = b""
        """The first bytes of the answer, with its whole head."""
        self._has_head = False
        self._size = 0

    def expect(self) -> None:
        """Call this when a request is sent: the next bytes are its answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._body = []
        self.head = b""
        self._has_head = False
        self._size = 0

    def feed(self, data: bytes) -> None:
        """Take received bytes. Raises Unavailable if they are not an HTTP answer, or if there was no request."""
        if self._parser is None:
            raise Unavailable("the server sent an answer without a request")
        self._size += len(data)
        if self._size > self._most:
            self._parser, self._body = None, []
            raise Unavailable(f"the server's answer has more than {self._most:,} bytes: ask for less, page by page")
        if not self._has_head:
            self.head += data  # a proxy, TLS or the network may cut it anywhere
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise Unavailable(f"the server's answer is not HTTP: {error}") from None
        if not self._has_head and len(self.head) > HEAD_BYTES:
            self._parser, self._body = None, []
            raise Unavailable(f"the head of the server's answer has more than {HEAD_BYTES:,} bytes")

    def ended(self) -> None:
        """The peer has closed the connection: complete an answer that declares no length. Proxies send such pages."""
        head, found, _ = self.head.partition(b"\r\n\r\n")
        if self._parser is None or not found or _DECLARED.search(head) is not None:
            return
        parser, self._parser = self._parser, None
        self.answered(parser.get_status_code(), b"".join(self._body), False)

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            # An informational response, such as a proxy's 103: the answer is still to come, or has begun.
            self.head, self._has_head = self.head.partition(b"\r\n\r\n")[2], False
            return
        parser, self._parser = self._parser, None
        self.answered(status, b"".join(self._body), parser.should_keep_alive())

    @abstractmethod
    def answered(self, status: int, body: bytes, is_kept: bool) -> None:
        """Called once the answer is complete. `is_kept`: whether the connection may carry another request."""


class _Cut(Unavailable):
    """The connection was closed or reset before an answer had come."""


class _Connection(AnswerReader, asyncio.Protocol):
    """A persistent connection with at most one request on its way."""

    def __init__(self, client: HttpClient, address: str) -> None:
        super().__init__()
        self._client = client
        self.address = address
        self._answer: asyncio.Future[Reply] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport
        self.used = False
        self.idle_since = 0.0
        """When the last request ended, by the clock on the wall: a machine that was frozen notices the jump."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def ask(self, request: bytes, seconds: float) -> asyncio.Future[Reply]:
        """Send a request and return the future of its answer.

        The future raises TimeoutError after `seconds`, and Unavailable if the connection fails before an answer.
        """
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        # A plain timer costs a third of `asyncio.timeout`, which cancels the waiting task.
        self._timer = loop.call_later(seconds, self._time_out)
        self.expect()
        self.transport.write(request)
        self.used = True
        return self._answer

    def data_received(self, data: bytes) -> None:
        try:
            self.feed(data)
        except Unavailable as error:
            self._fail(error)
            self.close()

    def answered(self, status: int, body: bytes, is_kept: bool) -> None:
        answer = self._ended()
        self._client.has_answered = True
        if answer is not None and not answer.done():
            answer.set_result((status, body, self.head))
        if is_kept:
            self._client.give_back(self)
        else:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._client.forget(self)
        if error is None:
            self.ended()
        may_speak_tls = not self._client.is_tls and not self._client.has_answered
        hint = "; if it speaks TLS, write https://" if may_speak_tls else ""
        self._fail(_Cut(f"the server closed the connection before it answered{hint}"))

    def _ended(self) -> asyncio.Future[Reply] | None:
        """Forget the request on its way and return its future."""
        answer, self._answer = self._answer, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return answer

    def _fail(self, error: Exception) -> None:
        answer = self._ended()
        if answer is not None and not answer.done():
            answer.set_exception(error)

    def _time_out(self) -> None:
        self._fail(TimeoutError())
        self.close()

    def close(self) -> None:
        self.transport.close()

    def cut(self) -> None:
        """Close without the closing handshake of TLS, which a busy or silent peer might never answer."""
        self.transport.abort()


def _hint_of(error: Exception) -> str:
    """A hint for the user if a connection failed."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "this process may open no more files: raise its limit (ulimit -n), or close what it leaves open"
    reason = error.reason if isinstance(error, ssl.SSLError) else ""
    if reason == "WRONG_VERSION_NUMBER":
        return "it speaks no TLS: write http://"
    if reason == "CERTIFICATE_VERIFY_FAILED":
        return "name the authority of its certificate in NOTIFY_CA, and the server as its certificate does"
    return "is it started, and is this its address?"


class HttpClient:
    """Requests to one server. Belongs to one event loop."""

    def __init__(self, url: str, *, tls: ssl.SSLContext | TlsFiles | None = None, token: Shown | Token = None) -> None:
        """`tls`: the TLS context that verifies the server, or the files that it is made of; `token`: the token to send;
        None: from the environment (notify/client/transport/login.py). Raises InvalidRequest if `url` is not the
        address of a server.
        """
        parts = server_address(url)
        self.url = url.rstrip("/")
        self.address = str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80)
        self.reached = ""
        """The one of the host's addresses that has answered last; empty if none has. Any thread may ask."""
        self.has_answered = False
        """Whether the server has ever answered, so that it speaks the protocol of `url`."""
        self.is_tls = parts.scheme == "https"
        self._tls = (tls or tls_files_from_environment()) if self.is_tls else None
        self._base = parts.path.rstrip("/")
        """The prefix of each path, which selects one of several workers."""
        self._head_host = f"host: {parts.netloc}\r\n"
        self._token = token if isinstance(token, Token) else Token(token)
        self._heads: dict[tuple[str, str, str], str] = {}
        self._idle: deque[_Connection] = deque()
        self._open: set[_Connection] = set()
        self._room = asyncio.Semaphore(CONNECTIONS)
        self._foreign = Foreign()
        self._closed = self._leaving = False

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context for a new connection, of the files as they are now; None for http."""
        return self._tls.context() if isinstance(self._tls, TlsFiles) else self._tls

    async def call(self, method: str, path: str, body: bytes, seconds: float, kind: str = MSGPACK) -> bytes:
        """The body of a 200 answer. Raises the error that the server reports, Unavailable, or Timeout after `seconds`.

        Only a server's own answers count: ForeignAnswer, which is Unavailable, if a proxy or login page answered.
        If the server refuses the token and there is a new one, the request is sent again with the new token. It then
        has the full `seconds` again, because a poll may have used most of its time when its token was revoked.
        """
        token_header: str | None = self._token.header()
        status, answer = 401, b""
        foreign: ForeignAnswer | None = None
        for _ in range(1 + EXCHANGES):
            if token_header is None:
                break
            foreign = None
            try:
                status, answer = await self.ask(method, path, body, seconds, kind, token_header)
            except ForeignAnswer as error:
                if error.answered != 401:
                    raise
                status, foreign = 401, error  # a proxy may verify the token before the server does
            if status != 401:
                break
            token_header = self._token.instead_of(token_header)
        if status == 200:
            return answer
        raise foreign or _refusal(status, answer)

    async def ask(
        self, method: str, path: str, body: bytes, seconds: float, kind: str, token_header: str, gives: str = ""
    ) -> tuple[int, bytes]:
        """Status and body of a server's answer. Raises Unavailable, Timeout, ForeignAnswer.

        `kind`: the media type of the request; `gives`: that of its answer, by default the same; `token_header`: the
        header line with the token.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        request = self._request(method, path, body, kind, token_header)
        try:
            if self._room.locked():
                async with asyncio.timeout_at(deadline):
                    await self._room.acquire()
            else:
                await self._room.acquire()  # without waiting
            try:
                status, answer, head = await self._ask(request, deadline)
            finally:
                self._room.release()
        except TimeoutError:
            doubt = "" if method == "GET" else "; it may have been carried out"
            raise Timeout(f"no answer to {method} {path} within {seconds:g} s{doubt}") from None
        except _Cut as cut:
            if len(body) <= LARGE_BYTES:
                raise
            raise ForeignAnswer(
                f"{cut}, in the middle of a request with {len(body):,} bytes: if that is above the bound of a proxy in "
                "between, raise it (nginx: client_max_body_size)",
                answered=0,
            ) from None
        if (gives or kind).encode() in head if status == 200 else _problem(answer) is not None:
            return status, answer
        raise self._foreign.answer(f"{method} {self.url}{path}", len(body), status, head, answer)

    async def is_reachable(self, seconds: float) -> bool:
        """Whether a Notify server itself answers a small request, even with a refusal."""
        try:
            await self.call("GET", "/v1/members", b"", seconds)
        except NotifyError as error:
            return not isinstance(error, Unavailable)
        return True

    def request(self, method: str, path: str, body: bytes) -> bytes:
        """The bytes of a request that the caller sends on a connection of its own."""
        return self._request(method, path, body, MSGPACK, self._token.header())

    def _request(self, method: str, path: str, body: bytes, kind: str, token_header: str) -> bytes:
        head = self._heads.get((method, path, kind))
        if head is None:
            head = f"{method} {self._base}{path} HTTP/1.1\r\n{self._head_host}"
            head += f"content-type: {kind}\r\naccept: {kind}\r\ncontent-length: "
            if "?" not in path and len(self._heads) < 1000:  # a query is another one each time
                self._heads[(method, path, kind)] = head
        return f"{head}{len(body)}\r\n{token_header}\r\n".encode() + body

    async def _ask(self, request: bytes, deadline: float) -> Reply:
        """An answer, even if it is not a server's. Raises Unavailable, or TimeoutError at the deadline (the loop's
        time)."""
        loop = asyncio.get_running_loop()
        while True:
            connection = self._take_idle() or await self._connect(deadline)
            was_used = connection.used
            answer = connection.ask(request, deadline - loop.time())
            try:
                return await answer
            except Unavailable:
                # The server may have closed an idle connection just now. All routes may be repeated safely.
                if not was_used:
                    raise
            except asyncio.CancelledError:
                if answer.cancelled():  # otherwise it was answered, and may carry another request by now
                    connection.close()
                raise

    def _take_idle(self) -> _Connection | None:
        """An open connection without a request. Raises Closed, and Unavailable if the server is no longer a member."""
        if self._closed:
            raise Closed(CLOSED)
        if self._leaving:
            raise Unavailable(f"the server at {self.url} is no longer a member")
        while self._idle:
            connection = self._idle.pop()
            if abs(time.time() - connection.idle_since) > IDLE_SECONDS:  # the clock may have been set back
                connection.cut()
            elif not connection.transport.is_closing():
                return connection
        return None

    async def _connect(self, deadline: float) -> _Connection:
        """A new connection. Raises Unavailable, or TimeoutError at the deadline."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(loop.time() + CONNECT_SECONDS, deadline)):
                addresses = await addresses_of(*self.address)
                addresses.sort(key=lambda address: address != self.reached)  # the one that answered last comes first
                connection = await first_connection(addresses, self._connect_to, _Connection.cut)
        except (OSError, TimeoutError) as error:
            if isinstance(error, TimeoutError) and loop.time() >= deadline:
                raise
            raise Unavailable(f"no server at {self.url}: {error or 'no answer'}; {_hint_of(error)}") from None
        if self._closed:
            connection.cut()
            raise Closed(CLOSED)
        self._open.add(connection)
        self.reached = connection.address
        return connection

    async def _connect_to(self, address: str) -> _Connection:
        (host, port), tls = self.address, self.tls
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self, address), address, port, ssl=tls, server_hostname=None if tls is None else host
        )
        return connection

    def give_back(self, connection: _Connection) -> None:
        if self._closed or self._leaving:
            connection.close()
        else:
            connection.idle_since = time.time()
            self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close_when_idle(self) -> None:
        """Refuse new requests as Unavailable; each connection closes once its answer has come."""
        self._leaving = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close the idle connections: an answer belonged to another request, and further answers may do so too."""
        for connection in list(self._idle):
            connection.close()

    def close(self) -> None:
        """Cut every connection; requests on their way fail as Unavailable."""
        self._closed = True
        for connection in list(self._open):
            connection.cut()

    @property
    def is_open(self) -> bool:
        """Whether the loop still has a connection of this client."""
        return bool(self._open)


def read_answer(decode: Callable[[bytes], T], answer: bytes) -> T:
    """The content of a 200 answer. Raises ForeignAnswer if it is not a Notify server's, or not as that sent it."""
    try:
        return decode(answer)
    except UNDECODABLE as error:
        raise foreign_content(str(error)) from None


class Connections(Protocol):
    """Connections to servers whose idle ones can be closed."""

    def close_idle(self) -> None: ...


_decode_items = msgspec.msgpack.Decoder(Items).decode


def items_of(answer: bytes) -> list[Item]:
    """The results in an answer. Raises Unavailable if the answer has no list of results."""
    return read_answer(_decode_items, answer).items


def items_for(item_ids: Sequence[str], answer: bytes, connections: Connections) -> list[Item]:
    """The result for each id of a request, in order. Raises Unavailable like `items_for_both`."""
    return items_for_both(item_ids, (), answer, connections)[0]


def items_for_both(
    item_ids: Sequence[str], outcome_ids: Sequence[str], answer: bytes, connections: Connections
) -> tuple[list[Item], list[Item]]:
    """The results for the halves or other items of a request, and for its outcomes, each in the order of the ids.

    Raises Unavailable if the answer has results for other ids: a proxy has mixed up two answers, and items would count
    as stored that are not. Idle connections are closed then.
    """
    results = read_answer(_decode_items, answer)
    try:
        _check_answered(item_ids, results.items)
        _check_answered(outcome_ids, results.outcomes)
    except Unavailable:
        connections.close_idle()
        raise
    return results.items, results.outcomes


def _check_answered(item_ids: Sequence[str], items: Sequence[Item]) -> None:
    if len(items) != len(item_ids):
        raise Unavailable(f"the answer has {len(items)} items for {len(item_ids)}: is a proxy in between?")
    if [item.id for item in items] == item_ids:
        return
    for item_id, item in zip(item_ids, items, strict=True):
        if item.id != item_id and item.status in (200, 201):
            raise Unavailable(f"the answer for {item_id} belongs to {item.id}: is a proxy in between?")


_decode_problem = msgspec.json.Decoder(Problem).decode


def _problem(body: bytes) -> Problem | None:
    """The problem document of a Notify server; None if this is none. Other programs have problem documents, too."""
    try:
        problem = _decode_problem(body)
    except UNDECODABLE:
        return None
    return problem if problem.type.startswith(PROBLEM_TYPE) else None


def _refusal(status: int, body: bytes) -> NotifyError:
    """The error for a server's answer whose status is not 200."""
    problem = _decode_problem(body)
    return error_of(status, problem.code, problem.detail, problem.retry_after)


_BY_CODE: dict[str, type[NotifyError]] = {
    IdInUse.code: IdInUse,
    OutcomeConflict.code: OutcomeConflict,
    StaleReceipt.code: StaleReceipt,
    "foreign_host": Unavailable,  # a proxy has changed the name: the request was not judged
    WrongShard.code: Unavailable,  # the shard's server is unreachable, or keys are being redistributed
}
_BY_STATUS: dict[int, type[NotifyError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    507: DiskFull,
} | dict.fromkeys((408, 425, 500, 502, 503, 504), Unavailable)


def error_of(status: int, code: str, detail: str, retry_after: float | None = None) -> NotifyError:
    """The error for an HTTP problem, or for an item of a batch."""
    if status == 429:
        error: NotifyError = Backpressure(detail, code, 1.0 if retry_after is None else retry_after)
    else:
        kind = _BY_CODE.get(code) or _BY_STATUS.get(status) or InvalidRequest
        error = kind(detail)
    error.code = code
    error.status = status
    return error


async def until_closed(clients: Sequence[HttpClient]) -> None:
    """Wait until the loop has closed the connections of closed clients: it must not be closed before."""
    for _ in range(CLOSE_ROUNDS):
        await asyncio.sleep(0.001)  # the loop closes each connection in one of its next iterations
        if not any(client.is_open for client in clients):
            break
