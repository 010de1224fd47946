"""Alone: halves and outcomes that a thread sends by itself, while no other thread of its producer sends.

If the loop's thread sends, the interpreter's lock passes between the threads several times, which costs more CPU time
than the request. So the half of a thread that is alone goes out, and its answer is read, in that thread. Its outcome is
written there, too; the answer is read before the next outcome, or by a timer. The loop sends again, with the same id,
what is not answered with 200: only the loop retries, changes servers and handles errors.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from notify.client.http import HttpClient, items_of
from notify.client.line import Line
from notify.client.loop import LoopThread
from notify.client.running import Running
from notify.client.transactions import HALVES, NOT_NOW, OUTCOMES
from notify.errors import Timeout, Unavailable
from notify.wire import Item, PackedMessage

OPEN_SECONDS = 0.5
"""How long it may take to connect to a server that has just answered the loop."""
LOOK_SECONDS = 0.2
"""How often the loop looks whether the last outcome was answered, while the lines are in use."""
ANSWER_SECONDS = 10.0
"""The loop sends an outcome again that is not answered for so long."""
SILENT_SECONDS = 5.0
"""Lines are closed after so long without a half."""
TAKEN_SECONDS = 1.0
"""How long another thread may have the line of outcomes. Who has it for longer was interrupted and is gone."""


class Alone:
    """Two lines to a producer's only server, one for halves and one for outcomes; one thread at a time uses a line."""

    def __init__(self, thread: LoopThread, running: Running, seconds: float) -> None:
        """`seconds`: how long a half may wait for its answer."""
        self._thread = thread
        self._running = running
        self._seconds = seconds
        self._server: HttpClient | None = None
        """The server that the lines are connected to."""
        self._half_line, self._outcome_line = Line(), Line()
        self._taking_half, self._taking_outcome = threading.Lock(), threading.Lock()
        self._unanswered: tuple[str, str | None, str] | None = None
        """The outcome that was sent last, until its answer is read."""
        self._used_at = self._sent_at = 0.0
        self._may_open = self._is_watched = self._is_closed = False

    def loop_was_answered(self) -> None:
        """The server has answered the loop: lines to it may be opened."""
        self._may_open = True

    # --- halves -----------------------------------------------------------------------------------------------

    def store_half(self, transaction_id: str, messages: list[PackedMessage]) -> Item | None:
        """Send a half and wait; its item. None where the loop is to send it. Raises Timeout."""
        if not self._taking_half.acquire(blocking=False):
            return None
        try:
            server = self._line_to()
            body = None if server is None else self._running.client.half_alone(transaction_id, messages)
            return None if server is None or body is None else self._ask(server, transaction_id, body)
        except OSError:
            self._close_outcome_line()  # whatever cut this one has most likely cut both
            return None
        finally:
            if self._is_closed:
                self._half_line.close()
            self._taking_half.release()

    def _line_to(self) -> HttpClient | None:
        """The server that the lines lead to; opens them where they may be. Raises OSError."""
        server = self._running.client.http.only
        if server is None or self._is_closed:
            return None
        if not self._half_line.is_open:
            if not self._may_open:
                return None
            self._may_open = False
            self._close_outcome_line()
            self._server = server
            self._half_line.open(server, OPEN_SECONDS)
            self._outcome_line.open(server, OPEN_SECONDS)
            if not self._is_watched:
                self._is_watched = True
                self._thread.call(self._look_later)
        return server if server is self._server else None

    def _ask(self, server: HttpClient, transaction_id: str, body: bytes) -> Item | None:
        self._used_at = time.monotonic()
        self._half_line.send(server.request("POST", HALVES, body))
        answer = self._half_line.answer(self._seconds)
        if answer is None:
            self._half_line.close()
            raise Timeout(f"no answer to POST {HALVES} within {self._seconds:g} s; it may have been carried out")
        item = _item_of(answer, transaction_id)
        if item is None:
            self._half_line.close()  # what comes on it may be the answer to something else
        return None if item is None or item.status in NOT_NOW else item

    # --- outcomes ---------------------------------------------------------------------------------------------

    def outcome_soon(self, transaction_id: str, shard: str | None, outcome: str) -> bool:
        """Send an outcome, and do not wait; False where the loop is to send it."""
        if not self._outcome_line.is_open or not self._taking_outcome.acquire(blocking=False):
            return False
        try:
            body = self._running.client.outcome_alone(transaction_id, shard, outcome)
            if body is None or self._server is None or not self._is_answered() or not self._outcome_line.is_open:
                return False
            request = self._server.request("POST", OUTCOMES, body)
            self._unanswered, self._sent_at = (transaction_id, shard, outcome), time.monotonic()
            self._outcome_line.send(request)
            return True
        except OSError:
            self._unanswered = None
            return False
        finally:
            self._taking_outcome.release()

    def _is_answered(self, seconds: float = 0.0) -> bool:
        """Whether the last outcome is answered, or was left to the loop. Waits for its answer so long at most."""
        sent = self._unanswered
        if sent is None:
            return True
        try:
            answer = self._outcome_line.answer(seconds)
        except OSError:
            self._lose()
            return True
        if answer is None:
            return False
        item = _item_of(answer, sent[0])
        if item is None or item.status in NOT_NOW:  # NOT_NOW: a shard is away, or a key moves
            self._lose()
        else:
            self._unanswered = None
        return True

    @contextlib.contextmanager
    def _outcome_line_taken(self) -> Iterator[None]:
        """Take the line of outcomes, also from one that was interrupted while it had it: nobody waits for ever."""
        is_taken = self._taking_outcome.acquire(timeout=TAKEN_SECONDS)
        try:
            yield
        finally:
            if is_taken:
                self._taking_outcome.release()

    def _close_outcome_line(self) -> None:
        with self._outcome_line_taken():
            self._is_answered()
            self._lose()

    def _lose(self) -> None:
        """Close the line of outcomes. The loop sends the outcome again that is not answered."""
        self._outcome_line.close()
        lost, self._unanswered = self._unanswered, None
        if lost is not None:
            self._thread.call(self._running.queue_outcome, *lost)

    # --- looking after the lines ------------------------------------------------------------------------------

    def _look_later(self) -> None:
        self._thread.loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """On the loop. A line that a thread has taken is in use."""
        now = time.monotonic()
        if self._taking_outcome.acquire(blocking=False):
            try:
                if not self._is_answered() and now - self._sent_at > ANSWER_SECONDS:
                    self._lose()
            finally:
                self._taking_outcome.release()
        if self._is_closed or (now - self._used_at > SILENT_SECONDS and self._is_let_go()):
            return
        self._look_later()

    def _is_let_go(self) -> bool:
        """Close the lines, unless one is in use; whether they are closed."""
        if self._unanswered is not None or not self._taking_half.acquire(blocking=False):
            return False
        try:
            self._half_line.close()
            self._close_outcome_line()
            self._is_watched = False
            return True
        finally:
            self._taking_half.release()

    def finish(self, seconds: float) -> None:
        """Wait for the answer of the last outcome, so long at most; then the loop sends it again."""
        with self._outcome_line_taken():
            if not self._is_answered(seconds):
                self._lose()

    def close(self, seconds: float) -> None:
        """Finish, and close the lines; a half that is on its way closes its own."""
        self._is_closed = True
        self.finish(seconds)
        with self._outcome_line_taken():
            self._lose()
        if self._taking_half.acquire(blocking=False):
            self._half_line.close()
            self._taking_half.release()

    def abandon(self) -> None:
        """Close the lines in a forked child, without the locks: threads of the parent may have held them then."""
        self._half_line.close()
        self._outcome_line.close()


def _item_of(answer: tuple[int, bytes], transaction_id: str) -> Item | None:
    """The item of an answer; None where the loop is to ask again: not 200, or no answer for this transaction."""
    if answer[0] != 200:
        return None
    try:
        items = items_of(answer[1])
    except Unavailable:
        return None
    return items[0] if len(items) == 1 and items[0].id == transaction_id else None
