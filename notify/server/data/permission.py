"""Checks whether a request's principal may do what a data route does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from notify.errors import TooLarge, Unauthorized
from notify.protocol.limits import LIMITS, check_between, check_name
from notify.runtime.clock import Clock
from notify.server.access.principal import ENDED, EVERYONE, Principal
from notify.server.data.request import Request

_NAMED = {"check": "producer_group", "bridge": "source", "consume": "group", "read": "topic"}
"""The kind of name that a right to each action has."""


def check(request: Request, action: str, name: str, topic: str = "*") -> None:
    """Raises Forbidden if the principal may not do this, InvalidRequest if `name` or `topic` is not a valid name.

    If the principal is EVERYONE nothing is checked here: the names are checked where they are used.
    """
    principal = request.principal
    if principal is not EVERYONE:
        check_name(_NAMED[action], name)
        if topic != "*":
            check_name("topic", topic)
        principal.check(action, name, topic)


def check_large(request: Request, size: int) -> None:
    """Before a large body is read: raises Forbidden if its sender may not use the route for any name, TooLarge if the
    route takes no such body."""
    action, most = _LARGE.get(request.path, ("", NO_CONTENT_BYTES))
    if not action:
        parts = request.path.split("/")
        action = _LARGE_OF_NOUN.get(parts[2] if len(parts) > 2 else "", "")
        if action == "bridge" or parts[-1] == "settle":
            most = LIMITS.request_bytes
    if size > most:
        raise TooLarge(f"a request to {request.path[:100]} has at most {most} bytes", "request_too_large")
    if action:
        request.principal.check_some(action)


NO_CONTENT_BYTES = 1 << 20
"""The largest body of a request without messages or settlements: decoded, it takes a multiple."""
_LARGE = {
    "/v1/transactions": ("check", LIMITS.request_bytes),
    "/v1/transactions/outcomes": ("check", LIMITS.request_bytes),
    "/v1/transactions/states": ("check", NO_CONTENT_BYTES),
    "/v1/transactions/left-behind": ("check", NO_CONTENT_BYTES),
    "/v1/checks/poll": ("check", NO_CONTENT_BYTES),
    "/v1/messages": ("publish", LIMITS.request_bytes),
}
"""The action that a sender needs for some name, and the largest body, by path."""
_LARGE_OF_NOUN = {"groups": "consume", "bridge": "bridge", "sources": "bridge", "schedules": "publish"}


def check_subscriber(request: Request, group: str, topic: str) -> None:
    """As `check` for the action `consume`; `topic` may be a pattern."""
    check_name("group", group)
    check_name("topic", topic.replace("*", "x"))
    principal = request.principal
    if principal is not EVERYONE:
        principal.check("consume", group, topic)


def may_consume(request: Request, group: str, topics: Sequence[str] = ()) -> Callable[[str], bool] | None:
    """A function that tells whether the principal may consume a topic with a group at the moment; None: every topic.

    Raises Forbidden if it may consume no topic, or not each of `topics`, which the request names; of a pattern it gets
    the topics that it may consume. Raises InvalidRequest if a name is not valid, or there are more topics than a
    request may name.
    """
    principal = request.principal
    if principal is EVERYONE:
        return None
    check_name("group", group)
    check_between("the number of topics", len(topics), 0, LIMITS.topics)
    for topic in topics:
        if "*" in topic:
            check_name("topic", topic.replace("*", "x"))
        else:
            check(request, "consume", group, topic)
    principal.check_some("consume", group)
    return lambda topic: principal.may("consume", group, topic)


def polling(request: Request, clock: Clock) -> AbstractContextManager[None]:
    """The context in which a request, whose body is decoded, waits for messages or checks.

    Raises Backpressure if its principal has too many waiting requests, Unauthorized if the principal's access ends.
    """
    request.polls = True
    request.drop_body()  # it may have 8 MiB, and a poll waits for up to a minute
    return _UNBOUNDED if request.principal is EVERYONE else _polling(request.principal, clock)


_UNBOUNDED: AbstractContextManager[None] = contextlib.nullcontext()


@contextlib.contextmanager
def _polling(principal: Principal, clock: Clock) -> Iterator[None]:
    task = asyncio.current_task()
    assert task is not None
    with principal.waiting(task.cancel), _ended_in_time(principal, clock):
        try:
            yield
        except asyncio.CancelledError:
            if not principal.is_over:
                raise
            task.uncancel()
            raise Unauthorized(ENDED) from None


@contextlib.contextmanager
def _ended_in_time(principal: Principal, clock: Clock) -> Iterator[None]:
    """For the time that a poll waits: ends the principal at the moment its credential expires."""
    timer: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal timer
        seconds = (principal.expires_us - clock()) / 1e6
        if seconds <= 0:
            principal.end()
        elif seconds <= LIMITS.wait_seconds:  # no poll waits longer
            timer = asyncio.get_running_loop().call_later(seconds, look)

    if principal.expires_us:
        look()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
