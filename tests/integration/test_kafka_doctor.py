"""`notify doctor --kafka` on a real node: what it finds wrong, and what it says to do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from notify.client import Consumer
from notify.errors import Unavailable
from notify.testing.ports import free_port
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import cli
from tests.support.kafka import KafkaNode, open_transaction
from tests.support.kafka_consumers import admin_of
from tools.kafka_cluster import KafkaCluster

pytest.importorskip("confluent_kafka")

from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

from notify.cli.kafka import checkup, topics
from notify.cli.kafka.checkup import transaction_lines
from notify.cli.kafka.line import Line
from notify.cli.kafka.nodes import WANTED
from notify.cli.kafka.seen import Seen
from notify.kafka import brokers
from notify.kafka.brokers import make_topics
from notify.kafka.cluster import Cluster
from notify.kafka.topics import LARGEST_RECORD
from notify.movers.sinks.kafka import KafkaSink

CALL_SECONDS = 30.0


@pytest.fixture
def url(kafka_node: KafkaNode) -> str:
    return kafka_node.url


def make(url: str, name: str, config: Mapping[str, str]) -> None:
    (made,) = admin_of(url).create_topics([NewTopic(name, num_partitions=1, config=dict(config))]).values()
    made.result(CALL_SECONDS)


def doctor(*words: str) -> dict[str, Any]:
    code, answer = cli("doctor", *words, "--json")
    assert code == (0 if answer["ok"] else 1)
    assert len(answer["findings"]) == sum(line["level"] in ("warn", "fail") for line in answer["kafka"])
    return answer


@pytest.mark.long
def test_each_fault_of_a_topic_is_told_with_its_remedy(url: str, unique: str) -> None:
    make_topics(Cluster.of(url), [f"good.{unique}"], largest=LARGEST_RECORD)
    make(url, f"small.{unique}", {"max.message.bytes": "1000", "unclean.leader.election.enable": "true"})
    make(url, f"table.{unique}", {"cleanup.policy": "compact,delete"})
    make(url, f"notify-bridge-positions.{unique}", {"cleanup.policy": "delete"})
    make(url, f"notify-bridge-positions.{unique}.old", {"cleanup.policy": "compact"})
    make_topics(Cluster.of(url), [f"notify-bridge-positions.{unique}.new"], compacted=True)
    make(url, f"dead-letter.{unique}", {"retention.ms": "1000"})
    make(url, f"retry.{unique}", {"retention.bytes": "1000", "cleanup.policy": "compact"})
    found = [(line["level"], line["check"], line["text"]) for line in doctor("--kafka", url)["kafka"]]
    # A line names five topics at most, and other tests have theirs on the same node.
    seen = Seen.look(Cluster.of(url))
    own = {name: topic for name, topic in seen.topics.items() if unique in name}
    only = replace(seen, topics=own, configs={name: seen.configs[name] for name in own})
    found += [(line.level, line.check, line.text) for line in topics.lines(only)]

    def told(level: str, check: str, *texts: str) -> bool:
        return any(each[:2] == (level, check) and all(text in each[2] for text in texts) for each in found)

    assert told("ok", "broker", "answers at 127.0.0.1")
    assert told("ok", "controller")
    assert told("warn", "auto.create.topics.enable", "set it to false")
    assert told("warn", "max.message.bytes (messages)", f"small.{unique} has 1000", f"set it to {LARGEST_RECORD}")
    assert told("warn", "unclean.leader.election.enable (all topics)", f"small.{unique} has true")
    assert told("warn", "cleanup.policy (messages)", f"table.{unique} has compact,delete", "set it to delete")
    assert told("fail", "cleanup.policy (positions and orders)", f"positions.{unique} has delete", "set it to compact")
    for setting in ("segment.ms", "segment.bytes"):
        check = f"{setting} (positions and orders)"
        assert told("warn", check, f"positions.{unique}.old has ", "kafka-configs.sh", "segment.ms=86400000")
        assert not told("warn", check, f"positions.{unique}.new")
    assert told("warn", "retention.ms (dead letters)", f"dead-letter.{unique} has 1000", "set it to -1")
    assert told("warn", "retention.bytes (what waits)", f"retry.{unique} has 1000", "set it to -1")
    assert told("fail", "cleanup.policy (what waits)", f"retry.{unique} has compact", "set it to delete")
    assert not any(f"good.{unique}" in text for level, _, text in found if level != "ok")
    (undone,) = [admin_of(url).delete_topics([f"retry.{unique}"])[f"retry.{unique}"]]
    undone.result(CALL_SECONDS)


def test_a_transaction_that_is_open_for_too_long_is_told(
    url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "OLD_SECONDS", 0.0)
    producer = open_transaction(url, unique, unique, "k", "v")
    seen = Seen.look(Cluster.of(url))
    only = Seen(seen.cluster, 1, seen.brokers, {unique: seen.topics[unique]}, {}, {})
    (line,) = transaction_lines(only)
    producer.abort_transaction(CALL_SECONDS)
    assert (line.level, f"{unique}/" in line.text, "find-hanging" in line.text) == ("fail", True, True)
    eventually(lambda: [line.level for line in transaction_lines(only)] == ["ok"], "the transaction to have ended")


class Partition:
    """A partition as Kafka's client describes it."""

    def __init__(self, leader: int, replicas: list[int], isrs: list[int]) -> None:
        self.leader, self.replicas, self.isrs = leader, replicas, isrs


class Topic:
    def __init__(self, *partitions: Partition) -> None:
        self.partitions = dict(enumerate(partitions))


def seen_of(known: Mapping[str, Topic], configs: Mapping[str, Mapping[str, str]], **settings: str) -> Seen:
    """Three brokers."""
    values = {name.replace("_", "."): value for name, value in settings.items()}
    brokers = {number: f"127.0.0.1:{number}" for number in (1, 2, 3)}
    return Seen(Cluster.of("kafka://127.0.0.1:9"), 1, brokers, known, {1: values}, configs)


def test_copies_are_judged_by_the_number_of_brokers() -> None:
    whole = Partition(1, [1, 2, 3], [1, 2, 3])
    seen = seen_of(
        {
            "alone": Topic(Partition(1, [1], [1])),
            "away": Topic(Partition(-1, [1], [])),
            "behind": Topic(Partition(1, [1, 2, 3], [1])),
            "loose": Topic(whole),
            "tight": Topic(whole),
            "good": Topic(whole),
        },
        {"loose": {"min.insync.replicas": "1"}, "tight": {"min.insync.replicas": "3"}}
        | {"good": {"min.insync.replicas": "2"}},
    )
    told = [line for line in topics.lines(seen) if line.level in ("warn", "fail")]
    assert [(line.level, line.check, line.text.rpartition(" ")[2]) for line in told] == [
        ("fail", "leaders", "away/0"),
        ("warn", "copies", "behind/0"),
        ("warn", "replication", "away"),
        ("warn", "min.insync.replicas", "loose"),
        ("warn", "min.insync.replicas", "tight"),
    ]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("transaction.max.timeout.ms", "10000"),
        ("transactional.id.expiration.ms", "60000"),
        ("offsets.retention.minutes", "60"),
        ("offset.metadata.max.bytes", "100"),
        ("group.min.session.timeout.ms", "30000"),
        ("auto.create.topics.enable", "true"),
        ("default.replication.factor", "1"),
        ("offsets.topic.replication.factor", "1"),
        ("transaction.state.log.replication.factor", "1"),
        ("unclean.leader.election.enable", "true"),
    ],
)
def test_a_setting_of_brokers_that_breaks_a_promise_is_bad(name: str, bad: str) -> None:
    (wanted,) = [each for each in WANTED if each.name == name]
    assert not wanted.is_good(bad, seen_of({}, {}))
    assert "set it to" in wanted.remedy


def test_brokers_that_do_not_answer_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notify.cli.kafka.seen.CALL_SECONDS", 1.0)
    answer = doctor("--kafka", "kafka://127.0.0.1:9")
    assert [line["level"] for line in answer["kafka"]] == ["fail"]
    assert "does not answer" in answer["findings"][0]


@pytest.mark.long
def test_an_address_that_clients_do_not_reach_is_told_by_every_part(
    tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose name only other containers know. A consumer said that a controller does not answer."""
    monkeypatch.setattr(brokers, "CALL_SECONDS", 1.0)
    cluster = KafkaCluster(tmp_path, advertised=lambda port: free_port())
    cluster.start(5 * PATIENCE_SECONDS)
    try:
        consumer = Consumer(cluster.url, group=unique)
        consumer.subscribe(unique)(lambda message: None)
        with pytest.raises(Unavailable, match=r"directs clients to 127\.0\.0\.1:.*advertised\.listeners"):
            consumer.run(signals=False)

        async def claim() -> None:
            sink = KafkaSink(cluster.url, 1.0)
            try:
                await sink.claim(unique)
            finally:
                await sink.close()

        with pytest.raises(Unavailable, match=r"directs clients to 127\.0\.0\.1:.*advertised\.listeners"):
            asyncio.run(claim())
        found = " ".join(doctor("--kafka", cluster.url)["findings"])
        assert "directs clients to" in found and "advertised.listeners" in found
    finally:
        cluster.kill_node(0)


def test_a_role_that_is_none_is_refused(url: str) -> None:
    code, answer = cli("doctor", "--kafka", url, "--as", "consumer")
    assert (code, "consumer:GROUP" in answer["text"]) == (2, True)
    assert str(Line("a", "ok", "b")) == "ok      a: b"
