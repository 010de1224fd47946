"""A server that shows and steers the consumer groups of a Kafka cluster."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import cli
from tests.support.http import REASON, ask

pytest.importorskip("confluent_kafka")
from confluent_kafka import TopicPartition

from notify.errors import Unavailable
from notify.kafka import control, groups
from notify.kafka.cluster import Cluster
from notify.kafka.progress import Progress
from notify.kafka.subscriptions import Subscribed
from notify.kafka.table import newest
from notify.movers.sinks.kafka import KafkaSink
from notify.protocol.wire import PackedBridgeBatch
from notify.server.groups.kafka import oldest
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.snapshot import KafkaGroup, Position
from tests.support.kafka import open_transaction
from tests.support.kafka_consumers import make_topic, produce
from tests.support.kafka_groups import Group, admin, look_again, showing


@pytest.fixture(scope="module")
def server(kafka_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with showing(kafka_url, tmp_path_factory.mktemp("shown")) as server:
        yield server


def test_a_group_is_shown_with_its_lag(kafka_url: str, server: ServerProcess) -> None:
    group = Group(kafka_url)
    group.write(group.topic, 0, 10)
    group.write(group.topic, 1, 5)
    group.commit(0, Progress(4, frozenset((6, 7)), {4: 2}))
    group.commit(1, Progress(5))

    def row() -> dict[str, Any]:
        return next((g for g in admin(server, "GET", f"groups?prefix={group.name}")["groups"]), {})

    eventually(lambda: row().get("lag") == 6, "four of the six records from the position on to wait, and two commits")
    unknown = {"latency": {"commit_to_ack": None, "handler": None}}  # no settlement reaches the server
    known = {"name": group.name, "lag": 6, "leased": None, "paused": False, "consumers": 0, "dead_letters": 0} | unknown
    assert row().items() >= known.items()  # and rates and an age, once a minute passed
    assert group.name in [g["name"] for g in admin(server, "GET", "groups?sort=pain")["groups"]]
    queues = admin(server, "GET", f"groups/{group.name}")["queues"]
    shown = {q["queue"]: (q["position"], q["next"], q["settled_above"], q["retries"], q["lag"]) for q in queues}
    assert shown == {0: (4, 11, 2, 1, 5), 1: (5, 6, 0, 0, 1)}
    group.subscribe(Subscribed("ordered", 0, ("red",)))
    (noted,) = admin(server, "GET", f"groups/{group.name}")["subscriptions"]
    assert (noted["topic"], noted["mode"], noted["tags"]) == (group.topic, "ordered", ["red"])
    status, page = ask(server.url, "GET", f"/groups/{group.name}")
    assert (status, "Reset" in page, "Priorities" in page) == (200, True, False)
    assert ask(server.url, "GET", "/v1/admin/groups/none")[0] == 404
    metrics = ask(server.url, "GET", "/metrics")[1]
    assert f'notify_lag_messages{{group="{group.name}",topic="{group.topic}"}} 6.0' in metrics

    # The node is others', too: their groups may lag more than this one.
    eventually(lambda: any(g["oldest_seconds"] for g in overview(server)["lagging"]), "the age of an oldest message")
    assert overview(server)["lag"] >= 6
    assert overview(server)["lagging"][0]["name"] in cli("overview", "--url", server.url)[1]["text"]


def test_what_an_open_transaction_hides_is_lag(kafka_url: str, server: ServerProcess) -> None:
    """A group that got nothing more, because of another program's transaction, was shown without lag and raised no
    alarm."""
    group = Group(kafka_url)
    group.write(group.topic, 0, 3)
    group.commit(0, Progress(4))
    group.commit(1, Progress(0))
    hiding = open_transaction(kafka_url, f"other-{group.name}", group.topic, "k", "never", 0)
    group.write(group.topic, 0, 2)

    def queue() -> tuple[int, ...]:
        queues = admin(server, "GET", f"groups/{group.name}")["queues"]
        return next(((q["position"], q["next"], q["lag"]) for q in queues if q["queue"] == 0), ())

    try:
        eventually(lambda: queue() == (4, 8, 4), "what is hidden, and the marker behind it")
        assert admin(server, "GET", f"groups?prefix={group.name}")["groups"][0]["lag"] == 4
        metrics = ask(server.url, "GET", "/metrics")[1]
        assert f'notify_lag_messages{{group="{group.name}",topic="{group.topic}"}} 4.0' in metrics
        to_latest = {"topic": group.topic, "to": "latest", "dry_run": True}
        moved = admin(server, "POST", f"groups/{group.name}/reset", to_latest)
        assert {row["queue"]: row["to"] for row in moved["result"]["queues"]}[0] == 4, (
            "what commits later is not skipped"
        )
    finally:
        hiding.abort_transaction(PATIENCE_SECONDS)


def overview(server: ServerProcess) -> dict[str, Any]:
    return dict(admin(server, "GET", "overview")["queues"])


@pytest.mark.long
def test_pages_show_what_waits_and_link_to_what_is_there(kafka_url: str, server: ServerProcess) -> None:
    """Sixteen partitions of retries hid the others, and each dead letter was a link to a page that Kafka has not."""
    group = Group(kafka_url)
    retries = groups.retry_topic(group.name)
    group.write(retries, 4, 1)
    for partition in (3, 4):
        group.commit(partition, Progress(0), retries)
    group.commit(0, Progress(0))
    group.bury(0, 1)
    look_again(server)
    page = ask(server.url, "GET", f"/groups/{group.name}")[1]
    assert [f"{place}" in page for place in (f"{group.topic}/0", f"{retries}/4", f"{retries}/3")] == [True, True, False]
    page = ask(server.url, "GET", f"/groups/{group.name}/dead-letters")[1]
    assert ("ValueError: no" in page, "/messages/" in page) == (True, False)


def test_a_position_is_shown_while_a_consumers_transaction_is_open(kafka_url: str, server: ServerProcess) -> None:
    group = Group(kafka_url)
    group.write(group.topic, 0, 3)
    group.commit(0, Progress(1))
    consumer = group.cluster.consumer({"group.id": group.name})
    producer = group.cluster.producer({"transactional.id": group.name})
    producer.init_transactions(30)
    producer.begin_transaction()
    behind = [TopicPartition(group.topic, 0, 2)]
    producer.send_offsets_to_transaction(behind, consumer.consumer_group_metadata(), 30)
    try:
        queues = admin(server, "GET", f"groups/{group.name}")["queues"]
        assert [(q["queue"], q["position"]) for q in queues] == [(0, 1)]
    finally:
        producer.abort_transaction(30)
        consumer.close()


@pytest.mark.long
def test_topics_are_shown_with_their_groups(kafka_url: str, server: ServerProcess) -> None:
    group = Group(kafka_url)
    group.write(group.topic, 0, 3)
    group.commit(0, Progress(1))
    group.subscribe(Subscribed("ordered", 0))
    listed = admin(server, "GET", f"topics/{group.topic}")
    assert [(q["queue"], q["start"], q["end"]) for q in listed["queues"]] == [(0, 0, 4), (1, 0, 0)]
    assert listed["retention"] == 7 * 86_400
    assert admin(server, "GET", f"topics?prefix={group.topic}")["topics"] == [
        # which would take requests to the brokers, and the server sees no message
        listed | {"newest_at": None, "per_second": None, "latency": {"commit_to_queue": None}}
    ]
    of_topic = admin(server, "GET", f"topics/{group.topic}/groups")["groups"]
    assert of_topic == [{"group": group.name, "mode": "ordered", "lag": 3}]
    for page in (f"/topics?prefix={group.topic}", f"/topics/{group.topic}"):
        status, text = ask(server.url, "GET", page)
        assert (status, group.topic in text, "Delete" in text) == (200, True, False)
    assert group.topic in {t["name"] for t in cli("topic", "list", "--url", server.url, "--json")[1]["topics"]}
    assert ask(server.url, "GET", f"/v1/admin/topics/{groups.dead_letter_topic(group.name)}")[0] == 404


@pytest.mark.long
def test_a_group_is_paused_and_reset_through_the_control_topic(kafka_url: str, server: ServerProcess) -> None:
    group = Group(kafka_url)
    group.write(group.topic, 0, 6)
    group.commit(0, Progress(4))
    group.commit(1, Progress(0))

    def read() -> dict[bytes, bytes] | None:
        try:
            return newest(group.cluster, control.TOPIC)
        except Unavailable:  # the brokers of a loaded machine do not answer within the bound of one reading
            return None

    def wish() -> control.Control:
        wishes = eventually(read, "the brokers to give the topic of wishes")
        return control.Control.of(wishes.get(group.name.encode()))

    admin(server, "POST", f"groups/{group.name}/pause")
    assert wish().paused
    assert admin(server, "GET", f"groups/{group.name}")["paused"]
    dry = admin(server, "POST", f"groups/{group.name}/reset", {"topic": group.topic, "to": 1, "dry_run": True})
    rows = {row["queue"]: (row["from"], row["to"], row["again"], row["left_out"]) for row in dry["result"]["queues"]}
    assert rows == {0: (4, 1, 3, 0), 1: (0, 0, 0, 0)}
    assert not wish().resets
    for to in (1, "2026-01-01T00:00:00Z", "latest"):
        admin(server, "POST", f"groups/{group.name}/reset", {"topic": group.topic, "to": to})
    (reset,) = wish().resets  # the last one counts
    # A record that is no wish, such as another tool's, is in nobody's way.
    strange = group.cluster.producer({})
    strange.produce(control.TOPIC, b"no JSON", b"stranger", partition=0)
    strange.produce("notify-redriven", b"", b"no spot", partition=0)
    assert strange.flush(30) == 0
    assert (reset.topic, reset.to) == (group.topic, "latest")
    admin(server, "POST", f"groups/{group.name}/resume")
    assert not wish().paused
    assert wish().resets == (reset,)
    status, refused = ask(
        server.url, "POST", f"/v1/admin/groups/{group.name}/reset", {"reason": REASON, "topic": group.topic, "to": "x"}
    )
    assert (status, "instant or an offset" in refused["detail"]) == (422, True)


@pytest.mark.long
def test_sources_are_shown_as_bridges(kafka_url: str, server: ServerProcess) -> None:
    source = f"s{uuid.uuid4().hex[:8]}"

    async def publish() -> None:
        sink = KafkaSink(kafka_url)
        epoch, _ = await sink.claim(source)
        await sink.append(source, PackedBridgeBatch(epoch, "", "f:4"))
        await sink.close()

    asyncio.run(publish())
    # The server looks for topics every few seconds, and the bridge may be the first to make the one of positions.
    eventually(lambda: ask(server.url, "GET", f"/v1/admin/bridges/{source}")[0] == 200, "the source to be known")
    shown = admin(server, "GET", f"bridges/{source}")
    assert (shown["position"], shown["epoch"], shown["rows"]) == ("f:4", 1, None)
    assert f'notify_bridge_silent_seconds{{source="{source}"}}' in ask(server.url, "GET", "/metrics")[1]
    status, page = ask(server.url, "GET", "/nodes")
    assert (status, source in page) == (200, True)


@pytest.mark.long
def test_the_server_takes_no_messages_and_says_why(server: ServerProcess) -> None:
    status, refused = ask(server.url, "POST", "/v1/transactions", {"items": []})
    assert (status, refused["code"]) == (421, "wrong_role")
    assert "shows the consumer groups of Kafka" in refused["detail"]
    for method, path, body in (
        ("PUT", "topics/t", {}),
        ("DELETE", "topics/t", {}),
        ("POST", "topics/t/purge", {"before": "latest"}),
        ("PUT", "groups/g/subscriptions/t", {}),
        ("DELETE", "groups/g/subscriptions/t", {}),
        ("GET", "groups/g/priorities", {}),
        ("POST", "groups/g/redeliver", {"ids": ["x"]}),
        ("GET", "messages?topic=t", {}),
    ):
        status, refused = ask(
            server.url, method, f"/v1/admin/{path}", None if method == "GET" else {"reason": REASON} | body
        )
        assert (status, "queues are Kafka's" in refused["detail"]) == (421, True), (path, refused)
    for page in ("/", "/groups", "/topics", "/dead-letters", "/nodes", "/settings", "/jobs", "/actions", "/audits"):
        assert ask(server.url, "GET", page)[0] == 200, page


@pytest.mark.long
def test_a_server_whose_brokers_are_away_says_so(tmp_path: Path) -> None:
    (tmp_path / "notify.toml").write_text("alarm_every_seconds = 1\n")
    flags = ["--kafka", "kafka://127.0.0.1:9", "--config", str(tmp_path / "notify.toml")]
    server = ServerProcess(tmp_path / "data", flags=flags).start()
    try:
        assert ask(server.url, "GET", "/livez")[0] == 200
        status, refused = ask(server.url, "GET", "/v1/admin/groups")
        assert (status, "Kafka" in refused["detail"]) == (503, True)
        eventually(lambda: "kafka" in {alarm["name"] for alarm in alarms(server)}, "the alarm")
        status, overview = ask(server.url, "GET", "/v1/admin/overview")
        assert (status, overview["queues"], "Kafka" in overview["queues_away"]) == (200, None, True)
        for page in ("/", "/nodes"):
            status, text = ask(server.url, "GET", page)
            assert (status, "not shown" in text) == (200, True), page
        assert "not shown" in cli("overview", "--url", server.url)[1]["text"]
    finally:
        server.stop()


def alarms(server: ServerProcess) -> list[dict[str, Any]]:
    status, metrics = ask(server.url, "GET", "/metrics")
    assert status == 200
    return [{"name": "kafka"}] if 'notify_alarms{alarm="kafka"} 1.0' in metrics else []


@pytest.mark.long
def test_positions_without_a_record_keep_no_other_group_from_its_age(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oldest, "AT_ONCE", 1)
    make_topic(kafka_url, unique, partitions=2)
    produce(kafka_url, unique, ["first"], partition=1)
    at_a_marker, behind = (
        KafkaGroup(name, (Position(unique, partition, 0, 1, Progress(0)),), ())
        for partition, name in enumerate(("at-a-marker", "behind"))
    )
    ages = oldest.Oldest(Brokers(Cluster.of(kafka_url)))
    eventually(lambda: list(ages.of([at_a_marker, behind])) == ["behind"], "the age of the other group's message")
    ages.close()
