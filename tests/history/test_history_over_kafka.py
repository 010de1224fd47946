"""A short history over one node of Kafka, which is killed, frozen and started again like everything else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.history.run import Least, play
from tests.history.scene import Scene
from tests.support.clock import PATIENCE_SECONDS
from tests.support.databases import empty_database
from tests.support.kafka import KafkaNode

pytest.importorskip("confluent_kafka")

SECONDS = 4.0
PAUSE = 0.25
LEAST = Least(messages=300, faults={"node killed": 1}, seconds=PATIENCE_SECONDS)
"""One in 25 of half of the messages is delayed."""


@pytest.mark.long
def test_a_short_history_over_kafka(tmp_path: Path, database_urls: Mapping[str, str], kafka_node: KafkaNode) -> None:
    with empty_database("postgresql", database_urls, tmp_path) as url:
        scene = Scene(
            {"pg": url}, callers=4, is_over_databases=True, kafka=kafka_node.cluster,
            proxies=[kafka_node.proxy],
            groups=("shared", "ordered", "failover"),
            pause=PAUSE,
        )  # fmt: skip
        outcome = play(tmp_path, SECONDS, 1, scene, LEAST)
    assert (outcome.violations, outcome.broken) == ([], [])
    assert outcome.faults["node killed"] >= 1
    assert outcome.faults["message delayed"] >= 1
    assert len(outcome.history.records or ()) == len(outcome.history.committed) > 100
    assert outcome.history.moved_in_order
