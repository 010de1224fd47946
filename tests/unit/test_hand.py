"""The messages in hand: runs of a reply, who takes what waits, the fate of each message, and how much is asked for."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from notify.client import AsyncConsumer, Consumer, ReceivedMessage
from notify.client.consumer.reply import runs_of
from notify.client.handling import hand as hands
from notify.client.handling.batch import Batch
from notify.client.handling.hand import CAUTIOUS, IN_HAND, IN_HAND_BYTES, PACE_SECONDS, TURN_SECONDS, Hand
from notify.client.handling.handlers import Handler, NotTried, Partial, begin_in_own_context
from notify.client.handling.runs import Run, Times, messages_of, ranges_of
from notify.client.threads.handler_threads import HandlerThreads
from notify.errors import DeadLetter, InboxUnavailable
from notify.protocol.wire import Delivered, Received
from tests.support.clock import PATIENCE_SECONDS, eventually_async
from tests.support.virtual_loop import VirtualLoop


def delivered(texts: Iterable[str], lease: str = "1f", *, attempt: int = 1, topic: str = "t") -> list[Delivered]:
    return [
        Delivered(
            receipt=f"{lease}.{n}", id=f"{lease}-{n}", topic=topic, queue=0, offset=n, attempt=attempt, committed_at="",
            body=text.encode(),
        )
        for n, text in enumerate(texts)
    ]  # fmt: skip


def left_in(hand: Hand, session: Session) -> list[str]:
    """The messages that wait, which go."""
    return [run.message(place).text for run, place in hand.let_go(session)]


class Session:
    """Settles at once, and notes what."""

    def __init__(self) -> None:
        self.acknowledged: list[str] = []
        self.failed: dict[str, str] = {}
        self.hand: Hand
        self.times = Times()

    def noted(self, run: Run, place: int, error: BaseException) -> None:
        self.failed[run.message(place).text] = str(error) or type(error).__name__
        self.hand.settled(run, range(place, place + 1))

    def settle_noted(self, run: Run, returned: Sequence[range]) -> None:
        for together in returned:
            self.acknowledged.append(run.receipt(together))
            self.hand.settled(run, together)

    async def until_empty(self) -> None:
        await eventually_async(lambda: self.hand.count == 0, "everything to be settled")


def handle_all(hand: Hand) -> None:
    """Handle what waits for single messages' handlers."""
    while hand.has_waiting:
        for _ in hand.calls():
            pass


def handling(
    function: Callable[..., Any],
    deliveries: list[Delivered],
    *,
    concurrency: int = 4,
    session: Session | None = None,
    **options: Any,
) -> tuple[Session, Consumer | AsyncConsumer]:
    """Have a consumer's handler called with these messages, without a server."""
    is_async = asyncio.iscoroutinefunction(function)
    consumer = (AsyncConsumer if is_async else Consumer)("http://127.0.0.1:1", group="g", concurrency=concurrency)
    consumer.subscribe("t", **options)(function)
    session = session or Session()

    async def run() -> None:
        if isinstance(consumer, Consumer):
            consumer._pool = HandlerThreads(concurrency, "test")
        else:
            consumer._callers, consumer._contexts = {}, []
        hand = session.hand = Hand(lambda: consumer._start_caller(hand), consumer._count, concurrency, 32)
        hand.put(runs_of(session, consumer._handlers, Received(deliveries)))
        try:
            await asyncio.wait_for(session.until_empty(), PATIENCE_SECONDS)
        finally:
            hand.end()
            if isinstance(consumer, Consumer):
                consumer._pool.shutdown()

    asyncio.run(run())
    return session, consumer


# --- runs -----------------------------------------------------------------------------------------------------


def test_a_run_is_what_lies_side_by_side_in_one_lease() -> None:
    messages = [*delivered("abc", "1"), *delivered("de", "2"), *delivered("fghi", "3")[2:]]
    messages[1].receipt = "1.7"  # not beside the one before
    messages[4].receipt = "a receipt of another form"
    runs = runs_of(Session(), {}, Received(messages))
    texts = ["".join([message.text for message in run.messages if message is not None]) for run in runs]
    assert texts == ["a", "b", "c", "d", "e", "hi"]
    assert runs[-1].receipt(range(2)) == "3.2-3" and runs[-1].receipt(range(1, 2)) == "3.3"
    assert runs[-2].receipt(range(1)) == "a receipt of another form"


@pytest.mark.parametrize(
    ("places", "ranges"), [([], []), ([3], [(3, 4)]), ([5, 1, 2, 0, 9, 4], [(0, 3), (4, 6), (9, 10)])]
)
def test_ranges_cover_exactly_their_places(places: list[int], ranges: list[tuple[int, int]]) -> None:
    assert [(r.start, r.stop) for r in ranges_of(places)] == ranges


# --- who handles ----------------------------------------------------------------------------------------------


def test_a_slow_call_holds_up_nothing_behind_it() -> None:
    """The messages behind it are taken over by another thread."""
    others = threading.Event()
    done: list[str] = []

    def handle(message: ReceivedMessage) -> None:
        if message.text == "0":
            assert others.wait(PATIENCE_SECONDS)
        done.append(message.text)
        if len(done) == 99:
            others.set()

    handling(handle, delivered(map(str, range(100))), concurrency=2)
    assert done == [*map(str, range(1, 100)), "0"]


def test_a_slow_coroutine_holds_up_nothing_behind_it() -> None:
    others = asyncio.Event()
    done: list[str] = []

    async def handle(message: ReceivedMessage) -> None:
        if message.text == "0":
            await others.wait()
        done.append(message.text)
        if len(done) == 99:
            others.set()

    handling(handle, delivered(map(str, range(100))), concurrency=2)
    assert done == [*map(str, range(1, 100)), "0"]


@pytest.mark.parametrize("is_async", [False, True])
def test_slow_handlers_run_all_at_once_and_no_more(is_async: bool) -> None:
    at_once = most = 0
    lock, barrier, async_barrier = threading.Lock(), threading.Barrier(4), asyncio.Barrier(4)

    def count(step: int) -> None:
        nonlocal at_once, most
        with lock:
            at_once += step
            most = max(most, at_once)

    def handle(message: ReceivedMessage) -> None:
        count(1)
        barrier.wait(PATIENCE_SECONDS)
        count(-1)

    async def handle_async(message: ReceivedMessage) -> None:
        count(1)
        await async_barrier.wait()
        count(-1)

    session, consumer = handling(handle_async if is_async else handle, delivered("abcdefghijkl"))
    assert (most, consumer.handled, session.failed) == (4, 12, {})


@pytest.mark.parametrize("is_async", [False, True])
def test_a_message_is_acknowledged_while_the_next_call_of_its_caller_is_running(is_async: bool) -> None:
    is_settled, is_settled_async = threading.Event(), asyncio.Event()

    def handle(message: ReceivedMessage) -> None:
        if message.text == "b":
            assert is_settled.wait(PATIENCE_SECONDS)

    async def handle_async(message: ReceivedMessage) -> None:
        if message.text == "b":
            await asyncio.wait_for(is_settled_async.wait(), PATIENCE_SECONDS)

    class Settles(Session):
        def settle_noted(self, run: Run, returned: Sequence[range]) -> None:
            super().settle_noted(run, returned)
            assert self.acknowledged[0] == "1f.0"
            is_settled.set()
            is_settled_async.set()

    session, consumer = handling(
        handle_async if is_async else handle, delivered("ab"), concurrency=1, session=Settles()
    )
    assert session.acknowledged == ["1f.0", "1f.1"] and consumer.handled == 2


async def test_handlers_of_batches_and_of_single_messages_take_turns() -> None:
    calls: list[str] = []
    consumer = AsyncConsumer("http://127.0.0.1:1", group="g", concurrency=1)
    consumer._callers, consumer._contexts = {}, []

    @consumer.subscribe("t")
    async def single(message: ReceivedMessage) -> None:
        calls.append(message.text)

    @consumer.subscribe("b", batch=2)
    async def batch(messages: list[ReceivedMessage]) -> None:
        calls.append("".join([message.text for message in messages]))

    session = Session()
    hand = session.hand = Hand(lambda: consumer._start_caller(hand), consumer._count, 1, 32)
    deliveries = [*delivered("123456"), *delivered("abcd", "2", topic="b")]
    hand.put(runs_of(session, consumer._handlers, Received(deliveries)))
    await asyncio.wait_for(session.until_empty(), PATIENCE_SECONDS)
    assert calls == ["1", "ab", "2", "cd", "3", "4", "5", "6"]


async def test_removing_a_holder_keeps_the_order_of_the_others() -> None:
    sessions = [Session(), Session()]
    hand = Hand(lambda: None, lambda count, error: None, 1, 32)
    for session, texts, lease in ((0, "ab", "1"), (1, "12", "2"), (0, "cd", "3"), (1, "34", "4")):
        sessions[session].hand = hand
        hand.put(runs_of(sessions[session], {}, Received(delivered(texts, lease))))
    taken = next(hand.calls())
    assert taken.run.message(taken.place).text == "a" and hand.under_way == 1
    assert left_in(hand, sessions[0]) == [*"bcd"]
    assert left_in(hand, sessions[1]) == [*"1234"] and hand.under_way == 1
    assert not hand.has_waiting


def test_callers_take_in_order_while_what_waits_of_a_holder_goes() -> None:
    taken: list[str] = []

    class Line(collections.deque[Any]):
        """A line of which a caller takes the first message after each step of whoever else takes from it."""

        def popleft(self) -> Any:
            return self._followed(super().popleft())

        def pop(self) -> Any:  # type: ignore[override]
            return self._followed(super().pop())

        def _followed(self, waiting: Any) -> Any:
            if len(taken) < 2:
                run, place = super().popleft()
                taken.append(run.message(place).text)
            return waiting

    async def run() -> None:
        sessions = [Session(), Session()]
        hand = Hand(lambda: None, lambda count, error: None, 1, 32)
        hand._singles = Line()
        for session, texts, lease in ((0, "abcd", "1"), (1, "12", "2"), (0, "ef", "3")):
            hand.put(runs_of(sessions[session], {}, Received(delivered(texts, lease))))
        assert left_in(hand, sessions[1]) == [*"12"]
        assert taken + left_in(hand, sessions[0]) == [*"abcdef"]

    asyncio.run(run())


async def test_a_call_is_noted_with_the_error_that_its_handler_means() -> None:
    """The loop may settle it as soon as it is noted."""
    noted: list[BaseException | None] = []

    class Noted(collections.deque[Any]):
        def append(self, call: Any) -> None:
            noted.append(call.error)
            super().append(call)

    session = Session()
    hand = session.hand = Hand(lambda: None, lambda count, error: None, 1, 32)
    hand._noted = Noted()
    hand.put(runs_of(session, {}, Received(delivered("a"))))
    dead = DeadLetter("never")
    for call in hand.calls():
        call.error = ExceptionGroup("of tasks", [dead])
    assert noted == [dead]


async def test_times_are_those_of_each_call() -> None:
    """The clock is read once between two calls, whose time is that of both."""
    session = Session()
    hand = session.hand = Hand(lambda: None, lambda count, error: None, 1, 32)
    hand.put(runs_of(session, {}, Received(delivered("abc"))))
    (waiting_since,) = {waiting[0].began for waiting in hand._singles}
    instants = iter([waiting_since + seconds for seconds in (0.0005, 0.0007, 0.0307, 0.0307, 0.0308)])
    hand.clock = lambda: next(instants)
    while hand.has_waiting:
        for call in hand.calls():
            if call.place == 2:
                call.error = ValueError("no")
    hand.collect()
    waited, handled = session.times.waited, session.times.handled
    assert [(n, count) for n, count in enumerate(waited.counts) if count] == [(0, 2), (5, 1)]
    assert [(n, count) for n, count in enumerate(handled.counts) if count] == [(0, 2), (5, 1)]
    assert (waited.sum_us, handled.sum_us) == (500 + 700 + 30_700, 30_300)
    assert session.acknowledged == ["1f.0-1"] and session.failed == {"c": "no"}


def test_the_slowest_call_that_is_traced_is_told() -> None:
    trace_ids = [f"{n:032x}" for n in range(1, 4)]
    deliveries = delivered("abcd")
    for delivery, trace_id in zip(deliveries, trace_ids, strict=False):
        delivery.headers = {"traceparent": f"00-{trace_id}-{1:016x}-01"}
    (run,) = runs_of(Session(), {}, Received(deliveries))
    times = Times()
    times.add(run, [0, 1, 3], [run.began] * 3, [0.01, 0.05, 5.0])
    times.add(run, [2], [run.began], [0.02])
    assert f"slowest=50000.{trace_ids[1]}" in times.taken()
    assert times.taken() == ""


async def test_a_coroutine_gives_the_loop_its_turns() -> None:
    """Quick handlers of many messages do not hold up the application's other tasks."""
    turns = 0
    consumer = AsyncConsumer("http://127.0.0.1:1", group="g", concurrency=1)
    consumer._callers, consumer._contexts = {}, []

    @consumer.subscribe("t")
    async def handle(message: ReceivedMessage) -> None: ...

    session = Session()
    hand = session.hand = Hand(lambda: consumer._start_caller(hand), consumer._count, 1, 32)
    looks = itertools.count()
    hand.clock = lambda: next(looks) * TURN_SECONDS / 10  # ten messages take a turn's time
    hand.put(runs_of(session, consumer._handlers, Received(delivered(["x"] * 1000))))
    while hand.count:
        await asyncio.sleep(0)  # a turn of the loop
        turns += 1
    assert turns >= 90


def test_a_handler_changes_no_context_variable_of_the_next() -> None:
    import contextvars

    seen: list[str] = []
    variable = contextvars.ContextVar("variable", default="as it was")

    async def handle(message: ReceivedMessage) -> None:
        seen.append(variable.get())
        variable.set(message.text)
        await asyncio.sleep(0)  # a turn of the loop
        assert variable.get() == message.text

    session, _ = handling(handle, delivered("abc"), concurrency=1)
    assert seen == ["as it was"] * 3 and session.failed == {}


@pytest.mark.parametrize("batch", [None, 1])
def test_a_handler_in_a_thread_changes_no_context_variable_of_the_next(batch: int | None) -> None:
    """A tenant that a handler had set was that of the next message in its thread, too."""
    import contextvars

    seen: list[str] = []
    variable = contextvars.ContextVar("variable", default="as it was")

    def handle(messages: Any) -> None:
        seen.append(variable.get())
        variable.set("changed")

    session, _ = handling(handle, delivered("abc"), concurrency=1, batch=batch)
    assert seen == ["as it was"] * 3 and session.failed == {}


@pytest.mark.parametrize("batch", [None, 1])
def test_the_handlers_of_a_thread_share_djangos_caches(monkeypatch: pytest.MonkeyPatch, batch: int | None) -> None:
    """Each message had a new cache, with a connection of its own."""
    from django.core import cache

    caches = cache.CacheHandler({"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}})
    monkeypatch.setattr(cache, "caches", caches)
    seen: list[Any] = []
    handling(lambda messages: seen.append(caches["default"]), delivered("abc"), concurrency=1, batch=batch)
    assert len(seen) == 3 and len(set(map(id, seen))) == 1


async def test_coroutines_that_come_after_each_other_share_djangos_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message had a new cache, with a connection of its own."""
    from django.core import cache

    caches = cache.CacheHandler({"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}})
    monkeypatch.setattr(cache, "caches", caches)
    seen: list[Any] = []

    async def handle(message: ReceivedMessage) -> None:
        seen.append(caches["default"])

    consumer = AsyncConsumer("http://127.0.0.1:1", group="g", concurrency=1)
    consumer.subscribe("t")(handle)
    consumer._callers, consumer._contexts = {}, []
    session = Session()
    hand = session.hand = Hand(lambda: consumer._start_caller(hand), consumer._count, 1, 32)
    for lease in range(3):
        hand.put(runs_of(session, consumer._handlers, Received(delivered("a", str(lease)))))
        await asyncio.wait_for(session.until_empty(), PATIENCE_SECONDS)
        if consumer._callers:
            await asyncio.wait(list(consumer._callers))
    hand.end()
    assert len(seen) == 3 and len(set(map(id, seen))) == 1


def test_a_coroutine_in_its_own_context_is_cancelled_like_any_other() -> None:
    async def run() -> str:
        cleaned: list[str] = []

        async def handle() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.append("up")

        async def call() -> None:
            rest = begin_in_own_context(handle)
            assert rest is not None
            await rest

        task = asyncio.ensure_future(call())
        await asyncio.sleep(0)  # a turn of the loop
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return f"{task.cancelled()} {cleaned}"

    assert asyncio.run(run()) == "True ['up']"


# --- fates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("batch", [None, 8])
def test_each_message_of_a_run_has_its_own_fate(is_async: bool, batch: int | None) -> None:
    def judge(given: Any) -> None:
        texts = [m.text for m in given] if batch else [given.text]
        for text in texts:
            if text == "d":
                raise DeadLetter("never")
            if text in "fg":
                raise ValueError(f"not {text}")

    async def judge_async(given: Any) -> None:
        judge(given)

    session, consumer = handling(
        judge_async if is_async else judge, delivered("abcdefghij"), concurrency=1, batch=batch
    )
    assert session.failed == {"d": "never", "f": "not f", "g": "not g"}
    assert (consumer.handled, consumer.failed) == (7, 3)
    settled = [places for receipt in session.acknowledged for places in _places(receipt)]
    assert sorted(settled) == [0, 1, 2, 4, 7, 8, 9]


def _places(receipt: str) -> range:
    first, _, last = receipt.partition(".")[2].partition("-")
    return range(int(first), int(last or first) + 1)


def test_a_redelivered_message_is_alone_in_its_batch() -> None:
    calls: list[list[str]] = []
    messages = [*delivered("a"), *delivered(["again"], "2", attempt=2), *delivered("bc", "3")]
    handling(lambda given: calls.append([m.text for m in given]), messages, concurrency=1, batch=8)
    assert calls == [["a"], ["again"], ["b", "c"]]


class Handled:
    """A handler of batches that notes its calls, and fails on some messages."""

    def __init__(self, *poison: str, error: Callable[[str], BaseException] = ValueError) -> None:
        self.calls: list[list[str]] = []
        self._poison, self._error = frozenset(poison), error

    def handle(self, messages: list[ReceivedMessage]) -> None:
        self.calls.append([m.text for m in messages])
        if not self._poison.isdisjoint(self.calls[-1]):
            raise self._error(f"cannot handle {self.calls[-1]}")


def test_a_batch_that_fails_is_split_down_to_those_that_fail_alone() -> None:
    handler = Handled("c", "h")
    session, _ = handling(handler.handle, delivered("abcdefgh"), concurrency=1, batch=8)
    assert session.failed == {text: f"cannot handle ['{text}']" for text in "ch"}, "the error that it had alone"
    assert handler.calls[:4] == [[*"abcdefgh"], [*"abcd"], [*"ab"], [*"cd"]]
    done = [text for texts in handler.calls if {"c", "h"}.isdisjoint(texts) for text in texts]
    assert done == [*"abdefg"], "each once, in its order"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_batch_of_nothing_but_poison_has_a_bounded_cost(size: int) -> None:
    texts = [str(n) for n in range(size)]
    handler = Handled(*texts)
    session, _ = handling(handler.handle, delivered(texts), concurrency=1, batch=100)
    assert len(session.failed) == size and len(handler.calls) == 2 * size - 1


def test_a_batch_that_has_committed_a_part_is_not_halved() -> None:
    """The halves would count as handled: their claims stand."""
    handler = Handled("c", error=lambda text: Partial(ValueError(text)))
    session, _ = handling(handler.handle, delivered("abcd"), concurrency=1, batch=4)
    assert handler.calls == [[*"abcd"]]
    assert len(session.failed) == 4
    assert all("a part of its effect may be committed" in error for error in session.failed.values())


@dataclasses.dataclass
class Basket:
    item: str
    price: int


def test_the_halves_get_values_that_no_call_has_changed() -> None:
    """A handler that sums up, say, and fails on one message, would sum up the others twice."""
    seen: list[tuple[str, int]] = []

    def handle(baskets: list[Basket]) -> None:
        for basket in baskets:
            basket.price += 1
            seen.append((basket.item, basket.price))
            if basket.item == "d":
                raise ValueError("no d")

    bodies = [f'{{"item": "{text}", "price": 5}}' for text in "abcd"]
    session, _ = handling(handle, delivered(bodies), concurrency=1, batch=4)
    assert list(session.failed.values()) == ["no d"]
    assert [item for item, _ in seen] == [*"abcd", *"ab", *"cd", "c", "d"]
    assert {price for _, price in seen} == {6}


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_no_handler_is_called_after_one_that_exits(error: type[BaseException]) -> None:
    """The others are left for its session to give back."""
    called: list[str] = []

    def handle(message: ReceivedMessage) -> None:
        called.append(message.text)
        raise error(3)

    async def run() -> list[str]:
        consumer = Consumer("http://127.0.0.1:1", group="g", concurrency=1)
        consumer._pool = HandlerThreads(1, "test")
        consumer.subscribe("t")(handle)
        session = Session()
        hand = session.hand = Hand(lambda: consumer._start_caller(hand), consumer._count, 1, 32)
        hand.put(runs_of(session, consumer._handlers, Received(delivered("abc"))))
        await eventually_async(lambda: hand.count == 2, "the first to be settled")
        assert isinstance(consumer._left, error)
        left = left_in(hand, session)
        consumer._pool.shutdown()
        return left

    assert (asyncio.run(run()), called) == (["b", "c"], ["a"])


def test_a_batch_whose_handler_exits_is_given_back_whole() -> None:
    hand = _Noted()
    handler = Handler("t", print, "shared", (), None, 16, "", 1.0, 300.0, batch=4)
    (run,) = runs_of(Session(), {"t": handler}, Received(delivered("abcd")))
    lot = [(run, place) for place in range(4)]
    batch = Batch(hand, lot, messages_of(lot))  # type: ignore[arg-type]
    assert batch.next()
    batch.failed(ValueError("halved"))
    assert batch.next() and [m.text for m in batch.messages] == ["a", "b"]
    batch.failed(SystemExit(3))
    assert not batch.next() and hand.is_over
    assert hand.fates == dict.fromkeys(range(4), "the handler was not called: SystemExit")


@pytest.mark.parametrize("has_failed", [False, True])
def test_messages_of_a_batch_that_failed_are_not_given_back_when_the_inbox_is_away_for_the_halves(
    *, has_failed: bool
) -> None:
    hand = _Noted()
    handler = Handler("t", print, "shared", (), None, 16, "", 1.0, 300.0, batch=4)
    (run,) = runs_of(Session(), {"t": handler}, Received(delivered("abcd")))
    lot = [(run, place) for place in range(4)]
    batch = Batch(hand, lot, messages_of(lot))  # type: ignore[arg-type]
    assert batch.next()
    if has_failed:
        batch.failed(ValueError("halved"))
        assert batch.next()
    batch.failed(NotTried(InboxUnavailable("away")))
    assert not batch.next()
    fate = "halved" if has_failed else "the handler was not called: InboxUnavailable"
    assert hand.fates == dict.fromkeys(range(4), fate)


class _Noted:
    def __init__(self) -> None:
        self.fates: dict[int, str] = {}
        self.is_over = False
        self.clock = lambda: 0.0

    def note(self, lot: list[tuple[Run, int]], error: BaseException | None = None) -> None:
        self.fates |= {place: str(error) for _, place in lot}

    def end(self) -> None:
        self.is_over = True


async def test_a_thread_that_cannot_be_started_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hands, "START_SECONDS", 0.001)
    refusals = [RuntimeError("can't start new thread")] * 2
    session = Session()

    def start() -> None:
        if refusals:
            raise refusals.pop()
        asyncio.get_running_loop().call_soon(handle)

    def handle() -> None:
        hand.began()
        handle_all(hand)
        hand.left()

    hand = session.hand = Hand(start, lambda count, error: None, 2, 32)
    hand.put(runs_of(session, {}, Received(delivered("abc"))))
    await asyncio.wait_for(session.until_empty(), PATIENCE_SECONDS)
    assert not refusals


async def test_a_caller_may_begin_before_its_start_returns() -> None:
    """No other caller was ever started then: messages stayed in hand."""
    session = Session()
    threads = HandlerThreads(2, "test")  # a caller that leaves may start another

    def handle() -> None:
        hand.began()
        begun.set()
        handle_all(hand)
        hand.left()

    def start() -> None:
        begun.clear()
        threads.submit(handle)
        assert begun.wait(PATIENCE_SECONDS)

    begun = threading.Event()
    hand = session.hand = Hand(start, lambda count, error: None, 1, 32)
    for lease in "12":
        hand.put(runs_of(session, {}, Received(delivered("abc", lease))))
        await asyncio.wait_for(session.until_empty(), PATIENCE_SECONDS)
    threads.shutdown()


# --- how much -------------------------------------------------------------------------------------------------


class Asking:
    """A hand on a virtual clock, whose messages are handled when the test says so."""

    def __init__(self, **options: Any) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.session = Session()
        self.hand = self.session.hand = Hand(lambda: None, lambda count, error: None, 16, 32, **options)
        self._leases = 0

    def receive(self, count: int, *, attempt: int = 1, size: int = 1) -> None:
        self._leases += 1
        deliveries = delivered(["x" * size] * count, f"{self._leases:x}", attempt=attempt)
        self.hand.put(runs_of(self.session, {}, Received(deliveries)))

    def handle(self, seconds: float) -> None:
        """Handle everything in hand, in so much time."""
        self.loop.now += seconds
        handle_all(self.hand)
        self.hand.collect()


@pytest.mark.virtual_time
async def test_as_many_are_in_hand_as_handlers_finish_in_a_second() -> None:
    a = Asking()
    assert a.hand.room() == 1
    a.receive(1)
    a.handle(0)
    assert a.hand.room() == CAUTIOUS
    for _ in range(20):
        a.receive(a.hand.room())
        a.handle(PACE_SECONDS)  # whatever is in hand: the handlers are quick
    assert a.hand.room() == IN_HAND
    for _ in range(8):
        a.receive(100)
        a.handle(1)
        a.hand.room()
    assert 100 <= a.hand.room() <= 110
    for _ in range(8):
        a.receive(1)
        a.handle(1)
        a.hand.room()
    assert a.hand.room() == 32, "what concurrency needs"


@pytest.mark.virtual_time
async def test_idle_time_is_not_slowness() -> None:
    a = Asking()
    for _ in range(20):
        a.receive(a.hand.room())
        a.handle(PACE_SECONDS)
    for _ in range(20):
        a.loop.now += 60
        a.receive(1)
        a.handle(0)
    assert a.hand.room() == IN_HAND


@pytest.mark.virtual_time
async def test_few_are_in_hand_while_they_come_again() -> None:
    """Each of them would use up another attempt if one of them kills the process."""
    a = Asking()
    for _ in range(20):
        a.receive(a.hand.room())
        a.handle(PACE_SECONDS)
    a.receive(100, attempt=2)
    assert a.hand.most == CAUTIOUS
    a.handle(PACE_SECONDS)
    assert a.hand.room() == 2 * CAUTIOUS
    a.receive(2 * CAUTIOUS)
    a.handle(PACE_SECONDS)
    assert a.hand.room() > 2 * CAUTIOUS


@pytest.mark.virtual_time
async def test_a_message_that_kills_its_process_is_soon_alone() -> None:
    """A process that begins again with repeated messages takes one, then two, and so on."""
    a = Asking()
    rooms = []
    for _ in range(6):
        rooms.append(a.hand.room())
        a.receive(a.hand.room(), attempt=3)
        a.handle(1)
    assert rooms == [1, 2, 4, 8, 16, 32]


@pytest.mark.virtual_time
async def test_more_is_asked_for_when_half_is_settled() -> None:
    a = Asking(most=100)
    a.receive(1)
    a.receive(9)
    a.handle(0)
    assert a.hand.room() == 100
    a.receive(51)
    assert a.hand.room() == 0


@pytest.mark.virtual_time
async def test_large_bodies_are_bounded_by_their_bytes() -> None:
    a = Asking(most=IN_HAND)
    mebibyte = 1 << 20
    a.receive(1)
    a.receive(1)
    a.handle(0)
    asked = 0
    while a.hand.room():
        a.receive(8, size=mebibyte)
        asked += 8
    assert asked * mebibyte == IN_HAND_BYTES
    a.handle(1)
    assert a.hand.room() == IN_HAND, "what is settled does not count"
    a.receive(2, size=IN_HAND_BYTES // 2)
    assert a.hand.room() == 14, "no handler is idle for want of room"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_that_empties_its_message_is_settled(is_async: bool) -> None:
    """The bytes in hand were counted by the message, and the consumer never ended."""

    def empty(message: ReceivedMessage) -> None:
        for name in ("body", "id", "key", "headers"):
            object.__setattr__(message, name, None)

    async def empty_soon(message: ReceivedMessage) -> None:
        empty(message)

    session, _ = handling(empty_soon if is_async else empty, delivered("abc"))
    assert sum([len(place) for place in session.acknowledged]) and session.hand._bytes == 0
