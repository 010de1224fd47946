"""Refused messages over Kafka: delayed ones that their topics did not take when they were due, and movers' reports."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notify.errors import InvalidRequest
from notify.kafka.records import ID
from notify.protocol.wire import RefusedReport, RefusedTransaction
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.http import ask
from tests.support.kafka import committed

pytest.importorskip("confluent_kafka")

from notify.kafka.cluster import Cluster
from notify.kafka.transactional import TransactionalProducer
from notify.kafka.undelivered import DECISIONS, SOURCE, TOPIC, UndeliveredList
from notify.movers.sinks.kafka import KafkaSink
from notify.server.groups.kafka import sources as over_kafka
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.sources import RefusedOverKafka
from tests.support.delayed import refuse
from tests.support.kafka_consumers import CALL_SECONDS, admin_of


@pytest.fixture
def server(kafka_url: str, tmp_path: Path) -> Iterator[ServerProcess]:
    (tmp_path / "notify.toml").write_text("alarm_every_seconds = 1\n")
    flags = ["--kafka", kafka_url, "--config", str(tmp_path / "notify.toml")]
    running = ServerProcess(tmp_path / "data", flags=flags).start()
    yield running
    running.stop()


def refused(server: ServerProcess, source: str) -> dict[str, Any]:
    status, answer = ask(server.url, "GET", "/v1/admin/refused")
    return next((row for row in answer["sources"] if row["source"] == source), {}) if status == 200 else {}


@pytest.mark.long
def test_delayed_messages_that_were_refused_are_shown_sent_and_dropped(
    kafka_url: str, server: ServerProcess, unique: str
) -> None:
    cli("refused", "drop", "--all", "--dsn", kafka_url, "--reason", "another test's")
    ids = [f"{unique}-{n}" for n in range(4)]
    own = f"notify-{unique}"  # no message has such a topic
    refuse(kafka_url, (ids[0], unique), (ids[1], unique), (ids[2], own), (ids[3], unique))
    eventually(lambda: refused(server, SOURCE).get("waiting") == 4, "the server to show them")
    line = refused(server, SOURCE)["transactions"][0]
    assert line == {"id": ids[0], "topic": unique, "code": "refused", "detail": "Message size too large"}
    page = ask(server.url, "GET", "/nodes")[1]
    assert ids[0] in page and "notify refused list" in page

    def metrics() -> str:
        return str(ask(server.url, "GET", "/metrics")[1])

    assert f'notify_refused_transactions{{source="{SOURCE}"}} 4.0' in metrics()
    eventually(lambda: 'notify_alarms{alarm="refused"} 1.0' in metrics(), "the alarm")

    why = ("--dsn", kafka_url, "--reason", "the topic takes more now", "--json")
    code, said = cli("refused", "list", "--dsn", kafka_url, "--json")
    assert (code, said["waiting"], [m["id"] for m in said["refused"]][-4:]) == (1, 4, ids)
    code, said = cli("refused", "retry", "--id", ids[0], "--dry-run", *why)
    assert (code, [m["id"] for m in said["messages"]]) == (0, ids[:1])
    code, said = cli("refused", "retry", "--id", ids[0], *why)
    assert (code, [m["status"] for m in said["messages"]]) == (0, [200]), said
    code, said = cli("refused", "retry", "--id", ids[0], *why)
    assert (code, said["messages"], said["not_on_the_list"]) == (1, [], ids[:1])  # each is sent once
    code, said = cli("refused", "drop", "--id", ids[1], *why)
    assert code == 0, said
    code, said = cli("refused", "retry", "--all", *why)  # one of them is refused again, and holds up no other
    assert (code, {m["id"]: m["status"] for m in said["messages"]}) == (1, {ids[2]: 422, ids[3]: 200}), said

    sent = committed(kafka_url, unique, 2)
    assert sorted(r.value().decode() for r in sent) == [ids[0], ids[3]]
    assert {tuple(r.headers()) for r in sent if r.value().decode() == ids[0]} == {
        ((ID, ids[0].encode()), ("colour", b"red"))
    }
    eventually(lambda: refused(server, SOURCE).get("waiting") == 1, "the server to know the decisions")
    assert cli("refused", "drop", "--all", *why)[0] == 0
    code, said = cli("refused", "list", "--dsn", kafka_url, "--json")
    states = {m["id"]: m["state"] for m in said["refused"]}
    assert (code, said["waiting"]) == (0, 0)
    assert {name: states[name] for name in ids} == dict(zip(ids, ("SENT", "DROPPED", "DROPPED", "SENT"), strict=True))
    eventually(lambda: 'notify_alarms{alarm="refused"} 0.0' in metrics(), "the alarm to be cleared")


@pytest.mark.long
def test_two_people_who_retry_send_a_message_once(kafka_url: str, unique: str) -> None:
    refuse(kafka_url, (unique, unique))
    cluster = Cluster.of(kafka_url)
    first, second = UndeliveredList(cluster), UndeliveredList(cluster)
    assert [item["status"] for item in first.retry([unique], "one")] == [200]
    assert second.retry([unique], "two") == []
    assert len(committed(kafka_url, unique, 1)) == 1
    assert committed(kafka_url, DECISIONS.topic)


@pytest.mark.long
def test_a_producer_that_is_replaced_sends_nothing_that_was_decided_in_between(kafka_url: str, unique: str) -> None:
    """Its decisions were those that it had read before another person's."""
    refuse(kafka_url, *[(f"{unique}-{n}", unique) for n in range(2)])
    cluster = Cluster.of(kafka_url)
    other = UndeliveredList(cluster)

    class Replaced(UndeliveredList):
        """The list, in which another person sends what is left once this one's producer is spent."""

        def _producer(self) -> TransactionalProducer:
            producer = super()._producer()
            commit = producer.commit_transaction

            def then_spent(seconds: float) -> None:
                commit(seconds)
                producer.is_spent = True
                other.retry([f"{unique}-1"], "two")

            producer.commit_transaction = then_spent  # type: ignore[method-assign]
            return producer

    ids = [f"{unique}-{n}" for n in range(2)]
    assert [item["id"] for item in Replaced(cluster).retry(ids, "one")] == ids[:1]
    assert sorted(record.value().decode() for record in committed(kafka_url, unique, 2)) == ids


@pytest.mark.long
def test_a_decision_is_about_a_message_and_not_about_its_offset(kafka_url: str, unique: str) -> None:
    """Whatever came to a list that was recreated counted as decided where another message had had its offset."""
    cluster = Cluster.of(kafka_url)
    waiting = UndeliveredList(cluster)
    refuse(kafka_url, (f"{unique}-1", unique), (f"{unique}-2", unique))
    waiting.drop(None, "no use")
    admin = admin_of(kafka_url)
    admin.delete_topics([TOPIC])[TOPIC].result(CALL_SECONDS)
    eventually(lambda: TOPIC not in admin.list_topics().topics, "the list to go")
    refuse(kafka_url, (f"{unique}-3", unique))
    decided = waiting.decisions()
    assert [(m.id, decided.of(m)) for m in waiting.read()] == [(f"{unique}-3", None)]
    shown = RefusedOverKafka(Brokers(cluster))
    assert [t.id for t in shown.read()[SOURCE][0].transactions] == [f"{unique}-3"]
    assert [item["status"] for item in waiting.drop(None, "no use either")] == [200]
    # A commit returns before the broker has marked its records as committed: they are read a moment later.
    eventually(lambda: shown.read()[SOURCE][0].waiting == 0, "the decision to be read")
    shown.close()


@pytest.mark.long
def test_messages_beyond_those_that_are_counted_count_once_others_are_decided(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_kafka, "MOST_HELD", 2)
    waiting = UndeliveredList(Cluster.of(kafka_url))
    waiting.drop(None, "of an earlier test")
    refuse(kafka_url, *[(f"{unique}-{n}", unique) for n in range(3)])
    shown = RefusedOverKafka(Brokers(Cluster.of(kafka_url)))
    assert shown.read()[SOURCE][0].waiting == 2
    waiting.drop([f"{unique}-0", f"{unique}-1"], "no use")
    eventually(
        lambda: [t.id for t in shown.read()[SOURCE][0].transactions] == [f"{unique}-2"], "the third to be counted"
    )
    waiting.drop(None, "no use")
    eventually(lambda: shown.read()[SOURCE][0].waiting == 0, "the decision to be read")
    shown.close()


@pytest.mark.long
def test_a_movers_report_is_shown(kafka_url: str, server: ServerProcess, unique: str) -> None:
    async def tell(waiting: int) -> None:
        sink = KafkaSink(kafka_url)
        await sink.show_refused(unique, RefusedReport(waiting, [RefusedTransaction("id", "t", "too_large", "2 MB")]))
        await sink.close()

    asyncio.run(tell(3))
    eventually(lambda: refused(server, unique).get("waiting") == 3, "the report")
    assert refused(server, unique)["transactions"][0]["detail"] == "2 MB"
    asyncio.run(tell(0))
    eventually(lambda: refused(server, unique).get("waiting") == 0, "the end of it")


def test_the_list_says_what_it_does_not_take(kafka_url: str) -> None:
    for words in (("--state", "RETRY"), ("--after", "x")):
        code, said = cli("refused", "list", "--dsn", kafka_url, *words)
        assert (code, "over Kafka" in said["text"]) == (2, True), said
    with pytest.raises(InvalidRequest, match="brokers"):
        Cluster.of("kafka://")
