"""The time from which on a group's inbox is complete: older messages are delivered again only with `force`.

An inbox is a table of the consumer's database. A purge deletes its oldest rows; then nothing tells whether an older
message took effect. `inbox_from_us` of a subscription is the time from which on each message that did has a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from notify.errors import Conflict
from notify.protocol import ids
from notify.protocol.limits import digits
from notify.protocol.message import FIRST_ID
from notify.protocol.wire import Payload, instant
from notify.storage.groups import Subscription
from notify.storage.queues import Store
from notify.storage.records import StoredMessage

NEVER_TOLD = -1
"""`inbox_from_us` of a subscription whose consumers have not reported an inbox."""
READ_BYTES = 1


def refuse_before(s: Subscription, times_us: Iterable[int]) -> None:
    """Raises Conflict if one of these times of commit is before the time from which on the inbox is complete."""
    if any(time_us < s.inbox_from_us for time_us in times_us):
        raise Conflict(
            f"the inbox of group {s.group!r} has rows of topic {s.topic!r} only from {instant(s.inbox_from_us)} on: "
            "older messages would take effect a second time; begin later, or send force (of a start: subscribe the "
            "group first, with force)",
            "before_inbox",
        )


def first_from(queues: Store, topic: str, queue: int, offset: int) -> list[int]:
    """When the first message from an offset on was committed; empty if there is none."""
    return [m.committed_us for m in queues.read(topic, queue, offset, 1, READ_BYTES)]


def refuse_letter(queues: Store, s: Subscription, m: StoredMessage, p: Payload) -> None:
    """As `refuse_before`, for a dead letter: by its time of commit, or its first id's if its queue has dropped it."""
    headers = p.headers or {}
    try:
        transaction, _ = ids.parse_message_id(headers.get(FIRST_ID, ""))
    except ValueError:
        transaction = m.transaction_id
    began_us = ids.milliseconds(transaction) * 1000
    queue = digits(headers.get("notify-dead-letter-queue", ""))
    offset = digits(headers.get("notify-dead-letter-offset", ""))
    if began_us < s.inbox_from_us and queue is not None and offset is not None:
        # The id has the producer's time, which may be wrong; the commit has the server's.
        for original in queues.read(p.topic, queue, offset, 1, READ_BYTES):
            if original.transaction_id == transaction:
                began_us = original.committed_us
    refuse_before(s, [began_us])


def although(s: Subscription, force: bool) -> Subscription:
    """With `force` an inbox that was never reported counts as complete: the effects are wanted again."""
    return dataclasses.replace(s, inbox_from_us=max(s.inbox_from_us, 0)) if force else s


def whole_from(queues: Store, s: Subscription, from_us: int, now_us: int, is_fresh: bool) -> int:
    """From when on an inbox, reported with rows from `from_us` on, is complete.

    Messages settled before the inbox began have no rows in it. Raises Conflict if a new subscription starts earlier.
    """
    if s.inbox_from_us != NEVER_TOLD:
        return max(s.inbox_from_us, from_us)
    topic = queues.topic(s.topic)
    times_us = []
    for queue in range(topic.queues if topic is not None else 0):
        progress = queues.progress(s.group, s.topic, queue)
        if not is_fresh and (progress.settled or progress.floor > queues.bounds(s.topic, queue)[0]):
            return max(now_us, from_us)
        times_us += first_from(queues, s.topic, queue, progress.floor)
    refuse_before(dataclasses.replace(s, inbox_from_us=from_us), times_us)
    return from_us
