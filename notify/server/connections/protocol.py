"""A connection: requests to data routes reach the core directly from the parser, all others uvicorn's ASGI.

ASGI cost a data request more time than the storage of its messages: scope, header copies, an event and a task's timer
for the body, checks of each header that is sent, two writes. Here a request is parsed, decoded, and answered in one
write. Pipelining, flow control, keep-alive and graceful stop are uvicorn's.
"""

from __future__ import annotations

import asyncio
import functools
from asyncio import TimerHandle
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from notify.errors import InvalidRequest, NotifyError, TooLarge, Unavailable
from notify.server.access import guard
from notify.server.access.principal import EVERYONE, NOBODY, UNVERIFIED, Principal
from notify.server.connections import identity
from notify.server.connections.application import Application
from notify.server.connections.cycle import ANSWERED, TOO_MUCH, DataCycle
from notify.server.connections.head import another_worker, data_request, own_path, without_upgrade
from notify.server.connections.held import Held
from notify.server.connections.pipeline import PACE_SECONDS, PIPELINED, Pipeline, PipelineFlow, is_known
from notify.server.connections.quota import Place, too_many
from notify.server.connections.turns import Turns
from notify.server.data.answer import Answer
from notify.server.data.request import Request

HEADER_BYTES = 64 << 10
"""The most bytes of a request's head; chunk extensions and trailers may have as many again."""
URL_BYTES = 16 << 10
"""The most bytes of a request's path and query, which are decoded before the sender is known."""
HEADER_FIELDS = 100
BODY_PARTS = 1 << 16
"""The most parts (chunks or single reads) of a body: each part costs time and memory."""
STRANGERS_PARTS = 1 << 10
"""The same for a sender that is not known (yet)."""


POLLS = ("/receive", "/poll")
"""The ends of the paths of requests that wait for messages or checks."""


class Refused(Exception):
    """Raised through the parser to stop it: nothing more is read from this connection."""


def too_large() -> TooLarge:
    """The error for a head beyond its bounds."""
    return TooLarge(
        f"a head has at most {HEADER_FIELDS} fields and {HEADER_BYTES} bytes, and trailers at most as many; a path "
        f"with its query has at most {URL_BYTES} bytes",
        "head_too_large",
        431,
    )


def in_pieces(most: int) -> TooLarge:
    """The error for a body in more than `most` parts."""
    return TooLarge(f"a body has at most {most} chunks: send larger ones", "request_too_large")


HEADER_SECONDS = 10.0
"""How long a head may take after its first byte, or after the answers to earlier requests are written."""
WRITE_SECONDS = 30.0
"""How long a client may take to read all but the last 64 kB of an answer; then its connection is cut."""
SHORT_BYTES = 16 << 10
"""An answer up to this size is written at once, with its head."""
SMALL_HEAD_BYTES = 4 << 10
"""Heads up to this size are not counted while their requests wait for a turn."""
LINGER_SECONDS = 2.0
"""How long a client may keep sending a refused request, so that it reads the answer instead of a reset."""


class Timers:
    """The timers of one connection; each is None while it does not run."""

    __slots__ = ("abort", "head", "pace", "rest", "write")

    def __init__(self) -> None:
        self.head: TimerHandle | None = None
        self.rest: TimerHandle | None = None
        self.pace: TimerHandle | None = None
        self.write: TimerHandle | None = None
        self.abort: TimerHandle | None = None

    def end_head(self) -> None:
        """Stop the timer of a head, which is complete."""
        if self.head is not None:
            self.head.cancel()
            self.head = None

    def end_rest(self) -> None:
        """Stop the timer of the rest of a body, which is complete."""
        if self.rest is not None:
            self.rest.cancel()
            self.rest = None

    def cancel(self) -> None:
        """Stop all timers, because the connection is lost."""
        for timer in (self.head, self.rest, self.pace, self.write, self.abort):
            if timer is not None:
                timer.cancel()
        self.head = self.rest = self.pace = self.write = self.abort = None


class Protocol(HttpToolsProtocol):
    """A connection that is cut unless it sends its requests' heads in time and within bounds, and reads its answers.

    uvicorn's protocol waits for ever for a head and for a reader, takes heads and trailers of any size, and reads any
    number of pipelined requests.
    """

    # Uvicorn's attributes, too: a connection's dict of more than 30 would take 2 kB.
    __slots__ = (
        "_answered",
        "_body_parts",
        "_certificate",
        "_counted_in",
        "_current",
        "_head_bytes",
        "_in_head",
        "_is_beyond",
        "_is_over",
        "_is_upgrade",
        "_names_worker",
        "_part_bytes",
        "_quiet_bytes",
        "_refusal",
        "_timers",
        "_unread_bytes",
        "_written_bytes",
        "access_log",
        "access_logger",
        "app",
        "app_state",
        "asgi_version",
        "client",
        "config",
        "connections",
        "cycle",
        "expect_100_continue",
        "flow",
        "headers",
        "limit_concurrency",
        "logger",
        "loop",
        "parser",
        "pipeline",
        "root_path",
        "scheme",
        "scope",
        "server",
        "server_state",
        "tasks",
        "timeout_keep_alive",
        "timeout_keep_alive_task",
        "transport",
        "url",
        "ws_protocol_class",
    )

    app: Application
    cycle: DataCycle  # type: ignore[assignment]
    flow: PipelineFlow  # type: ignore[assignment]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.pipeline = Pipeline()  # type: ignore[assignment]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = PipelineFlow(transport, self.pipeline)
        self._head_bytes = self._quiet_bytes = self._body_parts = 0
        self._in_head = True
        """No request has begun, or the head of the present one is not complete."""
        self._is_upgrade = False
        self._refusal: NotifyError | None = None
        self._is_over = False
        """Nothing more is read; requests that were read are answered."""
        self._current: Any = None
        """The unanswered cycle whose turn it is; `cycle` is the newest."""
        self._written_bytes = 0
        """The memory that an answer takes until all of it is read; 0: its writer has more; -1: it takes none."""
        self._part_bytes = self._unread_bytes = 0
        """The bytes of requests that are not complete, or wait, and of unread answers; `_counted_in` counts them."""
        self._counted_in: Held | None = None
        self._answered: Principal | None = None
        """The sender of the last request that was answered; None if it is not known."""
        self._certificate = identity.common_name(transport.get_extra_info("peercert"))
        self._timers = Timers()
        self._timers.head = self.loop.call_later(HEADER_SECONDS, self._too_slow)
        place = self.app.connections.admit(self, self.loop.time())
        self._is_beyond = place is Place.OPERATORS
        """It has an operator's place."""
        if place is Place.NONE:
            self.turn_away()

    # --- reading ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._unset_keepalive_if_required()
        self._quiet_bytes += len(data)
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    data = self._head_without_upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserError:
            if not self._is_over:
                self._refuse(self._refusal or InvalidRequest("this is not an HTTP request", "malformed", 400))
            elif self.pipeline:
                self._hold(len(data))
            return
        if self._quiet_bytes > HEADER_BYTES:
            self._refuse(too_large())
        elif self._in_head:
            if self._quiet_bytes:
                self._await_head()
                self._hold(len(data))
            elif self.pipeline:
                self._hold(len(data))
        elif type(self.cycle) is not DataCycle:
            if self._is_busy:
                self._hold(len(data))
        elif self.cycle.refusal is None and not self.cycle.has_room:
            self._hold(len(data))
            self._read_body()

    def _head_without_upgrade(self) -> bytes:
        """The head of a request that asks for another protocol (`Upgrade:`), without that field, for a new parser.

        HTTP allows a server to answer such a request in this protocol. The old parser would take the following bytes,
        the body included, for the other protocol; the new one reads the body as the head declares it.
        """
        head = without_upgrade(self.parser, self.url, self.headers)
        self._is_upgrade = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return head

    @property
    def _is_busy(self) -> bool:
        """Whether a request waits for its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        """Start the timer for a head that has begun, if no earlier request waits for its answer."""
        if self._timers.head is None and not self._is_busy:
            self._timers.head = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def _read_body(self) -> None:
        """Let the client send the rest of the body, if it is its turn, its sender is verified, and there is room."""
        cycle = self.cycle
        if type(cycle) is DataCycle and cycle.is_read and cycle.ask_for_room(self._owner(cycle.request.principal)):
            if cycle.has_room:
                self._let_go()
            self._expect_body()

    def _expect_body(self) -> None:
        """Let the client send the body, within the time for bodies."""
        if self.expect_100_continue:
            self.expect_100_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.cycle.expire_after(self.app.settings.body_timeout_seconds)

    def read_on(self, cycle: DataCycle) -> None:
        """Resume reading for a cycle whose turn it is; a later one is read after this one's answer."""
        if cycle is self.cycle and not self.transport.is_closing():
            if self._counted_in is not None:
                self._count()  # its sender is known now
            self._read_body()
            self.flow.resume_reading()

    def _refuse(self, error: NotifyError) -> None:
        """Read nothing more, send the error after the pending answers, and end the connection."""
        self._is_over = True
        if self._in_head:
            self._enqueue(DataCycle.refused(self, error))
        elif self._is_busy and type(self.cycle) is DataCycle:
            self.cycle.refuse(error)
        else:
            # The error is in the body of a request that the ASGI application answers, or has answered.
            self._close()

    def _enqueue(self, cycle: DataCycle) -> None:
        """Add a request to the pipeline, or start it if no earlier one waits for its answer."""
        newest, self.cycle = self.cycle, cycle
        if newest is not None and not newest.response_complete:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))  # type: ignore[arg-type]
        else:
            self._current = cycle
            cycle.start()

    # The parser calls the following methods, in this order.

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = self._body_parts = 0
        self._quiet_bytes = max(1, self._quiet_bytes)  # bytes read together with the last request's end count too
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > URL_BYTES:
            self._stop(too_large())
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer, which no route uses, and which must not pass for a field of the head
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > HEADER_BYTES or len(self.headers) >= HEADER_FIELDS:
            self._stop(too_large())
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def _stop(self, error: NotifyError) -> NoReturn:
        """Stop the parser. Raises Refused, which comes out of it as an HttpParserError."""
        self._refusal = error
        raise Refused

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._stop(InvalidRequest("this server is not a proxy", "method_not_allowed", 405))
            self._is_upgrade = True
            return
        if len(self.pipeline) >= PIPELINED:
            self.cycle.keep_alive = False
            self._is_over = True
            raise Refused
        self.url, self._names_worker = own_path(self.url, self.app.settings) or self._stop(another_worker())
        self._in_head = False
        self._quiet_bytes = 0
        if self._timers.head is not None:
            self._timers.end_head()
        if self.cycle is None:
            self.app.connections.has_asked(self)
        if self._is_beyond:
            self._is_beyond = not self.app.connections.has_room(self, self.loop.time())
        request = data_request(self.parser.get_method(), self.url, self.headers, self._names_worker)
        if request is None:
            try:
                guard.check_declared(self.url.partition(b"?")[0].decode("latin-1"), self.headers)
            except NotifyError as error:
                self._is_over = True
                self._enqueue(DataCycle.refused(self, identity.without_frames(error)))
            else:
                self._hand_to_asgi()
            return
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        cycle = DataCycle(self, request, keep_alive and not self._is_beyond)
        if self._is_beyond and request.principal is not NOBODY:
            refused: NotifyError | None = self.app.connections.refusal()
        else:
            refused = identity.admit(self.app.access, request, self._certificate)
        self._enqueue(cycle)
        if refused is not None:
            cycle.refuse(refused)
        elif request.principal is UNVERIFIED:
            cycle.verify()

    async def verify(self, request: Request) -> NotifyError | None:
        """Verify the sender, which may take a while; returns the error if it is refused."""
        return await identity.verify(self.app.access, request, self._certificate)

    def _hand_to_asgi(self) -> None:
        """Let uvicorn make its scope: the request is not for a data route."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        if self._is_beyond:
            headers.append((b"connection", b"close"))  # uvicorn says the same in its answer
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers = self.scope["headers"] = headers
        sender = identity.recognised(self.app.access, headers, self._certificate)
        self.scope |= {  # type: ignore[misc]
            "notify.certificate": self._certificate,
            "notify.names_worker": self._names_worker,
            "notify.sender": sender,
        }
        super().on_headers_complete()
        self.cycle.keep_alive = self.cycle.keep_alive and not self._is_beyond

    def on_body(self, body: bytes) -> None:
        self._quiet_bytes = 0
        self._body_parts += 1
        if self._body_parts > STRANGERS_PARTS:
            self._check_parts()
        if type(self.cycle) is DataCycle:
            self.cycle.add(body)
        else:
            super().on_body(body)

    def _check_parts(self) -> None:
        """Raises Refused for a body in too many parts, and for one whose sender is refused: the rest is not read."""
        cycle = self.cycle
        if type(cycle) is DataCycle and cycle.refusal is not None:
            self._is_over = True
            raise Refused
        most = STRANGERS_PARTS if self._sender() is None else BODY_PARTS
        if self._body_parts > most:
            self._stop(in_pieces(most))

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._in_head = True
        self._quiet_bytes = 0
        if self._timers.rest is not None:
            self._timers.end_rest()
        if type(self.cycle) is DataCycle:
            if self._counted_in is not None and not self.pipeline and self._sender() is not None:
                self._let_go()  # what is small and complete is answered soon
            self.cycle.complete()
        else:
            super().on_message_complete()

    # --- answering --------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._current = cycle
        if type(cycle) is DataCycle:
            cycle.start()
            if cycle is self.cycle:
                self._read_body()
            return
        sender: Principal | None = cycle.scope["notify.sender"]
        self._answered, self._written_bytes = sender, 0
        turns = self.app.strangers if sender is None else self.app.operators
        self._wait_for_turn(turns, cycle, functools.partial(cycle.run_asgi, app))

    def answer_in_turn(self, cycle: DataCycle) -> None:
        """As `answer`, when strangers have their turn."""
        if cycle.refusal is not None:
            self._let_go()  # its body is dropped
        self._wait_for_turn(self.app.strangers, cycle, functools.partial(self.answer, cycle))

    def _wait_for_turn(self, turns: Turns, cycle: Any, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin to answer a request when it is its sender's turn, unless the client has gone by then."""
        if self._head_bytes > SMALL_HEAD_BYTES:
            self._hold(self._head_bytes)  # the head waits, too

        def begin() -> None:
            if not cycle.disconnected:
                self.run(turns.timed(work))

        turns.wait(self.client[0] if self.client else "", begin)

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that the server waits for when it stops."""
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def answer(self, cycle: DataCycle) -> None:
        """Answer a request whose body is complete and whose turn it is."""
        try:
            if self.flow.write_paused and not cycle.disconnected:
                await self.flow.drain()  # before the answer is made: at most one unread answer is held
            request = cycle.request
            self._answered = request.principal if cycle.refusal is None else None
            if cycle.refusal is not None:
                answer = Answer.problem(cycle.refusal)
            elif request.principal is NOBODY:
                answer = await self.app.open_answer(request)
            else:
                answer = await self.app.data.answer(request)
            cycle.response_complete = True
            if cycle.disconnected or self.transport.is_closing():
                return
            default_headers = self.server_state.default_headers
            is_whole = request.method == "HEAD" or answer.size <= SHORT_BYTES
            written = answer.encoded(default_headers, cycle.keep_alive, is_whole and request.method != "HEAD")
            if is_whole:
                self._written_bytes = len(written)
                self.transport.write(written)
            else:
                self.transport.write(written)
                # A body that others share takes no memory of this connection, but TLS copies what it encrypts.
                self._written_bytes = -1 if answer.is_shared and self.scheme == "http" else answer.size
                for part in answer.parts:
                    self.transport.write(part)  # without copying it after the head
            if cycle.keep_alive:
                self.on_response_complete()
            else:
                self._end_behind(cycle)
        finally:
            # An idle connection keeps its last cycle: the body must not stay in memory with it.
            cycle.request, cycle.refusal = ANSWERED, None
            cycle.leave_room()

    def _end_behind(self, cycle: DataCycle) -> None:
        """End the connection after the answer to this request, which is written."""
        if cycle.refusal is None and not self._is_over:
            self._close()
            return
        self._is_over = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # TLS cannot close one direction
            self.transport.write_eof()
        self._timers.rest = self.loop.call_later(LINGER_SECONDS, self._close)

    def on_response_complete(self) -> None:
        """Start the next pipelined request, if there is one, after an answer is written."""
        if self.transport.is_closing():
            self._close()
            return
        if self.pipeline and not is_known(self.pipeline[-1][0]):
            self._unset_keepalive_if_required()
            self._timers.pace = self.loop.call_later(PACE_SECONDS, self._start_next)
            return
        super().on_response_complete()
        if self._counted_in is not None and self._in_head and not self._quiet_bytes and not self._is_busy:
            self._let_go()
        if self.flow.read_paused:
            self.flow.resume_reading()  # the next request does not wait any more
        if not self.cycle.response_complete:
            return
        if self._in_head:
            if self._quiet_bytes:
                self._await_head()
        elif self._timers.rest is None:
            # The request was answered before its body was complete: the rest, which may never end, is not read.
            self._timers.rest = self.loop.call_later(LINGER_SECONDS, self._close)

    def _start_next(self) -> None:
        cycle, app = self.pipeline.pop()
        self._start_asgi_task(cycle, app)
        self.flow.resume_reading()

    def pause_writing(self) -> None:
        """Bound the client's time from now on: it does not read as fast as the server writes."""
        super().pause_writing()
        if self._timers.write is None:
            self._timers.write = self.loop.call_later(WRITE_SECONDS, self.abort)
        if self._written_bytes >= 0:
            self._unread_bytes = max(self._written_bytes, self.transport.get_write_buffer_size())
            self._count()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._timers.write is not None:
            self._timers.write.cancel()
            self._timers.write = None
        if self._unread_bytes:
            self._unread_bytes = 0
            self._count()

    def eof_received(self) -> bool:  # type: ignore[override]  # True keeps the connection; uvicorn always closes it
        """Keep the connection for pending answers if the client has ended only its own direction, as `nc -N` does.

        A client that was killed looks the same. So a connection with a poll ends: messages would be leased to nobody.
        """
        cycles = [self._current, *[waiting for waiting, _ in self.pipeline]]
        is_poll = any(type(cycle) is DataCycle and cycle.request.path.endswith(POLLS) for cycle in cycles)
        if not self._is_busy or not self._in_head or is_poll or not self.transport.can_write_eof():
            return False  # TLS cannot close one direction
        self.cycle.keep_alive = False
        return True

    # --- what is held -----------------------------------------------------------------------------------------

    def _hold(self, size: int) -> None:
        """Count `size` more bytes of a request that is not complete, or that waits."""
        self._part_bytes += size
        self._count()

    def _let_go(self) -> None:
        """Stop counting requests, whose bytes are not held any more, or are counted elsewhere."""
        if self._part_bytes:
            self._part_bytes = 0
            self._count()

    def _count(self) -> None:
        """Count what is held for this connection. Other connections, or this one, may have to give way."""
        size = self._part_bytes + self._unread_bytes
        budget = self.app.budget
        sender = self._sender()
        held = budget.strangers if sender is None else budget.known
        if self._counted_in is not None and (self._counted_in is not held or not size):
            self._counted_in.discard(self)
            self._counted_in = None
            if not size:
                budget.give_back(self.loop)
        if size and not self.transport.is_closing():
            self._counted_in = held
            held.count(self, self._owner(sender), size)

    def _sender(self) -> Principal | None:
        """Who sends what is held; None if that is not known."""
        access, cycle, sender = self.app.access, self.cycle, self._answered
        if access is not None and not access.on:
            return EVERYONE
        if self._is_busy:
            if type(cycle) is not DataCycle:
                sender = cycle.scope["notify.sender"]  # type: ignore[attr-defined]
            else:
                sender = cycle.request.principal if cycle.refusal is None else None
        return None if sender is NOBODY or sender is UNVERIFIED else sender

    def _owner(self, sender: Principal | None) -> Hashable:
        """Whose share a sender's bytes take: a client's that is not known by name is its address's."""
        return (self.client and self.client[0]) if sender is None or sender is EVERYONE else sender

    def give_way(self) -> None:
        """Free what is held for this connection, because others need it: refuse its request, or end it."""
        self._counted_in = None
        self._part_bytes = self._unread_bytes = 0
        cycle = self.cycle
        is_asgi = self._is_busy and type(cycle) is not DataCycle
        if self._is_over or self.flow.write_paused or self.pipeline or (is_asgi and cycle.response_started):  # type: ignore[attr-defined]
            self.abort()
        elif self._is_busy and not is_asgi:
            if self._in_head:
                self.abort()  # the beginning of a head came after a waiting request
            else:
                self._refuse(Unavailable(TOO_MUCH))
        else:
            self._is_over = True
            self.parser, self.headers = httptools.HttpRequestParser(self), []
            if is_asgi:
                cycle.body = bytearray()  # type: ignore[attr-defined]
                cycle.disconnected = True
                cycle.message_event.set()
            answer = Answer.problem(Unavailable(TOO_MUCH))
            self.transport.write(answer.encoded(self.server_state.default_headers, False, True))
            self._close()

    # --- the end ----------------------------------------------------------------------------------------------

    def _too_slow(self) -> None:
        self._timers.head = None
        self._close()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, on which no request came within the time of keep-alive."""
        self._close()

    def shutdown(self) -> None:
        """Close the connection after its pending answers, because the server stops."""
        super().shutdown()
        if self.transport.is_closing():
            self._close()

    def _close(self) -> None:
        """End the connection when the client has read all, at the latest after LINGER_SECONDS."""
        self.transport.close()
        if self._timers.abort is None:
            self._timers.abort = self.loop.call_later(LINGER_SECONDS, self.abort)

    def turn_away(self) -> None:
        """Answer that there is no room, and end the connection, which has not sent a request yet."""
        if self._is_over:  # it sent something that is not a request, and was answered
            self.abort()
            return
        self._is_over = True
        answer = Answer.problem(too_many(self.app.connections.most))
        self.transport.write(answer.encoded(self.server_state.default_headers, False, True))
        self._close()

    def idle_since(self) -> float | None:
        """Since when (the loop's time) the connection is idle; None if it is not."""
        if self.transport.is_closing() or (self._is_over and not self._is_busy):
            return float("-inf")
        timer = self.timeout_keep_alive_task
        return None if timer is None else timer.when() - self.timeout_keep_alive

    def abort(self) -> None:
        """End the connection immediately; unwritten answers are dropped."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._part_bytes = self._unread_bytes = 0
        self._count()
        self.app.connections.discard(self)
        self._timers.cancel()
        self._unset_keepalive_if_required()
        for cycle in (self._current, *[waiting for waiting, _ in self.pipeline]):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)
        # A cycle and its connection refer to each other; this breaks the circle, since a full collection is rare.
        self.cycle = self._current = None  # type: ignore[assignment]
        self.headers = []
