"""Settings change while servers run: they are validated, recorded, spread to all servers, and rolled back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from notify.testing.process import ServerProcess
from tests.support.databases import empty_database
from tests.support.http import REASON, admin, ask
from tests.support.servers import settings_of, three_servers, until_all

WHY = {"reason": REASON}


@pytest.fixture
def cluster(database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """Three servers of one registry."""
    with empty_database("postgresql", database_urls, tmp_path) as url, three_servers(url, tmp_path) as servers:
        yield servers


@pytest.mark.long
def test_a_change_reaches_three_servers_and_is_rolled_back(cluster: list[ServerProcess]) -> None:
    first, second, third = cluster
    status, answer = ask(
        first.url, "PUT", "/v1/admin/settings", WHY | {"values": {"check_attempts": 3, "create_topics": "false"}}
    )
    assert (status, answer["result"]["revision"]) == (200, 1)
    assert answer["result"]["changes"]["check_attempts"] == {"from": 15, "to": 3}
    assert settings_of(first)["check_attempts"] == 3  # at once at this server
    until_all(cluster, "check_attempts", 3)
    assert settings_of(third)["create_topics"] is False
    assert settings_of(first)["storage"] == "(secret)"  # the URL may hold a password
    # Rate limits spread in the same way.
    admin(second.url, "PUT", "limits", {"producer_groups": {"slow": 7.0}})
    until_all(cluster, "revision", 2)
    assert admin(third.url, "GET", "limits")["producer_groups"] == {"slow": 7.0}
    # One call rolls back settings and rates.
    status, answer = ask(third.url, "POST", "/v1/admin/settings/rollback", WHY | {"to": 0})
    assert (status, answer["result"]["revision"]) == (200, 3)
    until_all(cluster, "check_attempts", 15)
    until_all(cluster, "revision", 3)
    assert admin(first.url, "GET", "limits")["producer_groups"] == {}
    revisions = admin(second.url, "GET", "settings/revisions")["revisions"]
    assert [r["number"] for r in revisions] == [3, 2, 1] and revisions[2]["reason"] == REASON
    actions = admin(second.url, "GET", "actions")["actions"]  # actions of all servers
    assert [a["what"] for a in actions] == ["settings.rollback", "limits.put", "settings.put"]
    # A server that starts again has the current settings.
    admin(first.url, "PUT", "settings", {"values": {"check_attempts": 4}})
    third.stop()
    third.start()
    assert settings_of(third)["check_attempts"] == 4


def test_an_invalid_setting_is_refused_and_changes_nothing(server: ServerProcess) -> None:
    before = settings_of(server)
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
    assert status == 422  # without a reason
    status, answer = ask(
        server.url, "PUT", "/v1/admin/settings", WHY | {"values": {"check_attempts": 3}, "dry_run": True}
    )
    assert status == 200 and answer["result"]["changes"]["check_attempts"]["to"] == 3
    stale = WHY | {"values": {"check_attempts": 3}, "after": before["revision"] + 7}
    assert ask(server.url, "PUT", "/v1/admin/settings", stale)[0] == 409
    assert ask(server.url, "POST", "/v1/admin/settings/rollback", WHY | {"to": 99})[0] == 404
    assert settings_of(server) == before


def test_a_changed_setting_is_acted_upon(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data").start()
    try:
        message = {"messages": [{"topic": "made", "body": "x"}]}
        assert ask(server.url, "POST", "/v1/messages", message)[1]["items"][0]["status"] == 201
        admin(server.url, "PUT", "settings", {"values": {"create_topics": False}})
        assert ask(server.url, "POST", "/v1/messages", message)[1]["items"][0]["status"] == 201
        other = {"messages": [{"topic": "other", "body": "x"}]}
        assert ask(server.url, "POST", "/v1/messages", other)[1]["items"][0]["status"] == 404
        server.stop()
        server.start()
        assert ask(server.url, "POST", "/v1/messages", other)[1]["items"][0]["status"] == 404
        admin(server.url, "PUT", "settings", {"values": {"create_topics": None}})
        assert ask(server.url, "POST", "/v1/messages", other)[1]["items"][0]["status"] == 201
    finally:
        server.stop()
