"""What every storage promises of topics, queues and groups, on memory and on the log."""

from __future__ import annotations

from typing import Any

import pytest

from notify.errors import InvalidRequest, NotFound
from storage.store import (
    DEAD_LETTER_PREFIX,
    Flush,
    SettleKind,
    State,
    Subscription,
    Topic,
)
from tests.contract.stores import SECOND, T0, Bench, bodies, commit, half


def test_keys_stay_in_one_queue_and_queues_share_the_rest(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await b.store.create_topic(Topic("q", queues=4))
        keyed = [half(str(n).encode(), topic="q", key="k") for n in range(20)]
        await commit(b.store, *keyed)
        await b.restart()
        filled = [q for q in range(4) if bodies(b.store, "q", q)]
        assert len(filled) == 1
        assert bodies(b.store, "q", filled[0]) == [str(n).encode() for n in range(20)]
        await commit(b.store, *[half(topic="q") for _ in range(40)])
        assert all(len(bodies(b.store, "q", q)) >= 10 for q in range(4))
        with pytest.raises(InvalidRequest):
            await b.store.create_topic(Topic("q", queues=2))

    run(scenario)


def test_delayed_messages_get_their_place_when_they_are_due(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        later = half(b"later", delay_us=10 * SECOND)
        await b.store.put([later], T0)
        await b.store.decide([(later.id, "g", State.COMMITTED)], T0 + 5 * SECOND)
        await commit(b.store, half(b"now"), half(b"at", deliver_at_us=T0 + 12 * SECOND), at=T0 + 5 * SECOND)
        await b.restart()
        assert bodies(b.store) == [b"now"]
        assert b.store.next_due_us() == T0 + 12 * SECOND
        assert b.store.release_due(T0 + 11 * SECOND, 10) == 0
        assert b.store.release_due(T0 + 13 * SECOND, 10) == 1
        await b.store.sync()
        await b.restart()
        assert b.store.release_due(T0 + 16 * SECOND, 10) == 1
        await b.store.sync()
        await b.restart()
        assert b.store.next_due_us() is None
        assert bodies(b.store) == [b"now", b"at", b"later"]

    run(scenario)


def test_progress_survives(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await commit(b.store, *[half() for _ in range(20)])
        await b.store.subscribe(Subscription("c", "t"), [3])
        await b.store.settle("c", "t", 0, [(3, 2), (8, 3)], SettleKind.ACK, T0)
        b.store.attempted("c", "t", 0, [(5, 2)])
        await b.store.sync()
        await b.restart()
        progress = b.store.progress("c", "t", 0)
        assert (progress.floor, progress.settled, progress.attempts) == (5, {8, 9, 10}, {5: 2})
        await b.store.settle("c", "t", 0, [(5, 3)], SettleKind.ACK, T0)
        await b.restart()
        progress = b.store.progress("c", "t", 0)
        assert (progress.floor, progress.settled, progress.attempts) == (11, set(), {})
        assert [(s.group, s.topic) for s in b.store.subscriptions()] == [("c", "t")]
        await b.store.unsubscribe("c", "t")
        await b.restart()
        assert b.store.subscriptions() == []

    run(scenario)


def test_the_move_to_the_dead_letters_is_one_step(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await commit(b.store, half(b"a"), half(b"b"))
        await b.store.subscribe(Subscription("c", "t"), [0])
        first = b.store.read("t", 0, 0, 1, 100)[0]
        await b.store.dead_letter("c", [(first, b"dead a")], T0)
        await b.restart()
        assert b.store.progress("c", "t", 0).floor == 1
        dead = b.store.read(DEAD_LETTER_PREFIX + "c", 0, 0, 10, 100)
        assert [(m.payload, m.transaction_id) for m in dead] == [(b"dead a", first.transaction_id)]

    run(scenario)


def test_offsets_by_time(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        for n in range(10):
            await commit(b.store, half(), at=T0 + n * SECOND)
        await b.restart()
        assert b.store.offset_at("t", 0, T0 + 4 * SECOND) == 4
        assert b.store.offset_at("t", 0, T0 + 4 * SECOND + 1) == 5
        assert b.store.offset_at("t", 0, T0 + 99 * SECOND) == 10

    run(scenario)


def test_reads_are_bounded_in_number_and_bytes(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await commit(b.store, *[half(bytes(100)) for _ in range(10)])
        assert len(b.store.read("t", 0, 2, 3, 1 << 20)) == 3
        assert [m.offset for m in b.store.read("t", 0, 2, 10, 250)] == [2, 3]
        assert len(b.store.read("t", 0, 0, 10, 1)) == 1  # one always comes through
        assert b.store.read("t", 0, 10, 10, 100) == []
        with pytest.raises(NotFound):
            b.store.read("t", 1, 0, 1, 1)
        with pytest.raises(NotFound):
            b.store.bounds("nope", 0)

    run(scenario)


def test_a_deleted_topic_takes_its_subscriptions_along(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await b.store.subscribe(Subscription("c", "t"), [0])
        await b.store.delete_topic("t")
        await b.restart()
        assert b.store.topic("t") is None
        assert b.store.subscriptions() == []
        with pytest.raises(NotFound):
            await b.store.delete_topic("t")
        await b.store.create_topic(Topic("t"))
        await commit(b.store, half(b"new"))
        assert bodies(b.store) == [b"new"]

    run(scenario)


def test_pauses_and_how_a_topic_flushes_survive(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await b.store.create_topic(Topic("fast", flush=Flush.MEMORY))
        await b.store.create_topic(Topic("faster", flush=Flush.ASYNC))
        for group in ("kept", "resumed", "gone"):
            await b.store.subscribe(Subscription(group, "t"), [0])
            await b.store.pause(group, True)
        await b.store.pause("resumed", False)
        await b.store.unsubscribe("gone", "t")
        await b.restart()
        assert b.store.paused() == {"kept"}
        assert {t.name: t.flush for t in b.store.topics()} == {
            "t": Flush.SYNC,
            "fast": Flush.MEMORY,
            "faster": Flush.ASYNC,
        }
        # A request is answered as its strictest topic asks, and says so.
        fast, faster, synced = half(topic="fast"), half(topic="faster"), half()
        assert [r.flush for r in await b.store.put([fast], T0)] == [Flush.MEMORY]
        assert [r.flush for r in await b.store.put([fast, faster], T0)] == [Flush.ASYNC] * 2
        assert [r.flush for r in await b.store.put([fast, synced], T0)] == [Flush.SYNC] * 2
        await b.store.decide([(t.id, "g", State.COMMITTED) for t in (fast, faster, synced)], T0)
        await b.restart()
        assert [len(bodies(b.store, topic)) for topic in ("fast", "faster", "t")] == [1, 1, 1]

    run(scenario)
