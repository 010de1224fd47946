"""Keeps a consumer running while the brokers refuse it: a right or password that was withdrawn may be granted again."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from notify.client.kafka.loop import KafkaLoop
from notify.client.kafka.plan import Plan
from notify.errors import Forbidden, InvalidRequest, Unauthorized, Unavailable
from notify.kafka.cluster import REFUSED_SETTINGS, Cluster
from notify.runtime.backoff import Backoff

log = logging.getLogger("notify.consumer")

AGAIN_SECONDS, AGAIN_MAX_SECONDS = 1.0, 30.0


async def consume(plan: Plan, stopping: asyncio.Event) -> None:
    """Receive until `stopping`. Until the loop has worked once, its errors are raised: see KafkaLoop.run.

    After that, a refusal, or brokers that do not answer, end only the current clients. New clients, with the current
    file of settings, are tried until the brokers accept one. Nothing is lost meanwhile: messages that were not
    committed are delivered again.
    """
    backoff = Backoff(AGAIN_SECONDS, AGAIN_MAX_SECONDS)
    has_worked = False
    cluster = Cluster.of(plan.url)
    while not stopping.is_set():
        loop: KafkaLoop | None = None
        try:
            loop = KafkaLoop(plan, cluster)
            await loop.run(stopping)
            return
        except (Unauthorized, Forbidden, Unavailable, InvalidRequest) as error:
            if loop is not None and loop.has_worked:
                has_worked = True
                backoff.reset()
            is_refusal = not isinstance(error, InvalidRequest) or error.code in ("no_topic", REFUSED_SETTINGS)
            if not has_worked or not is_refusal:
                raise
            wait = backoff.next()
            log.warning("group %s receives nothing, again in %.1f s: %s", plan.group, wait, error)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), wait)
        cluster = cluster.again()
