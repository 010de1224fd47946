"""Calls of Kafka's client within a bound of our own: some of them hang, whatever time they were given."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Hangs(Exception):
    """A call has not ended in time. It goes on in its thread, and what it uses is not to be used any more."""


def within(seconds: float, function: Callable[[], T], more: float = 0.0) -> T:
    """A function's result, called in a thread of its own. Raises what it raises, and Hangs.

    `more` seconds are waited once `seconds` are over: where the whole process stood still, the call goes on with it.
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
