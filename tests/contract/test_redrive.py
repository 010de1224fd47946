"""A dead letter is sent again once, or dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from notify.protocol import ids
from notify.protocol.wire import Payload, encode_msgpack
from notify.server.core.core import Core
from notify.server.groups import own_letters
from notify.server.groups.own_letters import OwnLetter, OwnLetters
from notify.server.letters.engine import REDRIVE, Closing, Fate, Look
from notify.server.letters.letters import Letters
from notify.server.letters.query import Chosen, LetterQuery
from notify.server.settings import Settings
from notify.storage.groups import Subscription
from notify.storage.names import retry_topic
from notify.storage.records import NewMessage, NewTransaction
from tests.contract.stores import T0, Bench


async def all_of(letters: OwnLetters, group: str) -> list[OwnLetter]:
    return (await letters.read(group, 0, Look(lambda _: True, 10))).letters


def test_the_letters_of_one_message_in_two_groups_are_sent_again_separately(run: Callable[..., None]) -> None:
    """They have the same offset in the dead-letter topics of their groups."""

    async def scenario(b: Bench) -> None:
        core = Core(b.store, Settings(), lambda: T0)
        payload = encode_msgpack(Payload("t", b"x"))
        sent = NewTransaction(ids.new_id(), "", [NewMessage("t", payload)], committed=True)
        for group in ("g", "h"):
            await core.delivery.following.subscribe(Subscription(group, "t"), "earliest")
        await b.store.put([sent], T0)
        (message,) = b.store.read("t", 0, 0, 10, 1 << 20)
        for group in ("g", "h"):
            b.store.dead_letter_soon(group, [(message, payload)], T0)
        await b.store.sync()
        for group in ("g", "h"):
            letters = OwnLetters(core)
            page = await all_of(letters, group)
            assert await letters.fates(group, page) == [Fate.OPEN]
            for expected in (201, 200):
                (item,) = await letters.close(group, page, REDRIVE)
                assert item["status"] == expected
            assert await letters.fates(group, page) == [Fate.REDRIVEN]
            assert b.store.bounds(retry_topic(group, "t"), 0) == (0, 1)

    run(scenario)


@pytest.mark.parametrize("first", ["drop", "send"])
def test_a_letter_is_dropped_or_sent_whichever_comes_first(run: Callable[..., None], first: str) -> None:
    """Both have one id, so that neither follows the other, also over a restart."""

    async def scenario(b: Bench) -> None:
        core = Core(b.store, Settings(), lambda: T0)
        payload = encode_msgpack(Payload("t", b"x"))
        sent = NewTransaction(ids.new_id(), "", [NewMessage("t", payload)], committed=True)
        await core.delivery.following.subscribe(Subscription("g", "t"), "earliest")
        await b.store.put([sent], T0)
        (message,) = b.store.read("t", 0, 0, 10, 1 << 20)
        b.store.dead_letter_soon("g", [(message, payload)], T0)
        await b.store.sync()
        letters = OwnLetters(core)
        page = await all_of(letters, "g")
        how = Closing(drop="ann: of no use") if first == "drop" else REDRIVE
        assert [item["status"] for item in await letters.close("g", page, how)] == [204 if first == "drop" else 201]
        await b.restart()
        letters = OwnLetters(Core(b.store, Settings(), lambda: T0))
        page = await all_of(letters, "g")
        assert await letters.fates("g", page) == [Fate.DROPPED if first == "drop" else Fate.REDRIVEN]
        closed_by = await letters.closed_by("g", page[0].message)
        assert closed_by is not None and closed_by[1] == ("ann: of no use" if first == "drop" else None)
        assert [item["status"] for item in await letters.close("g", page, Closing(drop="again"))] == [200]
        (item,) = await letters.close("g", page, REDRIVE)
        assert item["status"] == (410 if first == "drop" else 200)
        assert b.store.bounds(retry_topic("g", "t"), 0) == (0, first == "send")

    run(scenario)


@pytest.mark.parametrize("by_ids", [True, False])
@pytest.mark.parametrize("does", ["redrive", "drop"])
def test_letters_are_sent_and_dropped_in_lots_of_bytes(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, does: str, by_ids: bool
) -> None:
    """All of them were held at once: 4,096 letters of a megabyte."""
    monkeypatch.setattr(own_letters, "LOT_BYTES", 3_000)

    async def scenario(b: Bench) -> None:
        core = Core(b.store, Settings(), lambda: T0)
        payload = encode_msgpack(Payload("t", b"x" * 1_000))
        sent = [NewTransaction(ids.new_id(), "", [NewMessage("t", payload)], committed=True) for _ in range(20)]
        await core.delivery.following.subscribe(Subscription("g", "t"), "earliest")
        await b.store.put(sent, T0)
        messages = b.store.read("t", 0, 0, 100, 1 << 20)
        b.store.dead_letter_soon("g", [(message, payload) for message in messages], T0)
        await b.store.sync()
        names = [ids.message_id(transaction.id, 0) for transaction in sent]
        engine = OwnLetters(core)
        letters = Letters(engine, engine.counts)
        # The third is closed before.
        await (await letters.redrive("g", Chosen((names[2],), LetterQuery(), 1))).do()
        if does == "drop":
            change = await letters.drop("g", (*names, "none") if by_ids else tuple(names), "of no use")
        else:
            change = await letters.redrive("g", Chosen((*names, "none") if by_ids else None, LetterQuery(), 100))
        assert change.preview["ids"] == [n for n in sorted(names) if by_ids or does == "drop" or n != names[2]]
        lots: list[int] = []
        put = b.store.put

        async def counted(transactions: list[NewTransaction], *words: Any) -> Any:
            lots.append(len(transactions))
            return await put(transactions, *words)

        monkeypatch.setattr(b.store, "put", counted)
        items = (await change.do())["items"]
        assert max(lots) <= 3 and sum(lots) == len(change.preview["ids"])
        new = 201 if does == "redrive" else 204
        expected = {name: 200 if name == names[2] else new for name in change.preview["ids"]}
        assert {item["id"]: item["status"] for item in items} == expected | ({"none": 404} if by_ids else {})
        assert await engine.counts.look_at("g", 100) == 20 and engine.count("g") == 0

    run(scenario)


def test_a_letter_that_is_purged_meanwhile_is_refused_alone(run: Callable[..., None]) -> None:
    async def scenario(b: Bench) -> None:
        core = Core(b.store, Settings(), lambda: T0)
        payload = encode_msgpack(Payload("t", b"x"))
        sent = [NewTransaction(ids.new_id(), "", [NewMessage("t", payload)], committed=True) for _ in range(3)]
        await core.delivery.following.subscribe(Subscription("g", "t"), "earliest")
        await b.store.put(sent, T0)
        b.store.dead_letter_soon("g", [(m, payload) for m in b.store.read("t", 0, 0, 100, 1 << 20)], T0)
        await b.store.sync()
        engine = OwnLetters(core)
        letters = Letters(engine, engine.counts)
        change = await letters.redrive("g", Chosen(None, LetterQuery(), 100))
        await (await letters.purge("g", 1)).do()
        items = (await change.do())["items"]
        assert sorted(item["status"] for item in items) == [201, 201, 404]
        assert items[-1]["id"] == ids.message_id(sent[0].id, 0)

    run(scenario)
