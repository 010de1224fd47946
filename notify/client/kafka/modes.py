"""Whether consumers run that share a group's partitions in the other way: by one owner, or among the group's members.

Kafka does not tell them apart: an owner reads by assignment and commits in transactions, which it takes in a group that
has members, too. Both would handle every message, and overwrite each other's offsets.
"""

from __future__ import annotations

import asyncio
import time

from confluent_kafka import KafkaError, KafkaException

from notify.client.kafka.feed import SESSION_SECONDS
from notify.client.kafka.plan import Plan
from notify.client.kafka.refusals import error_of, refusal
from notify.errors import Conflict
from notify.kafka.answers import answered
from notify.kafka.cluster import Cluster
from notify.kafka.groups import owner_topic

CALL_SECONDS = 10.0
LOOK_SECONDS = 0.5
PASSING_SECONDS = 2.0 * SESSION_SECONDS
"""A consumer that was killed seems to be there for a session longer."""
_UNKNOWN = (KafkaError.GROUP_ID_NOT_FOUND, KafkaError.GROUP_AUTHORIZATION_FAILED)
"""There is no such group, or this user may not look."""


class OtherModes:
    """Looks at the group that consumers of the other way are members of."""

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self._plan = plan
        self._cluster = cluster
        self._admin = cluster.admin()
        self._group = plan.kafka_group if plan.sharing == "owner" else owner_topic(plan.group)

    async def refuse(self) -> None:
        """Raises Conflict (`mode_in_use`) where there are some, and stay; Unavailable, Unauthorized."""
        if self._plan.sharing == "broadcast":
            return  # each instance is a group of its own
        deadline = time.monotonic() + PASSING_SECONDS
        while await asyncio.to_thread(self._are_there):
            if time.monotonic() > deadline:
                raise Conflict(
                    f"group {self._plan.group!r} has consumers of another mode; stop them first", "mode_in_use"
                )
            await asyncio.sleep(LOOK_SECONDS)

    def _are_there(self) -> bool:
        described = self._admin.describe_consumer_groups([self._group], request_timeout=CALL_SECONDS)
        try:
            return bool(answered(described[self._group], CALL_SECONDS).members)
        except KafkaException as raised:
            if error_of(raised).code() in _UNKNOWN:
                return False
            raise refusal(error_of(raised), self._cluster, self._group) from raised
