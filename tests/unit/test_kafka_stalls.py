"""Consumers over Kafka whose partitions stand still."""

from __future__ import annotations

from notify.kafka.groups import owner_topic, retry_topic
from notify.kafka.progress import Progress
from notify.server.groups.kafka.latest_snapshot import STALLED_SECONDS, Stuck
from notify.server.groups.kafka.snapshot import KafkaGroup, Member, Position

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
