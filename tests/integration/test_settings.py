"""Settings that change while servers run: validated, recorded, spread to all of them, rolled back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from notify.testing.process import ServerProcess
from storage.sql import schema
from storage.sql.dialects import open_engine
from tests.support.databases import empty_database
from tests.support.http import ask

WHY = {"reason": "a test"}


@contextmanager
def three_servers(database_urls: dict[str, str], tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """Three servers of one registry."""
    with ExitStack() as stack:
        url = stack.enter_context(empty_database("postgresql", database_urls, tmp_path))
        engine = open_engine(url)
        schema.upgrade(engine, "main")
        engine.dispose()
        servers = []
        for n in range(3):
            servers.append(ServerProcess(tmp_path / str(n), flags=["--storage", url]))
            stack.callback(servers[-1].stop)
            servers[-1].start()
        yield servers


@pytest.fixture
def cluster(database_urls: dict[str, str], tmp_path: Path) -> Iterator[list[ServerProcess]]:
    with three_servers(database_urls, tmp_path) as servers:
        yield servers


def values(server: ServerProcess) -> dict[str, Any]:
    _, found = ask(server.url, "GET", "/v1/admin/settings")
    return {row["name"]: row["value"] for row in found["settings"]} | {"revision": found["revision"]}


def until_all(servers: list[ServerProcess], name: str, value: Any, within: float = 5.0) -> float:
    """Seconds until every server has the value."""
    began = time.monotonic()
    while any(values(s)[name] != value for s in servers):
        assert time.monotonic() - began < within, [values(s)[name] for s in servers]
        time.sleep(0.05)
    return time.monotonic() - began


def test_a_change_reaches_three_servers_and_is_rolled_back(cluster: list[ServerProcess]) -> None:
    first, second, third = cluster
    status, answer = ask(
        first.url, "PUT", "/v1/admin/settings", WHY | {"values": {"check_attempts": 3, "create_topics": "false"}}
    )
    assert (status, answer["result"]["revision"]) == (200, 1)
    assert answer["result"]["changes"]["check_attempts"] == {"from": 15, "to": 3}
    assert values(first)["check_attempts"] == 3  # there at once
    until_all(cluster, "check_attempts", 3)
    assert values(third)["create_topics"] is False
    assert values(first)["storage"] == "(secret)"  # it may hold a password
    # What holds is acted upon, not only shown: rates come the same way.
    ask(second.url, "PUT", "/v1/admin/limits", WHY | {"producer_groups": {"slow": 7.0}})
    until_all(cluster, "revision", 2)
    assert ask(third.url, "GET", "/v1/admin/limits")[1]["producer_groups"] == {"slow": 7.0}
    # One call back, for settings and rates.
    status, answer = ask(third.url, "POST", "/v1/admin/settings/rollback", WHY | {"to": 0})
    assert (status, answer["result"]["revision"]) == (200, 3)
    until_all(cluster, "check_attempts", 15)
    until_all(cluster, "revision", 3)
    assert ask(first.url, "GET", "/v1/admin/limits")[1]["producer_groups"] == {}
    _, found = ask(second.url, "GET", "/v1/admin/settings/revisions")
    assert [r["number"] for r in found["revisions"]] == [3, 2, 1] and found["revisions"][2]["reason"] == "a test"
    _, found = ask(second.url, "GET", "/v1/admin/actions")  # at whichever server it was done
    assert [a["what"] for a in found["actions"]] == ["settings.rollback", "limits.put", "settings.put"]
    # A server that comes later, or again, starts with what holds.
    ask(first.url, "PUT", "/v1/admin/settings", WHY | {"values": {"check_attempts": 4}})
    third.stop()
    third.start()
    assert values(third)["check_attempts"] == 4


def test_what_cannot_be_is_refused_and_changes_nothing(server: ServerProcess) -> None:
    before = values(server)
    for wrong, code in (
        ({"check_attempts": 0}, "invalid_setting"),
        ({"check_attempts": "many"}, "invalid_setting"),
        ({"no_such": 1}, "invalid_setting"),
        ({"limits": 1}, "invalid_setting"),
        ({"port": 1}, "needs_restart"),
        ({"check_attempts": 3, "retention_seconds": -1}, "invalid_setting"),
    ):
        status, problem = ask(server.url, "PUT", "/v1/admin/settings", WHY | {"values": wrong})
        assert (status, problem["code"]) == (422, code), wrong
    status, _ = ask(server.url, "PUT", "/v1/admin/settings", {"values": {"check_attempts": 3}})
    assert status == 422  # no reason
    status, answer = ask(
        server.url, "PUT", "/v1/admin/settings", WHY | {"values": {"check_attempts": 3}, "dry_run": True}
    )
    assert status == 200 and answer["result"]["changes"]["check_attempts"]["to"] == 3
    stale = WHY | {"values": {"check_attempts": 3}, "after": before["revision"] + 7}
    assert ask(server.url, "PUT", "/v1/admin/settings", stale)[0] == 409
    assert ask(server.url, "POST", "/v1/admin/settings/rollback", WHY | {"to": 99})[0] == 404
    assert values(server) == before


def test_a_changed_setting_is_acted_upon(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data").start()
    try:
        message = {"messages": [{"topic": "made", "body": "x"}]}
        assert ask(server.url, "POST", "/v1/messages", message)[1]["items"][0]["status"] == 201
        ask(server.url, "PUT", "/v1/admin/settings", WHY | {"values": {"create_topics": False}})
        assert ask(server.url, "POST", "/v1/messages", message)[1]["items"][0]["status"] == 201
        other = {"messages": [{"topic": "other", "body": "x"}]}
        assert ask(server.url, "POST", "/v1/messages", other)[1]["items"][0]["status"] == 404
        server.stop()
        server.start()
        assert ask(server.url, "POST", "/v1/messages", other)[1]["items"][0]["status"] == 404
        ask(server.url, "PUT", "/v1/admin/settings", WHY | {"values": {"create_topics": None}})
        assert ask(server.url, "POST", "/v1/messages", other)[1]["items"][0]["status"] == 201
    finally:
        server.stop()
