"""The figures of one phase of the siege."""

from __future__ import annotations

import time
from typing import Any

from notify.testing.process import ServerProcess

SAMPLE_SECONDS = 0.25


class Measured:
    """The rates of producer and consumer, and the server's memory, in one phase."""

    def __init__(self, server: ServerProcess, sent: Any, received: Any, seconds: float) -> None:
        began, before = time.monotonic(), (sent.value, received.value, server.cpu_seconds())
        self.most_bytes = server.anonymous_bytes()
        while (passed := time.monotonic() - began) < seconds:
            time.sleep(min(SAMPLE_SECONDS, seconds - passed))  # the pause between two samples
            self.most_bytes = max(self.most_bytes, server.anonymous_bytes())
        self.sent = (sent.value - before[0]) / passed
        self.received = (received.value - before[1]) / passed
        self.cores = (server.cpu_seconds() - before[2]) / passed

    def line(self, phase: str) -> str:
        memory = self.most_bytes / (1 << 20)
        return (
            f"{phase:<16}{self.sent:>10,.0f} sent/s{self.received:>10,.0f} received/s{memory:>8,.0f} MiB at most"
            f"{self.cores:>8.2f} cores"
        )
