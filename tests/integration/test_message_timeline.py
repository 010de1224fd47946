"""One message's life, as an operator sees it: what happened to it, who has it, when it is tried again, and why not."""

from __future__ import annotations

from typing import Any

from notify.testing import InMemoryServer
from tests.support.groups import Caller, publish, subscribe
from tests.support.http import admin, post
from tests.support.transactions import half_request, new_id


def events(life: dict[str, Any]) -> list[str]:
    """Each event of a timeline, with its group and reason."""
    return [" ".join(filter(None, (e.get("group"), e["event"], e.get("reason")))) for e in life["timeline"]]


def life_of(server: InMemoryServer, message_id: str) -> dict[str, Any]:
    found: dict[str, Any] = admin(server.url, "GET", f"messages/{message_id}")
    return found


def test_an_undecided_half_is_in_no_queue(memory: InMemoryServer, unique: str) -> None:
    name = new_id()
    post(memory.url, "/v1/transactions", half_request(unique, name, topic=unique, key="k"))
    for shown in (
        life_of(memory, f"{name}.0")["message"],
        admin(memory.url, "GET", f"transactions/{name}")["messages"][0],
    ):
        assert shown["key"] == "k" and not {"queue", "offset", "committed_at"} & shown.keys()


def test_a_forced_outcome_is_previewed_with_what_it_does(memory: InMemoryServer, unique: str) -> None:
    subscribe(memory.url, f"{unique}-all", unique)
    subscribe(memory.url, f"{unique}-vip", unique, tags=["vip"])
    subscribe(memory.url, f"{unique}-later", f"{unique}.*")
    name = new_id()
    request = half_request(unique, name, topic=unique, key="7", tag="plain")
    request["transactions"][0]["messages"].append({"topic": f"{unique}.new", "body": "x"})
    post(memory.url, "/v1/transactions", request)

    def preview(action: str) -> Any:
        return admin(memory.url, "POST", f"transactions/{name}/{action}", {"dry_run": True})["result"]

    first = {"topic": unique, "key": "7", "tag": "plain"}
    second = {"topic": f"{unique}.new", "key": None, "tag": None}
    assert preview("commit") == {
        "state": "PREPARED",
        "becomes": "COMMITTED",
        "messages": [first | {"groups": [f"{unique}-all"]}, second | {"groups": [f"{unique}-later"]}],
    }
    assert preview("rollback") == {
        "state": "PREPARED",
        "becomes": "ROLLED_BACK",
        "messages": [first | {"groups": []}, second | {"groups": []}],
    }


def test_a_message_waiting_for_a_retry_shows_when(frozen_server: InMemoryServer, unique: str) -> None:
    server = frozen_server
    subscribe(server.url, unique, unique)
    publish(server.url, unique, ["x"])
    caller = Caller(server.url, unique, "i")
    (message,) = caller.receive(unique, lease=10)
    (group,) = life_of(server, message["id"])["groups"]
    assert (group["state"], group["instance"]) == ("handed out", "i") and group["next_attempt_at"] is None
    handed = life_of(server, message["id"])["timeline"][-1]
    assert (handed["event"], handed["instance"]) == ("handed out", "i")
    server.advance(11)
    (group,) = life_of(server, message["id"])["groups"]
    assert (group["state"], group["instance"], group["attempts"]) == ("to be tried again", None, 1)
    assert group["next_attempt_at"] == admin(server.url, "GET", "overview")["at"]  # with the next request
    (again,) = caller.receive(unique)
    caller.settle([again], "retry", delay=60)
    (group,) = life_of(server, message["id"])["groups"]
    assert (group["state"], group["attempts"]) == ("to be tried again", 2)
    assert group["next_attempt_at"] > admin(server.url, "GET", "overview")["at"]


def test_a_dead_letter_says_why_and_when_it_was_sent_again(frozen_server: InMemoryServer, unique: str) -> None:
    server = frozen_server
    subscribe(server.url, unique, unique)
    publish(server.url, unique, ["x"])
    caller = Caller(server.url, unique, "i")
    (message,) = caller.receive(unique)
    caller.settle([message], "dead_letter", reason="no such customer")
    life = life_of(server, message["id"])
    assert events(life)[-1] == f"{unique} moved to the dead letters no such customer"
    assert sum("dead letters" in event for event in events(life)) == 1
    server.advance(5)
    (item,) = admin(server.url, "POST", f"groups/{unique}/dead-letters/redrive", {"ids": [message["id"]]})["result"][
        "items"
    ]
    life = life_of(server, message["id"])
    assert events(life)[-1] == f"{unique} sent to the group again as {item['as']}"
    assert life["timeline"][-1]["at"] > life["timeline"][-2]["at"]


def test_the_last_attempt_of_a_dead_letter_does_not_stand_for_the_first(
    frozen_server: InMemoryServer, unique: str
) -> None:
    """The first attempt was shown with the last one's consumer and reason."""
    server = frozen_server
    subscribe(server.url, unique, unique, max_attempts=1)
    publish(server.url, unique, ["x"])
    first, second = (Caller(server.url, unique, name) for name in ("one", "two"))
    (message,) = first.receive(unique, lease=10)
    server.advance(11)
    server.advance(1)
    (again,) = second.receive(unique)
    server.advance(1)
    second.settle([again], "retry", reason="no such customer")
    assert [event for event in events(life_of(server, message["id"])) if event.startswith(unique)] == [
        f"{unique} handed out",
        f"{unique} attempt 1 ended with its consumer its lease ran out",
        f"{unique} handed out",
        f"{unique} moved to the dead letters no such customer",
    ]


def test_a_timeline_says_which_consumer_had_a_message_and_why_it_failed(
    frozen_server: InMemoryServer, unique: str
) -> None:
    server = frozen_server
    subscribe(server.url, unique, unique, max_attempts=3)
    publish(server.url, unique, ["a", "b", "c"])
    first, second = (Caller(server.url, unique, name) for name in ("one", "two"))
    messages = first.receive(unique)
    server.advance(1)
    first.settle(messages[:1], "retry", delay=0, reason="the bank is closed")
    first.settle(messages[1:2])
    server.advance(1)
    second.settle(second.receive(unique, max=1))
    server.advance(31)
    server.advance(1)
    again = first.receive(unique)
    first.settle(again)

    def told(message: dict[str, Any]) -> list[str]:
        life = life_of(server, message["id"])
        assert life["consumers_known_since"] < life["timeline"][0]["at"]
        told_ = [e for e in life["timeline"] if "group" in e]
        return [" ".join(filter(None, (e["event"], e.get("instance"), e.get("reason")))) for e in told_]

    assert told(messages[0]) == [
        "handed out one", "attempt 1 failed one the bank is closed", "handed out two", "acknowledged two",
    ]  # fmt: skip
    assert told(messages[1]) == ["handed out one", "acknowledged one"]
    assert told(messages[2]) == [
        "handed out one", "attempt 1 ended with its consumer one its lease ran out", "handed out one",
        "acknowledged one",
    ]  # fmt: skip


def test_an_event_has_a_kind_and_a_failure_its_traceback(frozen_server: InMemoryServer, unique: str) -> None:
    server = frozen_server
    subscribe(server.url, unique, unique, max_attempts=2)
    publish(server.url, unique, ["x"])
    caller = Caller(server.url, unique, "i")
    (message,) = caller.receive(unique)
    server.advance(1)
    caller.settle([message], "retry", delay=0, reason="first", trace="Traceback\n  one")
    server.advance(1)
    (again,) = caller.receive(unique)
    server.advance(1)
    caller.settle([again], "retry", reason="second", trace="x" * 20_000 + "the end")
    admin(server.url, "POST", f"groups/{unique}/dead-letters/redrive", {"ids": [message["id"]]})
    timeline = life_of(server, message["id"])["timeline"]
    assert [event["kind"] for event in timeline] == [
        "stored", "outcome", "queued", "handed_out", "failed", "handed_out", "dead_letter", "redriven",
    ]  # fmt: skip
    assert timeline[4]["trace"] == "Traceback\n  one"
    assert len(timeline[6]["trace"]) == 8000 and timeline[6]["trace"].endswith("the end")
    sent_again = life_of(server, timeline[7]["as"])
    assert sent_again["first_id"] == message["id"] and "first_id" not in life_of(server, message["id"])
    (third,) = caller.receive(unique)
    caller.settle([third], "dead_letter", reason="third", trace="of the third")
    last = life_of(server, third["id"])["timeline"][-1]
    assert (last["kind"], last["reason"], last["trace"]) == ("dead_letter", "third", "of the third")


def test_the_checks_of_a_half_are_in_its_timeline(frozen_server: InMemoryServer, unique: str) -> None:
    server, name = frozen_server, new_id()
    post(server.url, "/v1/transactions", half_request(unique, name, topic=unique))
    server.advance(60)
    asked = {"producer_group": unique, "instance": "shop-1", "wait": 0, "max": 10}
    (check,) = post(server.url, "/v1/checks/poll", asked)["checks"]
    server.advance(1)
    outcome = {"id": name, "outcome": "UNKNOWN", "check": check["token"], "reason": "it runs"}
    post(server.url, "/v1/transactions/outcomes", {"producer_group": unique, "outcomes": [outcome]})
    checks = [event for event in life_of(server, f"{name}.0")["timeline"] if event["kind"] == "check"]
    assert [event["event"] for event in checks] == ["shop-1 was asked whether it committed", "check answered UNKNOWN"]
    assert checks[1]["reason"] == "it runs"
