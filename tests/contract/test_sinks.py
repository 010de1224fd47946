"""Every sink stores each transaction once and in order, by id or by position, within the target's bounds.

`Target` is what a suite needs of a kind of target; queue servers are one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from notify.errors import Conflict, Unavailable
from notify.movers.sinks.queue_server import QueueSink
from notify.movers.sinks.sink import PutsById, Sink
from notify.protocol import ids
from notify.protocol.limits import LIMITS
from notify.protocol.wire import BridgedTransaction, Item, PackedBridgeBatch, PackedMessage
from notify.testing.process import ServerProcess
from tests.support.groups import bodies, drain, subscribe
from tests.support.http import admin
from tests.support.kafka import patient_sink
from tests.support.proxy import Proxy

T = TypeVar("T")


class Target:
    """A queue server with a topic and a group of this test."""

    def __init__(self, server: ServerProcess, topic: str) -> None:
        self.url = server.url
        self.topic = topic
        self._proxies: list[Proxy] = []
        subscribe(self.url, topic, topic)

    def sent(self, body: str, key: str = "k", group: str = "g", **fields: object) -> BridgedTransaction:
        """A transaction of one message."""
        message = PackedMessage(topic=self.topic, body=body.encode(), key=key, **fields)  # type: ignore[arg-type]
        return BridgedTransaction(id=ids.to_text(ids.new_id()), producer_group=group, messages=[message])

    def delivered(self, count: int) -> list[str]:
        """The bodies of all messages; waits until there are so many."""
        return bodies(drain(self.url, self.topic, self.topic, count))

    def limit(self, per_second: float | None) -> None:
        """Bound the topic's rate to so many messages a second, or remove the bound."""
        admin(self.url, "PUT", "limits", {"topics": {self.topic: per_second}} if per_second else {})

    def behind_proxy(self) -> tuple[Proxy, str]:
        """A proxy before the target, and the URL through it."""
        host, port = self.url.removeprefix("http://").split(":")
        proxy = Proxy(host, int(port))
        self._proxies.append(proxy)
        return proxy, f"http://127.0.0.1:{proxy.port}"

    def close(self) -> None:
        self.limit(None)
        for proxy in self._proxies:
            proxy.close()


@pytest.fixture
def target(server: ServerProcess, unique: str) -> Iterator[Target]:
    made = Target(server, unique)
    yield made
    made.close()


def use(url: str, work: Callable[[QueueSink], Awaitable[T]]) -> T:
    """The result of a function that uses a sink."""

    async def run() -> T:
        sink = patient_sink(url)
        assert isinstance(sink, PutsById)
        try:
            return await work(sink)
        finally:
            await sink.close()

    return asyncio.run(run())


def put(url: str, transactions: list[BridgedTransaction]) -> list[Item]:
    async def work(sink: PutsById) -> list[Item]:
        return await sink.put(transactions)

    return use(url, work)


def statuses(items: list[Item]) -> list[int]:
    return [item.status for item in items]


# --- once -----------------------------------------------------------------------------------------------------


def test_by_id_each_is_there_once(target: Target) -> None:
    some = [target.sent(str(n)) for n in range(5)] + [target.sent("5", group="")]
    assert statuses(put(target.url, some)) == [201] * 6
    assert statuses(put(target.url, [*some, target.sent("6")])) == [200] * 6 + [201]
    assert target.delivered(7) == [str(n) for n in range(7)]


def test_by_position_each_is_there_once_and_a_frozen_mover_that_wakes_is_refused(target: Target) -> None:
    async def move(sink: Sink, epoch: int, before: str, position: str, body: str) -> None:
        batch = PackedBridgeBatch(
            epoch=epoch, expected_position=before, position=position, transactions=[target.sent(body)]
        )
        await sink.append(target.topic, batch)

    async def run() -> None:
        frozen, other = patient_sink(target.url), patient_sink(target.url)
        epoch, position = await frozen.claim(target.topic)
        await move(frozen, epoch, position, "1", "a")
        later, position = await other.claim(target.topic)
        assert position == "1" and later > epoch
        await move(other, later, "1", "2", "b")
        with pytest.raises(Conflict) as refused:
            await move(frozen, epoch, "1", "2", "b")
        assert refused.value.code == "stale_epoch"
        with pytest.raises(Conflict):
            await frozen.claim(target.topic, take_back=False)
        for sink in (frozen, other):
            await sink.close()

    asyncio.run(run())
    assert target.delivered(2) == ["a", "b"]


@pytest.mark.parametrize("answer", [False, True], ids=["before the answer", "after it was written"])
def test_a_request_that_is_cut_is_put_again(target: Target, answer: bool) -> None:
    proxy, url = target.behind_proxy()
    some = [target.sent(str(n)) for n in range(5)]
    proxy.cut_at(b"POST /v1/transactions", answer=answer)
    with pytest.raises(Unavailable):
        put(url, some)
    assert proxy.cuts == 1
    assert statuses(put(url, some)) == [200 if answer else 201] * 5
    assert target.delivered(5) == [str(n) for n in range(5)]


# --- order ----------------------------------------------------------------------------------------------------


def test_the_order_per_key_is_kept_over_producer_groups(target: Target) -> None:
    """A key's order holds across producer groups, although a request carries one group."""
    some = [target.sent(f"{n % 3} {n}", key=f"k{n % 3}", group="gh"[n // 3 % 2]) for n in range(30)]
    some.insert(9, target.sent("0 8.5", key="k0", group=""))
    assert statuses(put(target.url, some)) == [201] * 31
    came = target.delivered(31)
    for key in "012":
        numbers = [float(body.split()[1]) for body in came if body.startswith(key)]
        assert numbers == sorted(numbers)


def test_two_movers_at_once_keep_the_order(target: Target) -> None:
    some = [target.sent(f"{n % 5} {n:03}", key=f"k{n % 5}", group=f"g{n % 2}") for n in range(200)]

    async def run() -> None:
        sinks = [QueueSink(target.url) for _ in range(2)]
        halves = [sink.put(some[at:]) for sink, at in zip(sinks, (0, 0), strict=True)]
        for items in await asyncio.gather(*halves):
            assert {item.status for item in items} <= {200, 201}
        for sink in sinks:
            await sink.close()

    asyncio.run(run())
    came = target.delivered(200)
    for key in "01234":
        numbers = [body.split()[1] for body in came if body.startswith(key)]
        assert numbers == sorted(numbers) and len(numbers) == 40


def test_a_transaction_refused_for_now_is_not_overtaken(target: Target) -> None:
    """Later messages of its key wait, in the same request and in later ones."""
    target.limit(40)
    left = [target.sent(f"{n % 7} {n:03}", key=f"k{n % 7}", group=f"g{n % 2}") for n in range(150)]
    rounds = 0
    while left:
        rounds += 1
        items = put(target.url, left)
        assert {item.status for item in items} <= {200, 201, 429}
        left = [t for t, item in zip(left, items, strict=True) if item.status == 429]
    assert rounds > 2
    came = target.delivered(150)
    for key in "0123456":
        numbers = [body.split()[1] for body in came if body.startswith(key)]
        assert numbers == sorted(numbers)


# --- bounds ---------------------------------------------------------------------------------------------------


def test_requests_keep_within_the_bounds_of_the_target(target: Target) -> None:
    """Requests are cut by bytes and by count. A request of 18 MB ended a relay for good."""
    large = [target.sent(f"{n:04}" + "x" * 40_000) for n in range(450)]
    small = [target.sent(f"{n:04}") for n in range(450, LIMITS.items + 500)]
    assert set(statuses(put(target.url, large + small))) == {201}
    came = target.delivered(len(large) + len(small))
    assert [body[:4] for body in came] == [f"{n:04}" for n in range(len(came))]


def test_one_larger_than_a_request_is_refused_and_the_others_go(target: Target) -> None:
    large = target.sent("")
    large.messages = [PackedMessage(topic=target.topic, body=bytes(LIMITS.message_bytes)) for _ in range(9)]
    items = put(target.url, [target.sent("a"), large, target.sent("b")])
    assert statuses(items) == [201, 413, 201]
    assert items[1].code == "request_too_large" and "bytes" in str(items[1].detail)
    assert target.delivered(2) == ["a", "b"]


def test_a_permanently_refused_transaction_delays_no_other(target: Target) -> None:
    """Other transactions continue, whether the target refuses an item or the whole request."""
    bad = {
        "a long body": target.sent("x" * (LIMITS.message_bytes + 1)),
        "a topic that is no name": target.sent("x"),
        "a group that is no name": target.sent("x", group="no name"),
        "a header that is no text": target.sent("x"),
        "no message": target.sent("x"),
        "no group, and two messages": target.sent("x", group=""),
        "an id that is none": target.sent("x"),
    }
    bad["a topic that is no name"].messages[0].topic = "no name"
    bad["a header that is no text"].messages[0].headers = {"a": 1}  # type: ignore[dict-item]
    bad["no message"].messages = []
    bad["no group, and two messages"].messages *= 2
    bad["an id that is none"].id = "none"
    some = [target.sent("first")]
    for n, each in enumerate(bad.values()):
        some += [each, target.sent(str(n))]
    items = put(target.url, some)
    assert statuses(items[::2]) == [201] * 8
    for name, item in zip(bad, items[1::2], strict=True):
        assert 400 <= item.status < 500 and item.code and item.detail, name
    assert target.delivered(8) == ["first", *map(str, range(7))]
