"""A server that shows and steers the consumer groups of a Kafka cluster."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from notify.client import Consumer as NotifyConsumer
from notify.client import DeadLetter, ReceivedMessage
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import running
from tests.support.http import REASON, ask, call

pytest.importorskip("confluent_kafka")

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import NewPartitions, NewTopic  # type: ignore[attr-defined]

from notify.kafka import control, groups, records
from notify.kafka.cluster import Cluster
from notify.kafka.compacted import newest
from notify.kafka.progress import Progress
from notify.kafka.subscriptions import Place, Subscribed, Subscriptions
from notify.server.groups import Chosen
from notify.server.groups.kafka import dead_letters, letters
from notify.server.groups.kafka.dead_letters import KafkaLetters
from notify.server.groups.kafka.look import Look
from notify.server.groups.kafka.redriven import Redriven
from notify.server.groups.kafka.thread import BrokersThread
from notify.server.jobs.redrive import RedriveSpec, Wanted
from notify.sinks.kafka import KafkaSink
from notify.wire import PackedBridgeBatch


@pytest.fixture(scope="module")
def server(kafka_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    running = ServerProcess(tmp_path_factory.mktemp("shown"), flags=["--kafka", kafka_url]).start()
    yield running
    running.stop()


class Group:
    """A group as Notify's consumers leave it in Kafka: topics, records and committed progress."""

    def __init__(self, kafka_url: str, partitions: int = 2) -> None:
        self.name = f"g{uuid.uuid4().hex[:8]}"
        self.topic = f"t{self.name}"
        self.cluster = Cluster.of(kafka_url)
        wanted = {
            self.topic: partitions,
            groups.retry_topic(self.name): groups.RETRY_PARTITIONS,
            groups.dead_letter_topic(self.name): partitions,
        }
        client = self.cluster.admin()
        made = client.create_topics([NewTopic(name, num_partitions=count) for name, count in wanted.items()])
        for done in made.values():
            done.result(30)

    def write(self, to: str, partition: int, count: int, **headers: str) -> None:
        """Write records in a transaction of their own, as bridges and consumers do."""
        producer = self.cluster.producer({"transactional.id": self.name})
        producer.init_transactions(30)
        producer.begin_transaction()
        for number in range(count):
            own: records.Headers = [(records.ID, f"{uuid.uuid4()}.{number}".encode())]
            own += [(f"notify-{name}", value.encode()) for name, value in headers.items()]
            producer.produce(to, f'{{"n": {number}}}'.encode(), b"k", partition=partition, headers=own)
        producer.commit_transaction(30)

    def commit(self, partition: int, progress: Progress, topic: str = "") -> None:
        consumer = self.cluster.consumer({"group.id": self.name})
        at = TopicPartition(topic or self.topic, partition, progress.offset, progress.metadata())
        consumer.commit(offsets=[at], asynchronous=False)
        consumer.close()

    def subscribe(self, subscribed: Subscribed) -> None:
        Subscriptions(self.cluster, self.name).note({Place(self.topic, 0): subscribed}, begins=True)

    def bury(self, partition: int, count: int) -> None:
        """Write dead letters."""
        letters = groups.dead_letter_topic(self.name)
        self.write(letters, partition, count, topic=self.topic, reason="ValueError: no", attempt="16", expires="1")


def admin(server: ServerProcess, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    sent = body if method == "GET" else {"reason": REASON} | (body or {})
    status, answer = ask(server.url, method, f"/v1/admin/{path}", sent)
    assert status == 200, answer
    return dict(answer)


def test_a_group_is_shown_with_its_lag(kafka_url: str, server: ServerProcess) -> None:
    group = Group(kafka_url)
    group.write(group.topic, 0, 10)
    group.write(group.topic, 1, 5)
    group.commit(0, Progress(4, frozenset((6, 7)), {4: 2}))
    group.commit(1, Progress(5))

    def row() -> dict[str, Any]:
        return next((g for g in admin(server, "GET", f"groups?prefix={group.name}")["groups"]), {})

    eventually(lambda: row().get("lag") == 6, "four of the six records from the position on to wait, and two commits")
    assert row() == {"name": group.name, "lag": 6, "leased": None, "paused": False, "consumers": 0}
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


def overview(server: ServerProcess) -> dict[str, Any]:
    return dict(admin(server, "GET", "overview")["queues"])


def test_pages_show_what_waits_and_link_to_what_is_there(kafka_url: str, server: ServerProcess) -> None:
    """Sixteen partitions of retries hid the others, and each dead letter was a link to a page that Kafka has not."""
    group = Group(kafka_url)
    retries = groups.retry_topic(group.name)
    group.write(retries, 4, 1)
    for partition in (3, 4):
        group.commit(partition, Progress(0), retries)
    group.commit(0, Progress(0))
    group.bury(0, 1)
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


def test_topics_are_shown_with_their_groups(kafka_url: str, server: ServerProcess) -> None:
    group = Group(kafka_url)
    group.write(group.topic, 0, 3)
    group.commit(0, Progress(1))
    group.subscribe(Subscribed("ordered", 0))
    listed = admin(server, "GET", f"topics/{group.topic}")
    assert [(q["queue"], q["start"], q["end"]) for q in listed["queues"]] == [(0, 0, 4), (1, 0, 0)]
    assert listed["retention"] == 7 * 86_400
    assert admin(server, "GET", f"topics?prefix={group.topic}")["topics"] == [
        listed | {"newest_at": None, "per_second": None}  # which would take requests to the brokers
    ]
    of_topic = admin(server, "GET", f"topics/{group.topic}/groups")["groups"]
    assert of_topic == [{"group": group.name, "mode": "ordered", "lag": 3}]
    for page in (f"/topics?prefix={group.topic}", f"/topics/{group.topic}"):
        status, text = ask(server.url, "GET", page)
        assert (status, group.topic in text, "Delete" in text) == (200, True, False)
    assert group.topic in {t["name"] for t in cli("topic", "list", "--url", server.url, "--json")[1]["topics"]}
    assert ask(server.url, "GET", f"/v1/admin/topics/{groups.dead_letter_topic(group.name)}")[0] == 404


def test_dead_letters_are_listed_and_sent_again_once(kafka_url: str, server: ServerProcess) -> None:
    group = Group(kafka_url)
    group.bury(0, 3)
    group.bury(1, 2)
    group.commit(0, Progress(0))
    path = f"groups/{group.name}/dead-letters"
    listed = admin(server, "GET", path)["messages"]
    assert len(listed) == 5
    assert {m["headers"]["notify-dead-letter-reason"] for m in listed} == {"ValueError: no"}
    assert {m["topic"] for m in listed} == {group.topic}
    assert [m["offset"] for m in listed] == sorted(m["offset"] for m in listed)
    # A page ends anywhere, and the next goes on there.
    first = admin(server, "GET", f"{path}?max=2")
    rest = admin(server, "GET", f"{path}?offset={first['next_offset']}")["messages"]
    assert [m["id"] for m in first["messages"] + rest] == [m["id"] for m in listed]
    assert admin(server, "GET", f"{path}?contains=KeyError")["messages"] == []
    until_waiting(server, group, 5)
    (failure,) = admin(server, "GET", f"{path}/failures")["failures"]
    assert (failure["type"], failure["open"], failure["topics"]) == ("ValueError", 5, [group.topic])
    of_failure = admin(server, "GET", f"{path}?failure={failure['fingerprint']}")["messages"]
    assert [m["id"] for m in of_failure] == [m["id"] for m in listed]
    newest = admin(server, "GET", f"{path}?newest=true&max=3")
    before = admin(server, "GET", f"{path}?newest=true&before={newest['next_before']}")
    assert [m["id"] for m in newest["messages"] + before["messages"]] == [m["id"] for m in reversed(listed)]
    assert before["next_before"] == 0
    figures = admin(server, "GET", f"groups/{group.name}/history")
    assert figures["settled"] == [None] and len(figures["lag"]) == 1

    chosen = listed[1]["id"]
    assert admin(server, "POST", f"{path}/redrive", {"ids": [chosen], "dry_run": True})["result"]["ids"] == [chosen]
    sent = admin(server, "POST", f"{path}/redrive", {"ids": [chosen, "none"]})["result"]["items"]
    assert [(item["id"], item["status"]) for item in sent] == [(chosen, 201), ("none", 404)]
    again = admin(server, "POST", f"{path}/redrive", {"ids": [chosen]})["result"]["items"]
    assert [item["status"] for item in again] == [200]
    assert [m["id"] for m in admin(server, "GET", path)["messages"] if m["redriven"]] == [chosen]
    code, said = cli("dead-letter", "redrive", group.name, "--url", server.url, "--reason", "mended", "--json")
    assert code == 0, said

    until_waiting(server, group, 0)
    failures = admin(server, "GET", f"{path}/failures")
    assert (failures["failures"][0]["open"], failures["looked_at"], failures["of"]) == (0, 5, 5)

    redriven = committed(group, groups.retry_topic(group.name), 5)
    assert sorted(records.header(records.listed(r), records.ID) or "" for r in redriven) == sorted(
        m["id"] for m in listed
    )
    for record in redriven:
        headers = dict(records.listed(record))
        assert headers[records.ATTEMPT] == b"1"
        assert headers[records.TARGET] == group.topic.encode()
        assert not {records.REASON, records.EXPIRES} & headers.keys()


def until_waiting(server: ServerProcess, group: Group, count: int) -> None:
    """Wait until so many dead letters of a group were not sent again: a look reads only a part of what is new."""

    def counted() -> int:
        rows = admin(server, "GET", f"dead-letters?prefix={group.name}")["groups"]
        return sum(row["count"] for row in rows)

    eventually(lambda: counted() == count, f"{count} dead letters to wait")


def test_letters_that_are_dropped_are_never_sent_again(kafka_url: str, server: ServerProcess) -> None:
    group = Group(kafka_url)
    group.bury(0, 3)
    group.bury(1, 2)
    path = f"groups/{group.name}/dead-letters"
    ids = [m["id"] for m in admin(server, "GET", path)["messages"]]
    assert admin(server, "POST", f"{path}/drop", {"ids": ids[:2], "dry_run": True})["result"]["ids"] == ids[:2]
    for statuses in ([204, 204, 404], [200, 200, 404]):
        items = admin(server, "POST", f"{path}/drop", {"ids": [*ids[:2], "none"]})["result"]["items"]
        assert [item["status"] for item in items] == statuses
    sent = admin(server, "POST", f"{path}/redrive", {"ids": ids[1:3]})["result"]["items"]
    assert [(item["status"], item.get("code")) for item in sent] == [(410, "dropped"), (201, None)]
    shown = {m["id"]: (m["redriven"], m["dropped"]) for m in admin(server, "GET", path)["messages"]}
    assert [shown[name] for name in ids[:3]] == [(False, True), (False, True), (True, False)]
    until_waiting(server, group, 2)
    # The others are dropped by a job: what was sent before stays sent.
    code, job = cli("dead-letter", "drop", group.name, "--contains", "ValueError", "--url", server.url,
                    "--reason", "test orders", "--json")  # fmt: skip
    assert (code, sorted(item["status"] for item in job["items"])) == (0, [200, 200, 200, 204, 204])
    until_waiting(server, group, 0)
    assert len(committed(group, groups.retry_topic(group.name), 1)) == 1
    page = str(call(server.url, "GET", f"/groups/{group.name}/dead-letters"))
    assert "Drop the chosen" in page and "dropped" in page and "drop the letter" in page


@pytest.mark.long
def test_all_letters_are_sent_again_as_a_job_and_purged(kafka_url: str, server: ServerProcess) -> None:
    group = Group(kafka_url)
    group.bury(0, 4)
    group.bury(1, 3)
    path = f"groups/{group.name}/dead-letters"
    wanted = {"all": True, "wanted": {"contains": "ValueError"}}
    dry = admin(server, "POST", f"{path}/redrive", wanted | {"dry_run": True})
    assert dry["result"]["at_most"] >= 7
    why = ("--url", server.url, "--reason", "mended", "--json")
    code, said = cli("dead-letter", "redrive", group.name, "--all", *why)
    assert (code, said["done"]) == (0, 7), said
    until_waiting(server, group, 0)
    code, said = cli("dead-letter", "redrive", group.name, "--all", *why)  # each is sent once
    assert (code, said["failed"]) == (0, 0), said
    assert len(committed(group, groups.retry_topic(group.name), 7)) == 7

    group.bury(0, 2)
    until_waiting(server, group, 2)
    assert f'notify_dead_letters{{group="{group.name}"}} 2.0' in ask(server.url, "GET", "/metrics")[1]
    for page in (f"/groups/{group.name}/dead-letters", f"/do/dead-letters.redrive-all?group={group.name}"):
        status, text = ask(server.url, "GET", page)
        assert (status, group.name in text) == (200, True), page
    status, refused = ask(server.url, "POST", f"/v1/admin/{path}/purge", {"reason": REASON, "before": 3})
    assert (status, "partitions" in refused["detail"]) == (422, True)
    assert cli("dead-letter", "purge", group.name, "--before", "2026-01-01T00:00:00Z", *why)[0] == 0
    assert len(admin(server, "GET", path)["messages"]) == 9
    code, said = cli("dead-letter", "purge", group.name, "--before", "latest", *why)
    assert (code, said["result"]["missed"]) == (0, {}), said
    assert admin(server, "GET", path)["messages"] == []
    until_waiting(server, group, 0)
    group.bury(1, 1)
    until_waiting(server, group, 1)
    # More partitions leave the letters of the first ones what they are.
    client = group.cluster.admin()  # without it the call ends, too
    more = client.create_partitions([NewPartitions(groups.dead_letter_topic(group.name), 3)])
    more[groups.dead_letter_topic(group.name)].result(30)
    items = admin(server, "POST", f"{path}/redrive", {})["result"]["items"]
    assert [item["status"] for item in items] == [201]
    again = admin(server, "POST", f"{path}/redrive", {"ids": [items[0]["id"]]})["result"]["items"]
    assert [item["status"] for item in again] == [200]
    done = admin(server, "GET", f"actions?target={group.name}")["actions"]
    assert [a["what"] for a in done][2:] == ["dead_letter.purge"] * 2 + ["dead_letter.redrive"] * 2


@pytest.mark.parametrize("mode", ["shared", pytest.param("ordered", marks=pytest.mark.long), "failover"])
def test_a_letter_that_is_sent_again_reaches_its_group(kafka_url: str, server: ServerProcess, mode: str) -> None:
    group = Group(kafka_url)
    group.write(group.topic, 0, 3)
    handled: list[str] = []
    refused: list[str] = []
    consumer = NotifyConsumer(kafka_url, group=group.name, instance="i")

    @consumer.subscribe(group.topic, mode=mode, start="earliest")
    def handle(message: ReceivedMessage) -> None:
        if not refused:
            refused.append(message.id)
            raise DeadLetter("not now")
        handled.append(message.id)

    with running(consumer):
        path = f"groups/{group.name}/dead-letters"

        def letters() -> list[str]:
            status, answer = ask(server.url, "GET", f"/v1/admin/{path}")
            return [letter["id"] for letter in answer["messages"]] if status == 200 else []

        def consumers() -> int:
            status, answer = ask(server.url, "GET", f"/v1/admin/groups?prefix={group.name}")
            return sum(g["consumers"] for g in answer["groups"]) if status == 200 else 0

        eventually(lambda: consumers() == 1, "the group's consumer, an owner too, to be shown")
        eventually(lambda: letters() == refused != [], "the dead letter")
        admin(server, "POST", f"{path}/redrive", {"ids": refused})
        eventually(lambda: refused[0] in handled, "the letter to be handled")
    assert len(handled) == 3


def committed(group: Group, topic: str, count: int) -> list[Any]:
    """The first records of a topic's partition 0, as a reader of committed records sees them."""
    consumer: Consumer = group.cluster.consumer({"group.id": "reader"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    read: list[Any] = []

    def is_there() -> bool:
        read.extend(record for record in consumer.consume(100, 0.5) if record.error() is None)
        return len(read) >= count

    eventually(is_there, f"{count} records of {topic}")
    consumer.close()
    assert len(read) == count
    return read


def test_a_group_is_paused_and_reset_through_the_control_topic(kafka_url: str, server: ServerProcess) -> None:
    group = Group(kafka_url)
    group.write(group.topic, 0, 6)
    group.commit(0, Progress(4))
    group.commit(1, Progress(0))

    def wish() -> control.Control:
        return control.Control.of(newest(group.cluster, control.TOPIC).get(group.name.encode()))

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


@pytest.mark.parametrize("by", [pytest.param("ids", marks=pytest.mark.long), "job"])
def test_large_letters_are_sent_again_without_gathering_them(
    kafka_url: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redrive read all of them into memory, and sent them in one transaction."""
    monkeypatch.setattr(letters, "HELD_BYTES", 60_000)
    monkeypatch.setattr(dead_letters, "LOT_BYTES", 50_000)
    group = Group(kafka_url)
    topic = groups.dead_letter_topic(group.name)
    for partition in (0, 1):
        group.write(topic, partition, 30, topic=group.topic, text="x" * 10_000)
    lots: list[int] = []
    held: list[int] = []
    send, hold = Redriven.send, letters._Reading._hold

    def noted(self: Redriven, name: str, sent: Sequence[letters.Letter]) -> list[int]:
        lots.append(sum(letter.size for letter in sent))
        return send(self, name, sent)

    def counted(self: letters._Reading, letter: letters.Letter) -> None:
        hold(self, letter)
        held.append(sum(self._bytes.values()))

    monkeypatch.setattr(Redriven, "send", noted)
    monkeypatch.setattr(letters._Reading, "_hold", counted)
    monkeypatch.setattr(letters, "AT_ONCE", 2)

    async def redrive() -> list[dict[str, Any]]:
        thread = BrokersThread(group.cluster)
        look = Look(thread.brokers)
        own = KafkaLetters(thread, look)
        try:
            if by == "ids":
                change = await own.redrive(group.name, Chosen(None, Wanted(), 100))
                return list((await change.do())["items"])
            _, end, _ = await own.bounds(group.name)
            items: list[dict[str, Any]] = []
            offset = 0
            while (sent := await own.send_next(RedriveSpec(group.name, Wanted(), end), offset, 100)) is not None:
                items, offset = items + sent[0], sent[1]
            return items
        finally:
            await thread.close(own.close)
            look.close()

    items = asyncio.run(redrive())
    assert [item["status"] for item in items] == [201] * 60
    assert len(lots) >= 10 and max(lots) < 70_000
    assert max(held) < 110_000
    assert len(committed(group, groups.retry_topic(group.name), 60)) == 60
