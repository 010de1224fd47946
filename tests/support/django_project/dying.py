"""Processes on Django that die at one of the worst moments of their transaction."""

from __future__ import annotations

import os
import signal
from typing import Any

from notify.testing import crashing, forked
from tests.support.clock import PATIENCE_SECONDS
from tests.support.django_project import shop as shops

POINTS = ("after_half", "after_local_commit")


def _order(alias: str, database: dict[str, Any], url: str, group: str, point: str) -> None:
    """Place an order with a message, both named after the point, in the topic named after the group."""
    from notify.client import Message
    from notify.client.django import DjangoProducer

    with shops.added(alias, database):
        producer = DjangoProducer(url, group=group, using=alias, half_timeout=PATIENCE_SECONDS)
        with crashing(point, die=lambda _: os.kill(os.getpid(), signal.SIGKILL)):
            with shops.transaction.atomic(using=alias):
                shops.add(alias, point)
                producer.send(Message(group, point))


def order_and_die(alias: str, database: dict[str, Any], url: str, group: str, point: str) -> int | None:
    """Let a process place an order and die at one of POINTS. Returns its exit code; None if it lives on."""
    process = forked.context().Process(target=_order, args=(alias, database, url, group, point))
    process.start()
    process.join(PATIENCE_SECONDS)
    return process.exitcode
