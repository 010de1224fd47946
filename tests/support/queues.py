"""Where the queue is, a queue server or Kafka: tests of promises to consumers run on both with the same bodies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import pytest

from notify.client import Message
from notify.client.threads.loop import LoopThread
from notify.errors import Unavailable
from notify.movers.sinks.sink import Sink
from notify.protocol import ids
from notify.protocol.message import encode_body
from notify.protocol.wire import BridgedTransaction, PackedBridgeBatch, PackedMessage
from tests.support import groups
from tests.support.clock import PATIENCE_SECONDS
from tests.support.http import admin
from tests.support.kafka import patient_sink

LONG_OVER_KAFKA = pytest.mark.parametrize(
    "queue", ["queue server", pytest.param("Kafka", marks=pytest.mark.long)], indirect=True
)
"""For tests whose promise others of their file show over Kafka as well: there they run in `make test-long`."""


class Sender:
    """Publishes as a bridge does, to whichever queue: transactions that are committed."""

    def __init__(self, url: str) -> None:
        self._source = f"s{ids.to_text(ids.new_id())}"
        self._thread = LoopThread("a-test-sends")
        self._sink = self._thread.run(self._open(url))
        self._position = self._epoch = 0

    async def _open(self, url: str) -> Sink:
        return patient_sink(url)

    def send(self, *messages: Message) -> list[str]:
        """Publish each message in a transaction of its own, all in one batch; their ids, `{transaction}.0`."""
        transactions = [BridgedTransaction(ids.to_text(ids.new_id()), "senders", [_packed(m)]) for m in messages]
        self.again(*transactions)
        return [f"{t.id}.0" for t in transactions]

    def again(self, *transactions: BridgedTransaction) -> None:
        """Publish a batch of transactions, which may have been published before."""
        self._thread.run(self._publish(transactions))
        self._position += 1

    async def _publish(self, transactions: Sequence[BridgedTransaction]) -> None:
        """Once, also where a slow queue does not say whether it has the batch."""
        before, position = str(self._position or ""), str(self._position + 1)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                if not self._epoch:
                    self._epoch, stands = await self._sink.claim(self._source)
                    if stands == position:
                        return
                batch = PackedBridgeBatch(
                    epoch=self._epoch, expected_position=before, position=position, transactions=list(transactions)
                )
                assert not (await self._sink.append(self._source, batch)).refused
                return
            except Unavailable:
                assert time.monotonic() < deadline, "the queue takes nothing"
                self._epoch = 0

    def close(self) -> None:
        self._thread.run(self._sink.close())
        self._thread.close()


def _packed(message: Message) -> PackedMessage:
    body, headers = encode_body(message)
    key = None if message.key is None else str(message.key)
    return PackedMessage(message.topic, key=key, tag=message.tag, headers=headers, ttl=message.ttl, body=body)


class Queue(Protocol):
    """`url`: where consumers receive. `admin_url`: the server that shows its groups, and steers them."""

    url: str
    admin_url: str
    sender: Sender
    is_kafka: bool

    def make_topic(self, topic: str, queues: int = 1) -> None: ...

    def is_consumed(self, group: str, instances: int = 1) -> bool:
        """Whether so many instances of a group receive messages."""
        ...

    def is_settled(self, group: str) -> bool:
        """Whether nothing is left for a group: each message is done or a dead letter."""
        ...

    def close(self) -> None: ...


class Embedded:
    """A queue server."""

    is_kafka = False

    def __init__(self, url: str) -> None:
        self.url = self.admin_url = url
        self.sender = Sender(url)

    def make_topic(self, topic: str, queues: int = 1) -> None:
        admin(self.url, "PUT", f"topics/{topic}", {"queues": queues})

    def is_consumed(self, group: str, instances: int = 1) -> bool:
        return groups.is_subscribed(self.url, group) and _instances(self.url, group) >= instances

    def is_settled(self, group: str) -> bool:
        return groups.is_subscribed(self.url, group) and groups.lag(self.url, group) == 0

    def close(self) -> None:
        self.sender.close()


def _instances(url: str, group: str) -> int:
    """How many instances of a group there are, as its server shows them."""
    return sum(i["state"] != "gone" for i in admin(url, "GET", f"groups/{group}")["instances"])
