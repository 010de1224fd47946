"""Groups wherever the queue is, a queue server or Kafka: where they begin, how instances share, and how they are led.

What Kafka cannot do is in test_queues_refusals.py.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from notify.client import Consumer, DeadLetter, Message, ReceivedMessage
from notify.client.consumer import session
from notify.errors import Conflict
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import redrive, running
from tests.support.http import REASON, admin, ask
from tests.support.queues import LONG_OVER_KAFKA, Queue


def consumer_of(queue: Queue, group: str, topic: str, seen: list[str], **options: Any) -> Consumer:
    """A consumer that notes the texts of its messages."""
    consumer = Consumer(queue.url, group=group, instance=options.pop("instance", None), lease=options.pop("lease", 30))
    consumer.subscribe(topic, **options)(lambda message: seen.append(message.text))
    return consumer


def send(queue: Queue, topic: str, *texts: str) -> list[str]:
    """Send messages whose key is the first letter of their text; their ids."""
    return queue.sender.send(*(Message(topic, text, key=text[0]) for text in texts))


# --- where a group begins -------------------------------------------------------------------------------------


@LONG_OVER_KAFKA
def test_a_group_begins_where_it_says(queue: Queue, unique: str) -> None:
    queue.make_topic(unique)
    send(queue, unique, "a1", "a2", "a3")
    later = time.time() + 0.05
    eventually(lambda: time.time() > later, "an instant between")
    between = datetime.now(UTC)
    eventually(lambda: time.time() > later + 0.05, "an instant between")
    send(queue, unique, "new")
    wanted: dict[str, tuple[Any, list[str]]] = {
        "earliest": ("earliest", ["a1", "a2", "a3", "new"]),
        "offset": (1, ["a2", "a3", "new"]),
        "instant": (between, ["new"]),
        "latest": ("latest", []),
        "unsaid": (None, []),
    }
    seen: dict[str, list[str]] = {name: [] for name in wanted}
    groups = {name: f"{unique}-{name}" for name in wanted}
    consumers = [consumer_of(queue, groups[n], unique, seen[n], start=start) for n, (start, _) in wanted.items()]
    with running(*consumers):
        for group in groups.values():
            eventually(lambda group=group: queue.is_consumed(group), "each group to begin")  # type: ignore[misc]
        send(queue, unique, "last")
        for group in groups.values():
            eventually(lambda group=group: queue.is_settled(group), "each group to be through")  # type: ignore[misc]
    assert {name: sorted(texts) for name, texts in seen.items()} == {
        name: sorted([*texts, "last"]) for name, (_, texts) in wanted.items()
    }
    # Once there is a group, `start` says nothing any more.
    again: list[str] = []
    with running(consumer_of(queue, groups["latest"], unique, again, start="earliest")):
        send(queue, unique, "one more")
        eventually(lambda: again, "the next message")
    assert again == ["one more"]


def test_a_consumer_may_come_before_its_topic(queue: Queue, unique: str) -> None:
    """A topic that it has made takes the largest message, too."""
    seen: list[str] = []
    with running(consumer_of(queue, unique, unique, seen)):
        eventually(lambda: queue.is_consumed(unique), "the consumer")
        send(queue, unique, "first", "x" * (1 << 20))
        eventually(lambda: sorted(map(len, seen)) == [5, 1 << 20], "both messages")


# --- ordered --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_failure_blocks_its_key_and_no_other(queue: Queue, unique: str) -> None:
    """Until it succeeds, or is a dead letter."""
    queue.make_topic(unique)
    send(queue, unique, "x0", "x1", "x2", "y0", "y1", "z0", "z1")
    seen: list[tuple[str, int]] = []
    others = threading.Event()
    consumer = Consumer(queue.url, group=unique)

    @consumer.subscribe(unique, mode="ordered", start="earliest", retry_min=0.1, retry_max=0.1, max_attempts=5)
    def handle(message: ReceivedMessage) -> None:
        seen.append((message.text, message.attempt))
        if message.text == "y1":
            others.set()
        if message.text == "x1" and not (others.is_set() and message.attempt >= 3):
            raise ValueError("again")
        if message.text == "z0":
            raise DeadLetter("never")

    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "everything to be settled")
    texts = [text for text, _ in seen]
    assert list(dict.fromkeys(text for text in texts if text[0] == "x")) == ["x0", "x1", "x2"]
    assert [text for text in texts if text[0] in "yz"].count("y1") == 1
    assert [attempt for text, attempt in seen if text == "x1"][:3] == [1, 2, 3]
    assert texts.index("y1") < texts.index("x2"), "another key waits for nobody"
    assert texts.index("z0") < texts.index("z1") and texts.count("z0") == 1


@pytest.mark.long
def test_handlers_see_each_key_in_order(queue: Queue, unique: str) -> None:
    """Over several queues, with two consumers, of which one comes later, and some failures."""
    queue.make_topic(unique, 4)
    seen: dict[str, list[int]] = defaultdict(list)
    lock, chance = threading.Lock(), random.Random(7)

    def instance() -> Consumer:
        consumer = Consumer(queue.url, group=unique, concurrency=8)

        @consumer.subscribe(unique, mode="ordered", start="earliest", retry_min=0.1)
        def handle(message: ReceivedMessage) -> None:
            threading.Event().wait(chance.random() * 0.01)  # handlers take unlike times: else no key loses its order
            if message.attempt == 1 and chance.random() < 0.02:
                raise ValueError("now and then")
            with lock:
                seen[message.key or ""].append(int(message.text))

        return consumer

    def sent(numbers: range) -> None:
        queue.sender.send(*(Message(unique, str(n), key=key) for n in numbers for key in "abcdefgh"))

    sent(range(20))
    with running(instance()):
        eventually(lambda: queue.is_consumed(unique), "the first instance")
        with running(instance()):
            eventually(lambda: queue.is_consumed(unique, 2), "the second instance")
            sent(range(20, 40))
            eventually(lambda: queue.is_settled(unique), "320 messages to be settled")
    assert seen == {key: list(range(40)) for key in "abcdefgh"}


# --- one instance ---------------------------------------------------------------------------------------------


@LONG_OVER_KAFKA
def test_a_second_exclusive_instance_is_refused(queue: Queue, unique: str) -> None:
    queue.make_topic(unique, 2)
    seen: list[str] = []
    first, second = (consumer_of(queue, unique, unique, seen, mode="exclusive", start="earliest") for _ in range(2))
    with running(first):
        eventually(lambda: queue.is_consumed(unique), "the first instance")
        with pytest.raises(Conflict, match="exclusive") as refused:
            second.run(signals=False)
        assert refused.value.code == "topic_is_taken"
        send(queue, unique, *(f"{n}" for n in range(9)))
        eventually(lambda: queue.is_settled(unique), "the first to continue")
    assert Counter(seen) == Counter(map(str, range(9)))


def test_a_standby_takes_over(queue: Queue, unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LEAVE_SECONDS", PATIENCE_SECONDS)
    queue.make_topic(unique, 2)
    seen: dict[str, list[str]] = {"active": [], "standby": []}
    # The standby waits for no lease: the one that stops gives the topic up.
    options = {"mode": "failover", "start": "earliest", "lease": 3600}
    active, standby = (
        consumer_of(queue, unique, unique, texts, instance=name, **options) for name, texts in seen.items()
    )
    with ExitStack() as until_the_end:
        with running(active):
            eventually(lambda: queue.is_consumed(unique), "the active instance")
            send(queue, unique, "a", "b")
            eventually(lambda: queue.is_settled(unique), "both")
            until_the_end.enter_context(running(standby))
            send(queue, unique, "c", "d")
            eventually(lambda: queue.is_settled(unique), "both")
            assert sorted(seen["active"]) == ["a", "b", "c", "d"] and seen["standby"] == []
        send(queue, unique, "e")
        eventually(lambda: seen["standby"] == ["e"], "the standby to continue")


# --- broadcast ------------------------------------------------------------------------------------------------


def test_broadcast_reaches_every_instance_and_each_has_its_own_progress(queue: Queue, unique: str) -> None:
    queue.make_topic(unique)
    seen: dict[str, list[str]] = {"x": [], "y": []}

    def instance(name: str) -> Consumer:
        consumer = Consumer(queue.url, group=unique, instance=name)

        @consumer.subscribe(unique, mode="broadcast", retry_min=0.1)
        def handle(message: ReceivedMessage) -> None:
            seen[name].append(message.text)
            if name == "x" and message.text == "1" and message.attempt == 1:
                raise ValueError("again")

        return consumer

    with running(instance("x")):
        with running(instance("y")):
            for name in seen:
                eventually(lambda name=name: queue.is_consumed(f"{unique}@{name}"), name)  # type: ignore[misc]
            send(queue, unique, "1", "2")
            for name in seen:
                eventually(lambda name=name: queue.is_settled(f"{unique}@{name}"), name)  # type: ignore[misc]
        send(queue, unique, "while y was unreachable")
        eventually(lambda: len(seen["x"]) == 4, "x to get it")
    with running(instance("y")):
        eventually(lambda: len(seen["y"]) == 3, "y to get it later")
    assert Counter(seen["x"]) == Counter({"1": 2, "2": 1, "while y was unreachable": 1})
    assert Counter(seen["y"]) == Counter(["1", "2", "while y was unreachable"])


# --- operators ------------------------------------------------------------------------------------------------


@LONG_OVER_KAFKA
def test_a_paused_group_gets_nothing_until_it_is_resumed(queue: Queue, unique: str) -> None:
    """A paused group stays so over a restart, and others of the topic continue."""
    queue.make_topic(unique)
    seen: list[str] = []
    others: list[str] = []
    with running(consumer_of(queue, unique, unique, seen)):
        eventually(lambda: queue.is_consumed(unique), "the consumer")
        send(queue, unique, "before")
        eventually(lambda: seen == ["before"], "the first message")
        admin(queue.admin_url, "POST", f"groups/{unique}/pause", {})
    with running(
        consumer_of(queue, unique, unique, seen), consumer_of(queue, f"{unique}-2", unique, others, start="earliest")
    ):
        eventually(lambda: queue.is_consumed(unique), "the paused consumer")
        send(queue, unique, "meanwhile")
        eventually(lambda: sorted(others) == ["before", "meanwhile"], "the other group")
        assert seen == ["before"] and admin(queue.admin_url, "GET", f"groups/{unique}")["paused"]
        admin(queue.admin_url, "POST", f"groups/{unique}/resume", {})
        eventually(lambda: seen == ["before", "meanwhile"], "the rest")
        eventually(lambda: queue.is_settled(unique), "it to be settled")


def test_a_reset_is_carried_out_once_while_the_group_runs(queue: Queue, unique: str) -> None:
    """Each is carried out once, while the group runs."""
    queue.make_topic(unique, 2)
    send(queue, unique, "a", "b", "c")
    seen: list[str] = []
    path = f"groups/{unique}/reset"

    def reset(to: Any, **fields: Any) -> Any:
        return admin(queue.admin_url, "POST", path, {"topic": unique, "to": to, **fields})["result"]

    with running(consumer_of(queue, unique, unique, seen, start="earliest")):
        eventually(lambda: queue.is_settled(unique), "everything to be settled")
        preview = reset("earliest", dry_run=True)
        assert sum(row["again"] for row in preview["queues"]) >= 3 and len(seen) == 3
        reset("earliest")
        eventually(lambda: len(seen) == 6, "everything again")
        eventually(lambda: queue.is_settled(unique), "it to be settled")
        send(queue, unique, "d")
        eventually(lambda: len(seen) == 7, "the next message")
    assert Counter(seen) == Counter({"a": 2, "b": 2, "c": 2, "d": 1})


@LONG_OVER_KAFKA
def test_a_reset_of_a_broadcast_moves_each_instance(queue: Queue, unique: str) -> None:
    """On a queue server it succeeded, and moved none."""
    queue.make_topic(unique)
    seen: dict[str, list[str]] = {"x": [], "y": []}
    consumers = [consumer_of(queue, unique, unique, seen[name], instance=name, mode="broadcast") for name in seen]
    with running(*consumers):
        for name in seen:
            eventually(lambda name=name: queue.is_consumed(f"{unique}@{name}"), name)  # type: ignore[misc]
        send(queue, unique, "a", "b")
        eventually(lambda: all(len(texts) == 2 for texts in seen.values()), "both messages, twice")
        for name in seen:
            eventually(lambda name=name: queue.is_settled(f"{unique}@{name}"), name)  # type: ignore[misc]
        group = f"{unique}@x" if queue.is_kafka else unique  # Kafka knows the instances' groups alone
        admin(queue.admin_url, "POST", f"groups/{group}/reset", {"topic": unique, "to": "earliest"})
        eventually(lambda: all(len(texts) == 4 for texts in seen.values()), "both messages again")


@LONG_OVER_KAFKA
def test_a_reset_forward_leaves_out(queue: Queue, unique: str) -> None:
    queue.make_topic(unique)
    seen: list[str] = []
    with running(consumer_of(queue, unique, unique, seen)):
        eventually(lambda: queue.is_consumed(unique), "the consumer")
    send(queue, unique, "a", "b")
    admin(queue.admin_url, "POST", f"groups/{unique}/reset", {"topic": unique, "to": "latest"})
    with running(consumer_of(queue, unique, unique, seen)):
        eventually(lambda: queue.is_settled(unique), "the reset")
        send(queue, unique, "c")
        eventually(lambda: "c" in seen, "the next message")
    assert seen == ["c"]


def test_resets_that_cannot_be_are_refused(queue: Queue, unique: str) -> None:
    seen: list[str] = []
    with running(consumer_of(queue, unique, unique, seen)):
        eventually(lambda: queue.is_consumed(unique), "the consumer")
    path = f"/v1/admin/groups/{unique}/reset"
    future = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    wrong = ("yesterday", -1, 1000, future)
    for topic, to, status in (*((unique, to, 422) for to in wrong), ("nowhere", 0, 404)):
        answered, problem = ask(queue.admin_url, "POST", path, {"topic": topic, "to": to, "reason": REASON})
        assert answered == status, problem
    body = {"topic": unique, "to": "earliest", "replay_effects": True, "dry_run": True, "reason": REASON}
    answered, problem = ask(queue.admin_url, "POST", path, body)
    assert (answered, "effects are not replayed" in str(problem)) == ((422, True) if queue.is_kafka else (200, False))


@LONG_OVER_KAFKA
def test_a_letter_that_is_sent_again_has_all_its_attempts(queue: Queue, unique: str) -> None:
    """With its first attempt, once, and under an id by which an inbox knows it."""
    is_mended = threading.Event()
    seen: list[tuple[int, str, dict[str, str]]] = []
    consumer = Consumer(queue.url, group=unique)

    @consumer.subscribe(unique, start="earliest", max_attempts=2, retry_min=0.01)
    def handle(message: ReceivedMessage) -> None:
        seen.append((message.attempt, message.first_id, {k: v for k, v in message.headers.items() if k == "h"}))
        if not is_mended.is_set():
            raise ValueError("broken")

    (name,) = queue.sender.send(Message(unique, "x", headers={"h": "v"}))
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "the dead letter")
        is_mended.set()
        eventually(lambda: ask(queue.admin_url, "GET", f"/v1/admin/groups/{unique}/dead-letters")[0] == 200, "letters")
        (letter,) = eventually(
            lambda: admin(queue.admin_url, "GET", f"groups/{unique}/dead-letters")["messages"], "the letter"
        )
        for status in (201, 200):
            (item,) = redrive(queue.admin_url, unique, ids=[letter["id"]])["items"]
            assert item["status"] == status
        eventually(lambda: len(seen) == 3, "the third call")
        eventually(lambda: queue.is_settled(unique), "it to be settled")
    assert seen == [(attempt, name, {"h": "v"}) for attempt in (1, 2, 1)]
