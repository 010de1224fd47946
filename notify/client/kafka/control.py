"""Orders: reads the orders of operators from the topic `notify-control` (notify/kafka/control.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition

from notify.client.kafka.refusals import error_of, is_final, refusal
from notify.errors import InvalidRequest, Unavailable
from notify.kafka.calls import answered
from notify.kafka.client_thread import ClientThread
from notify.kafka.cluster import Cluster
from notify.kafka.codes import GONE
from notify.kafka.control import TOPIC, Control
from notify.runtime.program_log import program_log

T = TypeVar("T")
log = program_log("notify.consumer")

POLL_SECONDS = 0.2
"""How long one call waits for records; a consumer that stops waits for the call."""
FETCH_MILLISECONDS = 100
"""How long a broker may wait for further records before it reports the topic's end, for which each start waits."""
CALL_SECONDS = 10.0
AT_ONCE = 1000
"""The most records that one call reads, so that a consumer that ends does not wait for the topic's end."""
SILENCE_SECONDS = 60.0
"""How long the brokers may bring no records before the topic's end is reached."""


class Orders:
    """The last order for one group, in `control`. Reads in a separate thread. Make it on its event loop."""

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._cluster = cluster
        self._group = group
        self._consumer = self._reader()
        self._topic_id = ""
        self._thread = ClientThread("notify-kafka-control")
        self._at_end = False
        self.control = Control()

    async def catch_up(self) -> None:
        """Read the topic to its end. Raises Unavailable if the brokers do not answer in time."""
        await self._call(self._begin)
        heard = time.monotonic()
        while not self._at_end:
            if await self._call(self._read):
                heard = time.monotonic()
            elif time.monotonic() - heard > SILENCE_SECONDS:
                raise Unavailable(f"Kafka at {self._cluster.brokers} does not give the topic {TOPIC!r} to its end")
        await self.look()

    async def run(self, changed: Callable[[], None]) -> None:
        """Read new records until cancelled; `changed` is called in the loop after each new order."""
        while True:
            last_control = self.control
            await self._call(self._read)
            if self.control != last_control:
                changed()

    async def _call(self, function: Callable[[], T]) -> T:
        try:
            return await self._thread.call(function)
        except KafkaException as raised:
            raise refusal(error_of(raised), self._cluster, self._group) from raised

    async def look(self) -> None:
        """Read the topic from its first record if it was recreated since the last look. Raises Unavailable.

        The last order stays valid until a new one comes, so that a deleted topic does not resume a paused group.
        """
        await self._call(self._look)

    def _reader(self) -> Consumer:
        return self._cluster.consumer(
            {
                # Kafka's client requires a group's name; this consumer neither commits nor joins the group.
                "group.id": f"{self._group}-control",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": FETCH_MILLISECONDS,
            }
        )

    def _look(self) -> None:
        """Compare the topic's id: the offsets of a recreated topic may be the same as before."""
        topic_id = self._id_of_topic()
        if topic_id and self._topic_id and topic_id != self._topic_id:
            log.warning("topic %s was deleted and recreated; reading the orders for group %s again", TOPIC, self._group)
            self._consumer.close()
            self._consumer = self._reader()
            self._begin()
        self._topic_id = topic_id or self._topic_id

    def _id_of_topic(self) -> str:
        """The topic's id; empty while the topic is missing."""
        admin = self._cluster.admin()  # keep a reference: the client's calls end with the client
        described = admin.describe_topics(TopicCollection([TOPIC]), request_timeout=CALL_SECONDS)
        try:
            return str(answered(described[TOPIC], CALL_SECONDS).topic_id)
        except KafkaException as raised:
            if error_of(raised).code() in GONE:
                return ""
            raise

    def _begin(self) -> None:
        self._consumer.list_topics(
            TOPIC, timeout=CALL_SECONDS
        )  # without knowing the leader, a fetch waits half a second
        self._consumer.assign([TopicPartition(TOPIC, 0, OFFSET_BEGINNING)])

    def _read(self) -> int:
        """Read the records that are there, or wait for the first one; returns their number."""
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
        """Stop reading, after the current call. Waits at most `seconds` for it."""
        await self._thread.end(lambda: self._consumer.close(), seconds)
