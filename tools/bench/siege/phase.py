"""The figures of one phase of the siege."""

from __future__ import annotations

import contextlib
import time

from notify.testing import usage
from notify.testing.process import ServerProcess
from tools.bench.siege.load import Load

SAMPLE_SECONDS = 0.25


class Measured:
    """Rates of producer and consumer, the producer's latency, and the server's memory and CPU time, in one phase."""

    def __init__(self, server: ServerProcess, load: Load, seconds: float) -> None:
        began, before, cpu = time.monotonic(), load.counts(), _cpu_seconds(server)
        self.most_bytes = _bytes(server)
        while (passed := time.monotonic() - began) < seconds:
            time.sleep(min(SAMPLE_SECONDS, seconds - passed))  # the pause between two samples
            self.most_bytes = max(self.most_bytes, _bytes(server))
        self.last_bytes = _bytes(server)
        counts = load.counts()
        self.sent = (counts.sent - before.sent) / passed
        self.received = (counts.received - before.received) / passed
        self.half_seconds, self.late_seconds = counts.latency(before, 0.5), counts.latency(before, 0.99)
        self.cores = (_cpu_seconds(server) - cpu) / passed

    def line(self, phase: str) -> str:
        memory, half, late = self.most_bytes / (1 << 20), self.half_seconds * 1000, self.late_seconds * 1000
        return (
            f"{phase:<16}{self.sent:>8,.0f} sent/s{self.received:>8,.0f} received/s  p50{half:>7.1f} p99{late:>8.1f} ms"
            f"{memory:>7,.0f} MiB at most{self.cores:>6.2f} cores"
        )


def _processes(server: ServerProcess) -> list[int]:
    assert server.process is not None
    return [server.process.pid, *server.workers()]


def _bytes(server: ServerProcess) -> int:
    """The memory of the server with its workers, without mapped files (RssAnon)."""
    total = 0
    for pid in _processes(server):
        with contextlib.suppress(OSError):  # a worker has just ended
            total += usage.anonymous_bytes(pid)
    return total


def _cpu_seconds(server: ServerProcess) -> float:
    return sum(usage.cpu_seconds(pid) for pid in _processes(server))
