"""Items that share a request: an item that is wrong, or too many items at once, fail no other item."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from notify.client.batch import Batcher
from notify.errors import Forbidden, InvalidRequest, NotifyError, TooLarge, Unavailable

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


def test_what_another_try_cannot_mend_is_said_to_all_at_once() -> None:
    assert results(1, 13, 2) == [Forbidden] * 3
    assert results(1, 14, 2) == [Unavailable] * 3
    assert len(requests) == 2


def test_halving_is_bounded() -> None:
    assert results(*[-1] * 64) == [InvalidRequest] * 64
    assert len(requests) == 2 * 64 - 1
    assert issubclass(InvalidRequest, NotifyError)


def test_a_fault_is_told_to_those_who_wait_and_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(items: list[int]) -> Sequence[int]:
        raise KeyError("a fault of the SDK")

    async def scenario() -> None:
        batcher: Batcher[int, int] = Batcher(fail, in_flight=1)
        with pytest.raises(Unavailable) as refused:
            await batcher.submit(1)
        assert isinstance(refused.value.__cause__, KeyError)

    asyncio.run(scenario())
    (record,) = caplog.records
    assert record.exc_info is not None and record.exc_info[0] is KeyError
