"""Permission: whether who asks may do what a data route does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from notify.errors import Unauthorized
from notify.limits import check_name
from notify.server.access import EVERYONE
from notify.server.access.principal import ENDED
from notify.server.data.request import Request

_NAMED = {"check": "producer_group", "bridge": "source", "consume": "group", "read": "topic"}
"""The kind of thing that a right to this action names."""


def check(request: Request, action: str, name: str, topic: str = "*") -> None:
    """Raises InvalidRequest for what is no name, Forbidden where who asks may not."""
    check_name(_NAMED[action], name)
    if topic != "*":
        check_name("topic", topic)
    principal = request.principal
    if principal is not EVERYONE:
        principal.check(action, name, topic)


def check_subscriber(request: Request, group: str, topic: str) -> None:
    """As `check` for `consume`, of a topic or a pattern of topics."""
    check_name("group", group)
    check_name("topic", topic.replace("*", "x"))
    principal = request.principal
    if principal is not EVERYONE:
        principal.check("consume", group, topic)


def may_consume(request: Request, group: str) -> Callable[[str], bool] | None:
    """Whether who asks may consume a topic with a group, as of the moment it is asked; None: every topic.

    Raises Forbidden where it may consume none.
    """
    principal = request.principal
    if principal is EVERYONE:
        return None
    principal.check_some("consume", group)
    return lambda topic: principal.may("consume", group, topic)


@contextlib.contextmanager
def polling(request: Request) -> Iterator[None]:
    """While a request waits for something to hand out.

    Raises Backpressure where its principal has too many, Unauthorized where that ends meanwhile.
    """
    principal = request.principal
    task = asyncio.current_task()
    assert task is not None
    request.polls = True
    with principal.waiting(task.cancel):
        try:
            yield
        except asyncio.CancelledError:
            if not principal.is_over:
                raise
            task.uncancel()
            raise Unauthorized(ENDED) from None
