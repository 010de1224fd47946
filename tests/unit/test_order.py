"""The order of keys on the way to a target: steps of requests, what is held back, what a server refuses behind it."""

from __future__ import annotations

import random

from notify.movers.sinks.order import HeldBack, steps_of
from notify.protocol import ids
from notify.protocol.wire import BridgedTransaction, PackedMessage, PackedTransaction, PackedTransactions
from notify.server.core.core import Core
from notify.server.core.flow import RateLimits
from notify.server.settings import Settings
from notify.storage.memory import MemoryStore
from tests.contract.stores import T0


def transaction(name: str, group: str, *keys: str | None) -> BridgedTransaction:
    return BridgedTransaction(name, group, [PackedMessage(topic="t", body=b"", key=key) for key in keys])


def test_one_group_is_one_step() -> None:
    assert steps_of([]) == []
    some = [transaction(str(n), "g", "k") for n in range(3)]
    assert steps_of(some) == [{"g": some}]


def test_steps_keep_the_order_of_every_key() -> None:
    chance = random.Random(5)
    for _ in range(200):
        some = [
            transaction(str(n), chance.choice("ghi"), *[chance.choice(["a", "b", "c", None]) for _ in range(2)])
            for n in range(12)
        ]
        sent = [
            [(number, group, t) for group, ts in step.items() for t in ts] for number, step in enumerate(steps_of(some))
        ]
        flat = [each for step in sent for each in step]
        assert sorted(int(t.id) for *_, t in flat) == list(range(12))
        for key in "abc":
            own = [(number, group, int(t.id)) for number, group, t in flat if key in [m.key for m in t.messages]]
            assert [n for *_, n in own] == sorted(n for *_, n in own)
            # Groups of one step may be sent in any order.
            assert all(a[0] < b[0] or a[1] == b[1] for a, b in zip(own, own[1:], strict=False))


def test_a_transaction_waits_behind_a_waiting_one_with_its_key() -> None:
    held = HeldBack()
    assert not held and not held.holds(transaction("0", "g", "a"))
    held.hold(transaction("1", "g", "a"))
    assert held
    assert held.holds(transaction("2", "h", "a", "b"))
    assert held.holds(transaction("3", "g", "b")), "it is behind 2, which waits"
    assert not held.holds(transaction("4", "g", "c")) and not held.holds(transaction("5", "g", None))
    held.hold(transaction("6", "g", "c"), topics=True)
    assert held.holds(transaction("7", "g", None))


def test_whole_topics_wait_where_too_many_of_their_transactions_do() -> None:
    """A transaction of several topics may wait for one of them: the others continue."""
    both = BridgedTransaction("0", "g", [PackedMessage(topic=topic, body=b"", key="a") for topic in ("t", "u")])
    of_u = BridgedTransaction("1", "g", [PackedMessage(topic="u", body=b"", key=None)])
    behind = BridgedTransaction("2", "g", [PackedMessage(topic="u", body=b"", key="a")])
    held = HeldBack()
    held.hold(both, topics=True)
    held.widen()
    assert not held.topics and not held.holds(transaction("3", "g", "b")) and not held.holds(of_u)
    assert held.holds(behind)
    held = HeldBack()
    held.hold(both)
    held.hold(transaction("4", "g", "b"))
    held.widen()
    assert held.topics == {"t"}
    assert held.holds(transaction("5", "g", None)) and not held.holds(of_u)
    assert held.holds(behind), "its key waits in the topic that goes on"


async def test_a_server_takes_nothing_behind_what_it_refuses_for_now() -> None:
    """A topic's rate has room for another message a moment later: it overtook the one before it with its key."""
    now_us = T0

    def clock() -> int:
        nonlocal now_us
        now_us += 4_000
        return now_us

    core = Core(MemoryStore(), Settings(), clock)
    core.flow.set_limits(RateLimits(topics={"t": 100}))
    core.topics.use("t")
    sent = [
        PackedTransaction(
            id=ids.to_text(ids.new_id()),
            messages=[PackedMessage(topic="t", body=b"", key=f"k{n % 2}")],
            committed=True,
        )
        for n in range(400)
    ]
    items = await core.transactions.put(PackedTransactions(producer_group="g", transactions=sent))
    for key in (0, 1):
        statuses = [item.status for item in items[key::2]]
        refused = statuses.index(429)
        assert refused > 0 and set(statuses[:refused]) == {201} and set(statuses[refused:]) == {429}
    halves = [PackedTransaction(id=ids.to_text(ids.new_id()), messages=t.messages) for t in sent]
    statuses = [
        item.status for item in await core.transactions.put(PackedTransactions(producer_group="g", transactions=halves))
    ]
    assert 201 in statuses[statuses.index(429) :], "halves have no order yet"
