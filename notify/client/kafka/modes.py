"""Whether consumers run that share a group's partitions in the other way: by one owner, or among the group's members.

Kafka does not tell them apart: an owner reads by assignment and commits in transactions, which it takes in a group that
has members, too. Both would handle every message, and overwrite each other's offsets.
"""

from __future__ import annotations

import asyncio
import time

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from notify.client.kafka.client_thread import ClientThread
from notify.client.kafka.feed import PATIENCE_SECONDS, SESSION_SECONDS
from notify.client.kafka.plan import Plan
from notify.client.kafka.refusals import OTHERS_NOW, error_of, refusal
from notify.errors import Conflict, Unavailable
from notify.kafka.cluster import Cluster
from notify.kafka.groups import owner_topic

LOOK_SECONDS = 0.5
PASSING_SECONDS = 2.0 * SESSION_SECONDS
"""A consumer that was killed seems to be there for a session longer."""
_NOBODY = (
    KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED,
)  # fmt: skip
"""No owner ever was here, or this user may not know."""


class OtherModes:
    """Looks at the group that consumers of the other way are members of, in a thread of its own.

    Made on the event loop that it belongs to.
    """

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self._plan = plan
        self._cluster = cluster
        self._thread = ClientThread("notify-kafka-modes")
        self._group = plan.kafka_group if plan.sharing == "owner" else owner_topic(plan.group)

    async def refuse(self) -> None:
        """Raises Conflict (`mode_in_use`) where there are some, and stay; Unavailable, Unauthorized."""
        if self._plan.sharing == "broadcast":
            return  # each instance is a group of its own
        began = time.monotonic()
        while True:
            try:
                if not await self._thread.call(self._are_there):
                    return
                if time.monotonic() - began > PASSING_SECONDS:
                    raise Conflict(
                        f"group {self._plan.group!r} has consumers of another mode; stop them first", "mode_in_use"
                    )
            except Unavailable:  # the group has no coordinator yet, say
                if time.monotonic() - began > PATIENCE_SECONDS:
                    raise
            await asyncio.sleep(LOOK_SECONDS)

    def _are_there(self) -> bool:
        """Kafka takes a commit without a member only in a group that has none; what is committed says nothing.

        Asking for the group's members would do, too, but where the connection drops meanwhile Kafka's client ends the
        process (librdkafka 2.16, issue 4605).
        """
        # The session bounds how long a commit waits for the group's coordinator.
        consumer = self._cluster.consumer({"group.id": self._group, "session.timeout.ms": SESSION_SECONDS * 1000})
        try:
            mark = TopicPartition(owner_topic(self._plan.group), 0, 0)
            error = consumer.commit(offsets=[mark], asynchronous=False)[0].error
        except KafkaException as raised:
            error = error_of(raised)
        finally:
            consumer.close()
        if error is None or error.code() in _NOBODY:
            return False
        if error.code() in OTHERS_NOW:
            return True
        raise refusal(error, self._cluster, self._group)

    def close(self) -> None:
        """Look no more. Does not wait for a look that is under way."""
        self._thread.close()
