"""LEFT_OUT over Kafka: what a reset skips is noted by the consumer that carries it out, and told by the audit; and what
another program passed over, which is in doubt."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from notify.client import Consumer
from notify.server.configuration.records import Records
from notify.server.database import open_database
from notify.spark.audit import Audit
from notify.spark.explain.explained import explain
from notify.spark.inputs.actions import place_of_records
from notify.spark.inputs.databases import Database
from notify.spark.inputs.kafka_input import KafkaInput
from notify.spark.result import Inputs, Result
from tests.audit.audited import PLAN
from tests.audit.leaving import WHO, WHY, told
from tests.support.clock import eventually
from tests.support.groups import running
from tests.support.kafka import KafkaNode, commit_offsets
from tools.kafka_cluster import KafkaCluster

pytest.importorskip("confluent_kafka")

from confluent_kafka import TopicPartition

from notify.kafka import control
from notify.kafka.cluster import Cluster
from notify.kafka.progress import Progress
from notify.kafka.rights import of_server
from notify.kafka.subscriptions import MOST_RUNS, MOST_SKIPPED, SUBSCRIPTIONS, Place, Skipped, Subscribed
from tests.audit.kafka_world import Sent, World
from tests.support.kafka_consumers import onlooker, progress

HOUR_US = 3_600_000_000


@pytest.fixture(scope="module")
def kafka(kafka_node: KafkaNode) -> KafkaCluster:
    return kafka_node.cluster


def test_a_skip_is_what_lies_unsettled_between_two_offsets() -> None:
    done = Progress(5, frozenset({6, 9, 12, 30}))
    skipped = Skipped.between(done, 13, 7, "r")
    assert skipped == Skipped(((5, 6), (7, 9), (10, 12)), 7, "r")
    assert Skipped.between(done, 5, 7, "r") is None and Skipped.between(Progress(5), 3, 7, "r") is None
    noted = Subscribed("shared", 0, topic_id="a")
    for n in range(40):
        noted = Subscribed("shared", n, topic_id="a").with_skipped(noted, Skipped(((n, n + 1),), n, f"r{n}"))
    assert [s.reset for s in noted.skipped] == [f"r{n}" for n in range(40 - MOST_SKIPPED, 40)]
    wide = Skipped(tuple((2 * n, 2 * n + 1) for n in range(MOST_RUNS)), 50, "wide")
    assert noted.with_skipped(noted, wide).skipped == (wide,)
    assert Subscribed("shared", 0, topic_id="b").with_skipped(noted, None).skipped == ()


@pytest.mark.long
def test_messages_skipped_by_a_reset_are_reported_with_its_author_and_reason(
    spark: Any, kafka: KafkaCluster, unique: str, tmp_path: Path
) -> None:
    """One reset is carried out by a running consumer, which is paused, and one by the next that starts."""
    cluster, at_us = Cluster.of(kafka.url), time.time_ns() // 1000 - HOUR_US
    world = World(cluster, f"sqlite:///{tmp_path}/shop.db")
    handled: list[str] = []

    def instance() -> Consumer:
        consumer = Consumer(kafka.url, group=unique)
        consumer.subscribe(unique, start="earliest")(lambda message: handled.append(message.id))
        return consumer

    def order(*resets: str, paused: bool = True) -> None:
        several = tuple(control.Reset(each, unique, "latest") for each in resets)
        control.CONTROL.put(cluster, {unique: control.Control(paused, several)}, of_server())

    def send(count: int) -> list[Sent]:
        return [world.send(unique, 0, at_us + n) for n in range(count)]

    def is_at(reset: str) -> bool:
        return all(p.reset == reset for (topic, _), p in progress(kafka.url, unique).items() if topic == unique)

    settled = send(2)
    with running(instance()):
        eventually(lambda: len(handled) == len(settled), "the first messages")
        order()
        skipped = send(3)
        order("r1")
        eventually(lambda: is_at("r1"), "the first reset")
    more = send(2)
    order("r2")
    with running(instance()):
        eventually(lambda: is_at("r2"), "the second reset")
    order("r2", paused=False)
    later = send(1)
    with running(instance()):
        eventually(lambda: later[0].message_id in handled, "what came after the resets")
    world.close()
    assert sorted(handled) == sorted(sent.message_id for sent in (*settled, *later))
    noted = SUBSCRIPTIONS.rows(cluster)[unique, Place(unique, 0)]
    assert [(s.reset, s.runs) for s in noted.skipped] == [("r1", ((2, 5),)), ("r2", ((5, 7),))]

    engine = open_database(str(tmp_path))
    records = Records(engine)
    records.record(at_us, "bob", "group.reset", f"{unique}/{unique}", "another one", {"id": "r0"})
    records.record(at_us + 1, WHO, "group.reset", f"{unique}/{unique}", WHY, {"id": "r1"})
    engine.dispose()
    with contextlib.closing(Database(f"sqlite:///{tmp_path}/shop.db", "shop")) as database:
        place = place_of_records(str(tmp_path))
        inputs = Inputs([database], kafka=[KafkaInput(kafka.url, [unique])], records=[place])
        result = Audit(spark, PLAN, inputs, tmp_path / "scratch").run()
        assert (result.verdict, result.exit_code, result.reasons) == ("PASS", 0, []), [
            str(f)[:400] for f in result.found
        ]
        lost = {f.message_id for f in result.found if f.finding == "LEFT_OUT"}
        assert lost == {sent.message_id for sent in (*skipped, *more)} and result.counts["LEFT_OUT"] == len(lost)
        by = {(row["messages"], row["who"], row["reason"]) for row in result.left_out}
        assert by == {(3, WHO, WHY), (2, None, None)} and set(told(result.left_out)) == {(unique, "reset")}
        failing = Audit(spark, replace(PLAN, fail_on=("LEFT_OUT",)), inputs, tmp_path / "scratch").run()
        assert (failing.verdict, failing.exit_code) == ("FINDINGS", 1)
        known = explain(inputs, skipped[0].message_id, tmp_path / "scratch")
        assert f"LEFT_OUT: {unique} never settled it" in known.sentence and f"by {WHO}: {WHY}" in known.sentence
        assert "LEFT_OUT" not in explain(inputs, later[0].message_id, tmp_path / "scratch").sentence


@pytest.mark.long
def test_messages_that_another_program_passed_over_are_in_doubt(
    spark: Any, kafka: KafkaCluster, unique: str, tmp_path: Path
) -> None:
    """As by kafka-consumer-groups.sh --reset-offsets: an audit without an inbox passed, and nobody had handled them."""
    cluster, at_us = Cluster.of(kafka.url), time.time_ns() // 1000 - HOUR_US
    world = World(cluster, f"sqlite:///{tmp_path}/shop.db")
    handled: list[str] = []

    def instance() -> Consumer:
        consumer = Consumer(kafka.url, group=unique)
        consumer.subscribe(unique, start="earliest")(lambda message: handled.append(message.id))
        return consumer

    def has_handled(sent: list[Sent]) -> bool:
        return {each.message_id for each in sent} <= set(handled)

    def audited() -> Result:
        with contextlib.closing(Database(f"sqlite:///{tmp_path}/shop.db", "shop")) as database:
            inputs = Inputs([database], kafka=[KafkaInput(kafka.url, [unique])])
            result = Audit(spark, PLAN, inputs, tmp_path / "scratch").run()
            verdict = explain(inputs, passed[0].message_id, tmp_path / "scratch").verdicts[0]
        assert verdict.is_open == bool(result.reasons), verdict.sentence
        return result

    first = [world.send(unique, 0, at_us + n) for n in range(2)]
    with running(instance()):
        eventually(lambda: has_handled(first), "the first messages")
    passed = [world.send(unique, 0, at_us + n) for n in range(3)]
    commit_offsets(onlooker(kafka.url, unique), TopicPartition(unique, 0, 5))
    result = audited()
    (reason,) = result.reasons
    assert (result.verdict, result.exit_code) == ("INCONCLUSIVE", 2)
    assert f"for group {unique}" in reason and "offsets 0 to 4 of partition 0" in reason
    later = [world.send(unique, 0, at_us + n) for n in range(2)]
    with running(instance()):
        eventually(lambda: has_handled(later), "what came after the offset")
        eventually(lambda: progress(kafka.url, unique)[unique, 0].is_own, "the offset to be Notify's again")
    assert audited().reasons == [reason] and not has_handled(passed)

    world.take_effect(unique, [*first, *passed[:2], *later], at_us + HOUR_US // 2)
    result = audited()
    assert [(f.finding, f.message_id) for f in result.found] == [("ACKED_NO_EFFECT", passed[2].message_id)]
    assert result.reasons == []

    world.lose_effects(unique)
    again = control.Reset("r1", unique, 0)
    control.CONTROL.put(cluster, {unique: control.Control(False, (again,))}, of_server())
    with running(instance()):
        eventually(lambda: has_handled(passed), "what was passed over")
        eventually(lambda: progress(kafka.url, unique)[unique, 0].offset == 7, "their end")
    world.close()
    result = audited()
    assert (result.verdict, result.reasons) == ("PASS", [])
