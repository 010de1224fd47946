"""Resets, searches for messages, and redrives of some or all dead letters."""

from __future__ import annotations

import asyncio
import itertools
import urllib.parse
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from notify.client import Message, TransactionProducer
from notify.server.groups.own_letters import OwnLetters
from notify.server.jobs import runner
from notify.server.letters.engine import Closing
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import Caller, bodies, die, drain, publish, redrive, subscribe
from tests.support.http import admin, call, refusal
from tests.support.servers import stop_if_running

# --- resets ---------------------------------------------------------------------------------------------------


def test_a_reset_says_what_it_will_do_and_begins_an_epoch(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    publish(server.url, unique, [str(n) for n in range(5)])
    between = datetime.now(UTC)
    publish(server.url, unique, [str(n) for n in range(5, 10)])
    caller = Caller(server.url, unique, "i")
    had = caller.receive(unique)
    assert caller.settle(had[:8]) == [200] * 8
    reset = f"groups/{unique}/reset"
    preview = admin(server.url, "POST", reset, {"topic": unique, "to": between.isoformat(), "dry_run": True})
    row = {"queue": 0, "from": 8, "to": 5, "again": 3, "left_out": 0}
    assert preview["dry_run"] and preview["result"].items() >= {"epoch": 1, "queues": [row], "replay": 0}.items()
    assert caller.settle(had[8:9]) == [200]  # the dry run changed nothing
    done = admin(server.url, "POST", reset, {"topic": unique, "to": between.isoformat()})
    assert done["result"]["epoch"] == 1
    assert caller.settle(had[9:]) == [410]
    assert bodies(caller.receive(unique)) == ["5", "6", "7", "8", "9"]
    admin(server.url, "POST", reset, {"topic": unique, "to": "latest"})
    described = admin(server.url, "GET", f"groups/{unique}")["subscriptions"][0]
    assert described["epoch"] == 2
    subscribe(server.url, unique, unique)  # the same again keeps the epoch
    assert admin(server.url, "GET", f"groups/{unique}")["subscriptions"][0]["epoch"] == 2
    recorded = admin(server.url, "GET", "actions?max=20")["actions"]
    assert any(a["what"] == "group.reset" and a["target"] == f"{unique}/{unique}" for a in recorded)


def test_a_reset_counts_what_was_settled_behind_a_message_that_waits(server: ServerProcess, unique: str) -> None:
    """The oldest message failed, so that the group's position is before it. The preview said that no message is
    repeated, and a reset delivered them whose effects an inbox no longer knew."""
    since = datetime.now(UTC)
    subscribe(server.url, unique, unique, retry_min=3600.0, retry_max=3600.0)
    publish(server.url, unique, [str(n) for n in range(6)])
    caller = Caller(server.url, unique, "i")
    had = caller.receive(unique, max=6)
    assert caller.settle(had[:1], "retry") + caller.settle(had[2:5]) == [200] * 4
    reset = f"groups/{unique}/reset"
    for to, again, left_out in (("earliest", 3, 0), (1, 3, 1), (3, 2, 2), (5, 0, 2), ("latest", 0, 3)):
        preview = admin(server.url, "POST", reset, {"topic": unique, "to": to, "dry_run": True})["result"]
        assert [(row["again"], row["left_out"]) for row in preview["queues"]] == [(again, left_out)], to
    path = f"/v1/groups/{unique}/subscriptions/{unique}/inbox"
    call(server.url, "PUT", path, {"whole_from": (since + timedelta(hours=1)).isoformat()})
    assert refusal(server.url, "POST", reset, topic=unique, to="earliest") == (409, "before_inbox")
    admin(server.url, "POST", reset, {"topic": unique, "to": "earliest", "force": True})
    assert bodies(caller.receive(unique, max=6)) == [str(n) for n in range(6)]


def test_a_reset_beyond_the_log_is_refused(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    publish(server.url, unique, ["a", "b"])
    future = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    for to in (3, -1, future):
        assert refusal(server.url, "POST", f"groups/{unique}/reset", topic=unique, to=to) == (422, "out_of_bounds")
    for to in ("yesterday", True):
        assert refusal(server.url, "POST", f"groups/{unique}/reset", topic=unique, to=to)[0] == 422
    assert refusal(server.url, "POST", f"groups/{unique}/reset", topic="nowhere", to=0) == (404, "not_found")
    assert bodies(Caller(server.url, unique, "i").receive(unique)) == ["a", "b"]


def test_a_second_group_starts_anywhere(server: ServerProcess, unique: str) -> None:
    publish(server.url, unique, [str(n) for n in range(6)])
    middle = datetime.now(UTC)
    publish(server.url, unique, ["6", "7"])
    for start, first in (("earliest", "0"), (4, "4"), (middle.isoformat(), "6")):
        group = f"{unique}-{first}"
        admin(server.url, "PUT", f"groups/{group}/subscriptions/{unique}", {"start": start})
        assert bodies(Caller(server.url, group, "i").receive(unique)) == [str(n) for n in range(int(first), 8)]
    admin(server.url, "PUT", f"groups/{unique}-late/subscriptions/{unique}", {"start": "latest"})
    assert Caller(server.url, f"{unique}-late", "i").receive(unique) == []


# --- finding messages -----------------------------------------------------------------------------------------


def test_messages_by_key_by_time_and_by_id(server: ServerProcess, unique: str) -> None:
    with TransactionProducer(server.url, group=unique) as producer:
        first = producer.publish(Message(unique, "1", key="order 7"))
        producer.publish(Message(unique, "2", key="order 8"))
        middle = datetime.now(UTC)
        producer.publish(Message(f"{unique}-other", "3", key="order 7"))

    def find(**query: str) -> list[str]:
        messages = admin(server.url, "GET", "messages?" + urllib.parse.urlencode(query))["messages"]
        return [m["body"] if "body" in m else m["message"]["body"] for m in messages]

    assert find(key="order 7") == ["1", "3"]
    assert find(key="order 7", topic=unique) == ["1"]
    assert find(key="order 7", **{"from": middle.isoformat()}) == ["3"]
    assert find(topic=unique) == ["1", "2"]
    assert find(topic=unique, **{"from": middle.isoformat()}) == []
    assert find(topic=unique, to=middle.isoformat(), max="1") == ["1"]
    assert find(id=first) == ["1"]
    assert refusal(server.url, "GET", "messages") == (422, "invalid_query")
    assert refusal(server.url, "GET", "messages?topic=nowhere") == (404, "not_found")
    code, answer = cli("message", "find", "--key", "order 7", "--topic", unique, "--url", server.url, "--json")
    assert code == 0 and [m["body"] for m in answer["messages"]] == ["1"]


# --- dead letters ---------------------------------------------------------------------------------------------


def test_dead_letters_go_back_to_their_own_group_only(server: ServerProcess, unique: str) -> None:
    other = f"{unique}-other"
    for group in (unique, other):
        subscribe(server.url, group, unique)
    publish(server.url, unique, ["a", "b", "c"])
    caller, bystander = Caller(server.url, unique, "i"), Caller(server.url, other, "i")
    assert bystander.settle(bystander.receive(unique)) == [200] * 3
    die(caller, unique, 2, "no such account")
    die(caller, unique, 1, "timeout")
    listed = admin(server.url, "GET", f"groups/{unique}/dead-letters")["messages"]
    assert [(m["body"], m["redriven"]) for m in listed] == [("a", False), ("b", False), ("c", False)]
    of_account = admin(server.url, "GET", f"groups/{unique}/dead-letters?contains=account")["messages"]
    assert bodies(of_account) == ["a", "b"]
    preview = redrive(server.url, unique, wanted={"contains": "timeout"}, dry_run=True)
    assert preview["ids"] == [listed[2]["id"]]
    items = redrive(server.url, unique, wanted={"contains": "timeout"})["items"]
    assert [i["status"] for i in items] == [201]
    again = caller.receive(unique, wait=30)
    assert bodies(again) == ["c"] and again[0]["topic"] == unique
    assert again[0]["headers"]["notify-dead-letter-reason"] == "timeout"
    assert caller.settle(again) == [200]
    assert bystander.receive(unique) == []
    # A redrive by id, repeated, changes nothing; an id of no dead letter is answered as unknown.
    name = listed[0]["id"]
    assert [i["status"] for i in redrive(server.url, unique, ids=[name])["items"]] == [201]
    assert [i["status"] for i in redrive(server.url, unique, ids=[name, "nonsense"])["items"]] == [200, 404]
    assert bodies(caller.receive(unique, wait=30)) == ["a"]
    assert caller.receive(unique) == []
    flags = [m["redriven"] for m in admin(server.url, "GET", f"groups/{unique}/dead-letters")["messages"]]
    assert flags == [True, False, True]


def test_a_redriven_message_that_fails_again_is_dead_again(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    publish(server.url, unique, ["a"])
    caller = Caller(server.url, unique, "i")
    die(caller, unique, 1, "first time")
    for round_number in range(2):
        assert [i["status"] for i in redrive(server.url, unique)["items"]] == [201]
        die(caller, unique, 1, f"round {round_number}")
    listed = admin(server.url, "GET", f"groups/{unique}/dead-letters")["messages"]
    assert [m["headers"]["notify-dead-letter-reason"] for m in listed] == ["first time", "round 0", "round 1"]
    assert {m["headers"]["notify-dead-letter-topic"] for m in listed} == {unique}


@pytest.mark.long
def test_all_dead_letters_as_a_job_that_survives_a_kill(unique: str, tmp_path: Path) -> None:
    total = 3 * runner.BATCH
    # The server dies when a part of the job's batch is on the disk, before the job has noted that: at the third sync of
    # messages, as one request publishes all of them.
    server = ServerProcess(tmp_path / "data", environment={"NOTIFY_CRASH_AT": "half.after_sync:3"}).start()
    try:
        subscribe(server.url, unique, unique)
        publish(server.url, unique, [str(n) for n in range(total)])
        die(Caller(server.url, unique, "i"), unique, total, "boom")
        job = redrive(server.url, unique, all=True, wanted={"contains": "boom", "filter": 'topic != "x"'})["job"]
        eventually(lambda: server.process is None or server.process.poll() is not None, "the server's death")
    finally:
        stop_if_running(server)
    server = ServerProcess(tmp_path / "data").start()
    try:
        url = server.url
        ended = eventually(lambda: not_running(url, job), "the job to continue and end")
        assert (ended["state"], ended["done"], ended["failed"], ended["progress"]) == ("done", total, 0, 1.0)
        items = admin(url, "GET", f"jobs/{job}?max={total}")["items"]
        assert len({i["id"] for i in items}) == total
        # For a letter that was on the disk the job says 200: it was sent before.
        statuses = Counter(i["status"] for i in items)
        assert set(statuses) == {200, 201} and statuses[200] <= runner.BATCH
        assert sorted(map(int, bodies(drain(url, unique, unique, total)))) == list(range(total))
        code, answer = cli("dead-letter", "redrive", unique, "--all", "--reason", "again", "--url", url, "--json")
        assert code == 0 and (answer["state"], answer["done"]) == ("done", total)
        assert Caller(url, unique, "i").receive(unique) == []  # all were sent before
        assert refusal(url, "GET", "jobs/999") == (404, "not_found")
    finally:
        server.stop()


def not_running(url: str, job: int) -> dict[str, Any] | None:
    """The job, once it has ended."""
    shown: dict[str, Any] = admin(url, "GET", f"jobs/{job}")
    return None if shown["state"] == "running" else shown


def test_a_cancelled_job_stops_for_good(
    notify_server: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, is_cancelled = notify_server.url, asyncio.Event()
    close, cancel = OwnLetters.close, runner.Jobs.cancel
    batches = itertools.count(1)

    async def held_in_the_second_batch(letters: OwnLetters, group: str, batch: Any, how: Closing) -> Any:
        if next(batches) == 2:
            await is_cancelled.wait()
        return await close(letters, group, batch, how)

    async def cancel_and_let_go(running_jobs: runner.Jobs, number: int, why: str) -> None:
        asyncio.get_running_loop().call_soon(is_cancelled.set)  # after the cancellation has been noted
        await cancel(running_jobs, number, why)

    monkeypatch.setattr(runner, "BATCH", 5)
    monkeypatch.setattr(OwnLetters, "close", held_in_the_second_batch)
    monkeypatch.setattr(runner.Jobs, "cancel", cancel_and_let_go)
    subscribe(url, unique, unique)
    publish(url, unique, [str(n) for n in range(20)])
    die(Caller(url, unique, "i"), unique, 20, "boom")
    path = f"jobs/{redrive(url, unique, all=True)['job']}"
    eventually(lambda: admin(url, "GET", path)["done"] == 5, "the first batch")
    assert admin(url, "POST", f"{path}/cancel", {"dry_run": True})["result"]["state"] == "running"
    ended = admin(url, "POST", f"{path}/cancel", {"reason": "the wrong group"})["result"]
    assert (ended["state"], ended["done"]) == ("cancelled", 10)  # the job ended after its current batch
    assert "the wrong group" in ended["detail"] and ended["ended_at"] and ended["progress"] < 1
    assert refusal(url, "POST", f"{path}/cancel") == (409, "conflict")
    assert refusal(url, "POST", "jobs/999/cancel") == (404, "not_found")
    notify_server.restart()  # the job does not continue after a restart
    assert len(drain(url, unique, unique, 10)) == 10
    shown = admin(url, "GET", path)
    assert (shown["state"], shown["done"], shown["ended_at"]) == ("cancelled", 10, ended["ended_at"])


def test_a_refused_redrive_names_the_reason(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    publish(server.url, unique, ["a"])
    caller = Caller(server.url, unique, "i")
    die(caller, unique, 1, "boom")
    admin(server.url, "DELETE", f"groups/{unique}/subscriptions/{unique}", {})
    assert [(i["status"], i["code"]) for i in redrive(server.url, unique)["items"]] == [(404, "not_found")]
    path = f"groups/{unique}/dead-letters/redrive"
    assert refusal(server.url, "POST", path, wanted={"filter": "nope =="}) == (422, "invalid_filter")
    assert refusal(server.url, "POST", path, all=True, ids=["x"]) == (422, "invalid_schema")
    assert refusal(server.url, "POST", path, wanted={"dead_from": "yesterday"}) == (422, "invalid_schema")
    assert redrive(server.url, f"{unique}-none") == {"items": [], "next_offset": 0}


@pytest.mark.parametrize("query", ["max=0", "max=10001", "offset=-1"])
def test_a_list_of_letters_refuses_a_number_out_of_bounds(server: ServerProcess, unique: str, query: str) -> None:
    assert refusal(server.url, "GET", f"groups/{unique}/dead-letters?{query}")[0] == 422
