"""All connections of a server: the bound on their number, which one is closed for a new one, and operators' places."""

from __future__ import annotations

import enum
import resource
from typing import Protocol

import structlog

from notify.errors import Unavailable
from notify.protocol.limits import LIMITS
from notify.runtime.log_output import LogRate

log = structlog.get_logger("notify.server")

SILENT_SECONDS = 1.0
"""If there is no room for another connection, one that has sent no request for this long is closed first."""
IDLE_SECONDS = 5.0
"""If there is no room for another connection, one that has been idle for this long is closed."""
LOOK_SECONDS = 0.25
"""The least time between two searches for idle connections, since each goes through all connections."""
FILES_KEPT = 128
"""File descriptors left for segments, databases and webhooks; at least a quarter of all."""


class Place(enum.Enum):
    """The rights of a new connection."""

    FREE = enum.auto()
    """It may send any request."""
    OPERATORS = enum.auto()
    """It may ask once for what operators need (health, metrics, admin routes, the console), unless a place is freed."""
    NONE = enum.auto()
    """It is not admitted."""


class Connection(Protocol):
    """The part of a connection that `Connections` uses."""

    def idle_since(self) -> float | None:
        """Since when (the loop's time) it is idle; None if it is not."""

    def turn_away(self) -> None:
        """Answer that there is no room, and end the connection."""

    def abort(self) -> None:
        """End the connection immediately."""


class Connections:
    """The open connections, in the order in which they came."""

    def __init__(self, most: int, operators: int = LIMITS.operator_connections) -> None:
        """`most`: the bound on connections; `operators`: the places for operators beyond it."""
        self.most = most
        self.turned_away = 0
        self._operators = operators
        self._open: dict[Connection, None] = {}
        self._silent: dict[Connection, float] = {}
        """Connections that have not sent a request yet, and since when they are open."""
        self._beyond: set[Connection] = set()
        """Connections in operators' places."""
        self._idle: dict[Connection, None] = {}
        """Connections that were idle at the last search, the longest idle first."""
        self._looked = float("-inf")
        self._logged = LogRate(1)

    @property
    def count(self) -> int:
        """The number of open connections."""
        return len(self._open)

    def admit(self, connection: Connection, now: float) -> Place:
        """The place of a new connection; `now` is the loop's time. A silent or an idle one may be closed for it."""
        if self._is_full():
            # A connection that has only just come may be about to ask: then the new one gets an operator's place.
            self._make_room(now - SILENT_SECONDS, now)
        place = Place.FREE
        if self._is_full():
            if self._logged.may():
                remedy = "raise the setting connections and the limit of open files, or find who opens them"
                log.warning("too_many_connections", most=self.most, remedy=remedy)
            if len(self._beyond) >= self._operators and not self._end_silent(now, among_operators=True):
                self.turned_away += 1
                return Place.NONE
            self._beyond.add(connection)
            place = Place.OPERATORS
        self._open[connection] = None
        self._silent[connection] = now
        return place

    def _is_full(self) -> bool:
        return len(self._open) - len(self._beyond) >= self.most

    def has_asked(self, connection: Connection) -> None:
        """Note that a connection has sent its first request."""
        self._silent.pop(connection, None)

    def has_room(self, connection: Connection, now: float) -> bool:
        """Whether a connection in an operator's place gets a free place now."""
        if self._is_full():
            self._make_room(now, now)
        if self._is_full():
            return False
        self._beyond.discard(connection)
        return True

    def refusal(self) -> Unavailable:
        """The error for a request that gets no place; counts it."""
        self.turned_away += 1
        return too_many(self.most)

    def discard(self, connection: Connection) -> None:
        """Forget a connection that is closed, or about to be."""
        self._open.pop(connection, None)
        self._silent.pop(connection, None)
        self._idle.pop(connection, None)
        self._beyond.discard(connection)

    def _make_room(self, until: float, now: float) -> None:
        """End a connection that came by `until` and has sent no request, else an idle one."""
        if not self._end_silent(until):
            self._end_idle(now)

    def _end_silent(self, until: float, among_operators: bool = False) -> bool:
        """End the oldest connection without a request, if it came by `until`; whether there was one."""
        for oldest, since in self._silent.items():
            if since > until:
                break
            if (oldest in self._beyond) == among_operators:
                self.discard(oldest)
                self.turned_away += 1
                oldest.turn_away()
                return True
        return False

    def _end_idle(self, now: float) -> None:
        """End the connection that has been idle longest, if one is idle."""
        if not self._idle and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            waiting = [
                (since, c) for c in self._open if c not in self._beyond and (since := c.idle_since()) is not None
            ]
            self._idle = {c: None for _, c in sorted(waiting, key=lambda pair: pair[0])}
        while self._idle:
            longest = next(iter(self._idle))
            del self._idle[longest]
            since = longest.idle_since()
            if since is not None and now - since >= IDLE_SECONDS:
                self.discard(longest)
                longest.abort()
                return


def too_many(most: int) -> Unavailable:
    """The error for a connection that gets no place."""
    return Unavailable(
        f"the server has {most} connections, as many as its setting connections or its limit of open files allows; "
        "close unused ones, or try again",
        "too_many_connections",
    )


def open_files() -> int | None:
    """How many files this process may have open, after the limit was raised as far as allowed; None: no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError) as error:
            log.info("open_files_limit_stays", limit=soft, reason=str(error))
    return None if soft == resource.RLIM_INFINITY else soft


def allowed_by_files(wanted: int) -> int:
    """How many of the `wanted` connections the limit of open files allows."""
    soft = open_files()
    if soft is None:
        return wanted
    allowed = max(1, soft - max(FILES_KEPT, soft // 4) - LIMITS.operator_connections)
    if allowed < wanted:
        log.warning("connections_bounded_by_files", wanted=wanted, allowed=allowed, open_files=soft,
                    remedy="raise the limit of open files (LimitNOFILE of systemd, ulimit -n)")  # fmt: skip
    return min(wanted, allowed)
