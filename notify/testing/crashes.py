"""Simulates a crash of the service under test at the critical moments, without killing the test process.

with crashing("after_local_commit"):
    with pytest.raises(Crashed):
        place_order("book")
server.wait_until_decided()           # the check found the committed row

With `crashing(point, die=…)` a separate process really dies there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from notify.client.bound import BoundTransaction
from notify.client.carrier import Carrier
from notify.errors import InvalidRequest


class Crashed(BaseException):
    """Stands for the death of the process; no `except Exception` catches it."""


POINTS = {
    "after_half": "the server has the half, and the local transaction has not committed: the outcome must be ROLLBACK",
    "after_local_commit": "the database has committed, and no outcome was sent: the outcome must be COMMIT",
}


@contextlib.contextmanager
def crashing(point: str, die: Callable[[str], object] | None = None) -> Iterator[None]:
    """Raise Crashed at one of POINTS, in the thread that sends. Raises InvalidRequest for an unknown point.

    `die` is first called there with the transaction's id, in the same thread; it may kill the process.
    """
    if point not in POINTS:
        raise InvalidRequest(f"there is no crash point {point!r}; use one of {', '.join(POINTS)}")
    name = {"after_half": "_insert", "after_local_commit": "committed"}[point]
    original = getattr(Carrier, name)

    def crash(self: Any, *arguments: Any) -> Any:
        for bound in arguments:
            if isinstance(bound, BoundTransaction):
                if die is not None:
                    die(bound.id)
                bound.shard = None  # a dead process sends no rollback
        raise Crashed(point)

    setattr(Carrier, name, crash)
    try:
        yield
    finally:
        setattr(Carrier, name, original)
