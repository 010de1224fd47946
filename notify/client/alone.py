"""Alone: halves and outcomes that a thread sends by itself, while no other thread of its producer sends.

If the loop's thread sends, the interpreter's lock passes between the threads several times, which costs more CPU time
than the request. So the half of a thread that is alone goes out, and its answer is read, in that thread. Its outcome is
written there, too; the answer is read before the next outcome, or by a timer. The loop sends again, with the same id,
what is not answered with 200: only the loop retries, changes servers and handles errors.
"""

from __future__ import annotations

import threading
import time

import msgspec

from notify.client.http import HttpClient
from notify.client.line import Line
from notify.client.loop import LoopThread
from notify.client.running import Running
from notify.client.transactions import HALVES, NOT_NOW, OUTCOMES, items_of
from notify.errors import Timeout
from notify.wire import Item, PackedMessage

OPEN_SECONDS = 0.5
"""How long it may take to connect to a server that has just answered the loop."""
LOOK_SECONDS = 0.2
"""How often the loop looks whether the last outcome was answered, while the lines are in use."""
ANSWER_SECONDS = 10.0
"""The loop sends an outcome again that is not answered for so long."""
SILENT_SECONDS = 5.0
"""Lines are closed after so long without a half."""


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
            return None if server is None or body is None else self._ask(server, body)
        except (OSError, msgspec.DecodeError):
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

    def _ask(self, server: HttpClient, body: bytes) -> Item | None:
        self._used_at = time.monotonic()
        self._half_line.send(server.request("POST", HALVES, body))
        answer = self._half_line.answer(self._seconds)
        if answer is None:
            self._half_line.close()
            raise Timeout(f"no answer to POST {HALVES} within {self._seconds:g} s; it may have been carried out")
        if answer[0] != 200:
            return None
        item = items_of(answer[1])[0]
        return None if item.status in NOT_NOW else item

    # --- outcomes ---------------------------------------------------------------------------------------------

    def outcome_soon(self, transaction_id: str, shard: str | None, outcome: str) -> bool:
        """Send an outcome, and do not wait; False where the loop is to send it."""
        if not self._outcome_line.is_open or not self._taking_outcome.acquire(blocking=False):
            return False
        try:
            body = self._running.client.outcome_alone(transaction_id, shard, outcome)
            if body is None or self._server is None or not self._is_answered() or not self._outcome_line.is_open:
                return False
            self._outcome_line.send(self._server.request("POST", OUTCOMES, body))
            self._unanswered, self._sent_at = (transaction_id, shard, outcome), time.monotonic()
            return True
        except OSError:
            return False
        finally:
            self._taking_outcome.release()

    def _is_answered(self, seconds: float = 0.0) -> bool:
        """Whether the last outcome is answered, or was left to the loop. Waits for its answer so long at most."""
        if self._unanswered is None:
            return True
        try:
            answer = self._outcome_line.answer(seconds)
        except OSError:
            self._lose()
            return True
        if answer is None:
            return False
        if answer[0] == 200 and _is_for_good(answer[1]):
            self._unanswered = None
        else:
            self._lose()
        return True

    def _close_outcome_line(self) -> None:
        with self._taking_outcome:
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
        with self._taking_outcome:
            if not self._is_answered(seconds):
                self._lose()

    def close(self, seconds: float) -> None:
        """Finish, and close the lines; a half that is on its way closes its own."""
        self._is_closed = True
        self.finish(seconds)
        with self._taking_outcome:
            self._outcome_line.close()
        if self._taking_half.acquire(blocking=False):
            self._half_line.close()
            self._taking_half.release()

    def abandon(self) -> None:
        """Close the lines in a forked child, without the locks: threads of the parent may have held them then."""
        self._half_line.close()
        self._outcome_line.close()


def _is_for_good(answer: bytes) -> bool:
    """Whether the item of an answer says what became of its outcome; else a shard is away, or a key moves."""
    try:
        return items_of(answer)[0].status not in NOT_NOW
    except msgspec.DecodeError:
        return False
