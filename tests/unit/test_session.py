"""A consumer's session settles and renews neighbours together, and each by itself where the server refuses that."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from notify.client.consumer.session import TRACES_CHARACTERS, Session, Work
from notify.client.handling.hand import Hand
from notify.client.handling.handlers import Cancelled, Handler, NotTried
from notify.errors import DeadLetter, ForeignAnswer, Unavailable
from notify.protocol.wire import Delivered, Received, Settle, SettledItem, SettledItems, SettleItem, encode_msgpack
from notify.runtime.clock import boot_clock
from tests.support.clock import PATIENCE_SECONDS, eventually_async

LEASE = 30.0


class Server:
    """Stands in for the client of a server: takes what is settled, and refuses the leases that are over."""

    url = "http://server"

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str | None]] = []
        self.over: set[int] = set()
        """The places of the lease that are over."""
        self.is_behind_filter = False
        """Whether a proxy in front of it refuses requests with a traceback."""
        self.traces: list[int] = []
        """The lengths of the tracebacks that it got, in all requests."""
        self.left = 0
        """How often it has heard that the instance stops."""
        self.away = 0
        """How many requests it does not answer."""

    async def call(self, method: str, path: str, body: bytes, *_: Any) -> bytes:
        if self.away:
            self.away -= 1
            raise Unavailable("no connection")
        if path == "/v1/groups/g/leave":
            self.left += 1
            return b""
        assert path == "/v1/groups/g/settle"
        items = msgspec.msgpack.decode(body, type=Settle).items
        traces = [len(item.trace) for item in items if item.trace is not None]
        self.traces += traces
        if self.is_behind_filter and b"Traceback" in body:
            raise ForeignAnswer("403 from a web application firewall", answered=403)
        self.asked += [(item.action, item.receipt, item.reason) for item in items]
        return encode_msgpack(SettledItems([self._answer(item) for item in items]))

    def close(self) -> None:
        """Nothing is open."""

    def _answer(self, item: SettleItem) -> SettledItem:
        return SettledItem(item.receipt, self._status(item.receipt))

    def _status(self, receipt: str) -> int:
        first, _, last = receipt.partition(".")[2].partition("-")
        return 410 if self.over & set(range(int(first), int(last or first) + 1)) else 200


class Consuming:
    """A session with a few messages in hand, whose handlers end when the test says so."""

    def __init__(self, count: int, mode: str = "shared", *, tracebacks: bool = True) -> None:
        self.server = Server()
        self.hand = Hand(lambda: None, lambda messages, error: None, 16, 32)
        handler = Handler("t", print, mode, (), None, 16, "", 1.0, 300.0)
        work = Work("g", "i", {"t": handler}, self.hand, LEASE, PATIENCE_SECONDS, tracebacks=tracebacks)
        self.session = Session(work, self.server)  # type: ignore[arg-type]
        self.session.is_subscribed = True
        self.receive("7", count)
        self.taken = [next(self.hand.calls()) for _ in range(count)]

    def receive(self, lease: str, count: int) -> None:
        deliveries = [
            Delivered(receipt=f"{lease}.{n}", id=f"m{n}", topic="t", queue=0, offset=n, committed_at="", body=b"x")
            for n in range(count)
        ]
        self.session._begin(self.session._decode(encode_msgpack(Received(deliveries))))

    def note(self, *places: int, error: BaseException | None = None) -> None:
        for place in places:
            call = self.taken[place]
            self.hand.note([(call.run, call.place)], error)

    async def settled(self, left: int = 0) -> list[tuple[str, str, str | None]]:
        await eventually_async(lambda: self.hand.count == left, "the rest to be settled")
        asked, self.server.asked = self.server.asked, []
        return asked


async def test_neighbours_are_acknowledged_together_and_failures_alone() -> None:
    consuming = Consuming(9)
    consuming.note(0, 1, 2, 4, 5, 8)
    consuming.note(3, error=DeadLetter("never"))
    consuming.note(6, error=ValueError("again"))
    asked = await consuming.settled(left=1)
    assert sorted(asked, key=lambda item: item[1]) == [
        ("ack", "7.0-2", None),
        ("dead_letter", "7.3", "never"),
        ("ack", "7.4-5", None),
        ("retry", "7.6", "ValueError: again"),
        ("ack", "7.8", None),
    ]
    consuming.note(7)
    assert await consuming.settled() == [("ack", "7.7", None)]
    assert not consuming.session._runs


async def test_failures_have_their_tracebacks() -> None:
    consuming = Consuming(3)
    for place in range(3):
        consuming.note(place, error=ValueError("no"))
        asked = await consuming.settled(left=2 - place)
        assert asked == [("retry", f"7.{place}", "ValueError: no")]
    assert len(consuming.server.traces) == 3


async def test_a_proxy_that_refuses_tracebacks_holds_up_no_settlement() -> None:
    consuming = Consuming(2)
    consuming.server.is_behind_filter = True
    consuming.note(0)
    consuming.note(1, error=ValueError("no"))
    asked = await consuming.settled()
    assert sorted(asked) == [("ack", "7.0", None), ("retry", "7.1", "ValueError: no")]
    assert len(consuming.server.traces) == 1


async def test_no_traceback_is_written_for_which_a_request_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[BaseException] = []

    def trace_of(error: BaseException) -> str:
        written.append(error)
        return "x" * TRACES_CHARACTERS

    monkeypatch.setattr("notify.client.consumer.session.trace_of", trace_of)

    consuming = Consuming(4)
    consuming.note(0, 1, 2, error=ValueError("no"))
    assert len(await consuming.settled(left=1)) == 3 and len(written) == 1
    consuming.note(3, error=ValueError("no"))
    assert len(await consuming.settled()) == 1 and len(written) == 2


async def test_a_consumer_can_keep_its_tracebacks_to_itself() -> None:
    consuming = Consuming(1, tracebacks=False)
    consuming.note(0, error=ValueError("no"))
    assert await consuming.settled() == [("retry", "7.0", "ValueError: no")]
    assert consuming.server.traces == []


def test_the_tracebacks_of_a_request_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> Consuming:
        consuming = Consuming(4)
        consuming.note(*range(4), error=ValueError("no"))
        assert len(await consuming.settled()) == 4
        return consuming

    monkeypatch.setattr("notify.client.consumer.session.trace_of", lambda error: "x" * (TRACES_CHARACTERS // 3))
    assert len(asyncio.run(run()).server.traces) == 3


async def test_a_lease_that_is_over_costs_no_neighbour_its_acknowledgement(caplog: pytest.LogCaptureFixture) -> None:
    consuming = Consuming(4)
    consuming.server.over = {2}
    consuming.note(*range(4))
    assert [receipt for _, receipt, _ in await consuming.settled()] == ["7.0-3", "7.0", "7.1", "7.2", "7.3"]
    assert [record.getMessage().split()[0] for record in caplog.records] == ["m2"], "only this one is not settled"


def test_open_messages_are_renewed_together_and_alone_after_a_refusal() -> None:
    async def run() -> None:
        consuming = Consuming(5)
        (run,) = consuming.session._runs
        consuming.note(1)
        await consuming.settled(left=4)
        consuming.server.over = {3}
        consuming.session._renew(run)
        await eventually_async(lambda: len(consuming.server.asked) == 5, "the renewals")
        assert [item[:2] for item in consuming.server.asked] == [
            ("renew", "7.0"), ("renew", "7.2-4"), ("renew", "7.2"), ("renew", "7.3"), ("renew", "7.4"),
        ]  # fmt: skip

    asyncio.run(run())


async def test_what_waits_is_not_handled_once_its_lease_is_over(caplog: pytest.LogCaptureFixture) -> None:
    """Another consumer may have had it, and later messages of its key."""
    consuming = Consuming(0)
    consuming.receive("8", 4)
    (run,) = consuming.session._runs
    consuming.server.over = {1}
    run.until_us = boot_clock()
    consuming.session._renew(run)
    await eventually_async(lambda: not run.is_open[1], "the refusal of the second one's renewal")
    await eventually_async(lambda: run.until_us > boot_clock(), "the renewal of the others")
    handled = [next(consuming.hand.calls()).place]
    run.until_us = 0
    assert list(consuming.hand.calls()) == [] and handled == [0]
    await eventually_async(lambda: consuming.hand.count == 1, "the others to be given back")
    assert [r.getMessage().partition(" are")[0] for r in caplog.records] == ["3 messages"]


async def test_messages_that_have_not_begun_are_returned_after_the_last_receive() -> None:
    consuming = Consuming(0)
    session, hand = consuming.session, consuming.hand
    consuming.receive("8", 5)
    first = next(hand.calls())
    session.end()
    session.give_back_waiting()
    for _ in range(10):
        await asyncio.sleep(0)  # a turn of the loop
    assert consuming.server.asked == [], "a long poll is open, which would get them again"
    session._has_received.set()
    assert await consuming.settled(left=1) == [("give_back", "8.1-4", None)]
    hand.note([(first.run, first.place)])
    assert await consuming.settled() == [("ack", "8.0", None)]


async def test_messages_without_a_handler_are_returned_immediately() -> None:
    """It waited for the end of a long poll that did not end, while nobody renewed its lease: that was a death."""
    consuming = Consuming(2)
    consuming.note(0, 1, error=NotTried(Unavailable("the inbox's database is unreachable")))
    for _ in range(10):
        await asyncio.sleep(0)  # a turn of the loop
    assert consuming.server.asked == [("give_back", "7.0-1", None)]
    assert await consuming.settled() and not consuming.session._settling


async def test_a_handler_that_is_cut_off_by_the_stop_is_interrupted() -> None:
    consuming = Consuming(1)
    consuming.note(0, error=Cancelled())
    assert [action for action, _, _ in await consuming.settled()] == ["interrupted"]


@pytest.mark.parametrize(("mode", "count", "left"), [("shared", 0, 1), ("shared", 1, 1), ("failover", 1, 2)])
async def test_a_server_hears_once_that_a_consumer_stops_and_again_once_it_holds_nothing_of_its_own_topics(
    mode: str, count: int, left: int
) -> None:
    consuming = Consuming(count, mode)
    session, server = consuming.session, consuming.server
    draining = asyncio.ensure_future(session._drain())
    if count:
        await eventually_async(lambda: server.left == 1, "the server to know")
        consuming.note(0)
    await draining
    await session._close()
    assert server.left == left


async def test_a_server_that_is_away_hears_later_that_a_consumer_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notify.client.consumer.session.RETRY_SECONDS", 0.001)
    consuming = Consuming(1)
    consuming.server.away = 3
    draining = asyncio.ensure_future(consuming.session._drain())
    await eventually_async(lambda: consuming.server.left == 1, "the server to know")
    consuming.note(0)
    await draining


async def test_a_request_that_a_proxy_has_cut_off_comes_again_by_its_name() -> None:
    consuming = Consuming(0)
    server, session = consuming.server, consuming.session
    session._poll_time.was_cut = lambda error, lasted: True  # type: ignore[method-assign]
    paths: list[str] = []

    async def call(method: str, path: str, *_: Any) -> bytes:
        paths.append(path)
        if len(paths) in (2, 4):
            raise ForeignAnswer("the proxy waits no longer", answered=504)
        if len(paths) == 6:
            session.end()
        return encode_msgpack(Received([]))

    server.call = call  # type: ignore[method-assign]
    await session._receive_until_ended(None)
    names = [path.partition("&request=")[2] for path in paths]
    assert names[1] == names[2] and names[3] == names[4] and len(set(names)) == 4
