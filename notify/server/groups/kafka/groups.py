"""Consumer groups over Kafka, as the admin routes show and steer them."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from confluent_kafka import KafkaException

from notify.errors import InvalidRequest, NotFound, Unavailable
from notify.kafka import subscriptions
from notify.kafka.brokers import translated
from notify.kafka.cluster import Cluster
from notify.kafka.control import OBEY_SECONDS, Control, Reset
from notify.kafka.groups import consumer_group, dead_letter_topic, retry_topic
from notify.server.groups import Change, Chosen, Move
from notify.server.groups.kafka import letters, offsets, snapshot, sources
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.letters import Letter
from notify.server.groups.kafka.offsets import CALL_SECONDS, Place
from notify.server.groups.kafka.redriven import Redriven
from notify.server.groups.kafka.snapshot import KafkaGroup, Position, Snapshot
from notify.server.groups.kafka.sources import Sources
from notify.server.groups.kafka.wishes import Wishes
from notify.server.groups.own import WORST, not_letters
from notify.server.jobs.redrive import AT_ONCE, EFFECTS_KEPT, Wanted
from notify.server.watch.group_state import GroupState
from notify.wire import microseconds

T = TypeVar("T")
FRESH_SECONDS = 1.0
"""A snapshot so young serves several requests: a console asks for many things at once."""
MOST_GROUPS = 10_000
WAITING = 16
"""The most calls that wait for the brokers; beyond it a request is refused."""
NOT_KNOWN_OF_INSTANCES = ("asked_at", "in_flight", "finished", "per_second", "expired", "bound")
NOT_KNOWN_OF_SUBSCRIPTIONS = ("max_attempts", "retry_min", "retry_max", "epoch", "replay", "inbox_from")
"""Fields of the routes that consumers over Kafka tell nobody."""
NO_REPLAY = (
    "over Kafka effects are not replayed: an inbox does nothing for messages that took effect before; use a group of "
    "another name, or send the messages again"
)


class KafkaGroups:
    """The groups of one cluster. Blocking calls of Kafka's client run in one thread of their own.

    Every method raises Unavailable while the brokers do not answer.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._brokers = Brokers(cluster)
        self._wishes = Wishes(self._brokers)
        self._redriven = Redriven(self._brokers)
        self._sources = Sources(self._brokers)
        self._thread = ThreadPoolExecutor(1, "notify-kafka-groups")
        self._waiting = 0
        self._snapshot = Snapshot({}, {})
        self._paused: frozenset[str] = frozenset()
        self._looked_at = float("-inf")

    async def close(self) -> None:
        """Let go of the clients."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        self._wishes.close()
        self._redriven.close()
        self._sources.close()

    async def _call(self, function: Callable[[], T]) -> T:
        if self._waiting >= WAITING:
            raise Unavailable(f"{WAITING} requests wait for Kafka already; try again")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: self._brokers.insist(function)
            )
        except KafkaException as raised:
            raise translated(raised.args[0]) from raised
        except TimeoutError:
            raise Unavailable(
                f"Kafka at {self._brokers.cluster.brokers} does not answer within {CALL_SECONDS:g} s"
            ) from None
        finally:
            self._waiting -= 1

    def _look(self) -> Snapshot:
        if time.monotonic() - self._looked_at > FRESH_SECONDS:
            self._snapshot = snapshot.take(self._brokers.admin)
            self._paused = frozenset(name for name, wish in self._wishes.read().items() if wish.paused)
            self._looked_at = time.monotonic()
        return self._snapshot

    def _look_again(self) -> Snapshot:
        """For what was made since the last look."""
        self._looked_at = float("-inf")
        return self._look()

    def _known(self, name: str) -> KafkaGroup:
        group = self._look().groups.get(name) or self._look_again().groups.get(name)
        if group is None:
            raise NotFound(f"Kafka has no consumer group {name[:100]!r} of Notify's")
        return group

    # --- views ------------------------------------------------------------------------------------------------

    def lag(self) -> int:
        """The lag when somebody looked last: alarms look every few seconds."""
        return sum(group.lag for group in self._snapshot.groups.values())

    async def states(self) -> list[GroupState]:
        groups = (await self._call(self._look)).groups.values()
        return [_state(group, group.base in self._paused) for group in groups]

    async def sources(self) -> list[dict[str, Any]]:
        known = await self._call(lambda: self._sources.read(self._look().topics))
        return sources.shown(known, time.time_ns() // 1000)

    async def summary(self) -> dict[str, Any]:
        taken = await self._call(self._look)
        groups = taken.groups.values()
        worst = heapq.nlargest(WORST, (g for g in groups if g.lag), key=lambda g: g.lag)
        return {
            "lag": self.lag(),
            "topics": len(taken.message_topics()),
            "groups": len(groups),
            "leased": 0,
            "delayed": None,
            "dead_letters": sum(row["count"] for row in await self.with_dead_letters("", MOST_GROUPS)),
            "oldest_undelivered_seconds": None,
            "lagging": [
                {"name": g.name, "lag": g.lag, "oldest_seconds": None, "paused": g.base in self._paused} for g in worst
            ],
        }

    async def listed(self, prefix: str, after: str, most: int) -> dict[str, Any]:
        known = (await self._call(self._look)).groups
        names = heapq.nsmallest(most, (name for name in known if name > after and name.startswith(prefix)))
        rows = [
            {
                "name": name,
                "lag": known[name].lag,
                "leased": 0,
                "paused": known[name].base in self._paused,
                "consumers": len(known[name].members),
            }
            for name in names
        ]
        return {"groups": rows, "of": len(known)}

    async def one(self, name: str) -> dict[str, Any]:
        group, noted = await self._call(lambda: (self._known(name), self._subscriptions(name)))
        return {
            "name": name,
            "paused": group.base in self._paused,
            "subscriptions": noted,
            "patterns": [],
            "queues": [_position_row(p) for p in group.positions],
            "leases": [],
            "instances": [
                dict.fromkeys(NOT_KNOWN_OF_INSTANCES)
                | {"name": m.name, "state": "ok", "host": m.host, "partitions": m.partitions}
                for m in group.members
            ],
        }

    def _subscriptions(self, name: str) -> list[dict[str, Any]]:
        """One row a topic, as the group's consumers noted it."""
        noted = {
            place.topic: subscribed
            for (group, place), subscribed in subscriptions.read(self._brokers.cluster).items()
            if group == name
        }
        return [
            dict.fromkeys(NOT_KNOWN_OF_SUBSCRIPTIONS)
            | {"topic": topic, "mode": s.mode, "tags": list(s.tags), "filter": s.filter}
            for topic, s in sorted(noted.items())
        ]

    # --- steering ---------------------------------------------------------------------------------------------

    async def pause(self, name: str, is_paused: bool) -> Change:
        group = await self._call(lambda: self._known(name))
        preview = {"paused": is_paused, "within_seconds": OBEY_SECONDS}

        def do() -> Any:
            self._wishes.change(group.base, lambda wish: msgspec.structs.replace(wish, paused=is_paused))
            self._look_again()
            return preview

        return Change(preview, lambda: self._call(do))

    async def reset(self, name: str, move: Move) -> Change:
        if move.replay_effects:
            raise InvalidRequest(NO_REPLAY)
        wish = Reset(uuid.uuid4().hex, move.topic, move.to)
        wish.start()  # refused here, before anything is asked of the consumers
        rows = await self._call(lambda: self._moved(name, wish))
        preview = {"queues": rows, "effects": EFFECTS_KEPT, "within_seconds": OBEY_SECONDS}

        def do() -> Any:
            self._wishes.change(consumer_group(name), lambda before: _with(before, wish))
            self._look_again()
            return preview

        return Change(preview, lambda: self._call(do))

    def _moved(self, name: str, wish: Reset) -> list[dict[str, int]]:
        """Each partition's position before and after a reset."""
        positions = [p for p in self._known(name).positions if p.topic == wish.topic]
        if not positions:
            raise NotFound(f"group {name[:100]!r} has no position in {wish.topic[:100]!r}")
        to = wish.start()
        at_time: dict[Place, int] = {}
        if not isinstance(to, int | str):
            at_time = offsets.at_time(
                self._brokers.admin, [(p.topic, p.partition) for p in positions], microseconds(to)
            )
        return [_moved_row(p, _target(p, to, at_time)) for p in positions]

    # --- dead letters -----------------------------------------------------------------------------------------

    async def with_dead_letters(self, prefix: str, most: int) -> list[dict[str, Any]]:
        def count() -> list[dict[str, Any]]:
            topics = self._look().topics
            names = sorted({g.base for g in self._snapshot.groups.values() if g.base.startswith(prefix)})
            rows: list[dict[str, Any]] = [
                {
                    "group": name,
                    "count": letters.count(self._brokers, name, topics[dead_letter_topic(name)])
                    - self._redriven.of_group(name).offsets,
                }
                for name in names
                if dead_letter_topic(name) in topics
            ]
            return heapq.nlargest(most, (row for row in rows if row["count"] > 0), key=lambda row: row["count"])

        return await self._call(count)

    async def dead_letters(self, name: str, wanted: Wanted, offset: int, most: int) -> dict[str, Any]:
        def find() -> dict[str, Any]:
            chosen = list(itertools.islice((x for x in self._letters(name, offset) if _is_wanted(wanted, x)), most))
            sent = self._redriven.of_group(name)
            shown = [letter.shown(redriven=letter.number in sent) for letter in chosen]
            return {"messages": shown, "next_offset": chosen[-1].number + 1 if chosen else offset}

        return await self._call(find)

    async def redrive(self, name: str, chosen: Chosen) -> Change:
        if chosen.replay_effects:
            raise InvalidRequest(NO_REPLAY)
        if retry_topic(name) not in (await self._call(self._look)).topics:
            raise InvalidRequest(
                f"group {name[:100]!r} has no retry topic: letters of a broadcast are sent again with publish",
                "broadcast",
            )
        sent = await self._call(lambda: self._chosen(name, chosen))
        names = [letter.id for letter in sent]

        def do() -> Any:
            statuses = self._redriven.send(name, sent)
            items = [{"id": i, "status": status} for i, status in zip(names, statuses, strict=True)]
            return {"items": items + not_letters(name, chosen.ids, names)}

        return Change({"ids": names, "effects": EFFECTS_KEPT}, lambda: self._call(do))

    def _chosen(self, name: str, chosen: Chosen) -> Sequence[Letter]:
        if chosen.ids is not None:
            asked = set(chosen.ids)
            return [letter for letter in self._letters(name, 0) if letter.id in asked]
        sent = self._redriven.of_group(name)
        fitting = (x for x in self._letters(name, 0) if x.number not in sent and _is_wanted(chosen.wanted, x))
        return list(itertools.islice(fitting, min(chosen.most, AT_ONCE)))

    def _letters(self, name: str, number: int) -> Any:
        topic = dead_letter_topic(name)
        partitions = self._look().topics.get(topic) or self._look_again().topics.get(topic)
        if partitions is None:
            raise NotFound(f"Kafka has no dead letters of a group {name[:100]!r}")
        return letters.read(self._brokers, name, partitions, number)


def _state(group: KafkaGroup, is_paused: bool) -> GroupState:
    lags: dict[str, int] = {}
    for position in group.positions:
        lags[position.topic] = lags.get(position.topic, 0) + position.lag
    return GroupState(group.name, lags, is_paused, {"ok": len(group.members)}, 0)


def _with(before: Control, wish: Reset) -> Control:
    """The wishes of a group with another reset, in place of an earlier one of the same topic."""
    others = tuple(reset for reset in before.resets if reset.topic != wish.topic)
    return msgspec.structs.replace(before, resets=(*others, wish))


def _is_wanted(wanted: Wanted, letter: Letter) -> bool:
    return wanted.fits(letter.payload(), letter.dead_us)


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
    at = position.progress.offset
    return {
        "queue": position.partition, "from": at, "to": to, "again": max(0, at - to), "left_out": max(0, to - at)
    }  # fmt: skip


def _position_row(position: Position) -> dict[str, Any]:
    return {
        "topic": position.topic,
        "queue": position.partition,
        "position": position.progress.offset,
        "settled_above": len(position.progress.done),
        "next": position.end,
        "lag": position.lag,
        "retries": len(position.progress.failed),
        "paused": False,
    }
