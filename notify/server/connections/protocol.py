"""A connection: data routes straight from the parser to the core, everything else through uvicorn's ASGI.

A data request through ASGI cost more than the storage of what it carries: scope, header copies, an event and a task's
timer for the body, checks of each header that is sent, two writes. Here it is parsed, decoded, answered in one write.
uvicorn's connection keeps what it does well: pipelining, flow control, keep-alive, graceful stop.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Coroutine, Sized
from typing import Any
from typing import Protocol as Structure

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from notify.errors import InvalidRequest, NotifyError, TooLarge, Unavailable
from notify.limits import LIMITS
from notify.server.access.guard import NOT_RUNNING, Door
from notify.server.access.principal import NOBODY
from notify.server.connections.held import Unread, Unverified
from notify.server.connections.places import Connections, Place, too_many
from notify.server.data.routes import PROBES, Answer, Request, fault_of

HEADER_BYTES = 64 << 10
"""The most that a request's head may have, and as much again for chunk extensions and trailers."""
HEADER_FIELDS = 100
HEADER_SECONDS = 10.0
"""A head must be complete so long after its first byte, or after the answers of the requests before it are written."""
PIPELINED = 64
"""Requests of one connection that wait for the answers before theirs. Where more come, the connection ends behind
these: their client sends the others again, as HTTP asks of it."""
UNVERIFIED_BYTES = 64 << 10
"""The server holds so much of a body while it verifies who sends it, and then reads no further. It holds all that the
last read brought (uvloop reads up to 256 kB at once)."""

PACE_SECONDS = 0.02
"""The server waits so long between two pipelined requests of strangers, or to other than data routes: they cost the
server many times what they cost their sender, and no browser or tool pipelines them."""
_PROBES = tuple(path.encode() for path in PROBES)
LINGER_SECONDS = 2.0
"""How long a client may go on sending what was refused already, so that it reads the answer instead of a reset; and how
long a connection that is closed may take to hand over what is written."""
WRITE_SECONDS = 30.0
"""How long an answer may wait for its client to read it, but for the last 64 kB; then the connection is cut."""


CLOSE = (b"connection", b"close")

ANSWERED = Request("GET", "/", b"", [])
"""In place of a request that is answered."""


class Application(Door, Structure):
    """The application whose requests a connection reads, as far as a connection needs it."""

    connections: Connections
    unread: Unread
    unverified: Unverified

    async def answer(self, request: Request) -> Answer:
        """The answer to a request to a data route, or a probe."""


class DataCycle:
    """One request to a data route and its answer; stands where uvicorn's cycle would.

    Its work begins when its body is complete, it is known who asks, and the answers of the requests before it are
    written.
    """

    __slots__ = (
        "_chunks",
        "_held",
        "_protocol",
        "_size",
        "_task",
        "_timer",
        "_turn",
        "_verification",
        "disconnected",
        "keep_alive",
        "refusal",
        "request",
        "response_complete",
        "waits_for_body",
    )

    def __init__(self, protocol: Protocol, request: Request, keep_alive: bool) -> None:
        self._protocol = protocol
        self.request = request
        self.keep_alive = keep_alive
        self.disconnected = False
        self.response_complete = False
        self.waits_for_body = True
        self.refusal: NotifyError | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self._held = 0
        """Bytes that count among those of strangers."""
        self._turn = False
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._verification: asyncio.Task[None] | None = None

    @property
    def message_event(self) -> DataCycle:
        """Stands for the event that uvicorn sets when the connection is lost."""
        return self

    def set(self) -> None:
        """The connection is lost: a poll that waits for something to hand out is of no use any more."""
        self._stop_timer()
        if self._verification is not None:
            self._verification.cancel()
            self._give_back()
        if self._task is not None and self.request.polls:
            self._task.cancel()

    def add(self, body: bytes) -> None:
        """A part of the body."""
        if self.waits_for_body:
            self._size += len(body)
            if self._size > LIMITS.request_bytes:
                detail = f"the request has more than {LIMITS.request_bytes} bytes; send fewer items at once"
                self.refuse(TooLarge(detail, "request_too_large"))
            else:
                if self._verification is not None:
                    if not self._protocol.app.unverified.take(len(body)):
                        self._verification.cancel()
                        self._verification = None
                        self.refuse(Unavailable("too many requests wait to be let in; try again"))
                        return
                    self._held += len(body)
                    if self._size > UNVERIFIED_BYTES:
                        self._protocol.flow.pause_reading()
                self._chunks.append(body)

    @property
    def is_read(self) -> bool:
        """Whether the rest of its body may come: it is its turn, and known who sends it."""
        return self.waits_for_body and self._turn and self._verification is None

    def expire_after(self, seconds: float) -> None:
        """The body must be complete within this time."""
        if self._timer is None:
            self._timer = self._protocol.loop.call_later(seconds, self._expired)

    def _expired(self) -> None:
        self.refuse(InvalidRequest("the body did not arrive in time", "timeout", 408))

    def verify(self) -> None:
        """Find out who asks before anything is done, and before most of the body is taken: it may be anyone."""
        self._verification = self._protocol.run(self._verify())

    async def _verify(self) -> None:
        refused = await self._protocol.verify(self.request)
        self._verification = None
        self._give_back()
        if refused is not None:
            self.refuse(refused)
        elif not self.waits_for_body:
            self._begin()
        if self._turn:
            self._protocol.read_on(self)

    def refuse(self, error: NotifyError) -> None:
        """Answer without the rest of the body; where there is such a rest, the connection ends with the answer."""
        self.refusal = error
        self._give_back()
        self._chunks.clear()
        self.request.body = b""
        if self.waits_for_body:
            self.keep_alive = False
            self.complete()
        else:
            self._begin()

    def _give_back(self) -> None:
        """Its bytes belong to a verified sender now, or are dropped."""
        self._protocol.app.unverified.give_back(self._held)
        self._held = 0

    def complete(self) -> None:
        """The body is complete, or not waited for."""
        if self.waits_for_body:
            self.waits_for_body = False
            self._stop_timer()
            chunks, self._chunks = self._chunks, []
            self.request.body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            self._begin()

    def start(self) -> None:
        """It is this request's turn."""
        self._turn = True
        if not self.waits_for_body:
            self._begin()

    def _begin(self) -> None:
        """Do the work, if nothing has to come before it."""
        if self._turn and self._verification is None:
            self._task = self._protocol.run(self._protocol.answer(self))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Flow(FlowControl):
    """Nothing is read while requests of the connection wait for their turn, whoever asks for more."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if not self._pipeline:
            super().resume_reading()


class _Refused(Exception):
    """Raised through the parser, so that it stops: nothing more of this connection is read."""


class Protocol(HttpToolsProtocol):
    """A connection must send its request's head in time and within bounds, and read its answers, or it is cut.

    The stock protocol waits for ever for a head and for a reader, takes heads and trailers of any size, and reads on
    behind any number of requests that wait for their answers.
    """

    app: Application
    cycle: DataCycle  # type: ignore[assignment]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        self._head_bytes = self._quiet_bytes = 0
        self._in_head = True
        """No request has begun, or its head is not complete."""
        self._is_upgrade = False
        self._refusal: NotifyError | None = None
        self._is_over = False
        """Nothing more is read; what is read already is answered."""
        self._current: Any = None
        """The cycle whose turn it is, of those that are not answered yet; `cycle` is the newest."""
        self._certificate = _common_name(transport.get_extra_info("peercert"))
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(HEADER_SECONDS, self._too_slow)
        self._rest_timer: asyncio.TimerHandle | None = None
        self._pace_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._abort_timer: asyncio.TimerHandle | None = None
        place = self.app.connections.admit(self, self.loop.time())
        self._is_beyond = place is Place.OPERATORS
        """There was no room for it when it came."""
        if place is Place.NONE:
            self.turn_away()

    # --- reading ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._unset_keepalive_if_required()
        self._quiet_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if not self._is_over:
                self._refuse(self._refusal or InvalidRequest("this is no HTTP request", "malformed", 400))
            return
        if self._quiet_bytes > HEADER_BYTES:
            self._refuse(_too_large())
        elif self._in_head:
            self._await_head()
        elif type(self.cycle) is DataCycle and self.cycle.is_read:
            self._expect_body()

    def _feed(self, data: bytes) -> None:
        """Parse; a request that asks for another protocol (`Upgrade:`) is answered in this one, as HTTP allows."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser takes what follows for another protocol's, body included. A new one gets the same head
                # without that field, so that it reads the body as it is declared.
                data = self._head_again() + data[upgrade.args[0] :]
                self._is_upgrade = False
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _head_again(self) -> bytes:
        """The head that was read last, without `Upgrade`."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    @property
    def _is_busy(self) -> bool:
        """Whether a request waits for its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        """Once a head has begun, and it is its turn, it must be complete in time."""
        if self._quiet_bytes and self._head_timer is None and not self._is_busy:
            self._head_timer = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def _expect_body(self) -> None:
        """Let the client send on, and not for ever."""
        if self.expect_100_continue:
            self.expect_100_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.cycle.expire_after(self.app.settings.body_timeout_seconds)

    def read_on(self, cycle: DataCycle) -> None:
        """Read what a cycle whose turn it is had put off. Of a later one nothing is read before this one's answer."""
        if cycle is self.cycle and not self.transport.is_closing():
            if cycle.is_read:
                self._expect_body()
            self.flow.resume_reading()

    def _refuse(self, error: NotifyError) -> None:
        """Read nothing more, and say why behind the answers that are still to come; then the connection ends."""
        self._is_over = True
        if self._in_head:
            cycle = DataCycle(self, Request("GET", "/", b"", []), keep_alive=False)
            cycle.waits_for_body = False
            cycle.refusal = error
            self._enqueue(cycle)
        elif self._is_busy and type(self.cycle) is DataCycle:
            self.cycle.refuse(error)
        else:
            # In the body of a request that the application answers itself, or has answered.
            self._close()

    def _enqueue(self, cycle: DataCycle) -> None:
        """Behind the requests that wait for their answers, if there are such."""
        is_busy = self._is_busy
        self.cycle = cycle
        if is_busy:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))  # type: ignore[arg-type]
        else:
            self._current = cycle
            cycle.start()

    # Callbacks of the parser, in the order in which it calls them.

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._quiet_bytes = max(1, self._quiet_bytes)  # what came in one read with the last request's end counts, too
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: nobody asks for one, and it must not pass for a field of the head
        self._count_head(len(name) + len(value) + 4)
        if len(self.headers) >= HEADER_FIELDS:
            self._stop(_too_large())
        super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEADER_BYTES:
            self._stop(_too_large())

    def _stop(self, error: NotifyError) -> None:
        """Stop the parser. Raises _Refused, which comes out of it as an HttpParserError."""
        self._refusal = error
        raise _Refused

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._stop(InvalidRequest("this server is no proxy", "method_not_allowed", 405))
            self._is_upgrade = True
            return
        if len(self.pipeline) >= PIPELINED:
            self.cycle.keep_alive = False
            self._is_over = True
            raise _Refused
        self._in_head = False
        self._quiet_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        connections = self.app.connections
        if self.cycle is None:
            connections.has_asked(self)
        if self._is_beyond:
            self._is_beyond = not connections.has_room(self, self.loop.time())
        request = self._data_request()
        if request is None:
            self._hand_to_asgi()
            return
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        cycle = DataCycle(self, request, keep_alive and not self._is_beyond)
        is_probe = request.principal is NOBODY
        refused = connections.refusal() if self._is_beyond and not is_probe else self._admit(request)
        self._enqueue(cycle)
        if refused is not None:
            cycle.refuse(refused)
        elif request.principal is None:
            cycle.verify()

    def _admit(self, request: Request) -> NotifyError | None:
        """Note who asks before the body is taken, where access is on: None if that takes a while. Why not, if so."""
        access = self.app.access
        if access is None or not access.on or request.principal is NOBODY:
            return None
        for name, value in request.headers:
            if name == b"authorization":
                request.authorization = value
        try:
            request.principal = access.admit(request.authorization, self._certificate)
        except NotifyError as error:
            return _without_frames(error)
        return None

    async def verify(self, request: Request) -> NotifyError | None:
        """Note who asks where `_admit` could not tell. Why they may not, if so."""
        access = self.app.access
        if access is None:
            return Unavailable(NOT_RUNNING)
        try:
            request.principal = await access.verify(request.authorization, self._certificate)
        except NotifyError as error:
            return _without_frames(error)
        except Exception:
            return fault_of("verification_failed", request.method, request.path)
        return None

    def _hand_to_asgi(self) -> None:
        """Let uvicorn make its scope now that the request is known to be none of ours."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        if self._is_beyond:
            headers.append(CLOSE)  # uvicorn says the same in its answer
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers = self.scope["headers"] = headers
        self.scope["notify.certificate"] = self._certificate  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self.cycle.keep_alive = self.cycle.keep_alive and not self._is_beyond

    def _data_request(self) -> Request | None:
        """The request without its body, or None if it is neither a probe nor for a data route."""
        url = self.url
        if url in _PROBES and self.parser.get_method() in (b"GET", b"HEAD"):
            request = Request(self.parser.get_method().decode("latin-1"), url.decode(), b"", self.headers)
            request.principal = NOBODY
            return request
        if not url.startswith(b"/"):
            try:
                parsed = httptools.parse_url(url)
            except httptools.HttpParserInvalidURLError:
                return None
            url = parsed.path + (b"?" + parsed.query if parsed.query else b"")
        if not url.startswith(b"/v1/") or url.startswith(b"/v1/admin"):
            return None
        raw_path, _, query = url.partition(b"?")
        path = raw_path.decode("latin-1")
        if "%" in path:
            path = urllib.parse.unquote(path)
        return Request(self.parser.get_method().decode("latin-1"), path, query, self.headers)

    def on_body(self, body: bytes) -> None:
        self._quiet_bytes = 0
        if type(self.cycle) is DataCycle:
            self.cycle.add(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._in_head = True
        self._quiet_bytes = 0
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None
        if type(self.cycle) is DataCycle:
            self.cycle.complete()
        else:
            super().on_message_complete()

    # --- answering --------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._current = cycle
        if type(cycle) is DataCycle:
            cycle.start()
            if cycle.is_read and cycle is self.cycle:
                self._expect_body()
        else:
            super()._start_asgi_task(cycle, app)

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that the server waits for when it stops."""
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def answer(self, cycle: DataCycle) -> None:
        """Answer a request whose body is complete and whose turn it is."""
        try:
            await self._answer(cycle)
        finally:
            # An idle connection keeps its last cycle, and refers to itself through it: the body must not stay with it.
            cycle.request, cycle.refusal = ANSWERED, None

    async def _answer(self, cycle: DataCycle) -> None:
        if self.flow.write_paused and not cycle.disconnected:
            await self.flow.drain()  # before the answer is made: one that is not read is enough to hold
        answer = await self.app.answer(cycle.request) if cycle.refusal is None else Answer.problem(cycle.refusal)
        cycle.response_complete = True
        if cycle.disconnected or self.transport.is_closing():
            return
        with_body = cycle.request.method != "HEAD"
        self.transport.write(answer.encoded(self.server_state.default_headers, cycle.keep_alive, with_body))
        if cycle.keep_alive:
            self.on_response_complete()
        elif cycle.refusal is None and not self._is_over:
            self._close()
        else:
            self._is_over = True
            self.flow.resume_reading()
            if self.transport.can_write_eof():  # TLS has no end of one direction
                self.transport.write_eof()
            self._rest_timer = self.loop.call_later(LINGER_SECONDS, self._close)

    def on_response_complete(self) -> None:
        """An answer is written: the next request's turn, if there is one."""
        if self.transport.is_closing():
            self._close()
            return
        if self.pipeline and not _is_known(self.pipeline[-1][0]):
            self._unset_keepalive_if_required()
            self._pace_timer = self.loop.call_later(PACE_SECONDS, self._start_next)
            return
        super().on_response_complete()
        self.flow.resume_reading()  # the next one is no longer among those that wait
        if self._is_busy:
            return
        if self._in_head:
            self._await_head()
        elif self._rest_timer is None:
            # Answered before its body was there: nobody reads the rest, which may never end.
            self._rest_timer = self.loop.call_later(LINGER_SECONDS, self._close)

    def _start_next(self) -> None:
        cycle, app = self.pipeline.pop()
        self._start_asgi_task(cycle, app)
        self.flow.resume_reading()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to: from now on it has so long."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_SECONDS, self.abort)
        self.app.unread.add(self, self.transport.get_write_buffer_size(), self.loop.time())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._has_read()

    def _has_read(self) -> None:
        if self._write_timer is not None:
            self.app.unread.discard(self)
            self._write_timer.cancel()
            self._write_timer = None

    # --- the end ----------------------------------------------------------------------------------------------

    def _too_slow(self) -> None:
        self._head_timer = None
        self._close()

    def timeout_keep_alive_handler(self) -> None:
        """No request came for so long."""
        self._close()

    def shutdown(self) -> None:
        """The server stops."""
        super().shutdown()
        if self.transport.is_closing():
            self._close()

    def _close(self) -> None:
        """End the connection when what is written is read, and at the latest after LINGER_SECONDS."""
        self.transport.close()
        if self._abort_timer is None:
            self._abort_timer = self.loop.call_later(LINGER_SECONDS, self.abort)

    def turn_away(self) -> None:
        """Say that there is no room, and end the connection, which has not sent a request yet."""
        if self._is_over:  # what it sent is no request, and it was told so
            self.abort()
            return
        self._is_over = True
        answer = Answer.problem(too_many(self.app.connections.most))
        self.transport.write(answer.encoded(self.server_state.default_headers, False, True))
        self._close()

    def idle_since(self) -> float | None:
        """From when on (the loop's time) it has waited for nothing and sent nothing; None where that is not so."""
        if self.transport.is_closing() or (self._is_over and not self._is_busy):
            return float("-inf")
        timer = self.timeout_keep_alive_task
        return None if timer is None else timer.when() - self.timeout_keep_alive

    def abort(self) -> None:
        """End the connection at once, whatever is still to be written."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_read()
        self.app.connections.discard(self)
        for timer in (
            self._head_timer,
            self._rest_timer,
            self._pace_timer,
            self._abort_timer,
            self.timeout_keep_alive_task,
        ):
            if timer is not None:
                timer.cancel()
        self._head_timer = None
        for cycle in (self._current, *[waiting for waiting, _ in self.pipeline]):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)
        # A cycle and its connection refer to each other, and a full collection is rare: nothing waits for one.
        self.cycle = self._current = None  # type: ignore[assignment]
        self.headers = []


def _is_known(cycle: Any) -> bool:
    """Whether a request goes to a data route, from someone who is let in."""
    return type(cycle) is DataCycle and cycle.request.principal is not NOBODY


def _without_frames(error: NotifyError) -> NotifyError:
    """An error that is kept instead of raised.

    The frames of its traceback refer to whoever keeps it, and to all that the request showed: together they would stay
    until a full collection, which is rare.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def _too_large() -> TooLarge:
    return TooLarge(
        f"a head has at most {HEADER_FIELDS} fields and {HEADER_BYTES} bytes, and trailers no more than that",
        "head_too_large",
        431,
    )


def _common_name(certificate: Any) -> str | None:
    """The common name of a client's verified certificate, as Python's ssl shows it; None where there is none."""
    for names in (certificate or {}).get("subject", ()):
        for name, value in names:
            if name == "commonName":
                return str(value)
    return None
