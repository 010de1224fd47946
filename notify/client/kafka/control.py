"""Orders of operators, read from the topic `notify-control` (notify/kafka/control.py)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition

from notify.client.kafka.client_thread import ClientThread
from notify.client.kafka.refusals import error_of, is_final, refusal
from notify.errors import InvalidRequest, Unavailable
from notify.kafka.answers import answered
from notify.kafka.cluster import Cluster
from notify.kafka.codes import GONE
from notify.kafka.control import TOPIC, Control

T = TypeVar("T")
log = logging.getLogger("notify.consumer")

POLL_SECONDS = 0.2
"""A consumer that stops waits for a call that reads."""
FETCH_MILLISECONDS = 100
"""How long a broker may wait for further records before it says that the topic ends: each start waits for that."""
CALL_SECONDS = 10.0
AT_ONCE = 1000
"""The most records that one call reads, so that a consumer that ends does not wait for the topic's end."""
SILENCE_SECONDS = 60.0
"""How long the brokers may say nothing before the topic's end is reached."""


class Orders:
    """The last order of one group: `control`. It reads in a thread of its own.

    Made on the event loop that it belongs to.
    """

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._cluster = cluster
        self._group = group
        self._consumer = self._reader()
        self._topic_id = ""
        self._thread = ClientThread("notify-kafka-control")
        self._at_end = False
        self.control = Control()

    async def catch_up(self) -> None:
        """Read to the end. Raises Unavailable where the brokers do not give it."""
        await self._call(self._begin)
        heard = time.monotonic()
        while not self._at_end:
            if await self._call(self._read):
                heard = time.monotonic()
            elif time.monotonic() - heard > SILENCE_SECONDS:
                raise Unavailable(f"Kafka at {self._cluster.brokers} does not give the topic {TOPIC!r} to its end")
        await self.look()

    async def run(self, changed: Callable[[], None]) -> None:
        """Read what comes, until cancelled; `changed` is called in the loop for each new order."""
        while True:
            before = self.control
            await self._call(self._read)
            if self.control != before:
                changed()

    async def _call(self, function: Callable[[], T]) -> T:
        try:
            return await self._thread.call(function)
        except KafkaException as raised:
            raise refusal(error_of(raised), self._cluster, self._group) from raised

    async def look(self) -> None:
        """Read the topic from its first record on if it was made anew since the last look. Raises Unavailable.

        The last order counts until another comes: a group that is paused does not begin because a topic was deleted.
        """
        await self._call(self._look)

    def _reader(self) -> Consumer:
        return self._cluster.consumer(
            {
                # Kafka's client wants a group's name; nothing is committed, nobody is a member.
                "group.id": f"{self._group}-control",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": FETCH_MILLISECONDS,
            }
        )

    def _look(self) -> None:
        """A topic that was made anew may be as long as it was: its offsets do not tell, its id does."""
        known = self._id_of_topic()
        if known and self._topic_id and known != self._topic_id:
            log.warning("topic %s was made anew: the orders for group %s are read again", TOPIC, self._group)
            self._consumer.close()
            self._consumer = self._reader()
            self._begin()
        self._topic_id = known or self._topic_id

    def _id_of_topic(self) -> str:
        """Empty while the topic is missing."""
        admin = self._cluster.admin()  # its calls end with it
        described = admin.describe_topics(TopicCollection([TOPIC]), request_timeout=CALL_SECONDS)
        try:
            return str(answered(described[TOPIC], CALL_SECONDS).topic_id)
        except KafkaException as raised:
            if error_of(raised).code() in GONE:
                return ""
            raise

    def _begin(self) -> None:
        self._consumer.list_topics(TOPIC, timeout=CALL_SECONDS)  # a client that knows no leader yet waits half a second
        self._consumer.assign([TopicPartition(TOPIC, 0, OFFSET_BEGINNING)])

    def _read(self) -> int:
        """Read what is there, or wait for it. How many records came."""
        seconds = POLL_SECONDS
        for count in range(AT_ONCE):
            record = self._consumer.poll(seconds)
            if record is None:
                return count
            self._take(record)
            seconds = 0.0
        return AT_ONCE

    def _take(self, record: Any) -> None:
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

    async def close(self, seconds: float) -> None:
        """Read no more, after the call that is under way. Waits at most so long for it."""
        await self._thread.end(lambda: self._consumer.close(), seconds)
