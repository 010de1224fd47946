"""Topics and groups that Kafka hides from an audit: brokers leave those out of their lists that a user may not see.

So each one that should be there, by what others noted, is asked for by its name: then brokers say that it is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from functools import partial

from confluent_kafka import KafkaError, KafkaException, TopicCollection

from notify.errors import Unavailable
from notify.kafka.admin_process import AdminProcess
from notify.kafka.calls import gathered
from notify.kafka.cluster import Cluster
from notify.kafka.codes import GONE
from notify.kafka.group_questions import hidden_among
from notify.kafka.rights import user_of
from notify.runtime.visible import first_of
from notify.spark.inputs.kafka_parts import CALL_SECONDS

_NAMED = 20


def hidden_topics(cluster: Cluster, topics: Collection[str]) -> Iterator[str]:
    """A sentence if this user may not see some of these topics. Raises Unavailable."""
    if not topics:
        return
    admin = cluster.admin()  # answers get lost with it
    calls = admin.describe_topics(TopicCollection(sorted(topics)), request_timeout=CALL_SECONDS)
    refused = []
    try:
        for topic, answer in sorted(gathered(calls, CALL_SECONDS).items()):
            if isinstance(answer, KafkaError) and answer.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                refused.append(topic)
            elif isinstance(answer, KafkaError) and answer.code() not in GONE:
                raise KafkaException(answer)
    except (KafkaException, TimeoutError) as error:
        raise Unavailable(f"Kafka at {cluster.brokers} does not say which topics there are: {error}") from error
    if refused:
        yield (
            f"Kafka hides topics from {user_of(cluster)}, so that their messages are in no queue that was read: "
            f"{first_of(refused, _NAMED)}; grant it Read and DescribeConfigs on all topics"
        )


def hidden_groups(cluster: Cluster, groups: Collection[str]) -> Iterator[str]:
    """A sentence if this user may not see some of these groups. Raises Unavailable."""
    if not groups:
        return
    try:
        with closing(AdminProcess(cluster)) as asker:
            refused = asker.ask(partial(hidden_among, groups=sorted(groups)))
    except (KafkaException, TimeoutError) as error:
        raise Unavailable(f"Kafka at {cluster.brokers}: the groups' offsets cannot be read: {error}") from error
    if refused:
        yield (
            f"Kafka hides consumer groups from {user_of(cluster)}, so that nothing says what they settled: "
            f"{first_of(refused, _NAMED)}; grant it Describe on all groups"
        )
