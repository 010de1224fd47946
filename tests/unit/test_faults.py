"""A fault of the product is logged with its traceback and counted; a failure outside that passes is one line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
import structlog
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from notify.errors import Unavailable
from notify.runtime import faults
from notify.server.access.principal import EVERYONE
from notify.server.core.check_webhooks import CheckWebhooks
from notify.server.core.pushes import Push, Pushes
from notify.server.core.subscriptions import Subscriptions
from notify.server.problems import answer_errors
from notify.server.watch.alarms import Alarms
from notify.server.watch.history import History
from notify.storage.records import InDoubt
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS
from tests.support.http import ask, metric


def fault() -> RuntimeError:
    """An error with a traceback."""
    try:
        raise RuntimeError("dictionary changed size during iteration")
    except RuntimeError as error:
        return error


def test_a_fault_is_logged_with_its_traceback_and_counted() -> None:
    before = faults.count()
    with structlog.testing.capture_logs() as logged:
        faults.note("look_failed", fault(), job=7)
    (line,) = logged
    assert (line["event"], line["log_level"], line["job"]) == ("look_failed", "error", 7)
    assert "Traceback" in line["trace"] and "dictionary changed size" in line["trace"]
    assert faults.count() == before + 1


@pytest.mark.parametrize(
    ("error", "words"), [(fault(), "its log says why"), (sa.exc.OperationalError("q", {}, Exception("x")), "try again")]
)
def test_a_page_that_fails_is_answered_with_a_page(error: Exception, words: str) -> None:
    """A browser was shown JSON."""
    api = FastAPI()
    answer_errors(api)

    @api.get("/{path:path}")
    async def fail(request: Request, path: str) -> None:
        request.state.principal = EVERYONE
        raise error

    client = TestClient(api, raise_server_exceptions=False)
    answer = client.get("/topics", headers={"accept": "text/html"})
    assert answer.status_code >= 500 and "text/html" in answer.headers["content-type"] and words in answer.text
    assert words in client.get("/v1/admin/topics", headers={"accept": "text/html"}).json()["detail"]


def test_many_faults_are_all_counted_and_not_all_logged() -> None:
    before = faults.count()
    with structlog.testing.capture_logs() as logged:
        for _ in range(1000):
            faults.unexpected("request_failed", fault())
    assert faults.count() == before + 1000
    assert 0 < len(logged) < 500


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("the shard is unreachable"),
        ConnectionResetError("reset"),
        sa.exc.OperationalError("q", {}, Exception("x")),
    ],
)
def test_a_failure_that_passes_is_one_line_and_no_fault(error: Exception) -> None:
    before = faults.count()
    with structlog.testing.capture_logs() as logged:
        faults.note("heartbeat_failed", error)
    (line,) = logged
    assert (line["log_level"], "trace" in line, faults.count()) == ("warning", False, before)


def test_the_metrics_show_faults(notify_server: InMemoryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url, name = notify_server.url, "notify_unexpected_errors_total"
    before = metric(url, name)

    def fail(*_: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(Subscriptions, "checked", fail)
    assert ask(url, "PUT", "/v1/groups/g/subscriptions/t", {})[0] == 500
    assert ask(url, "PUT", "/v1/admin/groups/g/subscriptions/t", {"reason": "a test"})[0] == 500
    assert metric(url, name) == before + 2


class Failing:
    """Work that fails with an unexpected error the first time, and notes when it is tried again."""

    def __init__(self) -> None:
        self.again = asyncio.Event()
        self._has_failed = False

    def __call__(self) -> None:
        if not self._has_failed:
            self._has_failed = True
            raise RuntimeError("a fault")
        self.again.set()


async def _alarms(failing: Failing) -> Callable[[], Awaitable[None]]:
    alarms = Alarms(SimpleNamespace(settings=SimpleNamespace(alarm_every_seconds=0.001)), None, None, None, None)  # type: ignore[arg-type]

    async def look() -> None:
        failing()

    alarms.look = look  # type: ignore[method-assign]
    alarms.start()
    return alarms.stop


async def _history(failing: Failing) -> Callable[[], Awaitable[None]]:
    async def in_doubt() -> InDoubt:
        return InDoubt(0, 0)

    counters = SimpleNamespace(**dict.fromkeys(COUNTERS, 0))
    core = SimpleNamespace(metrics=counters, store=SimpleNamespace(in_doubt=in_doubt))
    history = History(core, lambda: 0)  # type: ignore[arg-type]
    history.sample = failing  # type: ignore[method-assign]
    history.start()
    return history.stop


async def _check_webhooks(failing: Failing) -> Callable[[], Awaitable[None]]:
    async def poll(_: Any) -> list[Any]:
        failing()
        await asyncio.Event().wait()
        return []

    webhooks = CheckWebhooks(SimpleNamespace(checks=SimpleNamespace(poll=poll)), dict)  # type: ignore[arg-type]
    webhooks.follow({"g": "http://127.0.0.1:9"})
    return webhooks.stop


async def _pushes(failing: Failing) -> Callable[[], Awaitable[None]]:
    def subscriptions() -> list[Any]:
        failing()
        return []

    queues = SimpleNamespace(subscriptions=subscriptions, patterns=list)
    pushes = Pushes(SimpleNamespace(has_queues=True, queues=queues, clock=lambda: 0), list)  # type: ignore[arg-type]
    pushes.follow({"g": Push("http://127.0.0.1:9", at_once=1)})
    return pushes.stop


COUNTERS = ("halves", "committed", "published", "delivered", "acked", "dead_lettered")


@pytest.mark.parametrize("begin", [_alarms, _history, _check_webhooks, _pushes])
async def test_a_fault_beside_the_requests_is_tried_again(
    begin: Callable[[Failing], Awaitable[Callable[[], Awaitable[None]]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A background task continues after a fault. It ended for good, and nothing said so."""
    monkeypatch.setattr("notify.server.watch.history.EVERY_SECONDS", 0.001)
    monkeypatch.setattr("notify.server.core.check_webhooks.RETRY_SECONDS", 0.001)
    monkeypatch.setattr("notify.server.core.pushes.RETRY_SECONDS", 0.001)
    before = faults.count()
    failing = Failing()
    stop = await begin(failing)
    await asyncio.wait_for(failing.again.wait(), PATIENCE_SECONDS)
    await stop()
    assert faults.count() == before + 1
