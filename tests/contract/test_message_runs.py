"""Runs of messages: encoded once, they say what the messages would say one by one, in whatever way a group receives."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from notify.protocol import ids
from notify.protocol.wire import Delivered, Payload, Receive, Received, SettleItem, encode_msgpack
from notify.server.data.encode import packed_deliveries, packed_runs
from notify.server.delivery import Delivery
from notify.server.delivery.cursor import READ_BYTES
from notify.server.delivery.leases import Handed
from notify.server.metrics import Metrics
from notify.server.topics import Topics
from notify.storage.groups import Subscription
from notify.storage.message_run import LEAST, CommitTimes, KeptRuns, MessageRun
from notify.storage.names import dead_letter_topic
from notify.storage.records import NewMessage, NewTransaction
from notify.storage.topics import Topic
from tests.contract.stores import SECOND, T0, Bench, commit
from tests.support.deliveries import each_of
from tests.support.transactions import sent

MANY = 1 << 30
COUNT = 4 * LEAST


def decoded(handed: list[Handed], in_runs: bool) -> list[Delivered]:
    answer = b"".join(packed_runs(handed)) if in_runs else packed_deliveries(handed)
    return each_of(msgspec.msgpack.decode(answer, type=Received))


def as_read(store: Any, offset: int, limit: int, max_bytes: int = MANY) -> list[Delivered]:
    """The messages that `read` finds, as deliveries of a lease."""
    return decoded([Handed("7.", store.read("t", 0, offset, limit, max_bytes), None)], in_runs=False)


def as_run(run: MessageRun | None) -> list[Delivered]:
    assert run is not None
    found = decoded([Handed("7.", [], None, run=run)], in_runs=True)
    assert [d.offset for d in found] == list(run.offsets)
    return found


def test_a_run_has_what_its_messages_have(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await b.store.create_topic(Topic("other"))
        messages = [NewMessage("t", encode_msgpack(Payload("t", b"%d" % n))) for n in (1, 2)]
        several = NewTransaction(ids.new_id(), "g", messages)
        for n in range(COUNT // 2):
            headers = {"h": "ü"} if n % 3 else None
            payload = encode_msgpack(Payload("t", bytes(n * 50), f"k{n}", "a", headers))
            one = NewTransaction(ids.new_id(), "g", [NewMessage("t", payload, f"k{n}", "a")])
            await commit(b.store, one, sent(b"other", topic="other") if n % 5 == 0 else sent(b"%d" % n), at=T0 + n)
        await commit(b.store, several)
        for _ in range(2):
            start, end = b.store.bounds("t", 0)
            assert start == 0 and end > COUNT // 2
            for offset, limit in ((0, end), (0, end + 5), (3, LEAST), (LEAST, LEAST + 1), (end - LEAST, 2 * LEAST)):
                assert as_run(b.store.read_run("t", 0, offset, limit, MANY)) == as_read(b.store, offset, limit)
            for most in (1, 400, 1000, 20_000):
                assert as_run(b.store.read_run("t", 0, 2, end, most)) == as_read(b.store, 2, end, most)
            assert b.store.read_run("t", 0, 0, LEAST - 1, MANY) is None
            assert b.store.read_run("t", 0, end - LEAST + 1, 100, MANY) is None
            assert b.store.read_run("t", 0, end, 100, MANY) is None
            await b.restart()
        b.store.trim("t", 0, 5)
        assert b.store.read_run("t", 0, 4, 100, MANY) is None
        assert as_run(b.store.read_run("t", 0, 5, 100, MANY)) == as_read(b.store, 5, 100)

    run(scenario)


def test_a_topic_s_time_to_live_is_that_of_the_first_to_expire(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await b.store.create_topic(Topic("t", ttl_us=10 * SECOND))
        for n in range(COUNT):
            await commit(b.store, sent(), at=T0 + n)
        run = b.store.read_run("t", 0, 3, 100, MANY)
        assert run is not None and run.expires_us == T0 + 3 + 10 * SECOND

    run(scenario)


async def delivery_of(b: Bench, now: list[int], **options: Any) -> Delivery:
    """Groups `plain` and `runs`, with the same subscription."""
    delivery = Delivery(b.store, lambda: now[0], Metrics(), Topics(b.store, on_first_use=True))
    for group in ("plain", "runs"):
        await delivery.following.subscribe(Subscription(group, "t", **options), "earliest")
    return delivery


@pytest.mark.parametrize(
    "options",
    [
        {}, {"mode": "ordered"}, {"mode": "broadcast"}, {"mode": "exclusive"}, {"tags": ("a",)},
        {"filter": 'headers.h == "y"'}, {"max_attempts": 2}, {"replay": 3},
    ],
    ids=lambda options: "".join(map(str, options.values())) or "shared",
)  # fmt: skip
def test_both_forms_say_the_same_of_whatever_became_of_messages(run: Any, options: dict[str, Any]) -> None:
    async def scenario(b: Bench) -> None:
        now = [T0]
        delivery = await delivery_of(b, now, **options)

        async def put(first: int, count: int) -> None:
            for n in range(first, first + count):
                headers = {"h": "xy"[n % 2]}
                payload = encode_msgpack(Payload("t", b"%d" % n, f"k{n % 40}", "ab"[n // LEAST % 2], headers))
                message = NewMessage("t", payload, f"k{n % 40}", "ab"[n // LEAST % 2])
                await commit(b.store, NewTransaction(ids.new_id(), "g", [message]), at=now[0])

        async def received(limit: int, lease: float = 30) -> dict[str, list[Delivered]]:
            forms: dict[str, list[Delivered]] = {}
            for group in ("plain", "runs"):
                request = Receive(instance="i", topics=["t"], max=limit, lease=lease)
                handed = await delivery.receive(group, request, in_runs=group == "runs")
                forms[group] = decoded(handed, in_runs=group == "runs")

            def shown(messages: list[Delivered]) -> list[Delivered]:
                return [msgspec.structs.replace(m, receipt=m.receipt.partition(".")[2]) for m in messages]

            assert shown(forms["plain"]) == shown(forms["runs"])
            return forms

        async def settle(forms: dict[str, list[Delivered]], places: slice, action: str, **more: Any) -> None:
            for group, messages in forms.items():
                if not messages[places]:
                    continue
                items = [SettleItem(receipt=m.receipt, action=action, **more) for m in messages[places]]
                assert {answer.status for answer in await delivery.settle(group, items)} <= {200}

        await received(1)  # instances of broadcast topics begin here
        await put(0, COUNT)
        first = await received(COUNT - 5)
        assert len(first["runs"]) >= LEAST
        await settle(first, slice(0, 3), "ack")
        await settle(first, slice(5, 7), "retry", delay=0)
        await settle(first, slice(8, 9), "retry", delay=20)
        await settle(first, slice(10, 12), "give_back")
        await settle(first, slice(13, 14), "dead_letter")
        second = await received(COUNT, lease=1)
        await settle(second, slice(1, 2), "ack")
        now[0] += 2 * SECOND
        await put(COUNT, COUNT)
        await delivery.tick()
        await received(3 * COUNT)
        now[0] += 40 * SECOND
        await delivery.tick()
        await put(2 * COUNT, COUNT)
        for _ in range(6):
            forms = await received(COUNT)
            await settle(forms, slice(None), "ack")
        lags = [delivery.groups[group].lag() for group in ("plain", "runs")]
        assert lags[0] == lags[1]
        if options.get("mode") != "broadcast":
            assert lags == [0, 0]
            letters = [b.store.bounds(dead_letter_topic(group), 0)[1] for group in ("plain", "runs")]
            assert letters[0] == letters[1] > 0

    run(scenario)


def test_settled_and_expired_messages_are_not_in_a_run(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        now = [T0]
        delivery = await delivery_of(b, now)
        for n in range(COUNT):
            await commit(b.store, sent(b"%d" % n))
        handed = await delivery.receive("runs", Receive(instance="i", max=COUNT), in_runs=True)
        deliveries = decoded(handed, in_runs=True)
        lease = deliveries[0].receipt.partition(".")[0]

        async def settle(*places: str) -> list[int]:
            items = [SettleItem(receipt=f"{lease}.{each}", action="ack") for each in places]
            return [answer.status for answer in await delivery.settle("runs", items)]

        assert await settle("0-4", "10", "20-29") == [200] * 3
        assert await settle("4-5", "10", f"0-{COUNT}") == [410] * 3
        assert await settle("30-33", "34", "33-35", "40", "36") == [200, 200, 410, 200, 200]
        settled = {*range(5), 10, *range(20, 30), *range(30, 35), 36, 40}
        await b.restart()
        delivery = Delivery(b.store, lambda: now[0], Metrics(), Topics(b.store, on_first_use=True))
        handed = await delivery.receive("runs", Receive(instance="i", max=COUNT), in_runs=True)
        assert [d.offset for d in decoded(handed, in_runs=True)] == [n for n in range(COUNT) if n not in settled]

    run(scenario)


@pytest.mark.parametrize("mode", ["shared", "ordered"])
@pytest.mark.parametrize("in_runs", [False, True])
def test_an_answer_has_bounded_bytes_however_many_messages_are_asked_for(mode: str, in_runs: bool) -> None:
    """A thousand messages of 1 MiB in one answer would take a gigabyte of the server's memory."""

    async def scenario() -> None:
        b = Bench("memory", Path())
        await b.store.create_topic(Topic("t"))
        delivery = await delivery_of(b, [T0], mode=mode)
        payload = encode_msgpack(Payload("t", bytes(1 << 20)))
        count = 2 * LEAST + 8
        messages = [NewMessage("t", payload, f"k{n}" if n % 2 else None) for n in range(count)]
        await b.store.put([NewTransaction(ids.new_id(), "g", messages, committed=True)], T0)
        for action in ("retry", "ack"):
            await delivery.tick()
            seen: list[int] = []
            items: list[SettleItem] = []
            while len(seen) < count:
                handed = await delivery.receive("runs", Receive(instance="i", max=1000), in_runs=in_runs)
                found = decoded(handed, in_runs=in_runs)
                assert 0 < sum(len(d.body) for d in found) <= READ_BYTES
                seen += [d.offset for d in found]
                items += [SettleItem(receipt=d.receipt, action=action, delay=0) for d in found]
            assert sorted(seen) == list(range(count))
            assert {answer.status for answer in await delivery.settle("runs", items)} == {200}
        assert delivery.groups["runs"].lag() == 0

    asyncio.run(scenario())


def spoil(directory: Path, bytes_of_payload: bytes) -> None:
    """Change a byte of a payload on the disk."""
    for name in directory.glob("*.log"):
        whole = name.read_bytes()
        at = whole.find(bytes_of_payload)
        if at >= 0:
            with name.open("r+b") as file:
                file.seek(at)
                file.write(b"#")
            return
    raise AssertionError("no segment has it")


def test_a_damaged_message_is_left_out_and_its_neighbours_are_delivered(tmp_path: Path) -> None:
    async def scenario() -> None:
        b = Bench("small-segments", tmp_path / "log")
        await b.store.open(T0)
        await b.store.create_topic(Topic("t"))
        for n in range(COUNT):
            await commit(b.store, sent(b"<%d>" % n))
        await b.restart()
        spoil(b.directory, b"<9>")
        assert b.store.read_run("t", 0, 0, COUNT, MANY) is None
        delivery = await delivery_of(b, [T0])
        handed = await delivery.receive("runs", Receive(instance="i", max=COUNT), in_runs=True)
        assert [d.offset for d in decoded(handed, in_runs=True)] == [n for n in range(COUNT) if n != 9]
        await b.store.close()

    asyncio.run(scenario())


def test_groups_in_step_get_the_same_bytes(tmp_path: Path) -> None:
    async def scenario() -> None:
        b = Bench("log", tmp_path / "log")
        await b.store.open(T0)
        await b.store.create_topic(Topic("t"))
        for n in range(COUNT):
            await commit(b.store, sent(b"%d" % n))
        delivery = await delivery_of(b, [T0])
        handed = [
            (await delivery.receive(group, Receive(instance="i", max=COUNT), in_runs=True))[0]
            for group in ("plain", "runs")
        ]
        assert handed[0].run is not None and handed[0].run is handed[1].run
        assert handed[0].token != handed[1].token
        await commit(b.store, sent(b"later"))
        longer = b.store.read_run("t", 0, 0, 2 * COUNT, MANY)
        assert longer is not None and longer.count == COUNT + 1  # not the kept one, which ends before
        await b.store.close()

    asyncio.run(scenario())


def test_runs_are_kept_within_a_number_of_bytes() -> None:
    kept = KeptRuns(800)

    def run(first: int, size: int) -> MessageRun:
        return MessageRun(first, LEAST, 0, 0, bytes(size), CommitTimes(array("Q")))

    kept.keep(1, run(0, 101))
    assert (kept.get(1, 0, LEAST), kept.bytes) == (None, 0)
    for first in range(10):
        kept.keep(1, run(first, 100))
    assert [first for first in range(10) if kept.get(1, first, LEAST)] == list(range(2, 10))
    assert kept.bytes == 800 and kept.get(1, 9, LEAST + 1) is None and kept.get(2, 9, LEAST) is None
    kept.keep(1, run(9, 50))
    assert kept.bytes == 750


@pytest.mark.parametrize("change", [{"heads": b"short"}, {"offsets": [(0, 1)]}, {"attempts": [1]}])
def test_a_run_that_contradicts_itself_is_not_taken(change: dict[str, Any]) -> None:
    run = {"lease": "7", "queue": 0, "offsets": [(0, 2)], "heads": bytes(52), "messages": [Payload("t", b"")] * 2}
    answer = encode_msgpack({"messages": [], "runs": [run]})
    assert len(each_of(msgspec.msgpack.decode(answer, type=Received))) == 2
    answer = encode_msgpack({"messages": [], "runs": [run | change]})
    with pytest.raises(msgspec.ValidationError):
        each_of(msgspec.msgpack.decode(answer, type=Received))
