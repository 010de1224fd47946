"""Reports of bridges and relays about refused messages beside their sources: the compacted topic `notify-refused`.

A record's key is the source, its value the report as JSON (notify/wire.py). Whoever shows groups reads them there.
"""

from __future__ import annotations

from confluent_kafka import KafkaException

from notify.errors import Unavailable
from notify.kafka.brokers import CALL_SECONDS, make_topics, translated
from notify.kafka.cluster import Cluster
from notify.kafka.rights import of_bridge
from notify.wire import RefusedReport, encode_json

TOPIC = "notify-refused"


def tell(cluster: Cluster, source: str, report: RefusedReport) -> None:
    """Write a report. Raises Unavailable, InvalidRequest where the topic cannot be made."""
    make_topics(cluster, [TOPIC], compacted=True)
    failed: list[str] = []
    try:
        producer = cluster.producer({"acks": "all"})
        producer.produce(
            TOPIC,
            encode_json(report),
            source.encode(),
            on_delivery=lambda error, _: failed.append(error.str()) if error is not None else None,
        )
        left = producer.flush(CALL_SECONDS)
    except KafkaException as raised:
        raise translated(raised.args[0], cluster, of_bridge(source)) from raised
    if failed or left:
        reason = f": {failed[0]}" if failed else f" within {CALL_SECONDS:g} s"
        raise Unavailable(f"Kafka does not take what a mover says of refused messages in {TOPIC}{reason}")
