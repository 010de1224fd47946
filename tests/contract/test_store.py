"""What every storage promises, on memory and on the log; the log is closed or killed and reopened in between."""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from notify import ids
from notify.errors import InvalidRequest, NotFound
from storage.log import LogStore
from storage.log.disk import Disk
from storage.memory import MemoryStore
from storage.store import (
    DEAD_LETTER_PREFIX,
    Flush,
    NewMessage,
    NewTransaction,
    Put,
    SettleKind,
    State,
    Store,
    Subscription,
    Topic,
)

T0 = 1_800_000_000_000_000
SECOND = 1_000_000


class Bench:
    """A store under test, and a way to restart it where that means something."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.directory = directory
        self.copies = 0
        self.store: Store = self._make()

    def _make(self) -> Any:
        if self.kind == "memory":
            return MemoryStore()
        return LogStore(self.directory, segment_bytes=1 << 20 if self.kind == "log" else 4096)

    async def restart(self, now_us: int = T0) -> None:
        """memory: nothing. log: close and reopen. small-segments: reopen a copy, as after a kill."""
        if self.kind == "memory":
            return
        if self.kind == "small-segments":
            await self.store.sync()
            if self.store._sealing is not None:  # type: ignore[attr-defined]
                await self.store._sealing  # type: ignore[attr-defined]
            self.copies += 1
            copy = self.directory.parent / f"copy-{self.copies}"
            shutil.copytree(self.directory, copy)
            await self.store.close()
            self.directory = copy
        else:
            await self.store.close()
        self.store = self._make()
        await self.store.open(now_us)


Scenario = Callable[[Bench], Coroutine[Any, Any, None]]


@pytest.fixture(params=["memory", "log", "small-segments"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], None]:
    def call(scenario: Scenario) -> None:
        async def whole() -> None:
            bench = Bench(request.param, tmp_path / "log")
            await bench.store.open(T0)
            await bench.store.create_topic(Topic("t"))
            try:
                await scenario(bench)
            finally:
                await bench.store.close()

        asyncio.run(whole())

    return call


def half(body: bytes = b"x", *, topic: str = "t", group: str = "g", **options: Any) -> NewTransaction:
    message_options = {k: options.pop(k) for k in ("key", "tag", "delay_us", "deliver_at_us") if k in options}
    return NewTransaction(ids.new_id(), group, [NewMessage(topic, body, **message_options)], **options)


async def commit(store: Store, *transactions: NewTransaction, at: int = T0) -> None:
    await store.put(transactions, at)
    await store.decide([(t.id, t.producer_group, State.COMMITTED) for t in transactions], at)


def bodies(store: Store, topic: str = "t", queue: int = 0) -> list[bytes]:
    return [m.payload for m in store.read(topic, queue, 0, 10_000, 1 << 30)]


def test_a_half_is_not_delivered_until_it_is_committed(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        a, c = half(b"a"), half(b"c")
        assert [r.put for r in await b.store.put([a, c], T0)] == [Put.STORED, Put.STORED]
        await b.restart()
        assert bodies(b.store) == []
        assert b.store.states([a.id]) == [State.PREPARED]
        result = await b.store.decide([(c.id, "g", State.COMMITTED), (a.id, "g", State.ROLLED_BACK)], T0)
        assert [(r.found, r.changed, r.state) for r in result] == [
            (True, True, State.COMMITTED),
            (True, True, State.ROLLED_BACK),
        ]
        await b.restart()
        assert bodies(b.store) == [b"c"]
        assert b.store.states([a.id, c.id]) == [State.ROLLED_BACK, State.COMMITTED]

    run(scenario)


def test_an_outcome_is_written_once(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = half()
        await commit(b.store, t)
        await b.restart()
        for outcome in (State.COMMITTED, State.ROLLED_BACK):
            result = (await b.store.decide([(t.id, "g", outcome)], T0))[0]
            assert (result.found, result.changed, result.state) == (True, False, State.COMMITTED)
        assert bodies(b.store) == [b"x"]

    run(scenario)


def test_unknown_transactions_and_foreign_groups_change_nothing(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = half()
        await b.store.put([t], T0)
        unknown, foreign = await b.store.decide(
            [(ids.new_id(), "g", State.COMMITTED), (t.id, "other", State.COMMITTED)], T0
        )
        assert not unknown.found
        assert not foreign.changed
        assert b.store.states([t.id]) == [State.PREPARED]

    run(scenario)


def test_the_same_id_again_is_the_same_transaction(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = half(b"a")
        first = await b.store.put([t, t], T0)
        assert [r.put for r in first] == [Put.STORED, Put.ALREADY]
        await b.restart()
        other = NewTransaction(t.id, "g", [NewMessage("t", b"b")])
        stranger = NewTransaction(t.id, "h", [NewMessage("t", b"a")])
        assert [r.put for r in await b.store.put([t, other, stranger], T0)] == [Put.ALREADY, Put.IN_USE, Put.IN_USE]
        await b.store.decide([(t.id, "g", State.COMMITTED)], T0)
        await b.restart()
        again = await b.store.put([t, other], T0)
        assert [(r.put, r.state) for r in again] == [(Put.ALREADY, State.COMMITTED), (Put.IN_USE, State.COMMITTED)]
        assert bodies(b.store) == [b"a"]

    run(scenario)


def test_messages_of_a_transaction_keep_their_order_and_numbers(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = NewTransaction(ids.new_id(), "g", [NewMessage("t", str(n).encode()) for n in range(50)])
        await commit(b.store, t)
        await b.restart()
        found = b.store.read("t", 0, 0, 100, 1 << 20)
        assert [(m.offset, m.message_no, m.payload) for m in found] == [(n, n, str(n).encode()) for n in range(50)]
        assert {m.transaction_id for m in found} == {t.id}

    run(scenario)


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


def test_checks_are_claimed_once_and_fenced_by_their_token(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = half(source="s", instance="i")
        await b.store.put([t], T0)
        assert b.store.claim_checks("g", T0 + 4 * SECOND, 10, 10 * SECOND) == []
        due = b.store.claim_checks("g", T0 + 5 * SECOND, 10, 10 * SECOND)
        assert [(d.id, d.source, d.instance, d.attempts, d.topics) for d in due] == [(t.id, "s", "i", 0, ("t",))]
        assert b.store.claim_checks("g", T0 + 6 * SECOND, 10, 10 * SECOND) == []
        again = b.store.claim_checks("g", T0 + 15 * SECOND, 10, 10 * SECOND)[0]
        assert again.token > due[0].token
        now = T0 + 16 * SECOND
        assert not await b.store.answer_check(t.id, due[0].token, now, now, 1, False)
        assert await b.store.answer_check(t.id, again.token, now, now + 5 * SECOND, 1, False)
        assert not await b.store.answer_check(t.id, again.token, now, now, 2, False)
        await b.restart(now)
        assert b.store.check_attempts(t.id) == (1, False)
        third = b.store.claim_checks("g", now + 5 * SECOND, 10, 10 * SECOND)[0]
        assert third.token > again.token
        assert b.store.half_payloads(t.id) == [b"x"]

    run(scenario)


def test_parked_transactions_stay_until_they_are_resolved(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = half()
        await b.store.put([t], T0)
        due = b.store.claim_checks("g", T0 + 5 * SECOND, 1, SECOND)[0]
        await b.store.answer_check(t.id, due.token, T0, T0 + 600 * SECOND, 15, True)
        await b.restart()
        assert b.store.states([t.id]) == [State.PARKED]
        assert [x.id for x in b.store.undecided(State.PARKED, "g", None, 10)] == [t.id]
        assert b.store.undecided(State.PREPARED, None, None, 10) == []
        result = (await b.store.decide([(t.id, "g", State.COMMITTED)], T0))[0]
        assert result.changed
        assert bodies(b.store) == [b"x"]

    run(scenario)


def test_resume_begins_the_checks_anew(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = half()
        await b.store.put([t], T0)
        due = b.store.claim_checks("g", T0 + 5 * SECOND, 1, SECOND)[0]
        await b.store.answer_check(t.id, due.token, T0, T0 + 600 * SECOND, 15, True)
        assert await b.store.resume_checks(t.id, T0 + 6 * SECOND, anew=False)
        assert b.store.check_attempts(t.id) == (15, True)
        assert len(b.store.claim_checks("g", T0 + 6 * SECOND, 1, SECOND)) == 1
        assert await b.store.resume_checks(t.id, T0 + 7 * SECOND, anew=True)
        await b.restart()
        assert b.store.check_attempts(t.id) == (0, False)
        assert len(b.store.claim_checks("g", T0 + 7 * SECOND, 1, SECOND)) == 1
        assert not await b.store.resume_checks(ids.new_id(), T0, anew=True)

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


def test_committed_at_once(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = half(b"a", committed=True)
        assert [(r.put, r.state) for r in await b.store.put([t], T0)] == [(Put.STORED, State.COMMITTED)]
        await b.restart()
        assert [r.put for r in await b.store.put([t], T0)] == [Put.ALREADY]
        assert bodies(b.store) == [b"a"]
        assert [m.offset for m in b.store.messages(t.id)] == [0]

    run(scenario)


steps = st.lists(
    st.tuples(
        st.sampled_from(["half", "commit", "rollback", "message", "settle", "restart", "delay", "release"]),
        st.integers(0, 7),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=steps)
def test_the_log_does_what_memory_does(steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any sequence of operations, with restarts, leaves the log and the plain model with the same answers."""

    async def whole() -> None:
        log = Bench("small-segments", tmp_path_factory.mktemp("log") / "log")
        model = MemoryStore()
        await log.store.open(T0)
        known: list[NewTransaction] = []
        now = T0
        await _both(log, model, lambda s: s.create_topic(Topic("t", queues=2)))
        await _both(log, model, lambda s: s.subscribe(Subscription("c", "t"), [0, 0]))
        for step, n in steps:
            now += SECOND
            at = now
            if step in ("half", "message", "delay"):
                options = {"delay_us": n * SECOND} if step == "delay" else {}
                t = half(bytes([n]) * n * 100, key=str(n), committed=step == "message", **options)
                known.append(t)
                await _both(log, model, lambda s, t=t, at=at: s.put([t], at))
            elif step in ("commit", "rollback") and known:
                t = known[n % len(known)]
                outcome = State.COMMITTED if step == "commit" else State.ROLLED_BACK
                await _both(log, model, lambda s, t=t, o=outcome, at=at: s.decide([(t.id, "g", o)], at))
            elif step == "settle":
                await _both(log, model, lambda s, n=n, at=at: s.settle("c", "t", n % 2, [(n, 2)], SettleKind.ACK, at))
            elif step == "release":
                assert log.store.release_due(at, 3) == model.release_due(at, 3)
                await log.store.sync()
            elif step == "restart":
                await log.restart(now)
        await log.restart(now)
        for queue in range(2):
            assert log.store.read("t", queue, 0, 100, 1 << 20) == model.read("t", queue, 0, 100, 1 << 20)
            mine, plain = log.store.progress("c", "t", queue), model.progress("c", "t", queue)
            assert (mine.floor, mine.settled) == (plain.floor, plain.settled)
        states = [t.id for t in known]
        assert log.store.states(states) == model.states(states)
        assert log.store.next_due_us() == model.next_due_us()
        await log.store.close()

    asyncio.run(whole())


async def _both(log: Bench, model: MemoryStore, call: Callable[[Any], Awaitable[Any]]) -> None:
    assert await call(log.store) == await call(model)


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


def test_a_decided_transaction_keeps_its_producer_group(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        done, undone, at_once = half(group="a"), half(group="b"), half(group="c", committed=True)
        await b.store.put([done, undone, at_once], T0)
        await b.store.decide([(done.id, "a", State.COMMITTED), (undone.id, "b", State.ROLLED_BACK)], T0)
        for _ in range(2):
            for t in (done, undone, at_once):
                found = b.store.transaction(t.id)
                assert found is not None and found.producer_group == t.producer_group
                foreign = NewTransaction(t.id, "other", t.messages, committed=t.committed)
                assert (await b.store.put([foreign], T0))[0].put == Put.IN_USE
                assert (await b.store.put([t], T0))[0].put == Put.ALREADY
            await b.restart()

    run(scenario)


class HeldDisk(Disk):
    """Its syncs wait until they are let go."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.go = threading.Event()
        self.go.set()

    def sync(self, fd: int) -> None:
        assert self.go.wait(10)
        super().sync(fd)


def test_only_a_synced_topic_waits_for_the_sync(tmp_path: Path) -> None:
    async def whole() -> None:
        disk = HeldDisk(tmp_path / "log")
        store = LogStore(tmp_path / "log", disk=disk)
        await store.open(T0)
        for flush in Flush:
            await store.create_topic(Topic(flush.name, flush=flush))
        store.journal._sync_average = 1.0  # a slow disk: its syncs are the thread's
        disk.go.clear()
        halves = {flush: half(topic=flush.name) for flush in Flush}
        synced = asyncio.create_task(store.put([halves[Flush.SYNC]], T0))
        await asyncio.sleep(0.05)  # the writer is in its sync now
        result = await asyncio.wait_for(store.put([halves[Flush.MEMORY]], T0), 1)
        assert result[0].flush == Flush.MEMORY
        waiting = asyncio.create_task(store.put([halves[Flush.ASYNC]], T0))
        await asyncio.sleep(0.05)
        assert not synced.done() and not waiting.done()  # its frame is behind the one that is being synced
        disk.go.set()
        assert (await synced)[0].flush == Flush.SYNC
        assert (await waiting)[0].flush == Flush.ASYNC
        disk.go.clear()
        another = half(topic="ASYNC")
        assert (await asyncio.wait_for(store.put([another], T0), 1))[0].flush == Flush.ASYNC
        assert (await asyncio.wait_for(store.put([another], T0), 1))[0].put == Put.ALREADY
        disk.go.set()
        await store.close()

    asyncio.run(whole())


def test_a_part_is_not_sealed_before_its_last_frame(tmp_path: Path) -> None:
    """Every frame fills a segment, so that the next one is full before this one is sealed.

    Found by `make crash`: the index of such a segment lacked that frame, and its messages were in no queue.
    """

    async def whole() -> None:
        store = LogStore(tmp_path / "log", segment_bytes=512, write_delay=lambda: 0.001)
        await store.open(T0)
        await store.create_topic(Topic("t"))

        chance = random.Random(1)

        async def caller() -> None:
            for _ in range(30):
                await asyncio.sleep(chance.random() * 0.002)
                await commit(store, *[half(bytes(300)) for _ in range(5)])

        await asyncio.gather(*(caller() for _ in range(8)))
        assert store.bounds("t", 0) == (0, 1200)
        await store.close()
        reopened = LogStore(tmp_path / "log")
        await reopened.open(T0)
        offset = 0
        while found := reopened.read("t", 0, offset, 1000, 1 << 30):
            assert [m.offset for m in found] == list(range(offset, offset + len(found)))
            offset += len(found)
        assert offset == 1200
        await reopened.close()

    asyncio.run(whole())


def test_ids_are_found_whatever_their_producers_clocks_say(tmp_path: Path) -> None:
    """Segments whose ranges of ids overlap, begin late, or lie in each other."""

    async def whole() -> None:
        store = LogStore(tmp_path / "log", segment_bytes=2048)
        await store.open(T0)
        await store.create_topic(Topic("t"))
        chance = random.Random(3)
        made: dict[bytes, State] = {}
        for step in range(120):
            skew = chance.choice((0, 0, 0, -60_000, 5_000, 3_600_000))
            milliseconds = 1_700_000_000_000 + step * 100 + skew
            name = ((milliseconds << 80) | (7 << 76) | (2 << 62) | chance.getrandbits(60)).to_bytes(16)
            outcome = chance.choice((State.COMMITTED, State.ROLLED_BACK))
            await store.put([NewTransaction(name, "g", [NewMessage("t", bytes(300))])], T0)
            await store.decide([(name, "g", outcome)], T0)
            made[name] = outcome
        await store.sealed_up()
        assert len(store.state.parts) > 20
        for _ in range(2):
            assert dict(zip(made, store.states(list(made)), strict=True)) == made
            assert store.states([bytes(16), b"\xff" * 16, ids.new_id()]) == [None] * 3
            assert all(len(store.messages(n)) == (made[n] == State.COMMITTED) for n in made)
            await store.close()
            store = LogStore(tmp_path / "log", segment_bytes=2048)
            await store.open(T0)
        await store.close()

    asyncio.run(whole())
