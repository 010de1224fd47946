"""Releases delayed messages in a separate thread, beside the bridges and relays of a process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from notify.errors import NotifyError
from notify.kafka.cluster import Cluster
from notify.movers.sinks.delays.releaser import Releaser

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
