"""Says in sentences for operators why a group, or one of its consumers, gets no messages at the moment."""

from __future__ import annotations

from collections.abc import Iterator

from notify.protocol.wire import instant
from notify.server.delivery.fair import FairTurns
from notify.server.delivery.group import Group
from notify.server.delivery.instances import HORIZON_SECONDS, Instance

MOST = 20
"""The most sentences that are shown."""


def reasons(group: Group, now_us: int) -> list[str]:
    """The causes that keep messages from the group's consumers now; empty if there are none."""
    return [sentence for sentence, _ in zip(_all(group, now_us), range(MOST), strict=False)]


def _all(group: Group, now_us: int) -> Iterator[str]:
    if group.paused:
        yield "The group is paused."
    if group.rate is not None and not group.rate.available(now_us):
        yield "The group has received as many messages as its rate allows (the limit of consumer groups)."
    if group.is_paced(now_us):
        yield "The group is far behind, and waits while producers are busy."
    for topic, owner in group.owners():
        if owner.until_us > now_us:
            yield (
                f"Topic {topic} is with consumer {owner.instance} alone until {instant(owner.until_us)}; "
                "the other consumers get nothing of it."
            )
    for cursor in group.cursors.values():
        if cursor.refused:
            yield f"Nothing of topic {cursor.topic} is delivered: {cursor.refused}"
        elif cursor.is_paused():
            yield (
                f"Queue {cursor.topic}/{cursor.queue} waits: too many messages after an unsettled one are already "
                "settled. Settle or redrive the oldest one."
            )
        elif isinstance(cursor, FairTurns) and (why := cursor.uneven()):
            yield f"Queue {cursor.topic}/{cursor.queue} {why}"
    if held := sum(1 for _ in group.holds):
        yield (
            f"{held} {'key is' if held == 1 else 'keys are'} held, because a message of each has used up its attempts: "
            "retry, skip or release them."
        )
    for cursor in group.holds.held_up():
        yield (
            f"Queue {cursor.topic}/{cursor.queue} waits: it has {len(cursor.held)} held keys, and too much waits "
            "behind them. Retry, skip or release them."
        )
    for i in group.instances.values():
        if group.instances.others_ask(i, now_us):
            yield from _reasons_of(i)


def _reasons_of(i: Instance) -> Iterator[str]:
    for topic, bound in i.bounds.items():
        yield (
            f"Consumer {i.name} has {bound.in_flight} messages of topic {topic}, and gets more only up to "
            f"{int(bound.most)}, or one at a time: its leases ran out. The bound grows with what it finishes."
        )
    if i.in_flight and not i.room(1):
        yield (
            f"Consumer {i.name} holds {i.in_flight} messages, as many as it finishes in {HORIZON_SECONDS:g} s or more: "
            "the next ones go to the other consumers."
        )
