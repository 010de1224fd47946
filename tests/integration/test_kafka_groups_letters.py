"""Dead letters of consumer groups in Kafka, as a server lists them, sends them again, drops and purges them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from notify.client import Consumer as NotifyConsumer
from notify.client import DeadLetter, ReceivedMessage
from notify.server.letters.letters import Letters
from notify.server.letters.query import Chosen, JobSpec, LetterQuery
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import running
from tests.support.http import REASON, ask, call

pytest.importorskip("confluent_kafka")

from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]

from notify.errors import Unavailable
from notify.kafka import groups, records
from notify.kafka.cluster import Cluster
from notify.kafka.progress import Progress
from notify.kafka.redriven import TOPIC
from notify.server.groups.kafka import dead_letters, letters
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.dead_letters import KafkaLetters
from notify.server.groups.kafka.latest_snapshot import LatestSnapshot
from notify.server.groups.kafka.redriven import Redriven
from notify.server.groups.kafka.thread import BrokersThread
from tests.support.delayed import interrupt_producers
from tests.support.kafka import open_transaction
from tests.support.kafka_consumers import CALL_SECONDS, make_topic
from tests.support.kafka_groups import Group, admin, committed, showing


@pytest.fixture(scope="module")
def server(kafka_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with showing(kafka_url, tmp_path_factory.mktemp("shown")) as server:
        yield server


@pytest.mark.long
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
    # A page ends anywhere, and the next continues there.
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
    code, said = cli(
        "dead-letter", "redrive", group.name, "--max", "100", "--url", server.url, "--reason", "mended", "--json"
    )
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


@pytest.mark.long
def test_letters_are_sent_again_once_beside_the_redrive_of_another_group(kafka_url: str) -> None:
    """All groups note their redrives in one topic. A transaction of another group that was open there hid the notes
    behind it, and letters were sent a second time."""
    group, brokers = Group(kafka_url), Brokers(Cluster.of(kafka_url))
    group.bury(0, 3)
    waiting = eventually(lambda: list(letters.read(brokers, group.name, 2, 0)), "the letters")
    others: list[Any] = []
    here = threading.current_thread()

    def another() -> None:
        if threading.current_thread() is here:  # not by a producer that an earlier test left
            end()
            others.append(open_transaction(kafka_url, "notify-redrive-another", TOPIC, "another/0@0", "x", partition=0))

    end = interrupt_producers("begin_transaction", another)
    redriven = Redriven(brokers)
    try:
        assert redriven.send(group.name, waiting[:1]) == [201]
        assert len(others) == 1
        hasty = Redriven(brokers, seconds=0.5)
        for _ in range(2):
            with pytest.raises(Unavailable, match="try again"):
                hasty.send(group.name, waiting)
            with pytest.raises(Unavailable, match="try again"):
                hasty.drop(group.name, waiting, "no use")
    finally:
        end()
        for other in others:
            other.abort_transaction(CALL_SECONDS)
    assert Redriven(brokers).send(group.name, waiting) == [200, 201, 201]
    assert Redriven(brokers).drop(group.name, waiting, "no use") == [200, 200, 200]
    sent = committed(group, groups.retry_topic(group.name), 3)
    assert len({records.header(records.listed(record), records.ID) for record in sent}) == 3


def until_waiting(server: ServerProcess, group: Group, count: int) -> None:
    """Wait until so many dead letters of a group were not sent again: a look reads only a part of what is new."""

    def counted() -> int:
        rows = admin(server, "GET", f"dead-letters?prefix={group.name}")["groups"]
        return sum(row["count"] for row in rows)

    eventually(lambda: counted() == count, f"{count} dead letters to wait")


@pytest.mark.long
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
    assert "Drop the selected dead letters" in page and "dropped" in page and "drop the dead letter" in page
    assert '<input type="hidden" name="offset" value="0">' in page
    form = str(call(server.url, "GET", f"/do/dead-letters.drop?group={group.name}&ids={ids[3]}&offset=2"))
    assert '<input type="hidden" name="offset" value="2">' in form


@pytest.mark.long
def test_letters_of_a_topic_that_was_made_anew_wait_though_earlier_ones_were_sent(
    kafka_url: str, server: ServerProcess
) -> None:
    group = Group(kafka_url)
    group.bury(0, 3)
    until_waiting(server, group, 3)
    listed = admin(server, "GET", f"groups/{group.name}/dead-letters")["messages"]
    admin(server, "POST", f"groups/{group.name}/dead-letters/redrive", {"ids": [m["id"] for m in listed]})
    until_waiting(server, group, 0)
    client, topic = group.cluster.admin(), groups.dead_letter_topic(group.name)
    client.delete_topics([topic])[topic].result(CALL_SECONDS)
    eventually(lambda: topic not in client.list_topics().topics, "the topic to go")
    make_topic(kafka_url, topic)
    group.bury(0, 2)
    until_waiting(server, group, 2)
    newest = admin(server, "GET", f"groups/{group.name}/dead-letters")["messages"][0]
    admin(server, "POST", f"groups/{group.name}/dead-letters/redrive", {"ids": [newest["id"]]})
    until_waiting(server, group, 1)


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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("by", [pytest.param("ids", marks=pytest.mark.long), "job"])
def test_large_letters_are_sent_again_without_gathering_them(
    kafka_url: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redrive read all of them into memory, and sent them in one transaction."""
    monkeypatch.setattr(letters, "HELD_BYTES", 60_000)
    monkeypatch.setattr(dead_letters, "LOT_BYTES", 50_000)
    monkeypatch.setattr("notify.server.letters.letters.LOT_BYTES", 50_000)
    group = Group(kafka_url)
    topic = groups.dead_letter_topic(group.name)
    for partition in (0, 1):
        group.write(topic, partition, 30, topic=group.topic, text="x" * 10_000)
    lots: list[int] = []
    held: list[int] = []
    send, hold = Redriven.send, letters._Reading._hold

    def noted(self: Redriven, name: str, sent: Sequence[letters.KafkaLetter]) -> list[int]:
        lots.append(sum(letter.size for letter in sent))
        return send(self, name, sent)

    def counted(self: letters._Reading, letter: letters.KafkaLetter) -> None:
        hold(self, letter)
        held.append(sum(self._bytes.values()))

    monkeypatch.setattr(Redriven, "send", noted)
    monkeypatch.setattr(letters._Reading, "_hold", counted)
    monkeypatch.setattr(letters, "AT_ONCE", 2)

    async def redrive() -> list[dict[str, Any]]:
        thread = BrokersThread(group.cluster)
        look = LatestSnapshot(thread.brokers)
        engine = KafkaLetters(thread, look)
        own = Letters(engine, engine.counts)
        try:
            if by == "ids":
                change = await own.redrive(group.name, Chosen(None, LetterQuery(), 100))
                return list((await change.do())["items"])
            end = (await own.bounds(group.name)).end
            items: list[dict[str, Any]] = []
            offset = 0
            while (sent := await own.close_next(JobSpec(group.name, LetterQuery(), end), offset, 100)) is not None:
                items, offset = items + sent[0], sent[1]
            return items
        finally:
            await thread.close(engine.close_clients)
            look.close()

    items = asyncio.run(redrive())
    assert [item["status"] for item in items] == [201] * 60
    assert len(lots) >= 10 and max(lots) < 70_000
    assert max(held) < 110_000
    assert len(committed(group, groups.retry_topic(group.name), 60)) == 60
