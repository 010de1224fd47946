"""The stores of a producer or consumer, opened in the process that uses them, and the threads that wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from notify.client.threads.handler_threads import HandlerThreads
from notify.client.threads.loop import home
from notify.errors import InvalidRequest

if TYPE_CHECKING:
    from notify.object_store.store import Store

T = TypeVar("T")

AT_ONCE = 8
"""The most objects that a producer or a consumer reads or writes at the same time."""
TRIES = 2


class Stores:
    """Any thread may use it. A forked child opens the stores again, since connections and threads are its parent's."""

    def __init__(self, urls: Sequence[str], seconds: float) -> None:
        """`seconds`: how long a store may give no sign of life. Raises InvalidRequest for a URL that names no store, or
        one whose library is not installed."""
        self._urls = {_address(url): url for url in urls}
        self._seconds = seconds
        self._lock = threading.Lock()
        self._home: object = None
        self._opened: dict[str, Store] = {}
        self._threads: HandlerThreads | None = None
        if urls:
            from notify.object_store.filesystem import check_url

            for url in self._urls:
                check_url(url)

    @property
    def urls(self) -> list[str]:
        return list(self._urls)

    def of(self, url: str) -> Store | None:
        """The store that was given under exactly this URL; None for any other URL, whatever it leads to."""
        if url not in self._urls:
            return None
        with self._lock:
            self._come_home()
            store = self._opened.get(url)
            if store is None:
                from notify.object_store.store import Store

                store = self._opened[url] = Store(url, stall_seconds=self._seconds, tries=TRIES)
            return store

    def submit(self, function: Callable[..., T], *arguments: object) -> Future[T]:
        """Call a function in one of AT_ONCE threads."""
        with self._lock:
            self._come_home()
            if self._threads is None:
                self._threads = HandlerThreads(AT_ONCE, "notify-bodies")
            return self._threads.submit(function, *arguments)

    def _come_home(self) -> None:
        """Leave what belongs to the process before a fork, or to threads that greenlets have replaced."""
        if self._home != (here := home()):
            self._home = here
            self._opened, self._threads = {}, None

    def close(self) -> None:
        """End the threads that are idle; the others end after what they do."""
        with self._lock:
            if self._threads is not None and self._home == home():
                self._threads.shutdown()
            self._threads = None


def _address(url: object) -> str:
    """A store's URL as references name it. Raises InvalidRequest for anything but text."""
    if not isinstance(url, str) or not url.rstrip("/"):
        raise InvalidRequest(f"a store is named by its URL, such as s3://bucket/prefix, not {url!r:.60}")
    return url.rstrip("/")
