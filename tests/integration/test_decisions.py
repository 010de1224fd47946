"""Decisions on many transactions at once: by ids and by conditions, their previews in sentences, jobs and records."""

from __future__ import annotations

from typing import Any

import pytest

from notify.server.jobs import deciding
from notify.storage.records import State
from notify.testing import InMemoryServer
from tests.support.clock import eventually
from tests.support.http import admin, ask, post
from tests.support.transactions import half_request, new_id


def halves(server: InMemoryServer, group: str, count: int, topic: str = "t", messages: int = 1) -> list[str]:
    """So many transactions of a producer group without an outcome."""
    names = [new_id() for _ in range(count)]
    for name in names:
        request = half_request(group, name, topic=topic, body="1")
        request["transactions"][0]["messages"] *= messages
        post(server.url, "/v1/transactions", request)
    return names


def states(server: InMemoryServer, names: list[str]) -> list[str]:
    return [admin(server.url, "GET", f"transactions/{name}")["state"] for name in names]


def test_a_bridge_decides_no_half_of_a_producer_that_names_its_source_alone(frozen_server: InMemoryServer) -> None:
    """Such a half, without an instance, was taken for one that the bridge had prepared: it committed it."""
    url, group = frozen_server.url, "names-a-source"
    name = new_id()
    post(url, "/v1/transactions", half_request(group, name) | {"source": group})
    batch: dict[str, Any] = {"epoch": 1, "expected_position": "", "position": "1", "claim": True, "transactions": []}
    for decided in ("commit", "rollback"):
        status, problem = ask(url, "POST", f"/v1/bridge/{group}/batches", batch | {decided: [name]})
        assert (status, problem["code"]) == (409, "foreign_half")
    assert states(frozen_server, [name]) == ["PREPARED"]


def decide(server: InMemoryServer, action: str, **fields: Any) -> Any:
    return admin(server.url, "POST", f"transactions/{action}", fields)["result"]


def ended(server: InMemoryServer, job: int) -> dict[str, Any]:
    return dict(eventually(lambda: _if_ended(server, job), "the job to end"))


def _if_ended(server: InMemoryServer, job: int) -> Any:
    shown = admin(server.url, "GET", f"jobs/{job}")
    return shown if shown["state"] != "running" else None


def test_chosen_ones_are_rolled_back_in_one_action(memory: InMemoryServer, unique: str) -> None:
    names = halves(memory, unique, 3, topic=unique, messages=2)
    unknown = new_id()
    chosen = [*names[:2], unknown]
    preview = decide(memory, "rollback", ids=chosen, dry_run=True)
    assert (preview["count"], preview["messages"], preview["left_out"]) == (2, 4, 1)
    assert preview["producer_groups"] == {unique: 2} and preview["topics"] == [{"topic": unique, "messages": 4}]
    assert states(memory, names) == ["PREPARED"] * 3, "a dry run changes nothing"
    assert decide(memory, "check", ids=chosen, dry_run=True)["offline"] == [unique]
    items = decide(memory, "rollback", ids=chosen)["items"]
    assert [item["status"] for item in items] == [200, 200, 404]
    assert states(memory, names) == ["ROLLED_BACK", "ROLLED_BACK", "PREPARED"]
    (action,) = [a for a in admin(memory.url, "GET", "actions")["actions"] if a["target"] == unique]
    assert action["what"] == "transactions.rollback" and len(action["result"]["items"]) == 3


def test_all_that_match_are_committed_by_a_job(memory: InMemoryServer, unique: str) -> None:
    admin(memory.url, "PUT", f"groups/{unique}/subscriptions/{unique}", {"start": "earliest"})
    names = halves(memory, unique, 5, topic=unique)
    others = halves(memory, f"{unique}.other", 1, topic=unique)
    wanted = {"producer_group": unique, "state": "PREPARED"}
    preview = decide(memory, "commit", all=True, wanted=wanted, dry_run=True)
    assert preview["topics"] == [{"topic": unique, "messages": 5, "groups": [unique]}]
    assert preview["young"] == 5 and not preview["is_more"]
    job = ended(memory, decide(memory, "commit", all=True, wanted=wanted)["job"])
    assert (job["state"], job["done"], job["failed"], job["what"]) == ("done", 5, 0, "transactions.commit")
    assert sorted(item["id"] for item in job["items"]) == sorted(names)
    assert states(memory, [*names, *others]) == ["COMMITTED"] * 5 + ["PREPARED"]
    counts = admin(memory.url, "GET", f"transactions?producer_group={unique}")["counts"]
    assert counts["COMMITTED"] >= 5 and counts["PREPARED"] >= 1


def test_transactions_stored_after_the_preview_are_left_alone(memory: InMemoryServer, unique: str) -> None:
    (first,) = halves(memory, unique, 1, topic=unique)
    stored_at = admin(memory.url, "GET", f"transactions/{first}")["stored_at"]
    memory.advance(5)
    (later,) = halves(memory, unique, 1, topic=unique)
    wanted = {"producer_group": unique, "stored_before": stored_at}
    ended(memory, decide(memory, "rollback", all=True, wanted=wanted)["job"])
    assert states(memory, [first, later]) == ["ROLLED_BACK", "PREPARED"]
    old = decide(memory, "rollback", all=True, wanted={"producer_group": unique, "older_than": 60}, dry_run=True)
    assert old["count"] == 0


@pytest.mark.long
def test_parked_ones_are_checked_again(memory: InMemoryServer, unique: str) -> None:
    """A job has PARKED transactions checked again with all their checks, and PREPARED ones at once."""
    names = halves(memory, unique, 2, topic=unique)
    park(memory, unique, names[0])
    preview = decide(memory, "check", ids=names, dry_run=True)
    assert (preview["parked"], preview["offline"]) == (1, [])
    ended(memory, decide(memory, "check", all=True, wanted={"producer_group": unique})["job"])
    assert states(memory, names) == ["PREPARED", "PREPARED"]
    asked = {"producer_group": unique, "instance": "i", "wait": 0, "max": 10}
    assert {c["id"] for c in post(memory.url, "/v1/checks/poll", asked)["checks"]} == set(names)


def park(server: InMemoryServer, group: str, name: str) -> None:
    """Answer every check of a transaction with UNKNOWN."""

    def is_parked() -> bool:
        admin(server.url, "POST", f"transactions/{name}/check", {})
        asked = {"producer_group": group, "instance": "i", "wait": 0, "max": 100}
        for check in post(server.url, "/v1/checks/poll", asked)["checks"]:
            outcome = {"id": check["id"], "outcome": "UNKNOWN", "check": check["token"]}
            if check["id"] == name:
                post(server.url, "/v1/transactions/outcomes", {"producer_group": group, "outcomes": [outcome]})
        return states(server, [name]) == ["PARKED"]

    eventually(is_parked, "the transaction to be parked")


def test_it_must_be_said_which(memory: InMemoryServer) -> None:
    for fields in ({}, {"ids": [new_id()], "all": True}):
        status, answer = ask(memory.url, "POST", "/v1/admin/transactions/rollback", {"reason": "r"} | fields)
        assert (status, answer["code"]) == (422, "invalid_schema")


def test_no_more_are_decided_than_the_bound(
    memory: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deciding, "MOST", 2)
    names = halves(memory, unique, 3, topic=unique)
    wanted = {"producer_group": unique}
    assert decide(memory, "rollback", all=True, wanted=wanted, dry_run=True)["is_more"]
    ended(memory, decide(memory, "rollback", all=True, wanted=wanted)["job"])
    assert states(memory, names) == ["ROLLED_BACK", "ROLLED_BACK", "PREPARED"]


def test_a_job_that_is_repeated_after_a_crash_says_the_same(memory: InMemoryServer, unique: str) -> None:
    names = [bytes.fromhex(name.replace("-", "")) for name in halves(memory, unique, 2, topic=unique)]
    assert deciding.unpacked(deciding.packed(names)) == names

    async def twice(running: Any) -> Any:
        first = await deciding.act(running.core, "commit", names)
        contrary = await deciding.act(running.core, "rollback", names)
        return first, await deciding.act(running.core, "commit", names), contrary

    first, again, contrary = memory.inside(twice)
    assert first == again and {item["status"] for item in first} == {200}
    assert {item["status"] for item in contrary} == {409} and contrary[0]["state"] == State.COMMITTED.name
