"""Permission: whether who asks may do what a data route does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from notify.errors import Unauthorized
from notify.limits import LIMITS, check_between, check_name
from notify.server.access.principal import ENDED, EVERYONE, Principal
from notify.server.data.request import Request

_NAMED = {"check": "producer_group", "bridge": "source", "consume": "group", "read": "topic"}
"""The kind of thing that a right to this action names."""


def check(request: Request, action: str, name: str, topic: str = "*") -> None:
    """Raises Forbidden where who asks may not do this, InvalidRequest where rights are asked for what is no name.

    The names of a request of EVERYONE are checked where they are used.
    """
    principal = request.principal
    if principal is not EVERYONE:
        check_name(_NAMED[action], name)
        if topic != "*":
            check_name("topic", topic)
        principal.check(action, name, topic)


def check_subscriber(request: Request, group: str, topic: str) -> None:
    """As `check` for `consume`, of a topic or a pattern of topics."""
    check_name("group", group)
    check_name("topic", topic.replace("*", "x"))
    principal = request.principal
    if principal is not EVERYONE:
        principal.check("consume", group, topic)


def may_consume(request: Request, group: str, topics: Sequence[str] = ()) -> Callable[[str], bool] | None:
    """Whether who asks may consume a topic with a group, as of the moment it is asked; None: every topic.

    Raises Forbidden where it may consume none, or not one of `topics`, which the request names; InvalidRequest where
    rights are asked for what is no name, or for more topics than a request may name.
    """
    principal = request.principal
    if principal is EVERYONE:
        return None
    check_name("group", group)
    check_between("the number of topics", len(topics), 0, LIMITS.topics)
    for topic in topics:
        check(request, "consume", group, topic)
    principal.check_some("consume", group)
    return lambda topic: principal.may("consume", group, topic)


def polling(request: Request) -> AbstractContextManager[None]:
    """While a request waits for something to hand out.

    Raises Backpressure where its principal has too many, Unauthorized where that ends meanwhile.
    """
    request.polls = True
    return _UNBOUNDED if request.principal is EVERYONE else _polling(request.principal)


_UNBOUNDED: AbstractContextManager[None] = contextlib.nullcontext()


@contextlib.contextmanager
def _polling(principal: Principal) -> Iterator[None]:
    task = asyncio.current_task()
    assert task is not None
    with principal.waiting(task.cancel):
        try:
            yield
        except asyncio.CancelledError:
            if not principal.is_over:
                raise
            task.uncancel()
            raise Unauthorized(ENDED) from None
