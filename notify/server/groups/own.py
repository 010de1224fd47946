"""The groups of this server's own queues."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any

from notify.admin_api.groups import EFFECTS_AGAIN, EFFECTS_KEPT
from notify.errors import NotFound
from notify.protocol.wire import instant
from notify.server.core.core import Core
from notify.server.delivery import explanations, following, inboxes
from notify.server.delivery.cursor import Cursor
from notify.server.delivery.group import Group
from notify.server.delivery.instances import states
from notify.server.groups import Move, QueueEngine
from notify.server.groups.own_letters import OwnLetters
from notify.server.groups.own_topics import INTERNAL, OwnTopics
from notify.server.groups.sending_again import next_replay
from notify.server.letters.engine import Change
from notify.server.letters.letters import Letters
from notify.server.watch.figures import OF_GROUPS, OF_TOPICS, Counts
from notify.server.watch.group_state import GroupState
from notify.storage.groups import Subscription

MOST_QUEUES = 64
"""The most lagging queues of a group whose oldest messages a chart reads; with more the age is left out."""
READ_BYTES = 1 << 20


class OwnCounts:
    """The figures of the own queues. Every method raises WrongRole if the server has no queues."""

    def __init__(self, core: Core, letters: OwnLetters) -> None:
        self._core = core
        self._letters = letters

    def topics(self) -> Sequence[str]:
        return [t.name for t in self._core.queues.topics() if not t.name.startswith(INTERNAL)]

    def topic(self, name: str) -> Counts:
        topic = self._core.queues.topic(name)
        if topic is None:
            raise NotFound(f"there is no topic {name[:100]!r}")
        sent = sum(self._core.queues.bounds(name, queue)[1] for queue in range(topic.queues))
        latencies = self._core.metrics.latencies.minute(name, OF_TOPICS)
        return Counts(sent, self._core.delivery.followers.lag(name), latencies=latencies)

    def groups(self) -> Sequence[str]:
        return [name for name in self._core.delivery.groups if "@" not in name]  # a broadcast's instances have none

    def group(self, name: str) -> Counts:
        group = group_of(self._core, name)
        settled = sum(c.progress.floor + c.progress.settled.offsets for c in group.cursors.values())
        lagging = sum(1 for c in group.cursors.values() if c.lag())
        oldest = oldest_seconds(self._core, name, self._core.clock()) if lagging <= MOST_QUEUES else None
        latencies = self._core.metrics.latencies.minute(name, OF_GROUPS)
        return Counts(settled, group.lag(), oldest, latencies, self._letters.count(name))


def group_of(core: Core, name: str) -> Group:
    """A group of this server. Raises NotFound."""
    group = core.delivery.groups.get(name)
    if group is None:
        raise NotFound(f"there is no group {name[:100]!r}")
    return group


def oldest_seconds(core: Core, group: str, now_us: int) -> float | None:
    """The age, in seconds, of the oldest message that a group has not settled; None if there is none."""
    oldest = None
    for cursor in core.delivery.groups[group].cursors.values():
        if not cursor.lag():
            continue
        first = core.queues.read(cursor.topic, cursor.queue, cursor.progress.floor, 1, READ_BYTES)
        if first and (oldest is None or first[0].committed_us < oldest):
            oldest = first[0].committed_us
    return None if oldest is None else round(max(0, now_us - oldest) / 1e6, 3)


WORST = 10
"""How many groups with the largest lags an overview shows."""
MOST_LEASES = 1000
"""The most leases of a group that are shown."""


def own_engine(core: Core) -> QueueEngine:
    """The engine of the server's own queues."""
    letters = OwnLetters(core)
    counted = OwnCounts(core, letters)
    return QueueEngine(OwnGroups(core, letters), Letters(letters, letters.counts), OwnTopics(core), counted)


class OwnGroups:
    """The groups of the server's own queues. If it has none, methods that need queues raise WrongRole."""

    def __init__(self, core: Core, letters: OwnLetters) -> None:
        self._core = core
        self._letters = letters

    def lag(self) -> int:
        if not self._core.has_queues:
            return 0
        return sum(group.lag() for group in self._core.delivery.groups.values())

    async def states(self) -> Sequence[GroupState]:
        if not self._core.has_queues:
            return []
        now_us = self._core.clock()
        groups = list(self._core.delivery.groups.values())
        await self._letters.counts.look([group.name for group in groups])
        objectives = self._core.objectives
        return [
            _state(
                group,
                self._letters.count(group.name),
                now_us,
                oldest_seconds(self._core, group.name, now_us) if objectives.lack_figures_of(group.name) else None,
            )
            for group in groups
        ]

    async def refused(self) -> list[dict[str, Any]]:
        return self._core.refusals.shown()

    async def sources(self) -> list[dict[str, Any]]:
        return self._core.bridges.shown()

    async def summary(self) -> dict[str, Any] | None:
        core = self._core
        if not core.has_queues:
            return None
        now_us = core.clock()
        groups = core.delivery.groups
        lags = [(g.lag(), g.name) for g in groups.values()]
        rows = [
            {
                "name": name,
                "lag": behind,
                "oldest_seconds": oldest_seconds(core, name, now_us),
                "paused": groups[name].paused,
            }
            for behind, name in heapq.nlargest(WORST, lags)
            if behind
        ]
        return {
            "lag": sum(behind for behind, _ in lags),
            "topics": sum(not t.name.startswith(INTERNAL) for t in core.queues.topics()),
            "groups": len(groups),
            "leased": sum(g.in_flight() for g in groups.values()),
            "delayed": core.queues.delayed(),
            "dead_letters": sum(self._letters.count(name) for name in groups),
            "oldest_undelivered_seconds": max((row["oldest_seconds"] or 0 for row in rows), default=None),
            "lagging": rows,
        }

    async def listed(self, prefix: str, after: str, most: int) -> dict[str, Any]:
        all_groups = self._core.delivery.groups
        names = heapq.nsmallest(most, (n for n in all_groups if n > after and n.startswith(prefix)))
        now_us = self._core.clock()
        rows = [
            {
                "name": g.name,
                "lag": g.lag(),
                "leased": g.in_flight(),
                "paused": g.paused,
                "consumers": sum(s != "gone" for s in states(g.instances, now_us).values()),
            }
            for g in (all_groups[name] for name in names)
        ]
        return {"groups": rows, "of": len(all_groups)}

    def _described(self, s: Subscription) -> dict[str, Any]:
        return _settings(s) | self._core.subscriptions.changes(s.group, s.topic)

    async def one(self, name: str) -> dict[str, Any]:
        g = group_of(self._core, name)
        queues = self._core.queues
        subscriptions = [s for s in queues.subscriptions() if s.group == name]
        return {
            "name": name,
            "paused": g.paused,
            "subscriptions": [
                self._described(s)
                | {"class": g.turns.class_of(s.topic), "share": g.turns.priorities.shares.get(s.topic, 1)}
                for s in subscriptions
            ],
            "patterns": [self._described(s) for s in queues.patterns() if s.group == name],
            "queues": [_cursor_row(c) for c in g.cursors.values()],
            "leases": [
                {
                    "instance": lease.instance.name,
                    "topic": lease.cursor.topic,
                    "queue": lease.cursor.queue,
                    "messages": len(lease.open),
                    "until": instant(lease.deadline_us),
                }
                for lease in list(g.leases.values())[:MOST_LEASES]
            ],
            "instances": _instances(g, self._core.clock()),
            "held_back": explanations.reasons(g, self._core.clock()),
        }

    async def reset(self, name: str, move: Move) -> Change:
        core = self._core
        rows: list[dict[str, Any]] = []
        subscriptions = self._moved(name, move.topic)
        for s in subscriptions:
            moves, times_us = self._moves(s, move)
            if not (move.force or move.replay_effects):
                inboxes.refuse_before(subscriptions[0], times_us)
            rows += moves if s.mode != "broadcast" else []  # its instances have the positions
        first = subscriptions[0]
        replay = next_replay(first).replay if move.replay_effects else first.replay
        preview = {"epoch": first.epoch + 1, "queues": rows, "replay": replay}
        preview["effects"] = EFFECTS_AGAIN if move.replay_effects else EFFECTS_KEPT

        async def do() -> Any:
            # Read again: consumers may have changed their settings meanwhile.
            moved = [next_replay(s) if move.replay_effects else s for s in self._moved(name, move.topic)]
            for s in moved:
                await core.delivery.following.reset(s, move.to)
            return preview | {"epoch": moved[0].epoch + 1, "replay": moved[0].replay}

        return Change(preview, do)

    def _moved(self, name: str, topic: str) -> list[Subscription]:
        """The subscriptions that a reset moves: the group's, and then those of its instances if it is broadcast.

        Raises NotFound if the group has no subscription to the topic.
        """
        queues = self._core.queues
        s = queues.subscription(name, topic)
        if s is None:
            raise NotFound(f"group {name[:100]!r} has no subscription to {topic[:100]!r}")
        instances = self._core.delivery.followers.instances_of(name) if s.mode == "broadcast" else []
        return [s, *(own for i in instances if (own := queues.subscription(i.name, topic)) is not None)]

    def _moves(self, s: Subscription, move: Move) -> tuple[list[dict[str, Any]], list[int]]:
        """How a reset moves a subscription in each queue, and when the first messages that come again were committed.

        Raises InvalidRequest if the target is not a position.
        """
        core, rows, times_us = self._core, [], []
        topic = core.queues.topic(s.topic)
        for queue in range(topic.queues if topic is not None else 0):
            progress = core.queues.progress(s.group, s.topic, queue)
            floor = progress.floor
            to = core.delivery.following.offset_of(s.topic, queue, move.to)
            behind, end = max(floor, to), core.queues.bounds(s.topic, queue)[1]
            # Offsets in gaps count as settled, and no message has them.
            waiting = max(0, end - behind) - progress.settled.between(behind, end)
            again = core.queues.count(s.topic, queue, to, floor)
            again += max(0, core.queues.count(s.topic, queue, behind, end) - waiting)
            left_out = behind - floor - progress.settled.between(floor, behind)
            rows.append({"queue": queue, "from": floor, "to": to, "again": again, "left_out": left_out})
            settled = (max(first, behind) for first, count in progress.settled if first + count > behind)
            first_again = to if to < floor else next(settled, None)
            if first_again is not None:
                times_us += inboxes.first_from(core.queues, s.topic, queue, first_again)
        return rows, times_us

    async def pause(self, name: str, is_paused: bool) -> Change:
        group_of(self._core, name)
        preview = {"paused": is_paused}

        async def do() -> Any:
            await self._core.delivery.pause(name, is_paused)
            return preview

        return Change(preview, do)


def _state(group: Group, dead_letters: int, now_us: int, oldest: float | None) -> GroupState:
    lags: dict[str, int] = {}
    unread: set[str] = set()
    for cursor in group.cursors.values():
        lag = cursor.lag()
        lags[cursor.topic] = lags.get(cursor.topic, 0) + lag
        if lag and not group.readers.has(cursor.serves, now_us):
            unread.add(cursor.serves)
    consumers = Counter(states(group.instances, now_us).values())
    seen_us = max((i.seen_us for i in group.instances.values()), default=0)
    held = [h.hold.since_us for h in group.holds]
    held_up = [f"{cursor.serves}/{cursor.queue}" for cursor in group.holds.held_up()]
    return GroupState(
        name=group.name,
        lags=lags,
        is_paused=group.paused,
        consumers=consumers,
        seen_us=seen_us,
        dead_letters=dead_letters,
        held=len(held),
        held_since_us=min(held, default=0),
        held_up=held_up,
        oldest_seconds=oldest,
        unread=sorted(unread),
    )


def _settings(s: Subscription) -> dict[str, Any]:
    return {
        "topic": s.topic,
        **following.shown(s),
        "earlier": [
            {"until": instant(until_us), "max_attempts": attempts, "max_deaths": deaths}
            for until_us, attempts, deaths in s.earlier
        ],
        "epoch": s.epoch,
        "replay": s.replay,
        "inbox_from": instant(s.inbox_from_us) if s.inbox_from_us > inboxes.NEVER_TOLD else None,
    }


def _instances(group: Group, now_us: int) -> list[dict[str, Any]]:
    by_instance = states(group.instances, now_us)
    return [
        {
            "name": i.name,
            "state": by_instance[i.name],
            "asked_at": instant(i.asked_us),
            "in_flight": i.in_flight,
            "finished": i.finished,
            "per_second": None if i.per_second is None or by_instance[i.name] == "gone" else round(i.per_second, 1),
            "expired": i.expired,
            "bound": i.bound,
        }
        for i in group.instances.values()
    ]


def _cursor_row(cursor: Cursor) -> dict[str, Any]:
    return {
        "topic": cursor.topic,
        "queue": cursor.queue,
        "position": cursor.progress.floor,
        "settled_above": cursor.progress.settled.offsets,
        "next": cursor.next,
        "lag": cursor.lag(),
        "retries": len(cursor.retries),
        "paused": cursor.is_paused(),
    }
