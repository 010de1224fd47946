"""This server's place in the registry: it writes a heartbeat every second, and reads the other members."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Engine

from notify.runtime import faults
from notify.runtime.clock import SteadyClock, boot_clock, wall_clock
from notify.runtime.threads import in_thread
from notify.server.tasks import ended
from notify.storage.members import Member
from notify.storage.sql import key_map, registry
from notify.storage.sql.rows import microseconds_of

if TYPE_CHECKING:
    from notify.storage.sql.key_map import KeyMap
    from notify.storage.sql.shards import SqlShards

log = structlog.get_logger("notify.server")

CLOCK_WARNING_US = 1_000_000
STOP_SECONDS = 5.0
CONSUMERS_EVERY, FORGET_EVERY = 2, 600
"""The number of heartbeats, one a second, between two of its consumers' heartbeats, and between two cleanups."""


class Work(Protocol):
    """The work of a server that it reports to the others."""

    def count(self) -> int:
        """How many transactions it has stored so far; the growth of this count is its load."""

    def consumers(self) -> Sequence[Member]:
        """The consumers that ask it for messages."""


class Idle:
    """The work of a server that has not started to serve."""

    def count(self) -> int:
        return 0

    def consumers(self) -> Sequence[Member]:
        return ()


class Membership:
    """Writes heartbeats; knows the members as of the last heartbeat, and the database's clock."""

    def __init__(self, engine: Engine, me: Member, shards: SqlShards | None = None) -> None:
        """`shards`: the storage that follows the key map; this server helps to carry out changes of that map."""
        self.engine = engine
        self.me = me
        self.members: Sequence[Member] = ()
        self.version = 0
        """Rises with every change of the servers; clients compare it."""
        self._offset_us = wall_clock() - boot_clock()
        self.clock = SteadyClock(self._time_us)
        """An estimate of the database's clock, so that the servers' own clocks may differ."""
        self._warned = False
        self._work: Work = Idle()
        self._counted = (0.0, 0)
        self._beats = 0
        self._is_announced = False
        self._shards = shards
        self._task: asyncio.Task[None] | None = None
        self._changing: asyncio.Task[None] | None = None

    @property
    def shares_storage(self) -> bool:
        """Whether several servers may write to this server's storage."""
        return self._shards is not None

    def _time_us(self) -> int:
        """The estimated time of the database, by a clock of this machine that nobody sets."""
        return boot_clock() + self._offset_us

    async def start(self) -> None:
        """Read the clock, the members and the key map. This server is not announced yet: clients would be refused while
        it starts, and then stay with another server.

        If the registry is unreachable, this server refuses messages with a key and uses this machine's clock until the
        registry answers.
        """
        if self._shards is not None:
            self._shards.wait_for_map()
        await self._beat_if_it_answers()

    async def announce(self, work: Work) -> None:
        """Become a member, because this server now answers requests, and report `work` to the others."""
        self._work = work
        self._is_announced = True
        await self._beat_if_it_answers()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _beat_if_it_answers(self) -> None:
        try:
            await in_thread(self._beat)
        except faults.DATABASE_AWAY as error:
            faults.note("registry_is_away", error)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(registry.HEARTBEAT_SECONDS)
            self._beats += 1
            # Gathered on the event loop: a thread must not iterate over objects that the loop changes.
            consumers = self._work.consumers() if self._beats % CONSUMERS_EVERY == 0 else ()
            try:
                await in_thread(self._beat, consumers)
            except Exception as error:
                faults.note("heartbeat_failed", error)
            # In its own task: a shard that does not answer must not delay the heartbeats.
            shards = self._shards
            if shards is not None and shards.key_map.previous and (self._changing is None or self._changing.done()):
                self._changing = asyncio.get_running_loop().create_task(in_thread(self._change_key_map, shards))

    def _beat(self, consumers: Sequence[Member] = ()) -> None:
        counted = (time.monotonic(), self._work.count())
        self.me.load = (counted[1] - self._counted[1]) / max(0.001, counted[0] - self._counted[0])
        self._counted = counted
        with self.engine.begin() as connection:
            asked_us = boot_clock()
            at = registry.now(connection)
            self._compare_clocks(microseconds_of(at), (asked_us + boot_clock()) // 2)
            if self._is_announced:
                registry.heartbeat(connection, self.me)
            for consumer in consumers:
                registry.heartbeat(connection, consumer)
            members = registry.members(connection)
            newest = None if self._shards is None else key_map.newest(connection)
        if self._is_announced and self._beats % FORGET_EVERY == 0:
            # In its own transaction: InnoDB locks the rows that it reads here, and two servers that each hold the lock
            # of their own row would wait for each other.
            with self.engine.begin() as connection:
                registry.forget_the_long_gone(connection)
        if self._shards is not None and newest is not None:
            self._follow_key_map(newest, self._shards)
        if _servers(members) != _servers(self.members):
            self.version += 1
        self.members = members

    def _follow_key_map(self, newest: KeyMap, shards: SqlShards) -> None:
        if not newest.version:
            first = shards.first_map()
            with contextlib.suppress(sa.exc.IntegrityError), self.engine.begin() as connection:
                key_map.make_first(connection, first)
            with self.engine.connect() as connection:
                newest = key_map.newest(connection)
        self.me.detail[key_map.FOLLOWS] = shards.follow(newest)

    def _change_key_map(self, shards: SqlShards) -> None:
        """Carry out the next step of a change of the key map if it is due."""
        try:
            with self.engine.begin() as connection:
                key_map.advance(connection, shards.key_map, shards.engines)
        except Exception as error:
            faults.note("key_map_waits", error, version=shards.key_map.version)

    def _compare_clocks(self, database_us: int, boot_us: int) -> None:
        """Follow the database's clock; `boot_us`: the time since this machine's start at `database_us`."""
        offset = database_us - boot_us
        # Except for the first time the offset is followed slowly: a single slow answer must not make time jump.
        first = not self.members
        self._offset_us = offset if first else self._offset_us + round((offset - self._offset_us) * 0.1)
        ahead_us = wall_clock() - boot_clock() - offset
        self.me.detail["clock_offset_seconds"] = round(ahead_us / 1e6, 3)
        if abs(ahead_us) > CLOCK_WARNING_US and not self._warned:
            self._warned = True
            log.warning(
                "clocks_differ",
                seconds=round(-ahead_us / 1e6, 3),
                remedy="this machine's clock and the database's differ; the database's is used. Run NTP on both.",
            )

    def shown(self) -> dict[str, Any]:
        """The answer of `GET /v1/members`."""
        return {
            "version": self.version,
            "members": [member.shown() for member in self.members],
        }

    async def stop(self) -> None:
        """Leave the registry, so that others stop sending here immediately, and not only after missed heartbeats."""
        await ended(self._task)
        if self._changing is not None:
            await asyncio.wait([self._changing], timeout=STOP_SECONDS)
        try:
            await in_thread(self._leave)
        except Exception as error:
            faults.note("not_left", error)  # the others will notice the missing heartbeats

    def _leave(self) -> None:
        with self.engine.begin() as connection:
            registry.leave(connection, self.me.name)


def _servers(members: Sequence[Member]) -> list[tuple[Any, ...]]:
    """The fields of the servers that clients follow."""
    return [(m.name, m.url, m.roles, m.shards, m.room) for m in members if m.kind == "server"]
