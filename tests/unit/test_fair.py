"""Tenants take turns: one with many messages does not delay another's few, in any mode, after any restart."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest

from notify.errors import Conflict, InvalidRequest, Unavailable
from notify.protocol import ids
from notify.protocol.wire import Payload, Receive, SettleItem, Subscribe, decode_payload, encode_msgpack
from notify.server.delivery import cursor, explanations, fair, lanes
from notify.server.delivery.fair import FairTurns
from notify.server.delivery.lanes import Lanes, OffsetQueue
from notify.server.groups.own_tenants import shares
from notify.storage.groups import Subscription
from notify.storage.records import NewMessage, NewTransaction
from notify.storage.topics import Topic
from tests.support.delivery import SECOND, Scene

KINDS = [("shared", "key"), ("shared", "header:tenant"), ("ordered", "key"), ("ordered", "header:tenant")]
each_kind = pytest.mark.parametrize(("mode", "fair_by"), KINDS)


async def scene(*bodies: str, **changes: Any) -> Scene:
    """A group whose tenants take turns. A body's first letter is its tenant, `-` none; its key is all before a dot."""
    s = Scene()
    await s.delivery.following.subscribe(Subscription("g", "t", **{"fair_by": "header:tenant"} | changes), None)
    await put(s, *bodies)
    return s


async def put(s: Scene, *bodies: str, tag: str | None = None, ttl: float = 0) -> None:
    transactions = []
    for body in bodies:
        tenant = body[0]
        key = None if tenant == "-" else body.partition(".")[0]
        headers = None if tenant == "-" else {"tenant": tenant}
        payload = encode_msgpack(Payload("t", body.encode(), key, tag, headers))
        message = NewMessage("t", payload, key=key, tag=tag, ttl_us=round(ttl * SECOND))
        transactions.append(NewTransaction(ids.new_id(), "", [message], committed=True))
    if transactions:
        await s.store.put(transactions, s.now_us)


async def receive(s: Scene, most: int = 100) -> dict[str, str]:
    """The receipts of what an instance is handed, by body, after the group has looked ahead."""
    request = Receive(instance="i", lease=30, max=most)
    handed = await s.delivery.receive("g", request)
    while not handed and s.delivery.groups["g"].has_skipped:
        handed = await s.delivery.receive("g", request)
    return {decode_payload(message.payload).body.decode(): receipt for h in handed for receipt, message, _ in h.each()}


async def settle(s: Scene, action: str, *receipts: str, delay: float = 0.0) -> None:
    items = [SettleItem(receipt=receipt, action=action, delay=delay, reason="boom") for receipt in receipts]
    if items:
        assert [answer.status for answer in await s.delivery.settle("g", items)] == [200] * len(items)


async def drain(s: Scene, most: int = 10) -> list[str]:
    """The messages that come until nothing comes any more; all of it is acknowledged."""
    came: list[str] = []
    while True:
        got = await receive(s, most)
        if not got:
            return came
        assert len(got) <= most
        came += got
        await settle(s, "ack", *got.values())


def bodies(tenant: str, count: int, keys: int = 1) -> list[str]:
    """Messages of a tenant, over so many keys."""
    return [f"{tenant}{n % keys}.{n}" for n in range(count)]


def of(s: Scene) -> FairTurns:
    found = s.delivery.groups["g"].cursors[("t", 0)]
    assert isinstance(found, FairTurns)
    return found


# --- lanes --------------------------------------------------------------------------------------------------------


def test_a_queue_of_offsets_is_a_queue() -> None:
    chance = random.Random(1)
    queue, model, following = OffsetQueue(), deque[int](), 0
    for _ in range(20_000):
        if chance.random() < 0.4:
            following += chance.choice((0, 0, 0, 1, 7))
            count = chance.choice((1, 1, 3, 100))
            queue.add(following, count)
            model.extend(range(following, following + count))
            following += count
        elif model:
            most = chance.choice((1, 2, 50, 1000))
            assert queue.first == model[0]
            taken = list(queue.take(most))
            assert 0 < len(taken) <= most and taken == [model.popleft() for _ in taken]
        assert len(queue) == len(model)


def test_neighbours_take_no_room() -> None:
    queue = OffsetQueue()
    for n in range(3000):
        queue.append(n)
    queue.add(3000, 5 << 20)
    assert queue.runs <= 7 and sum(len(queue.take(1 << 30)) for _ in range(queue.runs)) == len(range(3000 + (5 << 20)))


@pytest.mark.parametrize("most_tenants", [10_000, 5])
def test_turns_lose_and_double_nothing(monkeypatch: pytest.MonkeyPatch, most_tenants: int) -> None:
    monkeypatch.setattr(lanes, "MOST_TENANTS", most_tenants)
    chance = random.Random(most_tenants)
    turns, waiting, following = Lanes(), dict[int, int](), 0
    last: Counter[int] = Counter()
    for _ in range(5_000):
        what = chance.random()
        if what < 0.5:
            tenant, count = chance.randrange(20), chance.choice((1, 1, 5, 40))
            turns.add(tenant, following, count)
            waiting |= dict.fromkeys(range(following, following + count), tenant)
            following += count
        elif what < 0.9:
            for offset, _ in turns.take(chance.choice((1, 10, 100))):
                tenant = waiting.pop(offset)
                assert last[tenant] <= offset, "a tenant's messages come in order, also in a shared lane"
                last[tenant] = offset
        elif waiting:
            lowest = sorted(waiting)[:3]
            assert [offset for offset, _ in turns.take_lowest(3)] == lowest
            for offset in lowest:
                del waiting[offset]
        assert turns.count == len(waiting)
        assert turns.runs == sum(lane.offsets.runs for lane in turns._turns)
    assert sorted(offset for offset, _ in turns.take(1 << 20)) == sorted(waiting)
    assert (turns.count, turns.runs, turns.bytes) == (0, 0, 0)


def test_turns_are_even() -> None:
    turns = Lanes()
    for tenant in range(10):
        turns.add(tenant, tenant * 1000, 1000)
    for limit in (1, 7, 33, 100):
        taken = Counter(number for _ in range(10 * 32 // limit) for _, number in turns.take(limit))
        assert max(taken.values()) - min(taken.values() if len(taken) == 10 else [0]) <= lanes.LONGEST_TURN


# --- deliveries ---------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("restarts", [False, True])
async def test_a_few_messages_do_not_wait_behind_many(mode: str, fair_by: str, restarts: bool) -> None:
    s = await scene(*bodies("a", 2_000, 50 if fair_by != "key" else 1), mode=mode, fair_by=fair_by)
    await settle(s, "ack", *(await receive(s, 20)).values())
    for tenant in "bcde":
        await put(s, *bodies(tenant, 5))
    if restarts:
        s.restart()
    came = await drain(s)
    assert all(body[0] == "a" for body in came[60:]), "the few are through after a few requests"
    assert len(came) == len(set(came)) == 2_020 - (20 if fair_by != "key" or mode == "shared" else 1)
    assert s.delivery.groups["g"].lag() == 0


@each_kind
async def test_each_key_is_in_order(mode: str, fair_by: str) -> None:
    chance = random.Random(7)
    s = await scene(mode=mode, fair_by=fair_by, max_attempts=1000)
    sent = [f"{chance.choice('aaaaabcd')}{chance.randrange(4)}.{n}" for n in range(400)]
    first: dict[str, int] = {}
    done: set[str] = set()
    while len(done) < 400:
        await put(s, *sent[:5])
        del sent[:5]
        got = await receive(s, 12)
        s.now_us += SECOND
        await s.delivery.tick()
        for body, receipt in got.items():
            key, _, number = body.partition(".")
            assert body not in done
            if body not in first:
                before = [b for b in first if b.startswith(f"{key}.")]
                assert all(int(b.partition(".")[2]) < int(number) for b in before)
                assert mode == "shared" or all(b in done for b in before)
                first[body] = 1
            if chance.random() < 0.2:
                await settle(s, "retry", receipt, delay=chance.choice((0, 2)))
            else:
                await settle(s, "ack", receipt)
                done.add(body)
        if chance.random() < 0.05:
            s.restart()
    assert await drain(s) == [] and s.delivery.groups["g"].lag() == 0


async def test_the_failures_of_one_tenant_do_not_take_the_turns_of_others() -> None:
    s = await scene(*bodies("a", 50))
    await settle(s, "retry", *(await receive(s, 50)).values())
    await put(s, *bodies("b", 10), *bodies("a", 50)[40:])
    await s.delivery.tick()
    got = await receive(s, 20)
    assert Counter(body[0] for body in got) == {"a": 10, "b": 10}
    await settle(s, "retry", *[receipt for body, receipt in got.items() if body[0] == "b"], delay=5)
    s.now_us += 5 * SECOND
    await s.delivery.tick()
    assert sum(body[0] == "b" for body in await receive(s, 20)) == 10


async def test_an_answer_is_in_the_order_of_turns() -> None:
    s = await scene(*bodies("a", 500), *bodies("b", 10))
    came = list(await receive(s, 400))
    assert "".join(body[0] for body in came) == "a" * 16 + "b" * 10 + "a" * 374


async def test_expired_leases_come_back_in_turns() -> None:
    s = await scene(*bodies("a", 100), *bodies("b", 2))
    first = await receive(s, 30)
    s.now_us += 31 * SECOND
    await s.delivery.tick()
    again = await receive(s, 30)
    assert set(again) == set(first)
    assert set(s.store.progress("g", "t", 0).attempts.values()) == {1}


async def test_messages_that_name_no_tenant_are_one() -> None:
    s = await scene("-1", "-2", "-3", *bodies("a", 3))
    assert list(await receive(s, 4)) == ["-1", "-2", "a0.0", "a0.1"]
    rows = of(s).waits()
    assert {of(s).oldest(waits)[0]: waits.messages for waits in rows.values()} == {None: 1, "a": 1}


@pytest.mark.parametrize("fair_by", ["key", "header:tenant"])
@pytest.mark.parametrize("changes", [{"tags": ("x",)}, {"filter": 'tag == "x"'}])
async def test_tags_and_filters_leave_out_as_ever(fair_by: str, changes: dict[str, Any]) -> None:
    s = await scene(fair_by=fair_by, **changes)
    for n in range(30):
        await put(s, f"a.{n}", tag="xy"[n % 2])
    await put(s, "b.1", tag="x")
    await put(s, "c.1", tag="y")
    came = await drain(s)
    assert sorted(came) == sorted([f"a.{n}" for n in range(0, 30, 2)] + ["b.1"])
    assert (s.metrics.filtered, s.delivery.groups["g"].lag()) == (16, 0)


async def test_other_tags_count_for_what_waits() -> None:
    s = await scene(tags=("x", "y"))
    await put(s, "a.1", "a.2", tag="x")
    await put(s, "a.3", tag="y")
    assert list(await receive(s, 1)) == ["a.1"]
    await s.delivery.following.subscribe(Subscription("g", "t", fair_by="header:tenant", tags=("y",)), None)
    assert await drain(s) == ["a.3"]


@each_kind
async def test_messages_dropped_or_expired_while_waiting_are_settled(mode: str, fair_by: str) -> None:
    s = await scene(*bodies("a", 10, 10), mode=mode, fair_by=fair_by)
    await put(s, *bodies("b", 3, 3), ttl=5)
    assert len(await receive(s, 1)) == 1
    s.store.trim("t", 0, 8)
    s.now_us += 6 * SECOND
    assert sorted(await drain(s)) == ["a8.8", "a9.9"]
    assert s.metrics.expired == 7 + 3


@each_kind
async def test_messages_dropped_before_they_were_seen_are_settled(mode: str, fair_by: str) -> None:
    s = await scene(*bodies("a", 10, 10), mode=mode, fair_by=fair_by)
    s.store.trim("t", 0, 4)
    assert len(await drain(s)) == 6
    assert s.store.progress("g", "t", 0).floor == 10


@each_kind
async def test_a_growth_of_queues_keeps_the_order_of_keys(mode: str, fair_by: str) -> None:
    s = await scene(*bodies("a", 40, 8), mode=mode, fair_by=fair_by)
    s.topics.put_soon(Topic("t", queues=3))
    await put(s, *[f"a{n % 8}.{n}" for n in range(40, 80)])
    last: dict[str, int] = {}
    for body in await drain(s, 7):
        key, _, number = body.partition(".")
        assert last.get(key, -1) < int(number)
        last[key] = int(number)
    assert sum(last.values()) == sum(range(72, 80))


# --- bounds -------------------------------------------------------------------------------------------------------


async def test_gaps_stay_within_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair, "MANY_GAPS", 10)
    monkeypatch.setattr(fair, "RUNS_BOUND", 20)
    s = await scene(*[f"{'ab'[n % 2]}{n}.1" for n in range(10)])
    for n in range(200):  # every other message is a new tenant's, and comes before the many of `a`
        await put(s, f"a{n}.2", f"{chr(0x100 + n)}{n}.3")
    most, told = 0, set[str]()
    while got := await receive(s, 3):
        await settle(s, "ack", *got.values())
        most = max(most, len(s.store.progress("g", "t", 0).settled))
        told.update(explanations.reasons(s.delivery.groups["g"], s.now_us))
    assert any("half of its turns to the oldest" in reason for reason in told)
    assert 10 <= most <= 20 + 3 and s.delivery.groups["g"].lag() == 0


@each_kind
async def test_beyond_its_memory_a_queue_is_read_later(
    monkeypatch: pytest.MonkeyPatch, mode: str, fair_by: str
) -> None:
    monkeypatch.setattr(fair, "AHEAD_BYTES", 16 * lanes.LANE_BYTES)
    monkeypatch.setattr(fair, "ENTRIES_AT_ONCE", 10)
    monkeypatch.setattr(fair, "MESSAGES_AT_ONCE", 10)
    sent = [f"{chr(0x100 + n)}{n}.1" for n in range(300)]
    s = await scene(*sent, mode=mode, fair_by=fair_by)
    assert await s.delivery.receive("g", Receive(instance="i", max=1)) == []  # more is to be looked at
    first = list(await receive(s, 1))
    (reason,) = explanations.reasons(s.delivery.groups["g"], s.now_us)
    assert "Queue t/0 is read no further" in reason
    came = await drain(s)
    assert sorted(first + came) == sorted(sent)
    assert of(s).lanes.count == 0 and explanations.reasons(s.delivery.groups["g"], s.now_us) == []


async def test_tenants_behind_one_busy_key_have_the_same_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is remembered, for people, although none has a message in a lane."""
    monkeypatch.setattr(fair, "AHEAD_BYTES", 100 * fair.KEY_BYTES)
    monkeypatch.setattr(fair, "MESSAGES_AT_ONCE", 10)
    s = await scene(mode="ordered")
    for n in range(300):
        payload = encode_msgpack(Payload("t", str(n).encode(), "busy", None, {"tenant": str(n)}))
        message = NewMessage("t", payload, key="busy")
        await s.store.put([NewTransaction(ids.new_id(), "", [message], committed=True)], s.now_us)
    first = list(await receive(s))
    assert first == ["0"] and 50 <= sum(rows.messages for rows in of(s).waits().values()) <= 110
    (reason,) = explanations.reasons(s.delivery.groups["g"], s.now_us)
    assert "Queue t/0 is read no further" in reason
    s.now_us += 31 * SECOND
    await s.delivery.tick()
    assert await drain(s) == [str(n) for n in range(300)]


@each_kind
async def test_a_queue_that_grows_faster_than_it_is_read(
    monkeypatch: pytest.MonkeyPatch, mode: str, fair_by: str
) -> None:
    """After some seconds there are turns among those tenants that were found, and the others follow."""
    monkeypatch.setattr(fair, "ENTRIES_AT_ONCE", 10)
    monkeypatch.setattr(fair, "MESSAGES_AT_ONCE", 10)
    sent = [*bodies("a", 40), "b.1"]
    s = await scene(*sent, mode=mode, fair_by=fair_by)
    came: list[str] = []
    for second in range(18):
        more = [f"c{second}-{n}.1" for n in range(20)]
        await put(s, *more)
        sent += more
        handed = await s.delivery.receive("g", Receive(instance="i", lease=60, max=4))
        got = {decode_payload(m.payload).body.decode(): receipt for h in handed for receipt, m, _ in h.each()}
        assert bool(got) == (second >= fair.LOOK_US // SECOND)
        if got:
            assert any("come faster" in each for each in explanations.reasons(s.delivery.groups["g"], s.now_us))
        came += got
        await settle(s, "ack", *got.values())
        s.now_us += SECOND
    assert "b.1" in came[:20], "it waits behind forty"
    came += await drain(s)
    assert sorted(came) == sorted(sent) and explanations.reasons(s.delivery.groups["g"], s.now_us) == []


async def test_many_tenants_share_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MOST_TENANTS", 5)
    sent = [f"{chr(0x100 + n % 100)}{n}.1" for n in range(500)]
    s = await scene(*sent)
    assert await receive(s, 1)
    rows = of(s).waits()
    assert len([number for number in rows if number >= 0]) == 5 and min(rows) < 0
    s.now_us += 31 * SECOND
    await s.delivery.tick()
    assert sorted(await drain(s)) == sorted(sent)


async def test_a_refused_read_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    s = await scene(*bodies("a", 5), *bodies("b", 5))
    assert len(await receive(s, 2)) == 2
    read = s.store.read

    def refuse(*arguments: Any) -> Any:
        raise Unavailable("the disk is unreachable")

    monkeypatch.setattr(s.store, "read", refuse)
    with pytest.raises(Unavailable):
        await receive(s, 4)
    monkeypatch.setattr(s.store, "read", read)
    assert len(await drain(s)) == 8


async def test_large_messages_wait_for_the_next_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair, "READ_BYTES", 200)
    monkeypatch.setattr(cursor, "READ_BYTES", 200)
    s = await scene(*bodies("a", 200), *bodies("b", 20))
    sizes, came = [], []
    while got := await receive(s, 100):
        sizes.append(len(got))
        came += got
        await settle(s, "ack", *got.values())
    assert max(sizes) < 20 and len(came) == len(set(came)) == 220
    assert all(body[0] == "a" for body in came[100:]), "what had no room is the first of the next answer"


# --- subscriptions ------------------------------------------------------------------------------------------------


async def test_held_keys_hold_their_tenant_alone() -> None:
    s = await scene(*bodies("a", 3), "b.1", mode="ordered", on_exhausted="hold", max_attempts=1)
    got = await receive(s)
    await settle(s, "retry", got["a0.0"])
    await settle(s, "ack", got["b.1"])
    await put(s, "b.2")
    assert await drain(s) == ["b.2"]
    s.restart()
    group = s.delivery.groups["g"]
    assert await drain(s) == []
    (held,) = group.holds
    assert held.cursor.waiting_for(held.offset) == 2
    assert [waits.messages for waits in of(s).waits().values()] == [2]
    group.holds.skip(held, "enough", s.now_us)
    assert await drain(s) == ["a0.1", "a0.2"]


async def test_it_begins_and_ends_where_the_group_is() -> None:
    s = await scene(*bodies("a", 10), "b.1", fair_by="")
    await settle(s, "ack", *(await receive(s, 3)).values())
    await s.delivery.following.subscribe(Subscription("g", "t", fair_by="key"), None)
    assert len(await receive(s, 2)) == 2
    assert sum(share.waiting for share in shares(s.delivery.groups["g"])) == 6
    await s.delivery.following.subscribe(Subscription("g", "t"), None)
    assert await drain(s) == [f"a0.{n}" for n in range(3, 10)] + ["b.1"]
    assert list(shares(s.delivery.groups["g"])) == []
    assert type(s.delivery.groups["g"].cursors[("t", 0)]) is cursor.Cursor


async def test_active_consumers_keep_it() -> None:
    s = await scene("a.1", fair_by="key")
    s.subscriptions.checked("g", "t", Subscribe(fair_by="key"))
    await receive(s)
    with pytest.raises(Conflict, match="mode shared and fair_by key"):
        s.subscriptions.checked("g", "t", Subscribe())
    assert s.subscriptions.checked("g", "t", Subscribe(force=True)).fair_by == ""


@pytest.mark.parametrize(
    ("mode", "fair_by"),
    [("shared", "tenant"), ("shared", "header:"), ("shared", "key "), ("broadcast", "key"), ("exclusive", "key")],
)
def test_fair_by_is_refused_for_modes_and_names_that_cannot_have_it(mode: str, fair_by: str) -> None:
    s = Scene()
    with pytest.raises(InvalidRequest, match="fair_by"):
        s.subscriptions.checked("g", "t", Subscribe(mode=mode, fair_by=fair_by))
