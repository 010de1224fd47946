"""How much of the server's time groups that catch up may take, so that producers keep theirs.

A group far behind reads from the disk as fast as it is let. What it costs is measured, and it waits in proportion
before it is given more: the longer, the busier producers keep the server. With idle producers it does not wait.
"""

from __future__ import annotations

from time import perf_counter, thread_time

from notify.server.metrics import Metrics

TRANSACTION_SECONDS = 15e-6
"""Time of the event loop for a half and its outcome, in full batches."""
PUBLISH_SECONDS = 8e-6
LEAST_SHARE = 0.1
"""Groups that catch up have so much of the server's time at least, whatever producers do."""
WINDOW_US = 100_000
BEHIND = 20_000
"""Messages that a group is behind, over all its queues: nearer ones are in memory and cost little."""
BUSY_LIMIT = 512
"""Messages in a reply while producers are busy: others wait as long as it takes to make it."""
WHOLE_COST = 4.0
"""A reply costs so many times the time to read it: encoding, sending and settling come on top."""
EVALUATION_SHARE = 0.15
"""The filters of all groups together may use so much of the time that the server's loop has left: whoever may subscribe
chooses what they cost."""
LEAST_EVALUATION_SHARE = 0.05
"""Filters may use so much of all of the loop's time, however busy it is."""
EVALUATION_SECONDS = 0.05
"""Filters may spend so many seconds at once of the share that nobody used."""
BUSY_SECONDS = 0.1
"""How busy the loop is, is looked at so often."""


class Pace:
    """The share of time that is left by producers, and that of filters."""

    def __init__(self, metrics: Metrics, now_us: int) -> None:
        self._metrics = metrics
        self._at_us = now_us
        self._halves = self._published = 0
        self.share = 1.0
        self._evaluation_seconds = EVALUATION_SECONDS
        self._evaluation_share = EVALUATION_SHARE
        self._spent_seconds = 0.0
        """In filters, since `_looked_at`."""
        self._looked_at = self._evaluated_at = perf_counter()
        self._worked_seconds = thread_time()

    def evaluation_wait(self) -> float:
        """Seconds until filters may be evaluated again; 0 where they may be now."""
        now = perf_counter()
        if now - self._looked_at > BUSY_SECONDS:
            self._look_at_loop(now)
        earned = (now - self._evaluated_at) * self._evaluation_share
        self._evaluation_seconds = min(EVALUATION_SECONDS, self._evaluation_seconds + earned)
        self._evaluated_at = now
        return 0.0 if self._evaluation_seconds > -1e-6 else -self._evaluation_seconds / self._evaluation_share

    def evaluated(self, seconds: float) -> None:
        """So much CPU time went into filters."""
        self._evaluation_seconds -= seconds
        self._spent_seconds += seconds

    def _look_at_loop(self, now: float) -> None:
        """How busy the loop's thread was with other things lately is how much less filters may take."""
        worked = thread_time()
        others = max(0.0, worked - self._worked_seconds - self._spent_seconds) / (now - self._looked_at)
        self._evaluation_share = max(LEAST_EVALUATION_SHARE, EVALUATION_SHARE * (1.0 - others))
        self._looked_at, self._worked_seconds, self._spent_seconds = now, worked, 0.0

    def look(self, now_us: int) -> None:
        """Take note of what producers sent lately."""
        passed_us = now_us - self._at_us
        if passed_us < WINDOW_US:
            return
        m = self._metrics
        seconds = (m.halves - self._halves) * TRANSACTION_SECONDS + (m.published - self._published) * PUBLISH_SECONDS
        self._at_us, self._halves, self._published = now_us, m.halves, m.published
        # The third power: what producers are seen to take is less than what they would, while others take it from them.
        left = max(LEAST_SHARE, (1.0 - min(1.0, seconds * 1e6 / passed_us)) ** 3)
        # Down at once, up slowly: producers must not have to win their time back again and again.
        self.share = left if left < self.share else self.share + 0.2 * (left - self.share)

    @property
    def is_busy(self) -> bool:
        return self.share < 0.8

    def pause_us(self, spent_seconds: float) -> int:
        """How long a group waits that has spent so much time on reading what lies far behind."""
        if not self.is_busy:
            return 0
        return round(spent_seconds * WHOLE_COST * (1.0 - self.share) / self.share * 1e6)
