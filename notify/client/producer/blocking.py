"""BlockingSender: lets a thread send its halves and outcomes itself, while no other thread of its producer sends.

If the loop's thread sends, the interpreter's lock passes between the threads several times, which costs more CPU time
than the request. A thread that is alone therefore sends its half and reads the answer itself. It also sends its
outcome; the answer is read before the next outcome, or by a timer. The loop sends a request again, with the same id, if
the answer is not 200: only the loop retries, changes servers and handles errors.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator

from notify.client.producer.running import Running, is_taken
from notify.client.producer.transactions import HALVES, NOT_NOW, OUTCOMES
from notify.client.threads.loop import LoopThread
from notify.client.transport.http import AnswerReader, HttpClient, items_of
from notify.errors import Timeout, Unavailable
from notify.protocol.wire import Item, PackedMessage

OPEN_SECONDS = 0.5
"""The timeout for connecting to a server that has just answered the loop."""
LOOK_SECONDS = 0.2
"""How often the loop looks whether the last outcome was answered, while the connections are in use."""
ANSWER_SECONDS = 10.0
"""The loop sends an outcome again if it has no answer after this time."""
SILENT_SECONDS = 5.0
"""The connections are closed after this time without a half."""
FROZEN_SECONDS = 5.0
"""How late a process may close the connections before it counts as one that was frozen."""
TAKEN_SECONDS = 1.0
"""How long another thread may hold the connection for outcomes before it counts as interrupted."""
RECEIVE_BYTES = 65_536


class BlockingConnection(AnswerReader):
    """A connection with at most one request on its way, on which a thread itself sends a request and reads the answer.
    Belongs to one thread at a time.

    If the server or the network fails, its methods raise OSError (TimeoutError is one), and the connection is closed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._socket: socket.socket | None = None
        self._answer: tuple[int, bytes] | None = None
        self._is_kept = True
        """Whether the server keeps the connection open after the last answer."""

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def open(self, client: HttpClient, seconds: float) -> None:
        """Connect to the client's server; `seconds`: the timeout for the connection and for later answers."""
        host, port = client.address
        connected = socket.create_connection((client.reached or host, port), timeout=seconds)
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tls = client.tls
            if tls is not None:
                connected = tls.wrap_socket(connected, server_hostname=host)
        except BaseException:
            connected.close()
            raise
        self._parser, self._answer = None, None
        self._socket = connected

    def send(self, request: bytes) -> None:
        """Send a request. Call `answer` for its answer."""
        if self._parser is not None:
            # A signal handler interrupted the wait for an earlier answer, which would be taken for this request's.
            self.close()
        connected = self._connected()
        self.expect()
        self._answer = None
        try:
            connected.sendall(request)
        except BaseException:
            self.close()
            raise

    def answer(self, seconds: float) -> tuple[int, bytes] | None:
        """Status and body of the answer; None if it has not come within `seconds`, but may still come."""
        deadline, remaining = time.monotonic() + seconds, seconds
        try:
            while self._answer is None:
                if not self._receive(remaining):
                    return None
                remaining = max(0.0, deadline - time.monotonic())
        except BaseException:
            self.close()
            raise
        if not self._is_kept:
            self.close()
        return self._answer

    def _receive(self, seconds: float) -> bool:
        """Read the bytes that have come; False if none came within `seconds`."""
        connected = self._connected()
        if connected.gettimeout() != seconds:
            connected.settimeout(seconds)
        try:
            data = connected.recv(RECEIVE_BYTES)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return False
        if not data:
            self.ended()
            if self._answer is None:
                raise ConnectionError("the server closed the connection")
            return True
        try:
            self.feed(data)
        except Unavailable as error:
            raise ConnectionError(str(error)) from None
        return True

    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("the connection was closed")
        return self._socket

    def answered(self, status: int, body: bytes, is_kept: bool) -> None:
        self._answer, self._is_kept = (status, body), is_kept

    def close(self) -> None:
        """Close the connection; a request on its way gets no answer."""
        closed, self._socket = self._socket, None
        if closed is not None:
            closed.close()


@contextlib.contextmanager
def _taken(lock: threading.Lock, seconds: float = 0.0) -> Iterator[bool]:
    """Wait at most `seconds` for a lock; whether it is taken within the block. Nobody waits forever: a thread that was
    interrupted may still hold it."""
    has_lock = lock.acquire(timeout=seconds)
    try:
        yield has_lock
    finally:
        if has_lock:
            lock.release()


class BlockingSender:
    """Two connections to a producer's only server: one for halves, one for outcomes; a thread at a time uses each."""

    def __init__(self, thread: LoopThread, running: Running, seconds: float) -> None:
        """`seconds`: how long to wait for the answer to a half."""
        self._thread = thread
        self._running = running
        self._seconds = seconds
        self._server: HttpClient | None = None
        """The server of both connections."""
        self._half_connection, self._outcome_connection = BlockingConnection(), BlockingConnection()
        self._taking_half, self._taking_outcome = threading.Lock(), threading.Lock()
        self._unanswered: tuple[str, str | None, str] | None = None
        """The last outcome that was sent, until its answer is read."""
        self._used_at = self._sent_at = 0.0
        self._used_at_time = 0.0
        """As `_used_at`, by the clock on the wall: a machine that was frozen notices the jump of one of both."""
        self._may_open = self._is_watched = self._is_closed = False

    def loop_was_answered(self) -> None:
        """Allow connections to the server to be opened, since it has just answered the loop."""
        self._may_open = True

    # --- halves -----------------------------------------------------------------------------------------------

    def store_half(self, transaction_id: str, messages: list[PackedMessage], source: str) -> Item | None:
        """Send a half, wait, and return its item; None if the loop has to send it. Raises Timeout."""
        with _taken(self._taking_half) as has_lock:
            if not has_lock:
                return None
            until = time.monotonic() + self._seconds
            try:
                server = self._connect()
                body = None if server is None else self._running.client.single_half(transaction_id, messages, source)
                return None if server is None or body is None else self._ask(server, transaction_id, body, until)
            except OSError:
                self._close_outcome_connection()  # a failure of one has most likely cut both
                return None
            finally:
                if self._is_closed:
                    self._half_connection.close()

    def _connect(self) -> HttpClient | None:
        """Open the connections if necessary, and return their server; None if the loop has to send. Raises OSError."""
        server = self._running.client.http.only
        if server is None or self._is_closed:
            return None
        if self._half_connection.is_open and self._was_frozen():
            self._half_connection.close()
            self._close_outcome_connection()
        if not self._half_connection.is_open:
            if not self._may_open:
                return None
            self._may_open = False
            self._close_outcome_connection()
            self._server = server
            seconds = min(OPEN_SECONDS, self._seconds / 4)
            self._half_connection.open(server, seconds)
            self._outcome_connection.open(server, seconds)
            if not self._is_watched:
                self._is_watched = True
                self._thread.call(self._look_later)
        return server if server is self._server else None

    def _was_frozen(self) -> bool:
        """Whether the connections should have been closed by now: the process, or its machine, was suspended, and a
        proxy in between may have dropped them silently."""
        silent = max(time.monotonic() - self._used_at, time.time() - self._used_at_time)
        return silent > SILENT_SECONDS + FROZEN_SECONDS

    def _ask(self, server: HttpClient, transaction_id: str, body: bytes, until: float) -> Item | None:
        """`until`: when to give up, by the monotonic clock."""
        self._used_at, self._used_at_time = time.monotonic(), time.time()
        self._half_connection.send(server.request("POST", HALVES, body))
        answer = self._half_connection.answer(max(0.001, until - time.monotonic()))
        if answer is None:
            self._half_connection.close()
            raise Timeout(f"no answer to POST {HALVES} within {self._seconds:g} s; it may have been carried out")
        item = _item_of(answer, transaction_id)
        if item is None:
            self._half_connection.close()  # its next answer may belong to another request
        return None if item is None or item.status in NOT_NOW else item

    # --- outcomes ---------------------------------------------------------------------------------------------

    def outcome_soon(self, transaction_id: str, shard: str | None, outcome: str) -> bool:
        """Send an outcome without waiting for the answer; False if the loop has to send it."""
        if not self._outcome_connection.is_open or self._running.handed_over or self._running.has_lost:
            return False
        with _taken(self._taking_outcome) as has_lock:
            if not has_lock:
                return False
            last = self._unanswered
            if last is not None and not self._is_answered():
                # The loop sends the last one, too, so that this one does not overtake it on another connection.
                self._running.hand_over(self._thread, *last)
                return False
            body = self._running.client.single_outcome(transaction_id, shard, outcome)
            if body is None or self._server is None or not self._outcome_connection.is_open:
                return False
            request = self._server.request("POST", OUTCOMES, body)
            self._unanswered, self._sent_at = (transaction_id, shard, outcome), time.monotonic()
            try:
                self._outcome_connection.send(request)
            except OSError:
                self._unanswered = None
                return False
            return True

    def notice_lost_outcome(self) -> None:
        """Notice whether the last outcome was lost, if no thread holds its connection."""
        if self._unanswered is None:
            return
        with _taken(self._taking_outcome) as has_lock:
            if has_lock:
                self._is_answered()

    def _is_answered(self, seconds: float = 0.0) -> bool:
        """Whether the last outcome is answered, or was left to the loop. Waits at most `seconds` for its answer."""
        last_outcome = self._unanswered
        if last_outcome is None:
            return True
        try:
            answer = self._outcome_connection.answer(seconds)
        except OSError:
            self._lose()
            return True
        if answer is None:
            return False
        item = _item_of(answer, last_outcome[0])
        if item is None or not is_taken(item):
            self._lose()
        else:
            self._unanswered = None
            self._running.heed(last_outcome[2], item)
        return True

    def _close_outcome_connection(self) -> None:
        with _taken(self._taking_outcome, TAKEN_SECONDS):
            self._is_answered()
            self._lose()

    def _lose(self, *, is_fault: bool = True) -> None:
        """Close the connection for outcomes. The loop sends the last outcome again if it is not answered. `is_fault`:
        it did not reach the server; otherwise nobody waits any longer."""
        self._outcome_connection.close()
        unanswered, self._unanswered = self._unanswered, None
        if unanswered is not None:
            self._running.hand_over(self._thread, *unanswered)
            if is_fault:
                self._running.outcome_was_lost()

    # --- looking after the connections ------------------------------------------------------------------------

    def _look_later(self) -> None:
        self._thread.loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Runs on the loop. If a thread holds a connection, that is in use and left alone."""
        now = time.monotonic()
        with _taken(self._taking_outcome) as has_lock:
            if has_lock and not self._is_answered() and now - self._sent_at > ANSWER_SECONDS:
                self._lose()
        if self._is_closed or (now - self._used_at > SILENT_SECONDS and self._close_unused()):
            return
        self._look_later()

    def _close_unused(self) -> bool:
        """Close the connections, unless one is in use; returns whether they are closed."""
        if self._unanswered is not None:
            return False
        with _taken(self._taking_half) as has_lock:
            if has_lock:
                self._half_connection.close()
                self._close_outcome_connection()
                self._is_watched = False
            return has_lock

    def finish(self, seconds: float) -> None:
        """Wait at most `seconds` for the answer to the last outcome; without one, the loop sends the outcome again."""
        with _taken(self._taking_outcome, TAKEN_SECONDS):
            if not self._is_answered(seconds):
                self._lose(is_fault=False)

    def close(self, seconds: float) -> None:
        """Finish and close the connections; a thread that is sending a half closes that for halves itself."""
        self._is_closed = True
        self.finish(seconds)
        with _taken(self._taking_outcome, TAKEN_SECONDS):
            self._lose()
        with _taken(self._taking_half) as has_lock:
            if has_lock:
                self._half_connection.close()

    def abandon(self) -> None:
        """Close the connections in a forked child, without the locks, which threads of the parent may have held."""
        self._half_connection.close()
        self._outcome_connection.close()


def _item_of(answer: tuple[int, bytes], transaction_id: str) -> Item | None:
    """The item in an answer; None if the loop has to send again: the status is not 200, or the id is another."""
    if answer[0] != 200:
        return None
    try:
        items = items_of(answer[1])
    except Unavailable:
        return None
    return items[0] if len(items) == 1 and items[0].id == transaction_id else None
