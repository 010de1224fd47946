"""Items that share a request: an item that is wrong, or too many items at once, fail no other item."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from notify.client.transport.batch import CARRIER_TURNS, Batcher
from notify.errors import Forbidden, InvalidRequest, NotifyError, TooLarge, Unavailable
from tests.support.clock import eventually_async

requests: list[list[int]] = []


@pytest.fixture(autouse=True)
def no_requests() -> None:
    requests.clear()


async def send(items: list[int]) -> Sequence[int]:
    """Stands for a server behind a proxy: a sum above 100 is too large, -1 malformed, -2 and -3 cannot be encoded."""
    requests.append(items)
    if -2 in items:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
    if -3 in items:
        raise OverflowError("date value out of range")
    if -1 in items:
        raise InvalidRequest("malformed", "invalid_schema")
    if sum(items) > 100:
        raise TooLarge("the request is too large")
    if 13 in items:
        raise Forbidden("not by you")
    if 14 in items:
        raise Unavailable("not now")
    return [2 * item for item in items]


def results(*items: int) -> list[int | type[BaseException]]:
    async def scenario() -> list[int | BaseException]:
        batcher: Batcher[int, int] = Batcher(send, in_flight=1)
        return await asyncio.gather(*[batcher.submit(item) for item in items], return_exceptions=True)

    return [type(r) if isinstance(r, BaseException) else r for r in asyncio.run(scenario())]


def test_a_request_that_is_refused_is_halved_down_to_the_item() -> None:
    assert results(1, 2, -1, 4, 5, 200, 7) == [2, 4, InvalidRequest, 8, 10, TooLarge, 14]
    assert results(60, 60, 60) == [120, 120, 120]
    assert results(1, -2, 3) == [2, Unavailable, 6]
    assert results(1, -3, 3) == [2, Unavailable, 6]


def test_a_permanent_error_fails_all_waiting_items_immediately() -> None:
    assert results(1, 13, 2) == [Forbidden] * 3
    assert results(1, 14, 2) == [Unavailable] * 3
    assert len(requests) == 2


def test_halving_is_bounded() -> None:
    assert results(*[-1] * 64) == [InvalidRequest] * 64
    assert len(requests) == 2 * 64 - 1
    assert issubclass(InvalidRequest, NotifyError)


async def test_a_fault_is_told_to_those_who_wait_and_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(items: list[int]) -> Sequence[int]:
        raise KeyError("a fault of the SDK")

    batcher: Batcher[int, int] = Batcher(fail, in_flight=1)
    with pytest.raises(Unavailable) as refused:
        await batcher.submit(1)
    assert isinstance(refused.value.__cause__, KeyError)
    (record,) = caplog.records
    assert record.exc_info is not None and record.exc_info[0] is KeyError


class Carried:
    """A batcher and the requests that it sent by itself."""

    def __init__(self, may_go_along: Callable[[], bool] = lambda: False) -> None:
        self.requests: list[list[int]] = []
        self.batcher: Batcher[int, int] = Batcher(self._send, in_flight=1, may_go_along=may_go_along)

    async def _send(self, items: list[int]) -> Sequence[int]:
        self.requests.append(items)
        return [2 * item for item in items]


async def test_items_taken_along_by_another_request_are_not_sent_twice() -> None:
    carried = Carried()
    first, second = [carried.batcher.submit(n) for n in (1, 2)]
    with carried.batcher.along(1) as none_of_several:
        assert none_of_several.items == []
    with carried.batcher.along(2) as along:
        third = carried.batcher.submit(3)
        assert along.items == [1, 2] and not carried.batcher.is_idle
        along.results = [10, 20]
    assert [await first, await second, await third] == [10, 20, 6]
    await carried.batcher.drain()
    assert carried.requests == [[3]] and carried.batcher.is_idle


async def test_items_of_a_failed_request_are_not_taken_along_again() -> None:
    """Else it would go from one failing request into the next, as long as there are such."""
    carried = Carried()
    first = carried.batcher.submit(1)
    with pytest.raises(Unavailable), carried.batcher.along(10):
        raise Unavailable("the other request failed")
    second = carried.batcher.submit(2)
    with carried.batcher.along(10) as along:
        assert along.items == [2]
        along.results = [20]
    await carried.batcher.drain()  # waits for what has not begun yet, too
    assert first.result() == 2 and second.result() == 20 and carried.requests == [[1]]


@pytest.mark.parametrize("turns", [0, 2, 1000])
async def test_an_item_waits_for_a_request_that_is_about_to_leave_and_not_for_long(turns: int) -> None:
    left = iter(range(turns))
    carried = Carried(lambda: next(left, None) is not None)
    carried.batcher.submit(1)
    waited = 0
    while not carried.requests:
        await asyncio.sleep(0)  # a turn of the loop
        waited += 1
    assert waited == min(turns, CARRIER_TURNS) + 2  # the task of a request begins one turn later


async def test_it_is_known_when_a_request_is_about_to_leave() -> None:
    carried = Carried()
    seen = [carried.batcher.is_about_to_send]
    carried.batcher.submit(1)
    while not carried.requests:
        seen.append(carried.batcher.is_about_to_send)
        await asyncio.sleep(0)  # a turn of the loop
    assert seen == [False, True, True] and not carried.batcher.is_about_to_send


async def test_a_request_that_is_cancelled_begins_no_other_before_a_drain() -> None:
    """A loop that ends cancels all tasks. Items that waited, or were in another's request, were begun then."""
    gone: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()
    requests: list[list[int]] = []

    async def hang_at_first(items: list[int]) -> Sequence[int]:
        requests.append(items)
        return [2 * item for item in items] if gone.done() else await gone

    hung: Batcher[int, int] = Batcher(hang_at_first, in_flight=1)
    carried = Carried()

    async def carry() -> None:
        with carried.batcher.along(10):
            await gone

    carrying = asyncio.create_task(carry())
    first, away = hung.submit(1), carried.batcher.submit(10)
    await eventually_async(lambda: requests, "the first request")
    waiting = hung.submit(2)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for _ in range(CARRIER_TURNS + 2):
        await asyncio.sleep(0)  # a turn of the loop
    assert isinstance(first.exception(), Unavailable) and carrying.cancelled()
    assert requests == [[1]] and carried.requests == [] and len(asyncio.all_tasks()) == 1
    await hung.drain()
    await carried.batcher.drain()
    assert (await waiting, await away) == (4, 20)


async def test_a_request_that_is_cancelled_before_it_begins_is_told_of_and_not_waited_for() -> None:
    """A service that cancels its tasks and closes its producer hung: `drain` looped, without a turn of the loop."""
    carried = Carried()
    lost = carried.batcher.submit(1)
    await asyncio.sleep(0)  # a turn of the loop: the request's task is there
    (task,) = asyncio.all_tasks() - {asyncio.current_task()}
    task.cancel()
    await asyncio.wait([task])
    await carried.batcher.drain()
    assert isinstance(lost.exception(), Unavailable) and carried.requests == []
    assert not carried.batcher.is_about_to_send and await carried.batcher.submit(2) == 4


async def test_items_in_order_leave_one_request_after_the_other_also_with_other_requests() -> None:
    answers: list[asyncio.Future[None]] = []

    async def answered_later(items: list[int]) -> Sequence[int]:
        requests.append(items)
        answers.append(asyncio.get_running_loop().create_future())
        await answers[-1]
        return items

    batcher: Batcher[int, int] = Batcher(answered_later, in_flight=4, in_order=True)
    first = batcher.submit(1)
    await eventually_async(lambda: requests == [[1]])
    second = batcher.submit(2)
    with batcher.along(10) as along:
        assert along.items == [], "an earlier item is on its way"
    answers[0].set_result(None)
    assert await first == 1
    with batcher.along(10) as along:
        assert along.items == [2]
        third = batcher.submit(3)
        with batcher.along(10) as further:
            assert further.items == []
        along.results = [2]
    assert await second == 2 and requests == [[1]]
    await eventually_async(lambda: requests == [[1], [3]])
    fourth = batcher.submit(4)
    batcher.refuse_waiting(Unavailable("an earlier one is lost"))
    answers[1].set_result(None)
    assert await third == 3
    with pytest.raises(Unavailable):
        await fourth
    assert batcher.is_idle and requests == [[1], [3]]
