"""Every sink stores a source's batches once, in order, each with its position: queue servers and Kafka."""

from __future__ import annotations

import asyncio

import pytest

from notify.errors import Conflict, NotifyError, Unavailable
from notify.movers.sinks.sink import Sink
from notify.protocol import ids
from notify.protocol.limits import LIMITS
from notify.protocol.wire import Bridged, BridgedTransaction, PackedBridgeBatch, PackedMessage
from tests.support.kafka import patient_sink
from tests.support.targets import Target


class Mover:
    """A bridge of the test's source, as its target sees it."""

    def __init__(self, target: Target, url: str = "") -> None:
        self._target = target
        self.sink: Sink = patient_sink(url or target.url)
        self.epoch = 0
        self.position = ""

    async def claim(self, *, take_back: bool = True) -> str:
        self.epoch, self.position = await self.sink.claim(self._target.topic, take_back=take_back)
        return self.position

    async def append(self, position: str, *transactions: BridgedTransaction, **fields: object) -> Bridged:
        batch = PackedBridgeBatch(
            epoch=self.epoch, expected_position=self.position, position=position, transactions=list(transactions),
            **fields,  # type: ignore[arg-type]
        )  # fmt: skip
        answer = await self.sink.append(self._target.topic, batch)
        if not answer.refused:
            self.position = position
        return answer

    async def close(self) -> None:
        await self.sink.close()


def sent(target: Target, body: str, key: str | None = "k", group: str = "g", **fields: object) -> BridgedTransaction:
    """A transaction of one message."""
    message = PackedMessage(topic=target.topic, body=body.encode(), key=key, **fields)  # type: ignore[arg-type]
    return BridgedTransaction(id=ids.to_text(ids.new_id()), producer_group=group, messages=[message])


@pytest.mark.long
def test_each_is_there_once_and_a_frozen_mover_that_wakes_is_refused(target: Target) -> None:
    async def run() -> None:
        frozen, other = Mover(target), Mover(target)
        await frozen.claim()
        await frozen.append("1", sent(target, "a"))
        assert await other.claim() == "1" and other.epoch > frozen.epoch
        await other.append("2", sent(target, "b"))
        with pytest.raises(Conflict) as refused:
            await frozen.append("2", sent(target, "b"))
        assert refused.value.code == "stale_epoch"
        with pytest.raises(Conflict) as refused:
            await frozen.claim(take_back=False)
        assert refused.value.code == "stale_epoch"
        await other.append("3", sent(target, "c"))
        assert await other.sink.position(target.topic) == "3"
        await frozen.close()
        await other.close()

    asyncio.run(run())
    assert target.delivered(3) == ["a", "b", "c"]


def test_two_movers_at_once_store_each_batch_once_and_in_order(target: Target) -> None:
    """Whoever is refused, or does not know what became of a batch, asks where the source stands."""
    count = 12
    rows = [sent(target, f"{n:02}") for n in range(count)]
    claims: list[int] = []

    async def move() -> None:
        mover = Mover(target)
        while True:
            try:
                at = int(await mover.claim() or 0)
                claims.append(at)
                for n in range(at, min(at + 3, count)):
                    await mover.append(str(n + 1), rows[n])
                if at == count:
                    break
            except (Conflict, Unavailable):
                continue
        await mover.close()

    async def both() -> None:
        await asyncio.gather(move(), move())

    asyncio.run(both())
    assert len(claims) > 2
    assert target.delivered(count) == [f"{n:02}" for n in range(count)]


@pytest.mark.long
@pytest.mark.parametrize("answer", [False, True], ids=["before the answer", "after it was written"])
def test_a_batch_that_is_cut_is_stored_once(target: Target, answer: bool) -> None:
    async def run() -> None:
        mover = Mover(target, target.proxied())
        await mover.claim()
        await mover.append("1", sent(target, "a"))
        was_cut = target.cut(answer=answer)
        row = sent(target, "second of two")
        try:
            await mover.append("2", row)
        except (Conflict, Unavailable):  # a client that sends again learns that its position is stored
            if await mover.claim(take_back=False) != "2":
                await mover.append("2", row)
        assert was_cut()
        await mover.append("3", sent(target, "c"))
        await mover.close()

    asyncio.run(run())
    assert target.delivered(3) == ["a", "second of two", "c"]


def test_the_order_per_key_is_kept_over_batches_and_producer_groups(target: Target) -> None:
    async def run() -> None:
        mover = Mover(target)
        await mover.claim()
        some = [sent(target, f"{n % 3} {n:02}", key=f"k{n % 3}", group="gh"[n // 3 % 2]) for n in range(30)]
        some.append(sent(target, "0 30", key="k0", group=""))
        for at in range(0, len(some), 7):
            await mover.append(str(at), *some[at : at + 7])
        await mover.close()

    asyncio.run(run())
    came = target.delivered(31)
    for key in "012":
        numbers = [body.split()[1] for body in came if body.startswith(key)]
        assert numbers == sorted(numbers) and len(numbers) >= 10


@pytest.mark.long
def test_parts_of_a_large_transaction_are_there_together_and_taken_back_together(target: Target) -> None:
    async def run() -> None:
        mover = Mover(target)
        await mover.claim()
        gone = [sent(target, "taken back"), sent(target, "that too")]
        await mover.append("", *gone, prepare=True)
        await mover.append("1", rollback=[t.id for t in gone])
        parts = [sent(target, f"{n} {'x' * 900_000}") for n in range(6)]
        await mover.append("1", *parts[:2], prepare=True)
        await mover.append("1", *parts[2:4], prepare=True)
        await mover.append("2", *parts[4:], commit=[t.id for t in parts[:4]])
        await mover.close()
        again = Mover(target)
        assert await again.claim() == "2"
        await again.close()

    asyncio.run(run())
    assert [body.split()[0] for body in target.delivered(6)] == [str(n) for n in range(6)]


def test_nothing_is_stored_beside_what_is_refused_for_good(target: Target) -> None:
    """The mover notes what is named, and sends the rest: the position is never past a refusal that nobody knows."""
    bad = {
        "a long body": sent(target, "x" * (LIMITS.message_bytes + 1)),
        "a long key": sent(target, "x", key="k" * (LIMITS.key_bytes + 1)),
        "a topic that is no name": sent(target, "x"),
        "a group that is no name": sent(target, "x", group="no name"),
        "a tag that is no name": sent(target, "x", tag="no name"),
        "too many headers": sent(target, "x", headers={str(n): "v" for n in range(LIMITS.headers + 1)}),
        "a delay of months": sent(target, "x", delay=LIMITS.delay_seconds + 1),
        "no message": sent(target, "x"),
    }
    bad["a topic that is no name"].messages[0].topic = "no name"
    bad["no message"].messages = []
    good = [sent(target, "first"), sent(target, "last")]

    async def run() -> None:
        mover = Mover(target)
        await mover.claim()
        answer = await mover.append("1", good[0], *bad.values(), good[1])
        by_id = {item.id: item for item in answer.refused}
        for name, each in bad.items():
            assert 400 <= by_id[each.id].status < 500 and by_id[each.id].code and by_id[each.id].detail, name
        assert len(by_id) == len(bad) and await mover.sink.position(target.topic) == ""
        assert not (await mover.append("1", *good)).refused
        assert await mover.sink.position(target.topic) == "1"
        await mover.close()

    asyncio.run(run())
    assert target.delivered(2) == ["first", "last"]


def test_a_batch_that_nobody_claimed_for_is_refused(target: Target) -> None:
    async def run() -> None:
        mover = Mover(target)
        mover.epoch = 1
        with pytest.raises(NotifyError, match="claim"):
            await mover.append("1", sent(target, "x"))
        await mover.close()
        await mover.close()

    asyncio.run(run())


@pytest.mark.long
def test_a_note_between_parts_does_not_commit_them(target: Target) -> None:
    """A source's transaction that takes long is between its parts when its bridge notes that it still lives."""

    async def run() -> None:
        mover = Mover(target)
        await mover.claim()
        await mover.append("1", sent(target, "before"))
        await mover.append("1", sent(target, "a part that is never committed"), prepare=True)
        await mover.append("1")
        await mover.close()
        again = Mover(target)
        assert await again.claim() == "1"
        whole = [sent(target, "first part"), sent(target, "last part")]
        await again.append("1", whole[0], prepare=True)
        await again.append("1")
        await again.append("2", whole[1], commit=[whole[0].id])
        await again.append("3", sent(target, "behind"))
        await again.close()

    asyncio.run(run())
    assert target.delivered(4) == ["before", "first part", "last part", "behind"]


def test_an_invalid_message_is_refused_alone(target: Target) -> None:
    """A queue server refuses the whole batch for it: that ended the bridge."""
    bad = [sent(target, "x") for _ in range(4)]
    bad[0].messages[0].headers = {"a": 1}  # type: ignore[dict-item]
    bad[1].messages[0].headers = "{no json"  # type: ignore[assignment]
    bad[2].messages[0].headers = ["a"]  # type: ignore[assignment]
    bad[3].messages[0].deliver_at = "no time"  # type: ignore[assignment]

    async def run() -> None:
        mover = Mover(target)
        await mover.claim()
        good = sent(target, "good")
        answer = await mover.append("1", *bad[:2], good, *bad[2:])
        assert {item.id for item in answer.refused} == {each.id for each in bad}
        assert all(item.status == 422 and item.code and item.detail for item in answer.refused)
        assert not (await mover.append("1", good)).refused
        await mover.close()

    asyncio.run(run())
    assert target.delivered(1) == ["good"]


@pytest.mark.long
def test_a_batch_that_is_larger_than_a_request_is_stored(target: Target) -> None:
    async def run() -> None:
        mover = Mover(target)
        await mover.claim()
        some = [sent(target, f"{n:02} {'x' * 900_000}") for n in range(LIMITS.request_bytes // 900_000 + 1)]
        assert (await mover.append("1", *some)).stored == len(some) == 10
        assert await mover.sink.position(target.topic) == "1"
        await mover.close()

    asyncio.run(run())
    assert [body[:2] for body in target.delivered(10)] == [f"{n:02}" for n in range(10)]
