"""The producer's side of check-back: no check and no listener keeps other checks from their answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from notify.check import CheckMessageListener, CheckUnavailable, HalfMessage, Outcome
from notify.check.schedule import CheckSchedule
from notify.client import TransactionProducer
from notify.client.producer.checker import THREADS, Checker, _Room
from notify.errors import InvalidRequest
from notify.protocol import ids
from notify.protocol.limits import LIMITS
from notify.protocol.wire import Check, CheckedMessage, Checks, OutcomeItem, Payload, Poll, encode_msgpack
from notify.server.core import checks as server_checks
from notify.server.core.check_log import CheckLog
from notify.server.core.checks import Checks as ServerChecks
from notify.server.metrics import Metrics
from notify.storage.checks import Due
from notify.storage.memory import MemoryStore
from notify.storage.records import State
from notify.storage.topics import Topic
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS, eventually_async
from tests.support.transactions import new_id, sent


class Asking:
    """Stands for a producer's client: each poll gives the next of these answers; then polls wait."""

    group, instance = "g", "i"

    def __init__(self, *answers: bytes | Sequence[Check]) -> None:
        self._answers = [a if isinstance(a, bytes) else encode_msgpack(Checks(list(a))) for a in answers]
        self.said: list[OutcomeItem] = []
        self.http: Any = self
        self.places = tuple

    async def asked(self) -> None:
        pass

    async def call(self, *_: Any, **__: Any) -> bytes:
        if not self._answers:
            await asyncio.Event().wait()
        return self._answers.pop(0)

    async def answer(self, item: OutcomeItem) -> None:
        encode_msgpack(item)  # as what leaves with the outcomes of others has to be
        self.said.append(item)

    def outcome_of(self, check: Check) -> str:
        """The outcome that was answered to a check; empty while there is no answer."""
        return next((item.outcome for item in self.said if item.id == check.id), "")


def check_of(topic: str = "", attempt: int = 1) -> Check:
    return Check("1", "main", new_id(), "", attempt, [CheckedMessage(topic)] if topic else [])


async def asked(
    client: Any, listeners: list[CheckMessageListener], *checks: Check, then: Callable[[], object] = lambda: None
) -> None:
    """Run a checker until it has answered each of these checks; then call `then`, and close it."""
    checker = Checker(client, None, listeners)
    task = asyncio.get_running_loop().create_task(checker.run())
    try:
        await eventually_async(lambda: all(map(client.outcome_of, checks)), "an answer to each check")
    finally:
        then()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await checker.close()


class Good(CheckMessageListener):
    topics = ("good",)

    def check(self, half: HalfMessage) -> Outcome:
        return Outcome.COMMIT


def test_checks_without_messages_take_nothing_from_the_others() -> None:
    """A server sends a check without messages where the half was decided just before it was read."""
    empty, good = [check_of() for _ in range(400)], check_of("good")
    client = Asking(empty, [good])
    asyncio.run(asked(client, [Good()], good, *empty))
    assert client.outcome_of(good) == "COMMIT"
    assert all(item.unavailable and item.outcome == "UNKNOWN" for item in client.said if item.id != good.id)


async def test_a_checker_that_ends_interrupts_no_statement() -> None:
    """An asyncio connection to SQLite that was interrupted as it began stayed open, and kept the lock of writers."""

    class Connection:
        async def __aenter__(self) -> Connection:
            began.set()
            return self

        async def run_sync(self, function: Callable[..., Any], *arguments: Any) -> Any:
            await may_end.wait()
            ends.append("statement")
            return "source", 0

        async def __aexit__(self, *error: object) -> None:
            ends.append("closed")

    class Engine:
        sync_engine = sa.create_engine("sqlite://", poolclass=sa.NullPool)

        def connect(self) -> Connection:
            return Connection()

    began, may_end, ends = asyncio.Event(), asyncio.Event(), list[str]()
    checker = Checker(Asking(), Engine(), [])  # type: ignore[arg-type]
    polling = asyncio.ensure_future(checker.run())
    await began.wait()
    polling.cancel()
    closing = asyncio.ensure_future(checker.close())
    await asyncio.gather(polling, return_exceptions=True)
    may_end.set()
    await closing
    assert ends == ["statement", "closed"]


def test_a_listener_that_hangs_keeps_nobody_else_waiting() -> None:
    end = threading.Event()

    class Hangs(CheckMessageListener):
        topics = ("hangs",)

        def check(self, half: HalfMessage) -> Outcome:
            end.wait()
            return Outcome.UNKNOWN

    checks = [check_of("hangs") for _ in range(200)]
    good = check_of("good")
    client = Asking(checks, [good])
    said: list[OutcomeItem] = []  # while the listener hung

    def then() -> None:
        said.extend(client.said)
        end.set()

    asyncio.run(asked(client, [Hangs(), Good()], good, then=then))
    assert client.outcome_of(good) == "COMMIT"
    # Checks that found too many waiting are answered as unavailable; the server asks again about the others.
    assert all(item.unavailable for item in said if item.id != good.id)


def test_answers_of_a_listener_can_be_sent() -> None:
    class Odd(CheckMessageListener):
        topics = ("odd",)

        def check(self, half: HalfMessage) -> Outcome:
            if half.attempt == 1:
                raise CheckUnavailable("half a pair: \ud800")
            raise SystemExit("a listener that ends its process") if half.attempt == 2 else StopIteration

    checks = [check_of("odd", attempt) for attempt in (1, 2, 3)]
    client = Asking(checks)
    asyncio.run(asked(client, [Odd()], *checks))
    reasons = {item.id: item.reason for item in client.said}
    assert reasons[checks[0].id] == "half a pair: ?"
    assert all(item.unavailable and item.outcome == "UNKNOWN" for item in client.said)


def test_an_answer_that_is_none_does_not_end_the_polling(caplog: pytest.LogCaptureFixture) -> None:
    good = check_of("good")
    client = Asking(b"<html>a proxy's page</html>", [good])
    asyncio.run(asked(client, [Good()], good))
    assert client.outcome_of(good) == "COMMIT"
    assert "polling for checks failed" in caplog.text


def test_listeners_that_could_never_answer_are_refused(memory: InMemoryServer, unique: str) -> None:
    class Text(Good):
        topics = "good"

    class Coroutine(Good):
        async def check(self, half: HalfMessage) -> Outcome:  # type: ignore[override]
            return Outcome.COMMIT

    with TransactionProducer(memory.url, group=unique) as producer:
        for listener in (Text(), Coroutine()):
            with pytest.raises(InvalidRequest):
                producer.add_check_listener(listener)


def test_a_half_that_is_decided_meanwhile_is_not_asked_about() -> None:
    """The half's outcome arrives after its check is claimed and before its messages are read."""

    async def scenario() -> list[str]:
        store = MemoryStore()
        contents = store.half_contents

        async def late(claimed: Sequence[Due]) -> list[list[Payload]]:
            await store.decide([(claimed[0].id, "g", State.COMMITTED)], 0)
            return await contents(claimed)

        store.half_contents = late  # type: ignore[method-assign]
        await store.open(0)
        await store.create_topic(Topic("t"))
        decided, open_still = sent(), sent()
        await store.put([decided], 0)
        await store.put([open_still], 1)
        checks = ServerChecks(store, lambda: 60_000_000, CheckSchedule(), "main", Metrics(), CheckLog())
        checked = await checks.poll(Poll(producer_group="g", instance="i"))
        assert [len(check["messages"]) for check in checked] == [1]
        assert [check["id"] for check in checked] == [ids.to_text(open_still.id)]
        return [check["id"] for check in checked]

    asyncio.run(scenario())


def test_a_poll_answers_with_no_more_than_goes_into_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that do not fit come with the next poll. All came at once: 60 halves of 7 MiB were a reply of 420 MiB."""
    monkeypatch.setattr(server_checks, "LIMITS", replace(LIMITS, reply_bytes=100_000))
    most_read = 0

    async def scenario() -> None:
        store = MemoryStore()
        contents = store.half_contents

        async def counted(claimed: Sequence[Due]) -> list[list[Payload]]:
            nonlocal most_read
            most_read = max(most_read, len(claimed))
            return await contents(claimed)

        store.half_contents = counted  # type: ignore[method-assign]
        await store.open(0)
        await store.create_topic(Topic("t"))
        halves = [sent(bytes(size)) for size in (30_000, 30_000, 30_000, 30_000, 200_000, *[10] * 40)]
        await store.put(halves, 0)
        log = CheckLog()
        checks = ServerChecks(store, lambda: 60_000_000, CheckSchedule(), "main", Metrics(), log)
        asked = []
        for count in (3, 1, 1, 40, 0):
            questions = await checks.poll(Poll(producer_group="g", instance="i", max=100))
            assert len(questions) == count
            asked += [question["id"] for question in questions]
            assert all(len(log.of(t.id)) == (ids.to_text(t.id) in asked) for t in halves)
        assert sorted(asked) == sorted(ids.to_text(t.id) for t in halves)

    asyncio.run(scenario())
    assert most_read <= server_checks.READ_AT_ONCE


async def test_a_check_whose_thread_cannot_be_started_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """After THREADS of them no check of this listener was ever answered again."""

    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    room = _Room("the listener")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more)
        for _ in range(THREADS):
            with pytest.raises(RuntimeError, match="new thread"):
                await room.in_thread(str)
    assert await asyncio.wait_for(room.in_thread(str, 5), PATIENCE_SECONDS) == "5"


def test_the_threads_of_listeners_do_not_outlive_the_process() -> None:
    """A listener that never returns does not keep a process from its end: its thread is a daemon."""
    daemons: list[bool] = []

    class Looks(CheckMessageListener):
        topics = ("looks",)

        def check(self, half: HalfMessage) -> Outcome:
            daemons.append(threading.current_thread().daemon)
            return Outcome.COMMIT

    check = check_of("looks")
    asyncio.run(asked(Asking([check]), [Looks()], check))
    assert daemons == [True]
