"""Releases delayed messages when they are due, beside every bridge and relay that publishes to Kafka.

Any number may run: they share the slots as members of a consumer group. None holds messages, all of which are on the
brokers' disks; whoever takes over reads on from the group's committed offsets.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from confluent_kafka import KafkaException

from notify.kafka.brokers import translated
from notify.kafka.cluster import Cluster
from notify.kafka.rights import of_bridge
from notify.sinks.delays.earlier import move_earlier
from notify.sinks.delays.release import Release, Released
from notify.sinks.delays.topics import make_wheels
from notify.sinks.delays.wheels import WHEELS, Wheels


def wall_us() -> int:
    """Now, in microseconds since 1970."""
    return time.time_ns() // 1000


class Releaser:
    """Runs in a thread of its own until it is stopped."""

    def __init__(self, cluster: Cluster, wheels: Wheels = WHEELS, now_us: Callable[[], int] = wall_us) -> None:
        self._cluster = cluster
        self._wheels = wheels
        self._now_us = now_us
        self._name = os.urandom(6).hex()
        self._stopping = threading.Event()
        self.total = Released()
        self.hung = 0
        """How many of its memberships did not end: each has some threads and megabytes."""

    def run(self) -> None:
        """Until `stop`. Raises Unavailable or Conflict where the brokers fail, InvalidRequest where they refuse."""
        self._cluster = self._cluster.again()
        try:
            make_wheels(self._cluster, self._wheels)
            self.total.moved += move_earlier(self._cluster, self._wheels, self._now_us)
            release = Release(self._cluster, self._wheels, self._now_us, self.total, self._name)
            try:
                while not self._stopping.is_set():
                    release.step()
            finally:
                self.hung += not release.close()
        except KafkaException as raised:
            raise translated(raised.args[0], self._cluster, of_bridge()) from raised

    def stop(self) -> None:
        """Have `run` return soon, from any thread."""
        self._stopping.set()

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until it is stopped. Whether it is stopped."""
        return self._stopping.wait(seconds)
