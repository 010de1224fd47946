"""Subscriptions: which are refused, and how a pattern's settings reach the topics that it matches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from notify.errors import Conflict, InvalidRequest
from notify.protocol import ids
from notify.protocol.wire import Payload, Receive, SettleItem, Subscribe, encode_msgpack
from notify.server.groups import Move
from notify.server.groups.own import OwnGroups
from notify.storage.groups import Priorities, PriorityClass
from notify.storage.records import NewMessage, NewTransaction
from notify.storage.topics import Topic
from tests.support.delivery import SECOND, Scene


@pytest.mark.parametrize("topic", ["t", "t*"])
async def test_after_a_start_a_group_counts_as_in_use_until_its_consumers_had_time_to_come_back(topic: str) -> None:
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
def test_a_subscription_with_a_wrong_field_is_refused(asked: Subscribe, code: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Scene().subscriptions.checked("g", "t", asked)
    assert refused.value.code == code


async def test_a_patterns_new_settings_reach_the_topics_that_it_follows() -> None:
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


async def test_a_group_goes_on_while_the_end_of_a_topic_becomes_durable() -> None:
    """Whoever asked meanwhile for the group's lag, or received by a pattern, got a 404, which ends a consumer."""
    s = Scene()
    for topic in ("gone", "left"):
        await s.subscriptions.put(s.subscriptions.checked("g", topic, Subscribe()), None)
    lags: list[int] = []

    async def slowly() -> None:
        lags.append(s.delivery.groups["g"].lag())

    s.store.sync = slowly  # type: ignore[method-assign]
    await s.delivery.following.delete_topic("gone")
    assert lags == [0] and list(s.delivery.groups["g"].modes()) == ["left"]


async def test_a_reset_keeps_settings_that_change_while_it_is_recorded() -> None:
    """The reset of a group whose consumers were just started with other settings took these back."""
    s = Scene()
    await s.subscriptions.put(s.subscriptions.checked("g", "t", Subscribe()), None)
    core: Any = SimpleNamespace(queues=s.store, delivery=s.delivery)
    letters: Any = None
    change = await OwnGroups(core, letters).reset("g", Move("t", "earliest", replay_effects=True))
    await s.subscriptions.put(s.subscriptions.checked("g", "t", Subscribe(max_attempts=3)), None)
    assert (await change.do())["replay"] == 1
    moved = s.store.subscription("g", "t")
    assert moved is not None and (moved.max_attempts, moved.epoch, moved.replay) == (3, 1, 1)


async def test_a_report_of_an_inbox_keeps_settings_that_change_meanwhile() -> None:
    s = Scene()
    for topic in ("t1", "t2"):
        s.topics.put_soon(Topic(topic))
    await s.subscriptions.put(s.subscriptions.checked("g", "t*", Subscribe()), None)

    async def changed_meanwhile() -> None:
        del s.store.sync
        await s.subscriptions.put(s.subscriptions.checked("g", "t*", Subscribe(max_attempts=3)), None)

    s.store.sync = changed_meanwhile  # type: ignore[method-assign]
    await s.subscriptions.report_inbox("g", "t*", s.now_us)
    assert [(x.max_attempts, x.inbox_from_us) for x in s.store.subscriptions()] == [(3, s.now_us)] * 2


@pytest.mark.parametrize("is_first", [True, False])
async def test_the_instances_of_a_broadcast_have_the_classes_of_their_group(is_first: bool) -> None:
    """They had one class, whatever the group's were. `is_first`: the classes are there before the instance."""
    s = Scene()
    for topic in ("low", "high"):
        await s.subscriptions.put(s.subscriptions.checked("g", topic, Subscribe(mode="broadcast")), None)
    classes = Priorities((PriorityClass("high", 6, ("high",)), PriorityClass("low", 1, ("low",))))
    if is_first:
        await s.delivery.following.set_priorities("g", classes)
    assert await s.delivery.receive("g", Receive(instance="x")) == []
    if not is_first:
        await s.delivery.following.set_priorities("g", classes)
    assert s.delivery.groups["g@x"].turns.priorities == classes
    s.restart()
    assert s.delivery.groups["g@x"].turns.priorities == classes


async def test_a_reset_of_a_broadcasts_instance_heeds_what_its_inbox_was_purged_of() -> None:
    s = Scene()
    await s.subscriptions.put(s.subscriptions.checked("g", "t", Subscribe(mode="broadcast")), None)
    await s.subscriptions.report_inbox("g", "t", 0)
    await s.delivery.receive("g", Receive(instance="x"))
    message = NewMessage("t", encode_msgpack(Payload("t", b"old")))
    await s.store.put([NewTransaction(ids.new_id(), "", [message], committed=True)], s.now_us)
    for handed in await s.delivery.receive("g", Receive(instance="x")):
        await s.delivery.settle("g", [SettleItem(receipt=r, action="ack") for r, _, _ in handed.each()])
    s.now_us += SECOND
    await s.subscriptions.report_inbox("g", "t", s.now_us)
    core: Any = SimpleNamespace(queues=s.store, delivery=s.delivery)
    letters: Any = None
    for group in ("g", "g@x"):
        with pytest.raises(Conflict, match="a second time"):
            await OwnGroups(core, letters).reset(group, Move("t", "earliest"))
