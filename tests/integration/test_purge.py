"""Purges: of a topic's messages up to a point, and of dead letters."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from notify.testing.process import ServerProcess
from tests.support.commands import cli
from tests.support.groups import Caller, bodies, die, publish, redrive, subscribe
from tests.support.http import admin, refusal


def start_of(server: ServerProcess, topic: str) -> int:
    return int(admin(server.url, "GET", f"topics/{topic}")["queues"][0]["start"])


def test_a_topic_is_purged_up_to_an_instant(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    publish(server.url, unique, [str(n) for n in range(6)])
    caller = Caller(server.url, unique, "i")
    had = caller.receive(unique)
    assert caller.settle([m for m in had if m["body"] in "0123"]) == [200] * 4
    between = datetime.now(UTC).isoformat()
    publish(server.url, unique, ["6", "7"])
    path = f"topics/{unique}/purge"
    row = {"queue": 0, "from": 0, "to": 6, "dropped": 6}
    preview = admin(server.url, "POST", path, {"before": between, "dry_run": True})
    assert preview["result"] == {"queues": [row], "missed": {unique: 2}}
    # Two messages are handed out and not settled: without force nothing is dropped.
    assert refusal(server.url, "POST", path, before=between) == (409, "not_settled")
    assert start_of(server, unique) == 0
    done = admin(server.url, "POST", path, {"before": between, "force": True, "reason": "a test's leftovers"})
    assert done["result"] == preview["result"] and start_of(server, unique) == 6
    assert caller.settle([m for m in had if m["body"] in "45"]) == [200, 200]  # their consumer may still settle them
    assert bodies(caller.receive(unique)) == ["6", "7"]
    late = f"{unique}-late"
    admin(server.url, "PUT", f"groups/{late}/subscriptions/{unique}", {"start": "earliest"})
    assert bodies(Caller(server.url, late, "i").receive(unique)) == ["6", "7"]
    recorded = admin(server.url, "GET", "actions?max=20")["actions"]
    assert any((a["what"], a["target"], a["reason"]) == ("topic.purge", unique, "a test's leftovers") for a in recorded)


def test_a_purge_survives_a_kill_and_a_group_goes_on_behind_it(unique: str, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data").start()
    try:
        subscribe(server.url, unique, unique)
        publish(server.url, unique, ["0", "1", "2"])
        code, answer = cli(
            *("topic", "purge", unique, "--before", "2", "--force", "--reason", "r", "--url", server.url, "--json")
        )
        assert code == 0 and answer["result"]["missed"] == {unique: 2}
        server.kill()
        server.start()
        assert start_of(server, unique) == 2
        assert admin(server.url, "GET", f"topics/{unique}/groups")["groups"][0]["lag"] == 1
        assert bodies(Caller(server.url, unique, "i").receive(unique)) == ["2"]
    finally:
        server.stop()


def test_dead_letters_are_purged(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    publish(server.url, unique, ["a", "b"])
    caller = Caller(server.url, unique, "i")
    die(caller, unique, 2, "boom")
    between = datetime.now(UTC).isoformat()
    publish(server.url, unique, ["c"])
    die(caller, unique, 1, "boom")
    path = f"groups/{unique}/dead-letters/purge"
    assert admin(server.url, "POST", path, {"before": between})["result"]["queues"][0]["dropped"] == 2
    listed = admin(server.url, "GET", f"groups/{unique}/dead-letters")["messages"]
    assert bodies(listed) == ["c"]
    assert [i["status"] for i in redrive(server.url, unique)["items"]] == [201]
    assert bodies(caller.receive(unique, wait=30)) == ["c"]
    code, answer = cli(
        *("dead-letter", "purge", unique, "--before", "latest", "--reason", "r", "--url", server.url, "--json")
    )
    assert code == 0 and answer["result"]["queues"][0]["dropped"] == 1
    assert admin(server.url, "GET", f"groups/{unique}/dead-letters")["messages"] == []


def test_a_purge_names_the_reason_why_rows_are_kept(server: ServerProcess, unique: str) -> None:
    publish(server.url, unique, ["a"])
    path = f"topics/{unique}/purge"
    assert refusal(server.url, "POST", path, before="yesterday") == (422, "invalid_start")
    assert refusal(server.url, "POST", path, before=2) == (422, "out_of_bounds")
    assert refusal(server.url, "POST", path) == (422, "invalid_schema")
    assert refusal(server.url, "POST", "topics/nowhere/purge", before="latest") == (404, "not_found")
    assert refusal(server.url, "POST", f"groups/{unique}/dead-letters/purge", before="latest") == (404, "not_found")
    assert start_of(server, unique) == 0
