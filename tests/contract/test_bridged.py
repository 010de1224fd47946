"""Every storage with queues stores a bridge's transactions and position together, in order, from one bridge."""

from __future__ import annotations

from typing import Any

import pytest

from notify.errors import Conflict, DiskFull, NotifyError, StorageFailed, Unavailable
from notify.protocol import ids
from notify.protocol.wire import BridgeBatch, BridgedTransaction, PackedBridgeBatch, PackedMessage
from notify.server.core.bridges import Bridges
from notify.server.topics import Topics
from notify.storage.bridged import BridgeState, IdsInUse
from notify.storage.records import NewTransaction, Put, PutResult, State
from tests.contract.stores import T0, Bench, bodies
from tests.support.transactions import sent


async def append(
    b: Bench, expected: str, position: str, *transactions: NewTransaction, now_us: int = T0, **options: Any
) -> list[PutResult]:
    """Append a batch of source "s", of epoch 1 unless `options` say otherwise."""
    batch = BridgeBatch(**({"epoch": 1} | options), expected_position=expected, position=position)
    return await b.store.append_from_bridge("s", batch, transactions, now_us)


def whole(body: bytes) -> NewTransaction:
    return sent(body, committed=True)


def test_the_position_is_durable_with_what_is_before_it(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        a, c = whole(b"a"), whole(b"c")
        await append(b, "", "1", a, claim=True)
        await b.restart()
        again = await append(b, "1", "2", a, c, now_us=T0 + 1)
        assert [r.put for r in again] == [Put.ALREADY, Put.STORED]
        await b.restart()
        assert b.store.bridges() == [BridgeState("s", 1, "2", 2, T0 + 1, "1")]
        assert bodies(b.store) == [b"a", b"c"]

    run(scenario)


def test_the_base_of_long_positions_is_durable_with_them(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await append(b, "", "1", claim=True)
        assert b.store.bridge_base("s") == ""
        await append(b, "1", "2", whole(b"a"), base="a base" * 1000)
        with pytest.raises(Conflict):
            await append(b, "1", "3", base="another")
        await append(b, "2", "3", whole(b"c"))
        await b.restart()
        assert b.store.bridge_base("s") == "a base" * 1000 and b.store.bridge_base("other") == ""
        await append(b, "3", "4", base="")
        await b.restart()
        assert b.store.bridge_base("s") == "" and b.store.bridges()[0].position == "4"
        assert bodies(b.store) == [b"a", b"c"]

    run(scenario)


def test_another_position_or_an_older_bridge_changes_nothing(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await append(b, "", "1", claim=True)
        with pytest.raises(Conflict):
            await append(b, "0", "2", whole(b"x"))
        with pytest.raises(Conflict):
            await append(b, "1", "2", whole(b"x"), epoch=2)
        with pytest.raises(Conflict):
            await append(b, "1", "2", whole(b"x"), claim=True)
        await append(b, "1", "1", epoch=3, claim=True)
        await b.restart()
        with pytest.raises(Conflict):
            await append(b, "1", "2", whole(b"x"))
        assert bodies(b.store) == [] and b.store.bridges()[0].position == "1"

    run(scenario)


def test_a_large_transaction_becomes_visible_with_its_last_part_and_in_order(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await append(b, "", "0", claim=True)
        parts = [sent(bytes([n]), source="s") for n in range(4)]
        await append(b, "0", "0", *parts[:2])
        await b.restart()
        await append(b, "0", "0", parts[2])
        assert bodies(b.store) == []
        last = [NewTransaction(t.id, t.producer_group, t.messages, committed=True) for t in (parts[2], parts[3])]
        results = await append(b, "0", "1", *last, commit=[ids.to_text(t.id) for t in parts[:2]])
        assert [r.put for r in results] == [Put.ALREADY, Put.STORED]
        await b.restart()
        assert bodies(b.store) == [bytes([n]) for n in range(4)]

    run(scenario)


def test_a_transaction_of_thousands_of_messages_becomes_visible(run: Any) -> None:
    """A batch that named 4,200 transactions of earlier parts was refused for ever, as if the disk were too slow."""

    async def scenario(b: Bench) -> None:
        await append(b, "", "0", claim=True)
        parts = [sent(b"%d" % n, source="s") for n in range(5000)]
        await append(b, "0", "0", *parts)
        await append(b, "0", "1", commit=[ids.to_text(t.id) for t in parts])
        assert bodies(b.store) == [b"%d" % n for n in range(5000)]

    run(scenario)


def test_a_batch_that_is_whole_or_not_at_all_stores_nothing_beside_an_id_in_use(run: Any) -> None:
    """A bridge notes the refusal before its position moves past it."""

    async def scenario(b: Bench) -> None:
        await append(b, "", "1", claim=True)
        known = whole(b"a")
        await append(b, "1", "2", known)
        await b.restart()
        other = NewTransaction(known.id, "another", known.messages, committed=True)
        with pytest.raises(IdsInUse) as refusal:
            await append(b, "2", "3", whole(b"b"), other, refuse_whole=True)
        assert refusal.value.ids == [known.id]
        assert b.store.bridges()[0].position == "2" and bodies(b.store) == [b"a"]
        results = await append(b, "2", "3", whole(b"b"), known, refuse_whole=True)
        assert [r.put for r in results] == [Put.STORED, Put.ALREADY]
        await b.restart()
        assert b.store.bridges()[0].position == "3" and bodies(b.store) == [b"a", b"b"]

    run(scenario)


@pytest.mark.parametrize(("source", "instance"), [("", ""), ("s", "shop-1"), ("other", "")])
@pytest.mark.parametrize("as_commit", [True, False])
def test_a_bridge_commits_only_halves_that_its_source_prepared(
    run: Any, source: str, instance: str, as_commit: bool
) -> None:
    """A bridge cannot commit a producer's halves. A right to one source committed those of every group."""

    async def scenario(b: Bench) -> None:
        await append(b, "", "0", claim=True)
        half = sent(b"not yet", source=source, instance=instance)
        await b.store.put([half], T0)
        await b.restart()
        if as_commit:
            with pytest.raises(Conflict, match="prepared") as refusal:
                await append(b, "0", "1", whole(b"x"), commit=[ids.to_text(half.id)])
            assert refusal.value.code == "foreign_half"
            assert b.store.bridges()[0].position == "0"
        else:
            repeated = NewTransaction(half.id, half.producer_group, half.messages, committed=True)
            results = await append(b, "0", "1", repeated, whole(b"x"))
            assert [r.put for r in results] == [Put.IN_USE, Put.STORED]
        shown = await b.store.transaction(half.id)
        assert shown is not None and shown.state.name == "PREPARED"
        assert bodies(b.store) == ([] if as_commit else [b"x"])
        # A commit of a decided or unknown transaction changes nothing: a batch may be repeated.
        await b.store.decide([(half.id, None, State.COMMITTED)], T0)
        position = "0" if as_commit else "1"
        await append(b, position, "2", commit=[ids.to_text(half.id), ids.to_text(sent(b"").id)])

    run(scenario)


@pytest.mark.parametrize("refusal", [DiskFull("full"), Unavailable("too much waits"), StorageFailed("it failed")])
def test_a_disk_that_takes_no_topic_refuses_no_transaction(run: Any, refusal: NotifyError) -> None:
    """It was taken for a refusal for good, and good transactions went to the list of refused ones."""

    class Full:
        """A store in front of another that makes no topic."""

        def __init__(self, store: Any) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def create_topic_soon(self, *_: object) -> None:
            raise refusal

    async def scenario(b: Bench) -> None:
        good = BridgedTransaction(
            id=ids.to_text(ids.new_id()), producer_group="g", messages=[PackedMessage(topic="new", body=b"x")]
        )
        batch = PackedBridgeBatch(
            epoch=1, expected_position="", position="1", claim=True, refuse_whole=True, transactions=[good]
        )
        full: Any = Full(b.store)
        with pytest.raises(type(refusal)):
            await Bridges(b.store, lambda: T0, Topics(full)).append("s", batch)
        assert b.store.bridges() == []
        done = await Bridges(b.store, lambda: T0, Topics(b.store)).append("s", batch)
        assert (done.stored, done.refused) == (1, [])

    run(scenario)
