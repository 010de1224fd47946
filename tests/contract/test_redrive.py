"""A dead letter is sent again once, also if an earlier version of the server sent it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from notify import ids
from notify.server.core.core import Core
from notify.server.jobs.dead_letters import DeadLetters
from notify.settings import Settings
from notify.storage.groups import Subscription
from notify.storage.names import redriven_id_without_topic, retry_topic
from notify.storage.records import NewMessage, NewTransaction
from notify.storage.topics import Topic
from notify.wire import Payload, encode_msgpack
from tests.contract.stores import T0, Bench


def test_a_letter_that_an_earlier_version_sent_again_is_known_as_such(run: Callable[..., None]) -> None:
    """Earlier versions used one id for the letters of two groups: the message in the group's own retry topic counts."""

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
        again = redriven_id_without_topic(sent.id, 0)
        name = retry_topic("g", "t")
        b.store.create_topic_soon(Topic(name))
        await b.store.put([NewTransaction(again, "", [NewMessage(name, payload)], committed=True)], T0)
        await b.restart()
        core = Core(b.store, Settings(), lambda: T0)
        for group, redriven, status, count in (("g", True, 200, 1), ("h", False, 201, 1)):
            letters = DeadLetters(core, group)
            page = letters.read(0, 10)
            assert await letters.are_closed(page) == [redriven]
            for expected in (status, 200):
                (item,) = await letters.send_again(page)
                assert item["status"] == expected
                assert (item["as"] == ids.message_id(again, 0)) == redriven
            assert b.store.bounds(retry_topic(group, "t"), 0) == (0, count)

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
        letters = DeadLetters(core, "g")
        page = letters.read(0, 10)
        if first == "drop":
            assert [item["status"] for item in await letters.drop(page, "ann: of no use")] == [204]
        else:
            assert [item["status"] for item in await letters.send_again(page)] == [201]
        await b.restart()
        letters = DeadLetters(Core(b.store, Settings(), lambda: T0), "g")
        page = letters.read(0, 10)
        assert await letters.are_closed(page) == [True]
        assert await letters.dropped(page) == ["ann: of no use" if first == "drop" else None]
        assert [item["status"] for item in await letters.drop(page, "again")] == [200]
        (item,) = await letters.send_again(page)
        assert item["status"] == (410 if first == "drop" else 200)
        assert b.store.bounds(retry_topic("g", "t"), 0) == (0, first == "send")

    run(scenario)
