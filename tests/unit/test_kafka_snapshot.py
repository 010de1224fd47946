"""Groups over Kafka while some partitions or groups have no leader: the others are shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from notify.kafka.groups import owner_topic, retry_topic
from notify.kafka.progress import Progress
from notify.server.groups.kafka.latest_snapshot import BLOCKED_SECONDS, STALLED_SECONDS, Stuck
from notify.server.groups.kafka.snapshot import KafkaGroup, Member, Position

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from notify.kafka.group_questions import progress_of_all
from notify.server.groups.kafka import snapshot
from notify.server.groups.kafka.answers import gathered

NO_LEADER, NO_COORDINATOR = KafkaError.LEADER_NOT_AVAILABLE, KafkaError.COORDINATOR_NOT_AVAILABLE


def answered(value: Any) -> Future[Any]:
    """A future with a value; a code is an error of the brokers."""
    future: Future[Any] = Future()
    if isinstance(value, int):
        future.set_exception(KafkaException(KafkaError(value)))
    else:
        future.set_result(value)
    return future


class Brokers:
    """Two groups, `a` in topic `t` and `b` in `u`; each topic has two partitions, of which 100 records are left."""

    def __init__(
        self, leaderless: Iterable[tuple[str, int]] = (), lost: Iterable[str] = (), unlisted: Iterable[str] = ()
    ) -> None:
        """`unlisted`: groups of a broker that does not answer who its groups are."""
        self._leaderless = set(leaderless)
        self._lost = set(lost)
        self._unlisted = set(unlisted)

    def list_topics(self, timeout: float) -> Any:
        names = ("t", "u", "dead-letter.a", "dead-letter.b")
        return SimpleNamespace(topics={name: SimpleNamespace(partitions=range(2)) for name in names})

    def list_consumer_groups(self, request_timeout: float) -> Any:
        listed = [SimpleNamespace(group_id=name) for name in ("a", "b", "others") if name not in self._unlisted]
        errors = [KafkaError(KafkaError._TIMED_OUT)] if self._unlisted else []
        return answered(SimpleNamespace(valid=listed, errors=errors))

    def list_consumer_group_offsets(
        self, asked: list[Any], require_stable: bool = True, request_timeout: float = 0.0
    ) -> Any:
        name = asked[0].group_id
        topic = {"a": "t", "b": "u", "others": "v"}[name]
        answer = SimpleNamespace(topic_partitions=[TopicPartition(topic, number, 40) for number in range(2)])
        return {name: answered(NO_COORDINATOR if name in self._lost else answer)}

    def list_offsets(self, asked: Mapping[TopicPartition, Any], **_: Any) -> Any:
        return {
            p: answered(NO_LEADER if (p.topic, p.partition) in self._leaderless else SimpleNamespace(offset=100))
            for p in asked
        }

    def describe_consumer_groups(self, names: list[str], request_timeout: float) -> Any:
        return {name: answered(NO_COORDINATOR if name in self._lost else SimpleNamespace(members=[])) for name in names}


def lags(taken: snapshot.Snapshot) -> dict[str, tuple[list[int], bool]]:
    return {name: ([p.progress.offset for p in g.positions], taken.is_whole(g)) for name, g in taken.groups.items()}


def test_all_is_told_or_the_brokers_are_asked_again() -> None:
    assert lags(snapshot.take(Brokers())) == {"a": ([40, 40], True), "b": ([40, 40], True)}  # type: ignore[arg-type]
    for brokers in (Brokers([("t", 1)]), Brokers(lost=["a"]), Brokers(unlisted=["a"])):
        with pytest.raises(KafkaException):
            snapshot.take(brokers)  # type: ignore[arg-type]


def test_a_partition_without_a_leader_hides_no_other_group() -> None:
    taken = snapshot.take(Brokers([("t", 1)]), in_part=True)  # type: ignore[arg-type]
    assert lags(taken) == {"a": ([40, 40], False), "b": ([40, 40], True)}


def test_a_group_without_a_coordinator_hides_no_other() -> None:
    taken = snapshot.take(Brokers(lost=["a"]), in_part=True)  # type: ignore[arg-type]
    assert lags(taken) == {"a": ([], False), "b": ([40, 40], True)}


def test_one_refusal_leaves_no_answer_behind() -> None:
    """A client that is given up takes the answers that are under way with it."""
    answers = gathered({"bad": answered(NO_LEADER), "good": answered("x")})
    assert answers["good"] == "x"
    assert isinstance(answers["bad"], KafkaError)


def test_a_group_of_a_broker_that_lists_none_is_shown_and_not_as_whole() -> None:
    """It was gone, with its lag and its dead letters, as if it had been deleted."""
    taken = snapshot.take(Brokers(unlisted=["a"]), in_part=True)  # type: ignore[arg-type]
    assert lags(taken) == {"a": ([40, 40], False), "b": ([40, 40], True)}


def test_an_audit_does_not_take_a_broker_that_lists_no_groups_for_one_without_groups() -> None:
    """It judged the messages as if nobody had subscribed to them."""
    assert progress_of_all(Brokers()).keys() == {"a", "b", "others"}  # type: ignore[arg-type]
    with pytest.raises(KafkaException):
        progress_of_all(Brokers(unlisted=["a"]))  # type: ignore[arg-type]


# --- consumers over Kafka whose partitions stand still --------------------------------------------------------------

A, B = Member("a", "h", (("t", 0),)), Member("b", "h", (("t", 1), (retry_topic("g"), 3)))


def group(at: int, *, done: int = 0, failed: int = 0, members: tuple[Member, ...] = (A, B)) -> KafkaGroup:
    """A group with messages in two partitions: it stands at `at` in the first, and has moved on in the second."""
    progress = Progress(at, frozenset(range(at + 1, at + 1 + done)), {at: failed} if failed else {})
    retries = Position(retry_topic("g"), 3, 0, 9, Progress(1))
    return KafkaGroup(
        "g", (Position("t", 0, 0, 100, progress), Position("t", 1, 0, 100, Progress(100)), retries), members
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def states(*looks: KafkaGroup, paused: frozenset[str] = frozenset()) -> list[str]:
    """The members' states after these looks, a little more than the bound apart."""
    clock = Clock()
    stalls = Stuck(clock)
    for look in looks:
        clock.now += STALLED_SECONDS + 1
        stalls.look([look], paused)
    return [stalls.state(looks[-1], member) for member in looks[-1].members]


def test_a_consumer_whose_partition_stands_still_is_stuck() -> None:
    assert states(group(5), group(5)) == ["stuck", "ok"]
    assert states(group(5)) == ["ok", "ok"]
    assert states(group(5), group(6)) == ["ok", "ok"]
    assert states(group(5), group(5, done=1)) == ["ok", "ok"]


def test_one_that_waits_or_is_paused_is_not() -> None:
    assert states(group(100), group(100)) == ["ok", "ok"]
    assert states(group(5, failed=2), group(5, failed=2)) == ["ok", "ok"]  # its next attempt is due later
    assert states(group(5), group(5), paused=frozenset("g")) == ["ok", "ok"]


def test_an_owner_reads_all_partitions() -> None:
    owner, standby = Member("a", "h", ((owner_topic("g"), 0),)), Member("b", "h", ())
    assert states(group(5, members=(owner, standby)), group(5, members=(owner, standby))) == ["stuck", "ok"]


def test_a_group_is_blocked_by_a_transaction_that_stays_open_and_not_stuck() -> None:
    """It was shown without lag, and without an alarm."""
    clock = Clock()
    stalls = Stuck(clock)

    def look(offset: int, hidden: int) -> list[str]:
        shown = KafkaGroup("g", (Position("t", 0, 0, 100, Progress(offset), hidden),), (A,))
        assert shown.lag == 100 - offset + hidden
        clock.now += BLOCKED_SECONDS / 2 + 1
        stalls.look([shown], frozenset())
        assert offset < 100 or stalls.state(shown, A) == "ok"
        return stalls.blocked(shown)

    assert (look(100, 7), look(100, 7), look(100, 8)) == ([], [], ["t/0"])
    assert (look(100, 0), look(100, 7)) == ([], []), "another transaction"
    assert (look(90, 7), look(90, 7), look(90, 7)) == ([], [], []), "it has messages to handle"
