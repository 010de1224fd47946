"""Simulates a crash of the tested service at the critical moments, without killing the test process.

with crashing("after_local_commit"):
    with pytest.raises(Crashed):
        place_order("book")
server.wait_until_decided()           # the check found the committed row

With `crashing(point, die=…)` a separate process can really die at that moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from notify.client.producer.half_sender import HalfSender, PendingMessages
from notify.errors import InvalidRequest


class Crashed(BaseException):
    """Simulates the death of the process; no `except Exception` catches it."""


POINTS = {
    "after_half": "the server has the half, and the local transaction has not committed: the outcome must be ROLLBACK",
    "after_local_commit": "the database has committed, and no outcome was sent: the outcome must be COMMIT",
}


@contextlib.contextmanager
def crashing(point: str, die: Callable[[str], object] | None = None) -> Iterator[None]:
    """Raise Crashed at one of POINTS, in the thread that sends. Raises InvalidRequest for an unknown point.

    Before that, `die` is called in the same thread with the id of the transaction; it may kill the process.
    """
    if point not in POINTS:
        raise InvalidRequest(f"there is no crash point {point!r}; use one of {', '.join(POINTS)}")
    method_name = {"after_half": "_insert", "after_local_commit": "committed"}[point]
    original = getattr(HalfSender, method_name)

    def crash(self: Any, *arguments: Any) -> Any:
        for pending in arguments:
            if isinstance(pending, PendingMessages):
                if die is not None:
                    die(pending.id)
                pending.shard = None  # a dead process sends no rollback
        raise Crashed(point)

    setattr(HalfSender, method_name, crash)
    try:
        yield
    finally:
        setattr(HalfSender, method_name, original)
