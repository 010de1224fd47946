"""Audits Kafka's topics and the databases, with a real node."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from notify.client.tables.definitions import half_message
from notify.errors import InvalidRequest, Unavailable
from notify.movers.relay.relay import Relay
from notify.spark.audit import Audit
from notify.spark.causes.commands import Commands
from notify.spark.causes.grouping import tell_causes
from notify.spark.explain.explained import explain
from notify.spark.inputs.databases import Database
from notify.spark.inputs.kafka_input import KafkaInput
from notify.spark.judge.completeness_proof import refuse_doubled
from notify.spark.result import Inputs, Plan, Result
from tests.audit.audited import AT_ONCE, PLAN, wait_until_closed
from tests.audit.shop import TOPIC, Shop
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.databases import empty_database
from tests.support.groups import running
from tests.support.kafka import KafkaNode
from tools.kafka_cluster import KafkaCluster

pytest.importorskip("confluent_kafka")

from notify.kafka.brokers import COMPACTED, KEPT, make_missing, new_topic
from notify.kafka.cluster import Cluster
from notify.kafka.groups import dead_letter_topic
from notify.kafka.progress import Progress
from notify.kafka.redriven import Spot
from notify.kafka.subscriptions import Place, Subscribed, Subscriptions
from notify.kafka.topic_ids import topic_ids
from notify.movers.sinks.delays.topics import make_wheels
from notify.movers.sinks.delays.wheels import WHEELS
from notify.spark.inputs import kafka_parts
from notify.spark.inputs.kafka_parts import Extent, Partition
from tests.audit.kafka_world import Sent, World

ORDERS = 20
SECOND = 1_000_000
HOUR = 3600 * SECOND
PARTITIONS = 4


@pytest.fixture(scope="module")
def kafka(kafka_node: KafkaNode) -> KafkaCluster:
    return kafka_node.cluster


@pytest.fixture
def world(kafka: KafkaCluster, tmp_path: Path) -> Iterator[World]:
    made = World(Cluster.of(kafka.url), f"sqlite:///{tmp_path}/shop.db")
    yield made
    made.close()


def audited(
    spark: Any,
    kafka: KafkaInput,
    directory: Path,
    plan: Plan = PLAN,
    progress: Callable[[str], None] = lambda text: None,
) -> Result:
    """Audit the database of `world` and these topics."""
    with contextlib.closing(Database(f"sqlite:///{directory}/shop.db", "shop")) as database:
        return Audit(spark, plan, Inputs([database], kafka=[kafka]), directory / "segments", progress).run()


def said(result: Result) -> list[tuple[str, str]]:
    """Every finding about a message with its id, or else its place. Bridges' positions are another test's."""
    about = [f for f in result.found if f.finding != "BRIDGE_GAP"]
    return sorted((f.finding, f.message_id or f"{f.topic}/{f.queue}@{f.offset}") for f in about)


@pytest.mark.long
def test_a_message_missing_in_kafka_is_lost_and_one_only_in_kafka_is_a_ghost(
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
            result = Audit(
                spark, AT_ONCE, Inputs([database], kafka=[KafkaInput(kafka.url, [TOPIC])]), tmp_path / "s"
            ).run()
    assert {f.finding: f.message_id for f in result.found} == {"LOST": lost, "GHOST": f"{ghost}.0"}
    assert (result.totals["in_queues"], result.totals["acknowledged"]) == (ORDERS, ORDERS)
    assert set(result.not_checked) == {"DUP_EFFECT"}


def test_settlements_over_kafka_follow_from_offsets_retries_and_effects(
    spark: Any, kafka: KafkaCluster, world: World, unique: str, tmp_path: Path
) -> None:
    group, at = unique, time.time_ns() // 1000 - HOUR
    sent = [world.send(unique, 0, at + n * SECOND, key="k") for n in range(12)]
    effectless, retried, waiting, buried, behind = *sent[1:5], sent[8]
    sent.append(world.send(unique, 0, at, key="k", expires=at + SECOND))
    assert world.fail(group, retried, 2, at + 20 * SECOND) == 0
    assert world.fail(group, waiting, 2, at + 20 * SECOND) == 1
    world.bury(group, buried, at + 20 * SECOND)
    handled = [s for s in sent[:12] if s not in (effectless, waiting, buried, behind)]
    world.take_effect(group, handled, at + 30 * SECOND)
    place = Place(unique, 0)
    ahead = frozenset(range(9, 13))
    world.progress(group, {place: Progress(8, ahead, {8: 1}), Place(f"retry.{group}", 0): Progress(1)})
    Subscriptions(Cluster.of(kafka.url), group).note({place: Subscribed("shared", 0)}, begins=True)
    # The instances of a broadcast say nothing about their group, nor does an inbox row of such a name.
    world.progress(f"{unique}-all@a", {place: Progress(3)})
    world.take_effect(f"{unique}-all@a", sent[:1], at + 30 * SECOND)
    result = audited(spark, KafkaInput(kafka.url, [unique]), tmp_path)
    assert said(result) == sorted(
        [
            ("ACKED_NO_EFFECT", effectless.message_id),
            ("DEAD", buried.message_id),
            ("REDELIVERED", retried.message_id),
            ("REDELIVERED", waiting.message_id),
            ("REDELIVERED", behind.message_id),
            ("UNDELIVERED", waiting.message_id),
            ("UNDELIVERED", behind.message_id),
        ]
    )
    assert result.notes == [] and set(result.not_checked) == {"DUP_EFFECT"}
    with contextlib.closing(Database(f"sqlite:///{tmp_path}/shop.db", "shop")) as database:
        inputs = Inputs([database], kafka=[KafkaInput(kafka.url, [unique])])
        tell_causes(spark, PLAN, inputs, result, Commands())
        for case in result.found:
            (verdict,) = explain(inputs, case.message_id, tmp_path, (5, 5)).verdicts
            assert case.finding in (verdict.finding, *verdict.others), (case, verdict)
        for each in (sent[0], sent[-1]):
            known = explain(inputs, each.message_id, tmp_path, (5, 5))
            assert (known.exit_code, known.verdicts[0].finding) == (0, ""), known.sentence
    causes = {cause.finding: cause.sentence for cause in result.causes}
    assert f"group {group} has been stuck since" in causes["UNDELIVERED"] and "2 messages" in causes["UNDELIVERED"]
    assert f"group {group} gave up 1 message" in causes["DEAD"]


@pytest.mark.long
def test_a_group_is_judged_by_what_it_noted(
    spark: Any, kafka: KafkaCluster, world: World, unique: str, tmp_path: Path
) -> None:
    """Neither tags that it does not take, nor what is before its start, nor what it filters out had an effect."""
    at = time.time_ns() // 1000 - HOUR
    early = world.send(unique, 0, at, tag="vip")
    vip, plain, missed = (world.send(unique, 0, at + n * SECOND, tag=tag) for n, tag in enumerate(("vip", "x", "vip")))
    place, cluster = Place(unique, 0), Cluster.of(kafka.url)
    groups = {name: f"{unique}-{name}" for name in ("tagged", "filtered", "silent")}
    for group in groups.values():
        world.take_effect(group, [vip], at + 10 * SECOND)
        world.progress(group, {place: Progress(4)})
    Subscriptions(cluster, groups["tagged"]).note(
        {place: Subscribed("shared", early.offset + 1, ("vip",))}, begins=True
    )
    Subscriptions(cluster, groups["filtered"]).note({place: Subscribed("shared", 0, (), "key == 'x'")}, begins=True)
    result = audited(spark, KafkaInput(kafka.url, [unique]), tmp_path)
    assert said(result) == [("ACKED_NO_EFFECT", missed.message_id)]
    assert result.found[0].groups == [groups["tagged"]] and plain.offset == 2
    assert [note for note in result.notes if groups["silent"] in note and "have not noted" in note]
    assert [note for note in result.notes if groups["filtered"] in note and "filters" in note]


@pytest.mark.long
def test_records_deleted_by_retention_during_the_audit_are_not_lost(
    spark: Any, kafka: KafkaCluster, world: World, unique: str, tmp_path: Path
) -> None:
    at = time.time_ns() // 1000 - HOUR
    sent = [world.send(unique, 0, at + n * SECOND) for n in range(8)]

    def delete(doing: str) -> None:
        if "databases" in doing:
            world.delete_before({sent[5].place: 5})

    result = audited(spark, KafkaInput(kafka.url, [unique]), tmp_path, progress=delete)
    assert (result.verdict != "PASS", said(result)) == (True, [])
    assert f"offsets 0 to 4 of {unique}/0" in result.reasons[0]
    assert (result.counts["PENDING"], result.totals["in_queues"]) == (5, 3)


@pytest.mark.long
def test_nothing_is_proven_by_a_topic_that_kafka_compacts(kafka: KafkaCluster, unique: str) -> None:
    """Messages of a key that had later ones were called LOST, and a repair sent them again."""
    cluster = Cluster.of(kafka.url)
    kept, table, foreign = f"kept.{unique}", f"table.{unique}", f"foreign.{unique}"
    make_missing(cluster, [new_topic(kept, 1, KEPT), *(new_topic(name, 1, COMPACTED) for name in (table, foreign))])
    noted = {Place(name, 0): Subscribed("shared", 0) for name in (kept, table)}
    Subscriptions(cluster, unique).note(noted, begins=True)
    for chosen, named in (([kept], []), ([kept, foreign], [foreign]), ([], [table])):
        given = KafkaInput(kafka.url, chosen)
        given.prepare()
        told = [why for why in given.hidden if "compacts topics" in why and unique in why]
        assert [name for name in (kept, table, foreign) if any(name in why for why in told)] == named


@pytest.mark.long
def test_an_inbox_that_was_wiped_is_missed(
    spark: Any, kafka: KafkaCluster, world: World, unique: str, tmp_path: Path
) -> None:
    """Its consumers noted that they keep one. A group that noted none is not judged."""
    at = time.time_ns() // 1000 - HOUR
    for n in range(4):
        world.send(unique, 0, at + n * SECOND)
    place = Place(unique, 0)
    for group, inbox_from_us in ((f"{unique}-with", at), (f"{unique}-without", -1)):
        world.progress(group, {place: Progress(4)})
        noted = Subscribed("shared", 0, inbox_from_us=inbox_from_us)
        Subscriptions(Cluster.of(kafka.url), group).note({place: noted}, begins=True)
    result = audited(spark, KafkaInput(kafka.url, [unique]), tmp_path)
    assert (result.verdict != "PASS", said(result)) == (True, [])
    (reason,) = result.reasons
    assert f"{unique}-with have an inbox" in reason.replace("group ", "")
    assert [note for note in result.notes if f"{unique}-without" in note]


@pytest.mark.long
def test_dead_letters_that_nobody_sent_again_are_counted(
    spark: Any, kafka: KafkaCluster, world: World, unique: str, tmp_path: Path
) -> None:
    at, letters = time.time_ns() // SECOND * 1000 - HOUR, Place(dead_letter_topic(unique), 0)
    purged, early, *dead, again = (world.send(unique, 0, at + n * SECOND) for n in range(6))
    for n, letter in enumerate((purged, early, *dead, again)):
        world.bury(unique, letter, at + n * SECOND, "too late" if letter is dead[1] else "never")
    other = world.publish(letters, "orders/0@7", at + 6 * SECOND, topic=unique, reason="never")
    world.note_redriven(unique, Spot(0, 5), again.message_id)
    world.note_redriven(unique, Spot(0, 2), again.message_id)  # of a topic that was recreated since
    world.delete_before({letters: 1})
    window = replace(PLAN, from_us=at + 2 * SECOND)
    result = audited(spark, KafkaInput(kafka.url, [unique]), tmp_path, window)
    cases = [f for f in result.found if f.finding == "DEAD"]
    assert [(f.message_id, f.offset, f.groups) for f in cases] == [
        *((letter.message_id, n, [unique]) for n, letter in enumerate(dead, 2)), ("", other, [unique])
    ]  # fmt: skip
    assert "orders/0@7" in cases[-1].detail and result.counts["DEAD"] == len(dead) + 1
    assert result.dead == [
        {"group": unique, "reason": "never", "count": 3},
        {"group": unique, "reason": "too late", "count": 1},
    ]


@pytest.mark.long
def test_effects_of_a_key_out_of_its_order_are_found(
    spark: Any, kafka: KafkaCluster, world: World, unique: str, tmp_path: Path
) -> None:
    at = time.time_ns() // 1000 - HOUR
    a, b = ([world.send(unique, 0, at + n * SECOND, key=key) for n in range(4)] for key in "ab")
    world.take_effect(unique, [a[0], a[2], a[1], a[3]], at + 20 * SECOND)
    world.take_effect(unique, [b[1], b[2], b[3], b[0]], at + 20 * SECOND)
    world.bury(unique, b[0], at + 20 * SECOND)  # it was sent again since
    place, cluster = Place(unique, 0), Cluster.of(kafka.url)
    for group in (unique, f"{unique}-shared"):
        world.progress(group, {place: Progress(8)})
    world.take_effect(f"{unique}-shared", [*reversed(a), *b], at + 20 * SECOND)
    Subscriptions(cluster, unique).note({place: Subscribed("ordered", 0)}, begins=True)
    Subscriptions(cluster, f"{unique}-shared").note({place: Subscribed("shared", 0)}, begins=True)
    result = audited(spark, KafkaInput(kafka.url, [unique]), tmp_path)
    assert said(result) == [("DEAD", b[0].message_id), ("DISORDER", a[1].message_id)]
    (disorder,) = [f for f in result.found if f.finding == "DISORDER"]
    assert disorder.evidence["after_offset"] == a[2].offset


@pytest.mark.long
def test_damaged_batches_are_found_and_what_is_readable_in_them_is_not_lost(
    spark: Any, kafka: KafkaCluster, world: World, unique: str, tmp_path: Path
) -> None:
    at = time.time_ns() // 1000 - HOUR
    sent = [world.send(unique, 1, at + n * SECOND) for n in range(9)]
    damage(kafka, sent[3])
    damage(kafka, sent[4])
    damage(kafka, sent[8])
    result = audited(spark, KafkaInput(kafka.url, [unique]), tmp_path)
    assert said(result) == [("CORRUPT", f"{unique}/1@{n}") for n in (3, 4, 8)]
    assert result.totals["in_queues"] == 9
    assert f"offsets 3 to 3 of {unique}/1" in result.found[0].detail


def damage(kafka: KafkaCluster, sent: Sent) -> None:
    """Change a bit of a record's body on the broker's disk."""
    (file,) = kafka.data_directory(0).glob(f"{sent.place.topic}-{sent.place.partition}/*.log")
    data = file.read_bytes()
    at = data.index(f"body of {sent.id}".encode())
    with file.open("r+b") as log:
        log.seek(at)
        log.write(bytes([data[at] ^ 1]))


@pytest.mark.long
def test_a_bridges_positions_must_follow_one_another(
    spark: Any, kafka: KafkaCluster, world: World, unique: str, tmp_path: Path
) -> None:
    at = time.time_ns() // 1000 - HOUR
    world.send(unique, 0, at)
    for number, value in enumerate(
        (
            b'{"epoch": 1, "position": "a", "since": ""}',
            b'{"epoch": 1, "position": "b", "since": "a"}',
            b'{"epoch": 2, "position": "b", "since": "b"}',
            b'{"epoch": 2, "position": "c", "since": "b"}',
            b'{"epoch": 2, "position": "e", "since": "d"}',
            b'{"epoch": 3, "position": "c", "since": "c"}',
            b'{"epoch": 2, "position": "f", "since": "c"}',
        )
    ):
        world.stand(unique, at + number * SECOND, value)
    result = audited(spark, KafkaInput(kafka.url, [unique]), tmp_path)
    assert [(f.finding, f.evidence["position"]) for f in result.found] == [
        ("BRIDGE_GAP", 4), ("BRIDGE_GAP", 5), ("BRIDGE_GAP", 6)
    ]  # fmt: skip


@pytest.mark.long
def test_a_delayed_message_that_waits_is_not_lost(
    spark: Any, kafka: KafkaCluster, world: World, unique: str, tmp_path: Path
) -> None:
    at = time.time_ns() // 1000 - HOUR
    world.send(unique, 0, at)
    make_wheels(Cluster.of(kafka.url), WHEELS)
    for topic in ("notify-delayed", "notify-delayed.hours"):
        waits, forgotten = (world.commit(unique, at) for _ in range(2))
        world.publish(Place(topic, 0), waits, at, key=waits, due=at + 3 * HOUR, topic=unique)
        world.publish(Place(topic, 0), forgotten, at, key=forgotten, due=at + SECOND, topic=unique)
        result = audited(spark, KafkaInput(kafka.url, [unique]), tmp_path)
        assert ("LOST", f"{forgotten}.0") in said(result) and ("LOST", f"{waits}.0") not in said(result)


@pytest.mark.long
def test_only_the_window_is_read_and_what_was_deleted_is_not_lost(
    spark: Any, kafka: KafkaCluster, world: World, unique: str, tmp_path: Path
) -> None:
    now = time.time_ns() // 1000
    days = [now - n * 24 * HOUR for n in (5, 4, 3, 2)]
    for day in days:
        for n in range(2 * PARTITIONS):
            world.send(unique, n % PARTITIONS, day + n * SECOND)
    late = world.commit(unique, days[1] + 60 * SECOND)
    world.publish(Place(unique, 0), late, days[3] + 60 * SECOND)
    lost = world.commit(unique, days[1] + 61 * SECOND)
    window = Plan(from_us=days[1], to_us=days[1] + HOUR, max_transaction_seconds=5, deliver_seconds=5)
    secret = KafkaInput(f"{kafka.url}?sasl.password=hush-hush", [unique])
    result = audited(spark, secret, tmp_path, window)
    assert said(result) == [("LOST", f"{lost}.0")]
    assert secret.queued(spark).count() == 2 * PARTITIONS and secret.is_cut and not secret.first_us
    assert "hush" not in secret.rows(spark)._jdf.queryExecution().toString()
    secret.release()

    world.delete_before({Place(unique, n): 4 for n in range(PARTITIONS)})
    rest = KafkaInput(kafka.url, [unique])
    result = audited(spark, rest, tmp_path)
    assert days[2] <= rest.first_us < days[2] + HOUR and said(result) == []
    world.delete_before({Place(unique, n): -1 for n in range(PARTITIONS)})
    nothing = KafkaInput(kafka.url, [unique])
    nothing.prepare()  # what is younger than the retention of 7 days would still be there
    assert days[0] - 3 * 24 * HOUR < nothing.first_us < days[0]


def test_offsets_that_are_not_of_the_present_topic_settle_nothing(kafka: KafkaCluster, world: World) -> None:
    """After a topic was recreated, or had lost its last records, an audit took for settled what no group had received:
    consumers begin again there, and until they do, nothing was missing."""
    topic, now_us = f"recreated-{time.time_ns()}", time.time_ns() // 1000
    place = Place(topic, 0)
    for n in range(3):
        world.send(topic, 0, now_us + n)
    topic_id = topic_ids(Cluster.of(kafka.url).admin(), [topic], PATIENCE_SECONDS)[topic]
    former, beyond, present = f"{topic}-former", f"{topic}-beyond", f"{topic}-present"
    world.progress(former, {place: Progress(3, topic="of-a-former-topic")})
    world.progress(beyond, {place: Progress(50)})
    world.progress(present, {place: Progress(3, topic=topic_id)})
    noted = Subscribed("shared", 2, topic_id="of-a-former-topic")
    Subscriptions(Cluster.of(kafka.url), former).note({place: noted}, begins=True)
    read = KafkaInput(kafka.url, [topic])
    read.prepare()
    progress = read.progress.progress
    assert [progress[group][place].offset for group in (former, beyond, present)] == [0, 0, 3]
    assert read.progress.subscribed[former, place].start == 0


def test_one_cluster_under_two_names_is_refused(kafka: KafkaCluster) -> None:
    """Every message in it was there twice."""
    other = kafka.url.replace("127.0.0.1", "localhost")
    with pytest.raises(InvalidRequest, match="are one cluster"):
        refuse_doubled(Inputs(kafka=[KafkaInput(kafka.url), KafkaInput(other)]))


def test_silent_brokers_are_reported_within_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer was waited for by itself, and given up before the client said what failed."""
    monkeypatch.setattr(kafka_parts, "CALL_SECONDS", 0.5)
    places = {Partition("t", n): Extent(0, 1) for n in range(20)}
    begun = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with pytest.raises(Unavailable, match="refused"):
        kafka_parts.cut(Cluster.of(f"kafka://127.0.0.1:{port}"), places, 1, 0)
    assert time.monotonic() - begun < PATIENCE_SECONDS
