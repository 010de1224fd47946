"""Segments go when their time is over; what still waits in them is carried, also through crashes and twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

from notify import ids
from storage.log import LogStore
from storage.store import NewMessage, NewTransaction, SettleKind, State, Subscription, Topic

T0 = 1_800_000_000_000_000
HOUR = 3_600_000_000


def half(body: bytes, **options: int) -> NewTransaction:
    return NewTransaction(ids.new_id(), "g", [NewMessage("t", body, **options)])  # type: ignore[arg-type]


async def fill(store: LogStore, count: int, at: int) -> list[bytes]:
    """Committed messages, over several segments."""
    bodies = []
    for n in range(count):
        t = half(b"%d-%d" % (at, n) + bytes(200))
        bodies.append(t.messages[0].payload)
        await store.put([t], at)
        await store.decide([(t.id, "g", State.COMMITTED)], at)
    await store.sealed_up()
    return bodies


def opened(directory: Path) -> LogStore:
    return LogStore(directory, segment_bytes=4096, retention_us=HOUR)


def rest(store: LogStore, offset: int = 0) -> dict[int, bytes]:
    return {m.offset: m.payload for m in store.read("t", 0, offset, 10_000, 1 << 30) if not m.corrupt}


def test_settled_messages_go_and_waiting_ones_stay(tmp_path: Path) -> None:
    async def run() -> None:
        store = opened(tmp_path / "log")
        await store.open(T0)
        await store.create_topic(Topic("t"))
        await store.subscribe(Subscription("c", "t"), [0])
        old = await fill(store, 60, T0)
        pending = half(b"undecided")
        delayed = half(b"delayed", delay_us=100 * HOUR)
        await store.put([pending, delayed], T0)
        await store.decide([(delayed.id, "g", State.COMMITTED)], T0)
        await fill(store, 10, T0 + 1)
        await store.settle("c", "t", 0, [(0, 20), (30, 25)], SettleKind.ACK, T0)
        segments = len(store.segments.all())
        assert await store.retain(T0 + HOUR - 1) == 0
        new = await fill(store, 30, T0 + 2 * HOUR)
        dropped = await store.retain(T0 + 2 * HOUR)
        assert dropped >= 5
        assert len(store.segments.all()) < segments + 6

        async def check(store: LogStore) -> None:
            found = rest(store)
            expected = {n: old[n] for n in [*range(20, 30), *range(55, 60)]}
            assert {n: found[n] for n in expected} == expected
            # The newest segment of that time may still be there as a whole; those before it only in part.
            assert not {*range(20), *range(30, 45)} & found.keys()
            assert [found[n] for n in range(70, 100)] == new
            assert store.half_payloads(pending.id) == [b"undecided"]
            assert store.bounds("t", 0)[1] == 100

        await check(store)
        await store.close()
        store = opened(tmp_path / "log")
        await store.open(T0)
        await check(store)
        # Twice: what was carried is carried again, and what is settled meanwhile is not.
        await fill(store, 40, T0 + 4 * HOUR)
        await store.settle("c", "t", 0, [(20, 5)], SettleKind.ACK, T0)
        assert await store.retain(T0 + 4 * HOUR) >= 1
        found = rest(store)
        assert {n: found[n] for n in range(25, 30)} == {n: old[n] for n in range(25, 30)}
        assert store.half_payloads(pending.id) == [b"undecided"]
        assert (await store.decide([(pending.id, "g", State.COMMITTED)], T0 + 4 * HOUR))[0].changed
        assert store.release_due(T0 + 101 * HOUR, 10) == 1
        await store.sync()
        await store.close()
        store = opened(tmp_path / "log")
        await store.open(T0)
        found = rest(store)
        assert sorted(found.values())[-2:] == [b"delayed", b"undecided"]
        # All settled: husks go, nothing old is left.
        await store.settle("c", "t", 0, [(0, 200)], SettleKind.ACK, T0)
        await fill(store, 20, T0 + 9 * HOUR)
        await store.retain(T0 + 9 * HOUR)
        first = store.segments.all()[0].base
        assert [name for name in store.disk.names() if name.endswith(".idx") and int(name[:20]) < first] == []
        assert store.bounds("t", 0)[0] > 60
        await store.close()

    asyncio.run(run())


def test_a_message_committed_after_its_halfs_segment_expired(tmp_path: Path) -> None:
    """The half is old, the commit is young: retention counts from the commit."""

    async def run() -> None:
        store = opened(tmp_path / "log")
        await store.open(T0)
        await store.create_topic(Topic("t"))
        late = half(b"late")
        await store.put([late], T0)
        await fill(store, 20, T0)
        await store.decide([(late.id, "g", State.COMMITTED)], T0 + 2 * HOUR)
        await fill(store, 20, T0 + 2 * HOUR)
        assert await store.retain(T0 + 2 * HOUR) >= 1
        assert b"late" in rest(store).values()
        await store.close()
        store = opened(tmp_path / "log")
        await store.open(T0)
        assert b"late" in rest(store).values()
        await store.close()

    asyncio.run(run())


def test_a_topic_may_keep_longer(tmp_path: Path) -> None:
    async def run() -> None:
        store = opened(tmp_path / "log")
        await store.open(T0)
        await store.create_topic(Topic("t", retention_us=10 * HOUR))
        await fill(store, 40, T0)
        await fill(store, 20, T0 + 5 * HOUR)
        assert await store.retain(T0 + 5 * HOUR) == 0
        assert await store.retain(T0 + 11 * HOUR) >= 1
        await store.close()

    asyncio.run(run())
