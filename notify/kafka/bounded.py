"""Bounds the time of calls of Kafka's client, some of which hang despite their own time-outs."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Hangs(Exception):
    """A call has not ended in time. It still runs in its thread, so that its client must not be used any more."""


def within(seconds: float, function: Callable[[], T], more: float = 0.0) -> T:
    """Call a function in a thread; its result. Raises the function's errors, and Hangs.

    After `seconds` it waits `more` seconds: if the whole process was frozen, the call can still end then.
    """
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="notify-kafka-call", daemon=True).start()
    if not (concurrent.futures.wait([done], seconds).done or concurrent.futures.wait([done], more).done):
        raise Hangs
    return done.result()
