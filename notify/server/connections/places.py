"""All connections of a server: how many there may be, who goes when there are too many, and a few for operators."""

from __future__ import annotations

import enum
import resource
from typing import Protocol

import structlog

from notify.errors import Unavailable
from notify.limits import LIMITS
from notify.log_rate import LogRate

log = structlog.get_logger("notify.server")

SILENT_SECONDS = 1.0
"""One that has sent no request for so long is closed first where there is no room for another."""
IDLE_SECONDS = 5.0
"""A connection that has had its answers, and sent nothing for so long, is closed where there is no room for another."""
LOOK_SECONDS = 0.25
"""Between two looks for such ones, since each goes through all connections."""
FILES_KEPT = 128
"""Descriptors that connections leave to segments, databases and webhooks, and at least a quarter of them all."""


class Place(enum.Enum):
    """The rights of a new connection."""

    FREE = enum.auto()
    """Everything."""
    OPERATORS = enum.auto()
    """Ask for what operators need (health, metrics, admin routes, the console), once, unless room is made meanwhile."""
    NONE = enum.auto()


class Connection(Protocol):
    """A connection as `Connections` needs it."""

    def idle_since(self) -> float | None:
        """From when on (the loop's time) it has waited for nothing and sent nothing; None where that is not so."""

    def turn_away(self) -> None:
        """Say that there is no room, and end it."""

    def abort(self) -> None:
        """End it at once."""


class Connections:
    """Those that are open, in the order in which they came."""

    def __init__(self, most: int, operators: int = LIMITS.operator_connections) -> None:
        """`most` of everybody, and `operators` beyond them."""
        self.most = most
        self.turned_away = 0
        self._operators = operators
        self._open: dict[Connection, None] = {}
        self._silent: dict[Connection, float] = {}
        """Those that have not sent a request yet, and since when they are there."""
        self._beyond: set[Connection] = set()
        """Those in operators' places."""
        self._idle: dict[Connection, None] = {}
        """Found idle at the last look, the longest idle first."""
        self._looked = float("-inf")
        self._logged = LogRate(1)

    @property
    def count(self) -> int:
        """How many are open."""
        return len(self._open)

    def admit(self, connection: Connection, now: float) -> Place:
        """A new one, now (the loop's time). Where all places are taken, one that does nothing goes for it."""
        if self._is_full():
            # Who has only just come may be about to ask: until then the new one has an operator's place.
            self._make_room(now - SILENT_SECONDS, now)
        place = Place.FREE
        if self._is_full():
            if self._logged.may():
                remedy = "raise the setting connections, or find who opens them"
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
        """It has sent its first request."""
        self._silent.pop(connection, None)

    def has_room(self, connection: Connection, now: float) -> bool:
        """Whether one that came for an operator's place may do everything now."""
        if self._is_full():
            self._make_room(now, now)
        if self._is_full():
            return False
        self._beyond.discard(connection)
        return True

    def refusal(self) -> Unavailable:
        """Why a request is not served."""
        self.turned_away += 1
        return too_many(self.most)

    def discard(self, connection: Connection) -> None:
        """It is closed, or about to be."""
        self._open.pop(connection, None)
        self._silent.pop(connection, None)
        self._idle.pop(connection, None)
        self._beyond.discard(connection)

    def _make_room(self, until: float, now: float) -> None:
        """End one that has sent no request and came by then; without such a one that is idle."""
        if not self._end_silent(until):
            self._end_idle(now)

    def _end_silent(self, until: float, among_operators: bool = False) -> bool:
        """End the oldest that has never sent a request, if it came by then; whether there was one."""
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
        """End the one that has been idle for longest, if there is one."""
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
    """The refusal for a connection that finds no place."""
    return Unavailable(
        f"the server has {most} connections, as many as its setting connections allows; close those that nobody uses, "
        "or try again",
        "too_many_connections",
    )


def open_files() -> int | None:
    """How many files this process may have open, once that is raised as far as it may be; None: any number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError) as error:
            log.info("open_files_limit_stays", limit=soft, reason=str(error))
    return None if soft == resource.RLIM_INFINITY else soft


def allowed_by_files(wanted: int) -> int:
    """How many of so many connections the limit of open files allows."""
    soft = open_files()
    if soft is None:
        return wanted
    allowed = max(1, soft - max(FILES_KEPT, soft // 4) - LIMITS.operator_connections)
    if allowed < wanted:
        log.warning("connections_bounded_by_files", wanted=wanted, allowed=allowed, open_files=soft,
                    remedy="raise the limit of open files (LimitNOFILE of systemd, ulimit -n)")  # fmt: skip
    return min(wanted, allowed)
