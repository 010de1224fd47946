"""Subscriptions: which are refused, and how a pattern's settings reach the topics that it matches."""

from __future__ import annotations

import asyncio

import pytest

from notify.errors import Conflict, InvalidRequest
from notify.wire import Subscribe
from tests.support.delivery import SECOND, Scene


@pytest.mark.parametrize("topic", ["t", "t*"])
def test_after_a_start_a_group_counts_as_in_use_until_its_consumers_had_time_to_come_back(topic: str) -> None:
    async def scenario() -> None:
        s = Scene()
        await s.subscriptions.put(s.subscriptions.checked("g", topic, Subscribe()), None)
        s.subscriptions.checked("g", topic, Subscribe(mode="ordered"))  # no consumer has asked since the start
        s.restart()
        s.now_us += 59 * SECOND
        with pytest.raises(Conflict, match=r"started less than 60 s ago.*with force") as refused:
            s.subscriptions.checked("g", topic, Subscribe(mode="ordered"))
        assert refused.value.code == "mode_in_use"
        s.subscriptions.checked("g", topic, Subscribe(mode="ordered", force=True))
        s.subscriptions.checked("g", topic, Subscribe(max_attempts=3))
        await s.subscriptions.put(s.subscriptions.checked("new", topic, Subscribe()), None)
        s.subscriptions.checked("new", topic, Subscribe(mode="ordered"))
        s.now_us += SECOND
        s.subscriptions.checked("g", topic, Subscribe(mode="ordered"))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (Subscribe(mode="random"), "invalid_schema"),
        (Subscribe(max_attempts=0), "out_of_bounds"),
        (Subscribe(retry_min=float("nan")), "out_of_bounds"),
        (Subscribe(retry_min=5, retry_max=1), "out_of_bounds"),
        (Subscribe(tags=["t"] * 65), "out_of_bounds"),
        (Subscribe(tags=["a b"]), "invalid_name"),
        (Subscribe(filter="1 +"), "invalid_filter"),
    ],
)
def test_what_cannot_be(asked: Subscribe, code: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Scene().subscriptions.checked("g", "t", asked)
    assert refused.value.code == code


def test_a_patterns_new_settings_reach_the_topics_that_it_follows() -> None:
    async def scenario() -> None:
        s = Scene()

        async def put(topic: str, asked: Subscribe) -> None:
            await s.subscriptions.put(s.subscriptions.checked("g", topic, asked), None)

        def settings(topic: str) -> tuple[str, int, tuple[str, ...]]:
            known = s.store.subscription("g", topic)
            assert known is not None
            cursor = s.delivery.groups["g"].cursors[(topic, 0)]
            assert cursor.subscription == known, "delivery uses the new settings"
            return known.mode, known.max_attempts, known.tags

        await put("order.own", Subscribe(max_attempts=2))
        s.topics.use("order.before")
        await put("order.*", Subscribe())
        s.topics.use("order.after")
        reset = await s.delivery.following.reset(s.store.subscription("g", "order.after"), "latest")  # type: ignore[arg-type]
        await put("order.*", Subscribe(mode="ordered", max_attempts=7, tags=["vip"]))
        for topic in ("order.before", "order.after"):
            assert settings(topic) == ("ordered", 7, ("vip",))
        assert settings("order.own") == ("shared", 2, ())
        after = s.store.subscription("g", "order.after")
        assert after is not None
        assert after.epoch == reset.epoch == 1, "the group's offsets stay"
        await put("order.before", Subscribe(max_attempts=3))
        await put("order.*", Subscribe())
        assert settings("order.before") == ("shared", 3, ())
        assert settings("order.after") == ("shared", 16, ())

    asyncio.run(scenario())
