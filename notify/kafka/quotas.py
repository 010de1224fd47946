"""Quotas of Kafka's brokers: an answer says for how long the broker will not read from the client, which is otherwise
silent. A client that waits for longer than a call may take looks as if brokers did not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from notify.runtime.program_log import program_log

log = program_log("notify.kafka")

LEAST_SECONDS = 1.0
"""Shorter waits pass unnoticed."""
TELL_AGAIN_SECONDS = 600.0
REMEDY = (
    "raise producer_byte_rate, consumer_byte_rate or request_percentage of its user or client.id (kafka-configs.sh)"
)


class Quotas:
    """How long brokers throttle the clients of this process."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._changing = threading.Lock()
        self.until = float("-inf")
        """Until when a broker does not read from a client, by the monotonic clock."""
        self._told_at = float("-inf")

    def note(self, event: Any) -> None:
        """Take a ThrottleEvent of a client, as its `throttle_cb`; log it now and then."""
        now = self._monotonic()
        with self._changing:
            self.until = max(self.until, now + event.throttle_time)
            if event.throttle_time < LEAST_SECONDS or now - self._told_at < TELL_AGAIN_SECONDS:
                return
            self._told_at = now
        log.warning(
            "Kafka at %s does not read from this client for %.0f s, because it uses more than its quota: %s",
            event.broker_name, event.throttle_time, REMEDY,
        )  # fmt: skip

    def why_silent(self) -> str:
        """The end of a sentence that says that brokers do not answer."""
        seconds = self.until - self._monotonic()
        if seconds < LEAST_SECONDS:
            return ""
        return f": a broker does not read from this client for another {seconds:.0f} s, because of its quota: {REMEDY}"


QUOTAS = Quotas()
"""Those of this process."""
