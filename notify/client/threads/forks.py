"""Forks: no fork happens while a background thread of ours is in the middle of using the service's engine.

A child would have a copy of the engine as that thread has left it: a lock that is held for ever, a dialect that is half
initialized. Where a fork calls no hooks of Python's, as in uWSGI, `ThreadOutgoing.start_ahead` keeps such threads away.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from notify.runtime.green import patched_by

FORK_SECONDS = 2.0
"""How long a fork waits for such threads; a check waits a second at most for a transaction's lock."""


class _Gate:
    """Lets the threads that use an engine and the fork of their process take turns."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._using: list[int] = []
        """The threads that use an engine; a thread that forks meanwhile does not wait for itself."""
        self._is_forking = False

    def enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_forking, FORK_SECONDS)
            self._using.append(threading.get_ident())

    def leave(self) -> None:
        with self._changed:
            self._using.remove(threading.get_ident())
            self._changed.notify_all()

    def close(self) -> None:
        own = threading.get_ident()
        with self._changed:
            self._is_forking = True
            self._changed.wait_for(lambda: all(thread == own for thread in self._using), FORK_SECONDS)

    def open(self) -> None:
        with self._changed:
            self._is_forking = False
            self._changed.notify_all()


_gate = _Gate()


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """Within this context, for a second or two, another thread's fork waits. Greenlets do not interrupt one another."""
    gate = _gate
    if patched_by():
        yield
        return
    gate.enter()
    try:
        yield
    finally:
        if gate is _gate:  # not in a child that was forked within the context
            gate.leave()


def _before() -> None:
    if not patched_by():
        _gate.close()


def _in_parent() -> None:
    if not patched_by():
        _gate.open()


def _in_child() -> None:
    global _gate
    _gate = _Gate()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
