"""Audits Kafka's topics and the databases, with a real node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notify.client.table import half_message
from notify.demo.kafka import KafkaCluster
from notify.errors import Unavailable
from notify.relay.relay import Relay
from notify.spark.audit import Audit
from notify.spark.databases import Database
from notify.spark.kafka_input import KafkaInput
from notify.spark.result import Inputs
from tests.audit.audited import AT_ONCE, wait_until_closed
from tests.audit.shop import Shop
from tests.support.clock import eventually
from tests.support.databases import empty_database
from tests.support.groups import running

pytestmark = pytest.mark.long

ORDERS = 20


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[KafkaCluster]:
    try:
        cluster = KafkaCluster(tmp_path / "kafka").start()
    except Unavailable as reason:
        pytest.skip(str(reason))
    yield cluster
    cluster.stop()


def test_what_kafka_lacks_is_lost_and_what_it_has_alone_is_a_ghost(
    spark: Any, kafka: KafkaCluster, database_urls: dict[str, str], tmp_path: Path
) -> None:
    with (
        empty_database("postgresql", database_urls, tmp_path) as url,
        contextlib.closing(Shop(url, "http://127.0.0.1:9", kafka.url)) as shop,
    ):
        with running(shop.consumer):
            for _ in range(ORDERS):
                shop.order()
            asyncio.run(Relay(shop.engine, kafka.url).run(once=True))
            eventually(lambda: len(shop.effects()) == ORDERS, "the effects of all orders")
        lost = shop.lose()
        ghost = min(shop.transactions())
        with shop.engine.begin() as connection:
            connection.execute(half_message.delete().where(half_message.c.transaction_id == ghost))
        with contextlib.closing(Database(url, "shop")) as database:
            wait_until_closed(database, AT_ONCE)
            result = Audit(spark, AT_ONCE, Inputs([database], kafka=[KafkaInput(kafka.url)]), tmp_path / "s").run()
    assert {f.finding: f.message_id for f in result.found} == {"LOST": lost, "GHOST": f"{ghost}.0"}
    assert (result.totals["in_queues"], result.totals["acknowledged"]) == (ORDERS, 0)
    assert set(result.not_checked) >= {"BRIDGE_GAP", "DISORDER", "REDELIVERED", "CORRUPT"}
