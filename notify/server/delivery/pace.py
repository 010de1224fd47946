"""Paces groups that catch up, so that producers keep their share of the server's time.

A group far behind reads from the disk as fast as it can. The time of its reads is measured, and it then waits in
proportion: the busier producers keep the server, the longer. While producers are idle, it does not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, thread_time

from notify.server.metrics import Metrics

TRANSACTION_SECONDS = 15e-6
"""The event loop's time for a half and its outcome, in full batches."""
PUBLISH_SECONDS = 8e-6
LEAST_SHARE = 0.1
"""The least share of the server's time for groups that catch up, however busy producers are."""
WINDOW_US = 100_000
STALE_US = 1_000_000
"""After this long without a look the mean says nothing about the present: the producers may have stopped."""
BEHIND = 20_000
"""The lag, over all queues, beyond which a group is paced: nearer messages are in memory and cost little."""
BUSY_LIMIT = 512
"""The most messages in a reply while producers are busy: all others wait while it is made."""
WHOLE_COST = 4.0
"""The cost of a reply as a multiple of the time to read it: encoding, sending and settling are added."""
EVALUATION_SHARE = 0.15
"""The share of the event loop's idle time that the filters of all groups together may use: anyone who may subscribe
chooses how much a filter costs."""
LEAST_EVALUATION_SHARE = 0.05
"""The least share of the event loop's whole time for filters, however busy it is."""
EVALUATION_SECONDS = 0.05
"""The most unused seconds that filters may save up."""
BUSY_SECONDS = 0.1
"""How often the load of the event loop is measured."""


class Pace:
    """The shares of the server's time for groups that catch up, and for filters."""

    def __init__(
        self,
        metrics: Metrics,
        now_us: int,
        passed: Callable[[], float] = perf_counter,
        worked: Callable[[], float] = thread_time,
    ) -> None:
        """`passed` and `worked`: clocks in seconds, of all time and of this thread's work."""
        self._passed, self._worked = passed, worked
        self._metrics = metrics
        self._at_us = now_us
        self._halves = self._published = 0
        self.share = 1.0
        self._evaluation_seconds = EVALUATION_SECONDS
        self._evaluation_share = EVALUATION_SHARE
        self._spent_seconds = 0.0
        """CPU time in filters since `_looked_at`."""
        self._looked_at = self._evaluated_at = self._passed()
        self._worked_seconds = self._worked()

    def evaluation_wait(self) -> float:
        """Seconds until filters may be evaluated again; 0 if they may be now."""
        now = self._passed()
        if now - self._looked_at > BUSY_SECONDS:
            self._look_at_loop(now)
        earned = (now - self._evaluated_at) * self._evaluation_share
        self._evaluation_seconds = min(EVALUATION_SECONDS, self._evaluation_seconds + earned)
        self._evaluated_at = now
        return 0.0 if self._evaluation_seconds > -1e-6 else -self._evaluation_seconds / self._evaluation_share

    def evaluated(self, seconds: float) -> None:
        """Count CPU time that filters took."""
        self._evaluation_seconds -= seconds
        self._spent_seconds += seconds

    def _look_at_loop(self, now: float) -> None:
        """Reduce the filters' share by the share of time in which the loop's thread did other work."""
        worked = self._worked()
        others = max(0.0, worked - self._worked_seconds - self._spent_seconds) / (now - self._looked_at)
        self._evaluation_share = max(LEAST_EVALUATION_SHARE, EVALUATION_SHARE * (1.0 - others))
        self._looked_at, self._worked_seconds, self._spent_seconds = now, worked, 0.0

    def look(self, now_us: int) -> None:
        """Measure how much producers sent since the last look, and adapt `share`."""
        passed_us = now_us - self._at_us
        if passed_us < WINDOW_US:
            return
        m = self._metrics
        seconds = (m.halves - self._halves) * TRANSACTION_SECONDS + (m.published - self._published) * PUBLISH_SECONDS
        self._at_us, self._halves, self._published = now_us, m.halves, m.published
        if not seconds or passed_us > STALE_US:
            self.share = 1.0  # producers that begin show within a window
            return
        # The third power, because the measure is too low: producers send less while others take their time.
        left = max(LEAST_SHARE, (1.0 - min(1.0, seconds * 1e6 / passed_us)) ** 3)
        # Down immediately, up slowly: otherwise producers would repeatedly lose their time.
        self.share = left if left < self.share else self.share + 0.2 * (left - self.share)

    @property
    def is_busy(self) -> bool:
        return self.share < 0.8

    def pause_us(self, spent_seconds: float) -> int:
        """How long, in microseconds, a group waits that has spent this time on reading far behind the head."""
        if not self.is_busy:
            return 0
        return round(spent_seconds * WHOLE_COST * (1.0 - self.share) / self.share * 1e6)
