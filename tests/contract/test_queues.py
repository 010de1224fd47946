"""Promises of every storage about topics, queues and groups, tested on memory and on the log."""

from __future__ import annotations

import time
from typing import Any

import pytest

from notify.errors import InvalidRequest, NotFound
from notify.protocol import ids
from notify.protocol.keys import key_hash, tag_hash
from notify.protocol.wire import Payload, encode_msgpack
from notify.storage.groups import Priorities, PriorityClass, SettleKind, Subscription
from notify.storage.holds import HOLD_RELEASED, HOLD_RETRIED
from notify.storage.names import DEAD_LETTER_PREFIX
from notify.storage.records import NewMessage, NewTransaction, State
from notify.storage.topics import Backlog, Flush, Topic
from tests.contract.stores import SECOND, T0, Bench, bodies, commit
from tests.support.transactions import bodies_in, message, sent


def test_keys_stay_in_one_queue_and_queues_share_the_rest(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await b.store.create_topic(Topic("q", queues=4))
        keyed = [sent(str(n).encode(), topic="q", key="k") for n in range(20)]
        await commit(b.store, *keyed)
        await b.restart()
        filled = [q for q in range(4) if bodies(b.store, "q", q)]
        assert len(filled) == 1
        assert bodies(b.store, "q", filled[0]) == [str(n).encode() for n in range(20)]
        await commit(b.store, *[sent(topic="q") for _ in range(40)])
        assert all(len(bodies(b.store, "q", q)) >= 10 for q in range(4))
        with pytest.raises(InvalidRequest):
            await b.store.create_topic(Topic("q", queues=2))

    run(scenario)


def test_delayed_messages_get_their_place_when_they_are_due(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        later = sent(b"later", delay_us=10 * SECOND)
        await b.store.put([later], T0)
        await b.store.decide([(later.id, "g", State.COMMITTED)], T0 + 5 * SECOND)
        await commit(b.store, sent(b"now"), sent(b"at", deliver_at_us=T0 + 12 * SECOND), at=T0 + 5 * SECOND)
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


def test_a_groups_progress_survives_a_restart(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await commit(b.store, *[sent() for _ in range(20)])
        await b.store.subscribe(Subscription("c", "t"), [3])
        await b.store.settle("c", "t", 0, [(3, 2), (8, 3)], SettleKind.ACK, T0)
        b.store.attempted("c", "t", 0, [(5, 2)])
        await b.store.sync()
        await b.restart()
        progress = b.store.progress("c", "t", 0)
        assert (progress.floor, list(progress.settled), progress.attempts) == (5, [(8, 3)], {5: 2})
        await b.store.settle("c", "t", 0, [(5, 3)], SettleKind.ACK, T0)
        await b.restart()
        progress = b.store.progress("c", "t", 0)
        assert (progress.floor, list(progress.settled), progress.attempts) == (11, [], {})
        assert [(s.group, s.topic) for s in b.store.subscriptions()] == [("c", "t")]
        await b.store.unsubscribe("c", "t")
        await b.restart()
        assert b.store.subscriptions() == []

    run(scenario)


def test_the_move_to_the_dead_letters_is_one_step(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await commit(b.store, sent(b"a"), sent(b"b"))
        await b.store.subscribe(Subscription("c", "t"), [0])
        first = b.store.read("t", 0, 0, 1, 100)[0]
        b.store.dead_letter_soon("c", [(first, b"dead a")], T0)
        await b.store.sync()
        await b.restart()
        assert b.store.progress("c", "t", 0).floor == 1
        dead = b.store.read(DEAD_LETTER_PREFIX + "c", 0, 0, 10, 100)
        assert [(m.payload, m.transaction_id) for m in dead] == [(b"dead a", first.transaction_id)]

    run(scenario)


def test_settlements_of_a_message_are_listed(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await commit(b.store, *[sent(b"%d" % n) for n in range(40)])
        for group in ("a", "b", "c", "late"):
            await b.store.subscribe(Subscription(group, "t"), [0])
        began = time.time_ns() // 1000
        assert await b.store.settlements("t", 0, 7) == ([], True)
        b.store.attempted("b", "t", 0, [(7, 1, 0), (8, 1, 0)])
        await b.store.settle("a", "t", 0, [(0, 5), (6, 3)], SettleKind.ACK, T0)
        b.store.attempted("b", "t", 0, [(7, 2, 0)])
        b.store.attempted("b", "t", 0, [(9, 1, 0, 1)])
        b.store.attempted("b", "t", 0, [(9, 1, 0, 1, 1)])
        b.store.dead_letter_soon("c", [(b.store.read("t", 0, 7, 1, 100)[0], b"dead")], T0)
        await b.store.sync()
        # Enough messages for the small segments to roll: the index of the first ones is on the disk.
        await commit(b.store, *[sent(bytes(500)) for _ in range(30)])
        await b.store.settle("b", "t", 0, [(7, 1)], SettleKind.EXPIRED, T0)
        await b.restart()
        settlements, whole = await b.store.settlements("t", 0, 7)
        assert [(s.group, s.kind, s.attempts) for s in settlements] == [
            ("b", None, 1),
            ("a", SettleKind.ACK, 0),
            ("b", None, 2),
            ("c", SettleKind.DEAD_LETTER, 0),
            ("b", SettleKind.EXPIRED, 0),
        ]
        assert whole
        assert all(began <= s.at_us <= time.time_ns() // 1000 for s in settlements)
        assert [s.at_us for s in settlements] == sorted(s.at_us for s in settlements)
        settlements, whole = await b.store.settlements("t", 0, 8)
        assert ([(s.group, s.kind, s.attempts) for s in settlements], whole) == (
            [("b", None, 1), ("a", SettleKind.ACK, 0)],
            True,
        )
        settlements, whole = await b.store.settlements("t", 0, 9)
        told = [(s.attempts, s.deaths, s.interruptions) for s in settlements]
        assert (told, whole) == ([(1, 1, 0), (1, 1, 1)], True)

    run(scenario)


def test_the_offset_of_an_instant_is_the_first_message_since_then(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        for n in range(10):
            await commit(b.store, sent(), at=T0 + n * SECOND)
        await b.restart()
        assert b.store.offset_at("t", 0, T0 + 4 * SECOND) == 4
        assert b.store.offset_at("t", 0, T0 + 4 * SECOND + 1) == 5
        assert b.store.offset_at("t", 0, T0 + 99 * SECOND) == 10

    run(scenario)


def test_reads_are_bounded_in_number_and_bytes(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        size = len(message(bytes(100)).payload)
        await commit(b.store, *[sent(bytes(100)) for _ in range(10)])
        assert len(b.store.read("t", 0, 2, 3, 1 << 20)) == 3
        assert [m.offset for m in b.store.read("t", 0, 2, 10, size * 5 // 2)] == [2, 3]
        assert len(b.store.read("t", 0, 0, 10, 1)) == 1  # a read returns one message at least
        assert b.store.read("t", 0, 10, 10, 100) == []
        with pytest.raises(NotFound):
            b.store.read("t", 1, 0, 1, 1)
        with pytest.raises(NotFound):
            b.store.bounds("nope", 0)

    run(scenario)


def test_a_deleted_topic_takes_its_subscriptions_along(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await b.store.subscribe(Subscription("c", "t"), [0])
        number = b.store.topic("t").number
        await b.store.delete_topic("t")
        await b.restart()
        assert b.store.topic("t") is None
        assert b.store.subscriptions() == []
        with pytest.raises(NotFound):
            await b.store.delete_topic("t")
        await b.store.create_topic(Topic("t"))
        await commit(b.store, sent(b"new"))
        assert bodies(b.store) == [b"new"]
        assert b.store.topic("t").number > number > 0
        await b.store.create_topic(Topic("t", queues=2))
        assert b.store.topic("t").number == number + 1

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
        # A request is answered by its strictest topic's rule, and the answer names it.
        fast, faster, synced = sent(topic="fast"), sent(topic="faster"), sent()
        assert [r.flush for r in await b.store.put([fast], T0)] == [Flush.MEMORY]
        assert [r.flush for r in await b.store.put([fast, faster], T0)] == [Flush.ASYNC] * 2
        assert [r.flush for r in await b.store.put([fast, synced], T0)] == [Flush.SYNC] * 2
        await b.store.decide([(t.id, "g", State.COMMITTED) for t in (fast, faster, synced)], T0)
        await b.restart()
        assert [len(bodies(b.store, topic)) for topic in ("fast", "faster", "t")] == [1, 1, 1]

    run(scenario)


def test_tags_are_looked_for_in_the_index(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await commit(b.store, *[sent(str(n).encode(), tag="ab"[n % 2]) for n in range(20)])
        await b.restart()
        wanted = frozenset([tag_hash("b")])
        messages, end = b.store.read_tagged("t", 0, 0, 10, 1 << 20, wanted)
        assert ([m.offset for m in messages], end) == ([1, 3, 5, 7, 9], 10)
        size = len(message(b"11", tag="b").payload)
        messages, end = b.store.read_tagged("t", 0, end, 100, size * 3 // 2, wanted)
        assert ([m.offset for m in messages], end) == ([11], 12)  # a second message would exceed the bytes
        assert b.store.read_tagged("t", 0, 12, 100, 1 << 20, frozenset([1])) == ([], 20)
        assert b.store.read_tagged("t", 0, 20, 100, 1 << 20, wanted) == ([], 20)

    run(scenario)


def test_ids_come_from_the_index(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await commit(b.store, *[sent(str(n).encode()) for n in range(8)])
        await b.restart()
        await commit(b.store, *[sent(str(n).encode()) for n in range(8, 12)])
        ids = [(m.committed_us, m.transaction_id) for m in b.store.read("t", 0, 0, 100, 1 << 20)]
        assert len(ids) == 12 and b.store.read_ids("t", 0, 0, 100) == ids
        assert b.store.read_ids("t", 0, 6, 4) == ids[6:10]
        assert b.store.read_ids("t", 0, 12, 100) == []

    run(scenario)


def test_hashes_come_from_the_index(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await commit(b.store, *[sent(str(n).encode(), key="ab"[n % 2], tag="x" if n > 7 else None) for n in range(8)])
        await b.restart()
        await commit(b.store, *[sent(str(n).encode(), tag="x") for n in range(8, 12)])
        hashes = [key_hash("ab"[n % 2]) for n in range(8)] + [0] * 4
        offsets, keys, tags = b.store.read_hashes("t", 0, 0, 100)
        assert (offsets.tolist(), keys.tolist()) == (list(range(12)), hashes)
        assert tags.tolist() == [0] * 8 + [tag_hash("x")] * 4
        offsets, keys, _ = b.store.read_hashes("t", 0, 5, 4)
        assert (offsets.tolist(), keys.tolist()) == ([5, 6, 7, 8], hashes[5:9])
        assert [len(part) for part in b.store.read_hashes("t", 0, 12, 100)] == [0, 0, 0]
        b.store.trim("t", 0, 3)
        assert b.store.read_hashes("t", 0, 0, 2)[0].tolist() == [3, 4]
        await b.store.subscribe(Subscription("f", "t", fair_by="header:tenant"), [0])
        await b.restart()
        subscription = b.store.subscription("f", "t")
        assert subscription is not None and subscription.fair_by == "header:tenant"

    run(scenario)


def test_messages_are_found_by_key_and_time(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await b.store.create_topic(Topic("other"))
        for n in range(12):
            batch = [sent(b"%d" % n, key=f"k{n % 3}"), sent(b"o%d" % n, key="k0", topic="other"), sent(b"none")]
            await commit(b.store, *batch, at=T0 + n * SECOND)
            if n == 6:
                await b.restart()
        await b.restart()
        messages = list(b.store.keyed("k1", None, 0, 1 << 62, 100))
        assert bodies_in(messages) == [b"1", b"4", b"7", b"10"]
        messages = list(b.store.keyed("k0", "t", T0 + 3 * SECOND, T0 + 9 * SECOND, 100))
        assert bodies_in(messages) == [b"3", b"6"]
        assert len(list(b.store.keyed("k0", None, 0, 1 << 62, 100))) == 16
        assert len(list(b.store.keyed("k0", None, 0, 1 << 62, 5))) == 5
        assert list(b.store.keyed("k9", None, 0, 1 << 62, 100)) == []
        assert list(b.store.keyed("k0", "nowhere", 0, 1 << 62, 100)) == []

    run(scenario)


def test_trimmed_messages_stay_gone(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await commit(b.store, *[sent(str(n).encode()) for n in range(10)])
        b.store.trim("t", 0, 4)
        b.store.trim("t", 0, 2)
        await b.store.sync()
        await b.restart()
        assert b.store.bounds("t", 0) == (4, 10)
        assert bodies(b.store) == [b"4", b"5", b"6", b"7", b"8", b"9"]
        assert b.store.offset_at("t", 0, 0) == 4
        b.store.trim("t", 0, 99)
        await b.store.sync()
        await b.restart()
        assert b.store.bounds("t", 0) == (10, 10)
        await commit(b.store, sent(b"new"))
        assert bodies(b.store) == [b"new"]

    run(scenario)


def test_messages_know_when_they_expire(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        def living(name: str, ttl: float) -> NewTransaction:
            payload = encode_msgpack(Payload("t", name.encode(), ttl=ttl or None))
            living_so_long = NewMessage("t", payload, ttl_us=round(ttl * SECOND), delay_us=SECOND)
            return NewTransaction(ids.new_id(), "", [living_so_long], committed=True)

        await b.store.put([living("own", 5), living("none", 0)], T0)
        assert b.store.release_due(T0 + SECOND, 10) == 2
        await b.store.sync()
        await b.restart()

        def expiry() -> list[int]:
            return [m.expires_us for m in b.store.read("t", 0, 0, 10, 1 << 20)]

        assert expiry() == [T0 + 6 * SECOND, 0]
        await b.store.create_topic(Topic("t", ttl_us=10 * SECOND))
        await b.restart()
        assert expiry() == [T0 + 6 * SECOND, T0 + 11 * SECOND]
        await b.store.create_topic(Topic("t", ttl_us=2 * SECOND))
        assert expiry() == [T0 + 3 * SECOND, T0 + 3 * SECOND]

    run(scenario)


def test_topics_groups_and_retries_are_as_they_were(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        topic = Topic("p", 3, 9 * SECOND, Flush.ASYNC, 5000, 7 * SECOND, 100, Backlog.DROP_OLDEST)
        await b.store.create_topic(topic)
        pattern = Subscription("g", "task.*", "ordered", ("x",), filter='tag == "x"')
        await b.store.set_pattern(pattern)
        await b.store.set_pattern(Subscription("g", "gone.*"))
        await b.store.drop_pattern("g", "gone.*")
        with pytest.raises(NotFound):
            await b.store.drop_pattern("g", "gone.*")
        priorities = Priorities((PriorityClass("a", 6, ("x", "y.*")), PriorityClass("b", 1)), {"x": 2})
        await b.store.set_priorities("g", priorities)
        await commit(b.store, *[sent() for _ in range(5)])
        earlier = ((T0, 16, 3), (T0 + 1, 9, 16))
        await b.store.subscribe(Subscription("g", "t", epoch=3, max_deaths=5, earlier=earlier), [0])
        b.store.attempted("g", "t", 0, [(1, 2, T0 + 50 * SECOND), (2, 1, 0), (3, 1, T0 + 9 * SECOND)])
        b.store.attempted("g", "t", 0, [(3, 2, 0)])
        b.store.attempted("g", "t", 0, [(2, 1, 0, 1), (3, 2, 0, 1, 4), (4, 0, 0, 0, 1)])
        await b.store.settle("g", "t", 0, [(0, 1)], SettleKind.ACK, T0)
        for _ in range(2):  # from the log, then from a checkpoint
            await b.restart()
            assert b.store.topic("p") == topic
            assert b.store.patterns() == [pattern]
            assert b.store.priorities("g") == priorities
            assert b.store.priorities("h") is None
            subscription = b.store.subscription("g", "t")
            assert subscription is not None and subscription.epoch == 3
            assert (subscription.max_deaths, subscription.earlier) == (5, earlier)
            progress = b.store.progress("g", "t", 0)
            assert progress.attempts == {1: 2, 2: 1, 3: 2, 4: 0}
            assert (progress.deaths, progress.interruptions) == ({2: 1, 3: 1}, {3: 4, 4: 1})
            assert progress.retry_at == {1: T0 + 50 * SECOND}
        await b.store.settle("g", "t", 0, [(1, 1), (3, 1)], SettleKind.ACK, T0)
        progress = b.store.progress("g", "t", 0)
        assert (progress.retry_at, progress.deaths, progress.interruptions) == ({}, {2: 1}, {4: 1})

    run(scenario)


def test_held_keys_survive_a_restart(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await commit(b.store, *[sent() for _ in range(6)])
        await b.store.subscribe(Subscription("c", "t", mode="ordered", on_exhausted="hold"), [0])
        b.store.attempted("c", "t", 0, [(1, 1, T0), (2, 1, T0)])
        b.store.hold("c", "t", 0, [(1, 2, 0, 0, 0, T0 + 1), (2, 3, 0, 2, 0, T0 + 2)], ["boom", "bang"])
        b.store.hold("c", "t", 0, [(4, 1, 0, 0, 0, T0 + 3)], ["bum"])
        await b.store.sync()
        await b.restart()
        progress = b.store.progress("c", "t", 0)
        assert dict(progress.held) == {1: (T0 + 1, "boom"), 2: (T0 + 2, "bang"), 4: (T0 + 3, "bum")}
        assert (progress.attempts, progress.deaths, progress.retry_at) == ({1: 2, 2: 3, 4: 1}, {2: 2}, {})
        subscription = b.store.subscription("c", "t")
        assert subscription is not None and subscription.on_exhausted == "hold"
        b.store.attempted("c", "t", 0, [(1, 2, 0, 0, 0, HOLD_RETRIED), (2, 3, 0, 2, 0, HOLD_RELEASED)])
        await b.store.settle("c", "t", 0, [(4, 1)], SettleKind.DEAD_LETTER, T0)
        await b.restart()
        progress = b.store.progress("c", "t", 0)
        assert (dict(progress.held), dict(progress.forgiven)) == ({}, {2: (3, 2)})
        assert progress.attempts == {1: 2, 2: 3}
        told, whole = await b.store.settlements("t", 0, 1)
        assert [(s.attempts, s.is_held) for s in told] == [(1, False), (2, True)] and whole
        await b.store.settle("c", "t", 0, [(0, 3)], SettleKind.ACK, T0)
        await b.restart()
        progress = b.store.progress("c", "t", 0)
        assert (progress.attempts, dict(progress.forgiven), dict(progress.held)) == ({}, {}, {})

    run(scenario)


def test_messages_are_found_by_their_transactions_while_others_come(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        made: list[NewTransaction] = []
        for number in range(4):
            made.append(sent(b"%d" % number))
            await commit(b.store, made[-1])
            if number == 2:
                await b.restart()
            found = [bodies_in(b.store.messages(one.id)) for one in made]
            assert found == [[b"%d" % n] for n in range(number + 1)]
            assert b.store.messages(ids.new_id()) == []

    run(scenario)
