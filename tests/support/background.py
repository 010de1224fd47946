"""Work that continues beside a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.clock import PATIENCE_SECONDS


@contextmanager
def repeated(
    call: Callable[[], object], *, threads: int, pause_seconds: float, passing: tuple[type[Exception], ...]
) -> Iterator[None]:
    """Make a call again and again in so many threads until the context ends; an error of these kinds passes."""
    stop = threading.Event()

    def go_on() -> None:
        while not stop.wait(pause_seconds):
            try:
                call()
            except passing:
                continue

    working = [threading.Thread(target=go_on) for _ in range(threads)]
    for thread in working:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in working:
            thread.join(PATIENCE_SECONDS)
