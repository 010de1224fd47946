"""Consumer groups over Kafka for the admin routes, which show, pause and reset them."""

from __future__ import annotations

import heapq
import time
import uuid
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import msgspec

from notify.admin_api.groups import EFFECTS_KEPT
from notify.errors import InvalidRequest, NotFound
from notify.kafka.control import OBEY_SECONDS, Control, Reset
from notify.kafka.groups import consumer_group
from notify.protocol.wire import microseconds
from notify.server.core.reports import FORGET_US, RefusedReports, refused_row
from notify.server.delivery.following import SETTINGS_SHOWN
from notify.server.groups import Move
from notify.server.groups.kafka import offsets, sources
from notify.server.groups.kafka.dead_letters import NO_REPLAY, KafkaLetters
from notify.server.groups.kafka.latest_snapshot import LatestSnapshot
from notify.server.groups.kafka.offsets import Place
from notify.server.groups.kafka.oldest import Oldest
from notify.server.groups.kafka.snapshot import KafkaGroup, Position, Snapshot
from notify.server.groups.kafka.sources import RefusedOverKafka, Sources
from notify.server.groups.kafka.subscriptions import Subscriptions
from notify.server.groups.kafka.thread import WRITE_SECONDS, BrokersThread
from notify.server.groups.own import WORST
from notify.server.letters.engine import Change
from notify.server.watch.group_state import GroupState

NOT_KNOWN_OF_INSTANCES = ("asked_at", "in_flight", "finished", "per_second", "expired", "bound")
NOT_KNOWN_OF_SUBSCRIPTIONS = (
    *[name for name in SETTINGS_SHOWN if name not in ("mode", "tags", "filter")],
    "earlier", "epoch", "replay", "inbox_from", "changes", "changes_last_hour",
)  # fmt: skip
"""Fields of the routes that are unknown for consumers over Kafka."""


class KafkaGroups:
    """The groups of one cluster. Every method raises Unavailable while the brokers do not answer."""

    def __init__(
        self,
        thread: BrokersThread,
        look: LatestSnapshot,
        noted: Subscriptions,
        letters: KafkaLetters,
        refusals: RefusedReports,
    ) -> None:
        """`refusals`: the reports of movers to this server."""
        self._thread = thread
        self._look = look
        self._noted = noted
        self._letters = letters
        self._sources = Sources(thread.brokers)
        self._oldest = Oldest(thread.brokers)
        self._refusals = refusals
        self._refused = RefusedOverKafka(thread.brokers)

    def close(self) -> None:
        self._sources.close()
        self._oldest.close()
        self._refused.close()

    # --- views ------------------------------------------------------------------------------------------------

    def lag(self) -> int:
        """The lag in the newest snapshot: alarms take one every few seconds."""
        return sum(group.lag for group in self._look.last.groups.values())

    async def states(self) -> list[GroupState]:
        snapshot, letters = await self._thread.call(lambda: (self._look.now(), self._letters.open_letters()))
        return [self._state(g, letters.pop(g.base, 0), snapshot.is_whole(g)) for g in snapshot.groups.values()]

    def _state(self, group: KafkaGroup, dead_letters: int, is_whole: bool) -> GroupState:
        lags: dict[str, int] = {}
        for position in group.positions:
            lags[position.topic] = lags.get(position.topic, 0) + position.lag
        consumers = Counter(self._look.stalls.state(group, member) for member in group.members)
        return GroupState(
            group.name, lags, group.base in self._look.paused, consumers, 0, dead_letters, is_whole=is_whole,
            blocked=self._look.stalls.blocked(group),
        )  # fmt: skip

    async def refused(self) -> list[dict[str, Any]]:
        reports = await self._thread.call(self._refused.read)
        oldest_us = time.time_ns() // 1000 - FORGET_US
        rows = [refused_row(source, *report) for source, report in sorted(reports.items()) if report[1] >= oldest_us]
        return self._refusals.shown() + rows

    async def sources(self) -> list[dict[str, Any]]:
        standings = await self._thread.call(lambda: self._sources.read(self._look.now().topics))
        return sources.shown(standings, time.time_ns() // 1000)

    async def summary(self) -> dict[str, Any]:
        def ask() -> tuple[Snapshot, list[KafkaGroup], dict[str, int], int]:
            snapshot = self._look.now()
            worst = heapq.nlargest(WORST, (g for g in snapshot.groups.values() if g.lag), key=lambda g: g.lag)
            return snapshot, worst, self._oldest.of(worst), sum(self._letters.open_letters().values())

        snapshot, worst, oldest_us, letters = await self._thread.call(ask)
        now_us = time.time_ns() // 1000
        ages = {name: round(max(0, now_us - at_us) / 1e6, 3) for name, at_us in oldest_us.items()}
        return {
            "lag": self.lag(),
            "topics": len(snapshot.message_topics()),
            "groups": len(snapshot.groups),
            "leased": None,
            "delayed": None,
            "dead_letters": letters,
            "oldest_undelivered_seconds": max(ages.values(), default=None),
            "lagging": [
                {
                    "name": g.name,
                    "lag": g.lag,
                    "oldest_seconds": ages.get(g.name),
                    "paused": g.base in self._look.paused,
                }
                for g in worst
            ],
        }

    async def listed(self, prefix: str, after: str, most: int) -> dict[str, Any]:
        all_groups = (await self._thread.call(self._look.now)).groups
        names = heapq.nsmallest(most, (name for name in all_groups if name > after and name.startswith(prefix)))
        rows = [
            {
                "name": name,
                "lag": all_groups[name].lag,
                "leased": None,
                "paused": all_groups[name].base in self._look.paused,
                "consumers": len(all_groups[name].members),
            }
            for name in names
        ]
        return {"groups": rows, "of": len(all_groups)}

    async def one(self, name: str) -> dict[str, Any]:
        group, noted = await self._thread.call(lambda: (self._look.known(name), self._subscriptions(name)))
        return {
            "name": name,
            "paused": group.base in self._look.paused,
            "subscriptions": noted,
            "patterns": [],
            "queues": [_position_row(p) for p in group.positions],
            "leases": [],
            "instances": [
                dict.fromkeys(NOT_KNOWN_OF_INSTANCES)
                | {
                    "name": m.name,
                    "state": self._look.stalls.state(group, m),
                    "host": m.host,
                    "partitions": len(m.places),
                }
                for m in group.members
            ],
        }

    def _subscriptions(self, name: str) -> list[dict[str, Any]]:
        """A row for each topic, from the subscriptions that the group's consumers noted."""
        return [
            dict.fromkeys(NOT_KNOWN_OF_SUBSCRIPTIONS)
            | {"topic": topic, "mode": s.mode, "tags": list(s.tags), "filter": s.filter}
            for topic, s in sorted(self._noted.of_group(name).items())
        ]

    # --- steering ---------------------------------------------------------------------------------------------

    async def pause(self, name: str, is_paused: bool) -> Change:
        group = await self._thread.call(lambda: self._look.known(name))
        preview = {"paused": is_paused, "within_seconds": OBEY_SECONDS}

        def do() -> Any:
            self._look.wishes.change(group.base, lambda wish: msgspec.structs.replace(wish, paused=is_paused))
            self._look.again()
            return preview

        return Change(preview, lambda: self._thread.call(do, WRITE_SECONDS))

    async def reset(self, name: str, move: Move) -> Change:
        if move.replay_effects:
            raise InvalidRequest(NO_REPLAY)
        wish = Reset(uuid.uuid4().hex, move.topic, move.to)
        wish.start()  # raises for a bad position, before the wish is written
        rows = await self._thread.call(lambda: self._moved(name, wish))
        preview = {"id": wish.id, "queues": rows, "effects": EFFECTS_KEPT, "within_seconds": OBEY_SECONDS}

        def do() -> Any:
            self._look.wishes.change(consumer_group(name), lambda before: _with(before, wish))
            self._look.again()
            return preview

        return Change(preview, lambda: self._thread.call(do, WRITE_SECONDS))

    def _moved(self, name: str, wish: Reset) -> list[dict[str, int]]:
        """Each partition's position before and after a reset."""
        self._look.again()  # a snapshot of a second ago could be outdated
        positions = [p for p in self._look.known(name).positions if p.topic == wish.topic]
        if not positions:
            raise NotFound(f"group {name[:100]!r} has no position in {wish.topic[:100]!r}")
        to = wish.start()
        most = max(p.end for p in positions)
        if isinstance(to, int) and to > most:
            raise InvalidRequest(
                f"offset {to} is beyond what topic {wish.topic!r} holds: up to {most}", "out_of_bounds"
            )
        if isinstance(to, datetime) and to > datetime.now(UTC):
            raise InvalidRequest(f"{to.isoformat()} is in the future; `latest` begins now", "out_of_bounds")
        at_time: dict[Place, int] = {}
        if not isinstance(to, int | str):
            at_time = offsets.at_time(
                self._thread.brokers.admin, [(p.topic, p.partition) for p in positions], microseconds(to)
            )
        return [_moved_row(p, _target(p, to, at_time)) for p in positions]


def _with(before: Control, wish: Reset) -> Control:
    """The wishes of a group with another reset, which replaces an earlier one of the same topic."""
    others = tuple(reset for reset in before.resets if reset.topic != wish.topic)
    return msgspec.structs.replace(before, resets=(*others, wish))


def _target(position: Position, to: Any, at_time: dict[Place, int]) -> int:
    if to == "earliest":
        return position.start
    if to == "latest":
        return position.end
    if isinstance(to, int):
        return min(max(to, position.start), position.end)
    offset = at_time.get((position.topic, position.partition), -1)
    return position.end if offset < 0 else offset


def _moved_row(position: Position, to: int) -> dict[str, int]:
    at, done = position.progress.offset, position.progress.done
    again = max(0, at - to) + sum(offset >= to for offset in done)
    left_out = max(0, to - at) - sum(offset < to for offset in done)
    return {"queue": position.partition, "from": at, "to": to, "again": again, "left_out": left_out}


def _position_row(position: Position) -> dict[str, Any]:
    return {
        "topic": position.topic,
        "queue": position.partition,
        "position": position.progress.offset,
        "settled_above": len(position.progress.done),
        "next": position.next,
        "lag": position.lag,
        "retries": len(position.progress.failed),
        "paused": False,
    }
