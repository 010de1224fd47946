"""All checks of a Kafka cluster, in the order in which they are printed."""

from __future__ import annotations

from confluent_kafka import KafkaException

from notify.cli.kafka import allowed, nodes, topics, transactions
from notify.cli.kafka.line import Line
from notify.cli.kafka.seen import NEEDS, Seen
from notify.errors import NotifyError
from notify.kafka.brokers import translated
from notify.kafka.cluster import Cluster


def checkup(url: str, role: str) -> list[Line]:
    """The lines of all checks. `role`: the role whose rights are checked, see allowed.py; "": no rights are checked.
    Raises InvalidRequest for an invalid URL or role."""
    cluster = Cluster.of(url)
    if role:
        allowed.needs_of(role, [])
    try:
        seen = Seen.look(cluster)
        lines = [*nodes.lines(seen), *topics.lines(seen), *transactions.lines(seen)]
        if role:
            lines += allowed.lines(seen, allowed.needs_of(role, seen.message_topics()))
        return lines
    except KafkaException as raised:
        return [Line("brokers", "fail", str(translated(raised.args[0], cluster, NEEDS)))]
    except NotifyError as error:
        return [Line("brokers", "fail", str(error))]
