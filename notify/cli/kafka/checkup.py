"""All checks of a Kafka cluster, in the order in which they are printed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from notify.cli.kafka import allowed, nodes, topics
from notify.cli.kafka.line import NAMED, Line, named
from notify.cli.kafka.seen import NEEDS, Seen
from notify.errors import NotifyError
from notify.kafka.brokers import CALL_SECONDS, translated
from notify.kafka.calls import answered, offset_of
from notify.kafka.cluster import Cluster


def checkup(url: str, role: str) -> list[Line]:
    """The lines of all checks. `role`: the role whose rights are checked, see allowed.py; "": no rights are checked.
    Raises InvalidRequest for an invalid URL or role."""
    cluster = Cluster.of(url)
    if role:
        allowed.needs_of(role, [])
    try:
        seen = Seen.look(cluster)
        lines = [*nodes.lines(seen), *topics.lines(seen), *transaction_lines(seen)]
        if role:
            lines += allowed.lines(seen, allowed.needs_of(role, seen.message_topics()))
        return lines
    except KafkaException as raised:
        return [Line("brokers", "fail", str(translated(raised.args[0], cluster, NEEDS)))]
    except NotifyError as error:
        return [Line("brokers", "fail", str(error))]


OLD_SECONDS = 180.0
"""An age at which a transaction is certainly hanging: the brokers end Notify's transactions after 60 s."""
READ_SECONDS = 5.0
TOOL = "kafka-transactions.sh --bootstrap-server … find-hanging"


def transaction_lines(seen: Seen) -> Iterator[Line]:
    """Find transactions that are open for longer than Notify's may be: they hide the records that follow them."""
    places = [TopicPartition(name, number) for name, topic in seen.topics.items() for number in topic.partitions]
    admin = seen.cluster.admin()
    try:
        stable = _ends(admin, places, IsolationLevel.READ_COMMITTED)
        ends = _ends(admin, places, IsolationLevel.READ_UNCOMMITTED)
        opened = [place for place in places if stable[_key(place)] < ends[_key(place)]]
        ages = {_key(p): _age(seen.cluster, p, stable[_key(p)]) for p in opened[:NAMED]}
    except (KafkaException, TimeoutError) as error:
        yield Line("transactions", "unknown", f"open ones cannot be looked for: {error}; {TOOL} does")
        return
    old = [f"{place} for {age:.0f} s" for place, age in ages.items() if age > OLD_SECONDS]
    if old:
        text = f"open for too long, so readers of committed records wait: {named(old)}; {TOOL} names its producer"
        yield Line("transactions", "fail", text)
    else:
        text = f"open in {len(opened)} partitions; {TOOL} tells by whom, Kafka's client does not"
        yield Line("transactions", "ok", text)


def _key(place: TopicPartition) -> str:
    return f"{place.topic}/{place.partition}"


def _ends(admin: Any, places: Iterable[TopicPartition], level: IsolationLevel) -> dict[str, int]:
    requests = {place: OffsetSpec.latest() for place in places}  # type: ignore[no-untyped-call]
    if not requests:
        return {}
    answers = admin.list_offsets(requests, isolation_level=level, request_timeout=CALL_SECONDS)
    return {_key(place): offset_of(answered(answer, CALL_SECONDS)) for place, answer in answers.items()}


def _age(cluster: Cluster, place: TopicPartition, offset: int) -> float:
    """The age in seconds of the first hidden record; 0 without one."""
    consumer = cluster.consumer({"group.id": "notify-readers", "isolation.level": "read_uncommitted"})
    try:
        consumer.assign([TopicPartition(place.topic, place.partition, offset)])
        record = consumer.poll(READ_SECONDS)
        if record is None:
            return 0.0
        if (error := record.error()) is not None:
            raise KafkaException(error)
        return time.time() - record.timestamp()[1] / 1000
    finally:
        consumer.close()
