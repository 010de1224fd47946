"""Orders of operators, read from the topic `notify-control` (notify/kafka/control.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from notify.client.kafka.refusals import error_of, is_final, refusal
from notify.errors import InvalidRequest, Unavailable
from notify.kafka.cluster import Cluster
from notify.kafka.control import TOPIC, Control

log = logging.getLogger("notify.consumer")

POLL_SECONDS = 1.0
MOST_POLLS = 60
"""The topic's end is reached within so many polls at the start."""


class Orders:
    """The last order of one group: `control`. It reads in a thread of its own."""

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._cluster = cluster
        self._group = group
        self._pool = ThreadPoolExecutor(1, "notify-kafka-control")
        self._consumer: Consumer = cluster.consumer(
            # Kafka's client wants a group's name; nothing is committed, nobody is a member.
            {"group.id": f"{group}-control", "enable.partition.eof": True}
        )
        self._at_end = False
        self.control = Control()

    async def catch_up(self) -> None:
        """Read to the end. Raises Unavailable where the brokers do not give it."""
        await self._call(lambda: self._consumer.assign([TopicPartition(TOPIC, 0, OFFSET_BEGINNING)]))
        for _ in range(MOST_POLLS):
            await self._call(self._poll)
            if self._at_end:
                return
        raise Unavailable(f"Kafka at {self._cluster.brokers} does not give the topic {TOPIC!r} to its end")

    async def run(self, changed: Callable[[], None]) -> None:
        """Read what comes, until cancelled; `changed` is called in the loop for each new order."""
        while True:
            before = self.control
            await self._call(self._poll)
            if self.control != before:
                changed()

    async def _call(self, function: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, function)
        except KafkaException as raised:
            raise refusal(error_of(raised), self._cluster.brokers, self._group) from raised

    def _poll(self) -> None:
        record = self._consumer.poll(POLL_SECONDS)
        if record is None:
            return
        error = record.error()
        if error is not None:
            self._at_end = self._at_end or error.code() == KafkaError._PARTITION_EOF
            if is_final(error):
                raise KafkaException(error)
        elif record.key() == self._group.encode():
            try:
                self.control = Control.of(record.value())
            except InvalidRequest as refused:
                log.warning("an order for group %s is not obeyed: %s", self._group, refused)

    async def close(self) -> None:
        await self._call(self._consumer.close)
        self._pool.shutdown(wait=False)
