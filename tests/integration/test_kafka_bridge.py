"""A bridge to Kafka, which knows no ids: a backfill says what it would publish again."""

from __future__ import annotations

import asyncio
import json

import pytest

from notify.binlog_bridge.pump import Bridge
from notify.clock import wall_clock
from notify.errors import InvalidRequest
from tests.support.bridges import outbox
from tests.support.kafka import KafkaNode, committed

pytest.importorskip("confluent_kafka")


@pytest.fixture
def url(kafka_node: KafkaNode) -> str:
    return kafka_node.url


def numbers(url: str, topic: str, wanted: int) -> list[int]:
    return sorted(json.loads(m.value())["n"] for m in committed(url, topic, wanted))


def move(binlog_url: str, url: str, **options: object) -> Bridge:
    bridge = Bridge([binlog_url], url)
    asyncio.run(bridge.run(once=True, **options))  # type: ignore[arg-type]
    return bridge


def test_a_backfill_to_kafka_says_what_it_would_send_again(url: str, binlog_url: str, unique: str) -> None:
    """It sent everything of the last hour again, unasked. A position of nothing needs no such question."""
    outbox(binlog_url, unique, range(3))
    move(binlog_url, url, fill=True)
    assert numbers(url, unique, 3) == [0, 1, 2]
    with pytest.raises(InvalidRequest, match="--backfill-from"):
        move(binlog_url, url, fill=True)
    since = wall_clock()
    outbox(binlog_url, unique, range(4, 6))
    move(binlog_url, url, fill=True, fill_since_us=since)
    assert numbers(url, unique, 5) == [0, 1, 2, 4, 5]
