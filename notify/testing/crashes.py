"""Crashes of the service under test at the moments that matter, without killing the test: the process only stops there.

with crashing("after_local_commit"):
    with pytest.raises(Crashed):
        place_order("book")
server.wait_until_decided()           # the check found the committed row

A process of its own can die there in earnest: `crashing(point, die=…)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from notify.client.binding import Binding
from notify.client.bound import BoundTransaction
from notify.errors import InvalidRequest


class Crashed(BaseException):
    """Stands for the death of the process: no `except Exception` catches it."""


POINTS = {
    "after_half": "the server has the half, the local transaction is not committed: it must end as ROLLBACK",
    "after_local_commit": "the database has committed, no outcome was sent: it must end as COMMIT",
}


@contextlib.contextmanager
def crashing(point: str, die: Callable[[str], object] | None = None) -> Iterator[None]:
    """Raise Crashed in the thread that sends, at one of POINTS. Raises InvalidRequest for another.

    `die`: called there first, with the transaction's id, in the thread that sends; it may end the process for good.
    """
    if point not in POINTS:
        raise InvalidRequest(f"there is no crash point {point!r}; there are {', '.join(POINTS)}")
    name = {"after_half": "_insert", "after_local_commit": "committed"}[point]
    original = getattr(Binding, name)

    def crash(self: Any, *arguments: Any) -> Any:
        for bound in arguments:
            if isinstance(bound, BoundTransaction):
                if die is not None:
                    die(bound.id)
                bound.shard = None  # a dead process sends no rollback
        raise Crashed(point)

    setattr(Binding, name, crash)
    try:
        yield
    finally:
        setattr(Binding, name, original)
