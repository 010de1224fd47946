"""Apache Kafka: one node that syncs every message to the disk before it acknowledges it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tools.bench.peers.driver import DrivenPeer, Driver, jar_version
from tools.bench.peers.system import Work
from tools.kafka_cluster import KafkaCluster, NodeSettings, jars

JAVA = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC")
SETTINGS = {"log.flush.interval.messages": 1, "num.partitions": 8, "transaction.state.log.num.partitions": 8}
"""The first has Kafka sync as the others do; by default it leaves that to the operating system and to replicas."""


class Kafka:
    """Kafka as released: one broker, which is its own controller."""

    name = "kafka"
    title = "Kafka"

    def version(self) -> str:
        return jar_version(jars(), "kafka_2.13")

    @contextmanager
    def started(self, directory: Path, work: Work) -> Iterator[DrivenPeer]:
        with ExitStack() as stack:
            cluster = KafkaCluster(directory, node_settings=NodeSettings(settings=SETTINGS, java=JAVA))
            stack.callback(cluster.stop)
            cluster.start()
            log_level = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
            driver = Driver("Kafka", cluster.brokers, jars(), directory, log_level)
            stack.callback(driver.stop)
            yield DrivenPeer(driver, work)
