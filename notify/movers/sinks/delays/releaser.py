"""Releases delayed messages when they are due, in a thread of every bridge and relay that publishes to Kafka.

Any number of releasers may run: they share the slots as members of a consumer group. All messages are on the brokers'
disks, and none only in a releaser; a releaser that takes over continues from the group's committed offsets.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaException

from notify.errors import NotifyError
from notify.kafka.brokers import translated
from notify.kafka.cluster import Cluster
from notify.kafka.rights import of_bridge
from notify.movers.sinks.delays.release import GROUP, Release, Released
from notify.movers.sinks.delays.topics import make_wheels
from notify.movers.sinks.delays.wheels import WHEELS, Wheels


def wall_us() -> int:
    """Now, in microseconds since 1970."""
    return time.time_ns() // 1000


class Releaser:
    """Releases messages in the calling thread until it is stopped."""

    def __init__(
        self, cluster: Cluster, wheels: Wheels = WHEELS, now_us: Callable[[], int] = wall_us, group: str = GROUP
    ) -> None:
        """`group`: the consumer group of all releasers of these wheels."""
        self._cluster = cluster
        self._wheels = wheels
        self._now_us = now_us
        self._group = group
        self.transactional_id = f"notify-delays-{os.urandom(6).hex()}"
        self._stopping = threading.Event()
        self.total = Released()
        self.hung = 0
        """How many of its memberships hung at their end: each still has some threads and megabytes."""

    def run(self) -> None:
        """Release until `stop`. Raises Unavailable or Conflict if the brokers fail, InvalidRequest if they refuse."""
        self._cluster = self._cluster.again()
        try:
            make_wheels(self._cluster, self._wheels)
            release = Release(self._cluster, self._wheels, self._now_us, self.total, self.transactional_id, self._group)
            try:
                while not self._stopping.is_set():
                    release.step()
            finally:
                self.hung += not release.close()
        except KafkaException as raised:
            raise translated(raised.args[0], self._cluster, of_bridge()) from raised

    def stop(self) -> None:
        """Make `run` return soon, from any thread."""
        self._stopping.set()

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds`, or until it is stopped; whether it is stopped."""
        return self._stopping.wait(seconds)


log = logging.getLogger("notify.binlog_bridge")

AGAIN_SECONDS = 5.0
MOST_HUNG = 20
"""After Kafka's client hung this often, a process releases no more messages; other processes still do."""


@contextmanager
def releasing(url: str) -> Iterator[None]:
    """Release due messages at a Kafka cluster in the background; after a failure it tries again."""
    with in_background(Releaser(Cluster.of(url))):
        yield


@contextmanager
def in_background(releaser: Releaser, again_seconds: float = AGAIN_SECONDS) -> Iterator[None]:
    """Run a releaser in a thread. `again_seconds`: the pause after a failure."""

    def run() -> None:
        while not releaser.wait(0) and releaser.hung < MOST_HUNG:
            try:
                releaser.run()
            except NotifyError as error:
                log.warning("releasing delayed messages failed, again in %g s: %s", again_seconds, error)
            except Exception:
                log.exception("releasing delayed messages failed, again in %g s", again_seconds)
            releaser.wait(again_seconds)
        if releaser.hung >= MOST_HUNG:
            log.error("Kafka's client hung %d times: delayed messages are not released here; restart", releaser.hung)

    thread = threading.Thread(target=run, name="notify-delays", daemon=True)
    thread.start()
    try:
        yield
    finally:
        releaser.stop()
        thread.join(5)
