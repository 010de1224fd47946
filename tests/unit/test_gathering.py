"""Batches are gathered, split where they fail, and let go where nobody waits: without a queue or a database."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from notify.client.claims import Partial
from notify.client.gathering import Gathering
from notify.client.handlers import Handler, check_callable
from notify.errors import DeadLetter
from notify.message import ReceivedMessage
from tests.support.clock import PATIENCE_SECONDS


def message(text: str, attempt: int = 1) -> ReceivedMessage:
    return ReceivedMessage(text, "t", 0, 0, text.encode(), None, None, {}, attempt, "")


def handler_of(function: Callable[..., Any], batch: int, topic: str = "t") -> Handler:
    read = check_callable(function, is_async=True, has_session=False, in_batches=True)
    return Handler(topic, function, "shared", (), None, 16, "", 1.0, 300.0, batch, read)


async def call(messages: Sequence[ReceivedMessage], function: Callable[..., Awaitable[None]]) -> None:
    await function(messages)


@dataclasses.dataclass
class Basket:
    item: str
    price: int


class Handled:
    """A handler that notes its batches, and fails on some messages."""

    def __init__(self, *poison: str, error: Callable[[str], BaseException] = ValueError) -> None:
        self.calls: list[list[str]] = []
        self._poison = frozenset(poison)
        self._error = error

    async def __call__(self, messages: list[ReceivedMessage]) -> None:
        texts = [m.text for m in messages]
        self.calls.append(texts)
        if not self._poison.isdisjoint(texts):
            raise self._error(f"cannot handle {texts}")


async def turns(count: int = 10) -> None:
    """Let everything happen that only the loop's turns keep waiting."""
    for _ in range(count):
        await asyncio.sleep(0)  # a turn


async def fate_of(gathering: Gathering, handler: Handler, message: ReceivedMessage) -> str:
    """The error that a message had, or nothing."""
    try:
        await gathering.handle(handler, message)
    except BaseException as error:
        return str(error) or type(error).__name__
    return ""


async def fates(gathering: Gathering, handler: Handler, *messages: ReceivedMessage) -> dict[str, str]:
    waits = [fate_of(gathering, handler, m) for m in messages]
    results = await asyncio.wait_for(asyncio.gather(*waits), PATIENCE_SECONDS)
    return {m.text: result for m, result in zip(messages, results, strict=True)}


def handled(handler: Handled, batch: int, *messages: ReceivedMessage, concurrency: int = 1) -> dict[str, str]:
    async def run() -> dict[str, str]:
        gathering = Gathering(call, concurrency)
        try:
            return await fates(gathering, handler_of(handler, batch), *messages)
        finally:
            await gathering.close()

    return asyncio.run(run())


def test_messages_that_come_together_are_handled_together() -> None:
    handler = Handled()
    assert set(handled(handler, 4, *map(message, "abcdefghij")).values()) == {""}
    assert handler.calls == [[*"abcd"], [*"efgh"], [*"ij"]]


def test_a_batch_that_fails_is_split_down_to_those_that_fail_alone() -> None:
    handler = Handled("c", "h")
    fates = handled(handler, 8, *map(message, "abcdefgh"))
    assert {text for text, fate in fates.items() if fate} == {"c", "h"}
    assert fates["c"] == "cannot handle ['c']", "the error that it had alone"
    assert handler.calls[:4] == [[*"abcdefgh"], [*"abcd"], [*"ab"], [*"cd"]]
    done = [text for texts in handler.calls if {"c", "h"}.isdisjoint(texts) for text in texts]
    assert done == [*"abdefg"], "each once, in its order"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_batch_of_nothing_but_poison_has_a_bounded_cost(size: int) -> None:
    texts = [str(n) for n in range(size)]
    handler = Handled(*texts)
    assert all(handled(handler, 100, *map(message, texts)).values())
    assert len(handler.calls) == 2 * size - 1


@pytest.mark.parametrize("error", [DeadLetter, asyncio.CancelledError])
def test_every_error_is_that_of_the_messages_that_raise_it_alone(error: type[BaseException]) -> None:
    """Also one that looks like the end of the batch's own task."""
    fates = handled(Handled("b", error=error), 4, *map(message, "abcd"))
    assert [text for text, fate in fates.items() if fate] == ["b"]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_batch_whose_handler_wants_to_exit_is_not_tried_any_more(error: type[BaseException]) -> None:
    """Its messages were handled in halves first, although the process was to end."""
    handler = Handled("c", error=error)
    fates = handled(handler, 4, *map(message, "abcd"))
    assert handler.calls == [[*"abcd"]]
    assert set(fates.values()) == {f"{error.__name__} ended the call of its batch"}


def test_the_rest_of_a_batch_that_was_halved_is_given_back_at_an_exit() -> None:
    calls: list[list[str]] = []

    async def handle(messages: list[ReceivedMessage]) -> None:
        calls.append([m.text for m in messages])
        if len(messages) == 2:
            raise SystemExit(3)
        raise ValueError("one of four")

    async def run() -> dict[str, str]:
        gathering = Gathering(call, 1)
        return await fates(gathering, handler_of(handle, 4), *map(message, "abcd"))

    results = asyncio.run(run())
    assert calls == [[*"abcd"], [*"ab"]]
    assert set(results.values()) == {"SystemExit ended the call of its batch"}


def test_no_batch_begins_after_an_exit() -> None:
    handler = Handled("a", error=SystemExit)
    fates = handled(handler, 2, *map(message, "abcdef"))
    assert handler.calls == [["a", "b"]]
    assert set(fates.values()) == {"SystemExit ended the call of its batch"}


def test_the_message_that_wants_to_exit_alone_has_failed() -> None:
    assert handled(Handled("a", error=SystemExit), 4, message("a")) == {"a": "cannot handle ['a']"}


def test_a_batch_that_has_committed_a_part_is_not_halved() -> None:
    """The halves would count as handled: their claims stand."""
    handler = Handled("c", error=partial_of)
    fates = handled(handler, 4, *map(message, "abcd"))
    assert handler.calls == [[*"abcd"]]
    assert all("a part of its effect may be committed" in fate for fate in fates.values())


def partial_of(text: str) -> Partial:
    return Partial(ValueError(text))


def test_the_halves_get_values_that_no_call_has_changed() -> None:
    """A handler that sums up, say, and fails on one message, would sum up the others twice."""
    seen: list[tuple[str, int]] = []

    async def handle(baskets: list[Basket]) -> None:
        for basket in baskets:
            basket.price += 1
            seen.append((basket.item, basket.price))
            if basket.item == "d":
                raise ValueError("no d")

    def basket(text: str) -> ReceivedMessage:
        return ReceivedMessage(text, "t", 0, 0, b'{"item": "%s", "price": 5}' % text.encode(), None, None, {}, 1, "")

    async def run() -> None:
        gathering = Gathering(call, 1)
        handler = handler_of(handle, 4)
        waits = [fate_of(gathering, handler, basket(text)) for text in "abcd"]
        assert await asyncio.gather(*waits) == ["", "", "", "no d"]

    asyncio.run(run())
    assert [item for item, _ in seen] == [*"abcd", *"ab", *"cd", "c", "d"]
    assert {price for _, price in seen} == {6}


def test_a_message_that_comes_again_is_alone() -> None:
    handler = Handled()
    handled(handler, 8, message("a"), message("again", 2), message("b"), message("c"), message("and again", 3))
    assert handler.calls == [["a"], ["again"], ["b", "c"], ["and again"]]


def test_batches_grow_while_handlers_are_slow_and_topics_take_turns() -> None:
    calls: list[tuple[str, list[str]]] = []

    async def run() -> None:
        free = asyncio.Event()

        def slow(topic: str) -> Handler:
            async def handle(messages: list[ReceivedMessage]) -> None:
                calls.append((topic, [m.text for m in messages]))
                await free.wait()

            return handler_of(handle, 3, topic)

        gathering = Gathering(call, 1)
        one, other = slow("one"), slow("other")
        waits = [asyncio.ensure_future(gathering.handle(one, message("a")))]
        await turns()
        for text in "bcde":
            waits.append(asyncio.ensure_future(gathering.handle(one, message(text))))
            await turns()
        waits.append(asyncio.ensure_future(gathering.handle(other, message("x"))))
        await turns()
        free.set()
        await asyncio.wait_for(asyncio.gather(*waits), PATIENCE_SECONDS)

    asyncio.run(run())
    assert calls == [("one", ["a"]), ("one", [*"bcd"]), ("other", ["x"]), ("one", ["e"])]


def test_at_most_so_many_batches_run_at_once() -> None:
    at_once, most = 0, 0

    async def run() -> None:
        nonlocal at_once, most
        three = asyncio.Barrier(3)

        async def handle(messages: list[ReceivedMessage]) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await three.wait()
            at_once -= 1

        gathering = Gathering(call, 3)
        await fates(gathering, handler_of(handle, 2), *map(message, "abcdefghijkl"))

    asyncio.run(run())
    assert most == 3


def test_a_batch_that_nobody_waits_for_is_cancelled_and_one_that_waits_does_not_begin() -> None:
    began: list[list[str]] = []
    cancelled: list[str] = []

    async def run() -> None:
        async def handle(messages: list[ReceivedMessage]) -> None:
            began.append([m.text for m in messages])
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append("".join(began[-1]))
                raise

        gathering, handler = Gathering(call, 1), handler_of(handle, 2)
        waits = {text: asyncio.ensure_future(gathering.handle(handler, message(text))) for text in "abcd"}
        await turns()
        waits["c"].cancel()
        waits["a"].cancel()
        await turns()
        assert not cancelled, "half a batch is still waited for"
        waits["b"].cancel()
        await turns()
        waits["d"].cancel()
        await asyncio.gather(*waits.values(), return_exceptions=True)
        await gathering.close()

    asyncio.run(run())
    assert (began, cancelled) == ([["a", "b"], ["d"]], ["ab", "d"])
