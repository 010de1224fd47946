"""Reports of bridges and relays about refused messages of their sources: the compacted topic `notify-refused`.

A record's key is the source, its value the report as JSON (notify/protocol/wire.py). Servers that show groups read the
reports.
"""

from __future__ import annotations

from notify.kafka.brokers import make_topics
from notify.kafka.cluster import Cluster
from notify.kafka.compacted import write
from notify.kafka.rights import of_bridge
from notify.protocol.wire import RefusedReport, encode_json

TOPIC = "notify-refused"


def tell(cluster: Cluster, source: str, report: RefusedReport) -> None:
    """Write a report. Raises Unavailable; InvalidRequest if the topic cannot be made."""
    make_topics(cluster, [TOPIC], compacted=True)
    write(cluster, TOPIC, {source: encode_json(report)}, of_bridge(source))
