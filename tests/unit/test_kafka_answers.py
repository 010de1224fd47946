"""Answers of Kafka's brokers while nodes die: what is asked again, and what nobody takes their word for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("confluent_kafka")

from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException

from notify.client.kafka.refusals import is_final, refusal
from notify.client.kafka.starting import Starts
from notify.errors import InvalidRequest
from notify.kafka.brokers import translated
from notify.kafka.cluster import Cluster
from notify.kafka.progress import Progress
from notify.kafka.rights import of_bridge
from notify.kafka.topic_ids import TopicIds
from notify.server.groups.kafka import letters
from notify.server.groups.kafka.answers import AGAIN, gathered
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.compacted import CompactedTopics
from notify.server.groups.kafka.offsets import latest


def test_partitions_without_a_leader_are_asked_for_again() -> None:
    asked: list[int] = []

    def ask() -> str:
        asked.append(1)
        if len(asked) == 1:
            raise KafkaException(KafkaError(KafkaError._NOENT, "Failed to query partition leaders: No leaders found"))
        return "told"

    assert Brokers(Cluster.of("kafka://127.0.0.1:9")).insist(ask) == "told"


def test_fewer_answers_than_questions_are_an_answer_of_the_client() -> None:
    answer: Future[int] = Future()
    answer.set_exception(RuntimeError("Results length 1 is different from future-map length 2"))
    told = gathered({"x": answer})["x"]
    assert isinstance(told, KafkaError)
    assert told.code() in AGAIN


class Started:
    """Brokers one of which has just started: it knows no topic at its `unknowing` question, and then all."""

    def __init__(self, unknowing: int) -> None:
        self._unknowing = unknowing
        self.admin = self
        self.cluster = self

    def describe_topics(self, topics: Any, **_: Any) -> Mapping[str, Future[Any]]:
        unknown: Future[Any] = Future()
        unknown.set_exception(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
        return {"t": unknown}

    def list_offsets(self, asked: Mapping[Any, Any], **_: Any) -> Mapping[Any, Future[Any]]:
        self._unknowing -= 1
        answers: dict[Any, Future[Any]] = {partition: Future() for partition in asked}
        for future in answers.values():
            if self._unknowing == 0:
                future.set_exception(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
            else:
                future.set_result(SimpleNamespace(offset=0, leader_epoch=None))
        return answers


def letters_of(brokers: Any) -> Iterator[Any]:
    return letters.read(brokers, "g", 1)


def news_of(brokers: Any) -> Iterator[Any]:
    return CompactedTopics(brokers, pytest.fail).news(["t"], whole=True)


@pytest.mark.parametrize(("read", "unknowing"), [(letters_of, 1), (letters_of, 2), (news_of, 1)])
def test_a_topic_that_a_broker_does_not_know_yet_is_not_taken_for_empty(
    read: Callable[[Any], Iterator[Any]], unknowing: int
) -> None:
    with pytest.raises(KafkaException) as raised:
        list(read(Started(unknowing)))
    assert raised.value.args[0].code() in AGAIN
    assert list(read(Started(3))) == []


def list_offsets(asked: Mapping[Any, Any], **_: Any) -> dict[Any, Future[Any]]:
    """As a client answers that does not know the first partition's leader."""
    answers = {}
    for partition in asked:
        answers[partition] = Future[Any]()
        answers[partition].set_result(
            SimpleNamespace(offset=[OFFSET_INVALID, 3, 9][partition.partition], leader_epoch=None)
        )
    return answers


def test_a_server_takes_no_end_that_a_client_does_not_know() -> None:
    places = [("t", 0), ("t", 1)]
    client: Any = SimpleNamespace(list_offsets=list_offsets)
    unknown: set[str] = set()
    assert latest(client, places, unknown) == {("t", 1): 3}
    assert unknown == {"t"}
    with pytest.raises(KafkaException) as raised:
        latest(client, places)
    assert raised.value.args[0].code() in AGAIN


def test_an_end_that_a_client_does_not_know_is_not_before_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client said -1001 and no error while leaders changed: groups started over, with all that they had done."""
    places = [("t", 0), ("t", 1), ("t", 2)]
    cluster = Cluster.of("kafka://127.0.0.1:1")
    monkeypatch.setattr(Cluster, "admin", lambda self: SimpleNamespace(list_offsets=list_offsets))
    monkeypatch.setattr(Starts, "_with_leader", lambda self, asked: list(asked))
    starts = Starts(SimpleNamespace(group="g"), None, cluster, None, None, TopicIds(cluster))
    begins, ends = starts._bounds(places)
    assert starts._cut({place: Progress(5) for place in places}, begins, ends) == {("t", 1): "earliest"}
    with pytest.raises(KafkaException):
        starts._listed(dict.fromkeys(places, None))


@pytest.mark.parametrize(
    ("code", "setting"),
    [
        (KafkaError.OFFSET_METADATA_TOO_LARGE, "offset.metadata.max.bytes"),
        (KafkaError.INVALID_SESSION_TIMEOUT, "group.min.session.timeout.ms"),
        (KafkaError.INVALID_TRANSACTION_TIMEOUT, "transaction.max.timeout.ms"),
        (KafkaError.GROUP_MAX_SIZE_REACHED, "group.max.size"),
    ],
)
def test_a_setting_of_brokers_is_named_by_consumers_and_bridges(code: int, setting: str) -> None:
    """They said the client's words, as if the brokers were away, and asked again for ever."""
    cluster, error = Cluster.of("kafka://127.0.0.1:9"), KafkaError(code)
    assert is_final(error)
    for told in (refusal(error, cluster, "points"), translated(error, cluster, of_bridge())):
        assert isinstance(told, InvalidRequest) and told.code == "broker_setting" and setting in str(told)
