"""Dead letters by cause: the groups are listed, and each is sent again or dropped as a whole."""

from __future__ import annotations

from typing import Any

from notify.client import Consumer
from notify.server.letters.failures import kind_of
from notify.testing import InMemoryServer
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import Caller, bodies, die, publish, running, subscribe
from tests.support.http import REASON, admin, post, refusal

BANK = "Timeout: no answer in {n} s (at shop.bank.pay:{n})"
NAME = "KeyError: 'name' (at shop.mail.greet:7)"


def failures(url: str, group: str) -> dict[str, Any]:
    found: dict[str, Any] = admin(url, "GET", f"groups/{group}/dead-letters/failures")
    return found


def dead(url: str, unique: str) -> Caller:
    """A group with three letters of one cause and two of another."""
    subscribe(url, unique, unique)
    publish(url, unique, [f"bank {n}" for n in range(3)] + [f"name {n}" for n in range(2)])
    caller = Caller(url, unique, "i")
    for n in range(3):
        die(caller, unique, 1, BANK.format(n=n + 5))
    die(caller, unique, 2, NAME)
    return caller


def ended(url: str, answer: Any) -> Any:
    """The job of a write, when it has ended."""
    number = answer["result"]["job"]
    eventually(lambda: admin(url, "GET", f"jobs/{number}")["state"] != "running", "the end of the job")
    return admin(url, "GET", f"jobs/{number}")


def test_letters_of_one_cause_are_a_group(frozen_server: InMemoryServer, unique: str) -> None:
    url = frozen_server.url
    dead(url, unique)
    found = failures(url, unique)
    rows = [(f["type"], f["place"], f["open"], f["count"]) for f in found["failures"]]
    assert rows == [("Timeout", "shop.bank.pay", 3, 3), ("KeyError", "shop.mail.greet", 2, 2)]
    assert (found["looked_at"], found["of"], found["others"]) == (5, 5, 0)
    first = found["failures"][0]
    assert first["topics"] == [unique] and first["example"]["reason"] == BANK.format(n=7)
    assert first["first_at"] == first["last_at"]
    listed = admin(url, "GET", f"groups/{unique}/dead-letters?failure={first['fingerprint']}")["messages"]
    assert bodies(listed) == ["bank 0", "bank 1", "bank 2"]


def test_a_group_of_failures_is_sent_again(frozen_server: InMemoryServer, unique: str) -> None:
    url = frozen_server.url
    caller = dead(url, unique)
    bank = kind_of(BANK.format(n=1)).fingerprint
    path, body = f"groups/{unique}/dead-letters/redrive", {"all": True, "wanted": {"failure": bank}}
    preview = admin(url, "POST", path, body | {"dry_run": True})["result"]
    assert preview["failure"]["open"] == 3 and preview["at_most"] == 5
    job = ended(url, admin(url, "POST", path, body))
    assert (job["state"], job["done"], job["failed"]) == ("done", 3, 0)
    assert sorted(bodies(caller.receive(unique))) == ["bank 0", "bank 1", "bank 2"]
    assert [(f["type"], f["open"], f["count"]) for f in failures(url, unique)["failures"]] == [
        ("KeyError", 2, 2),
        ("Timeout", 0, 3),
    ]
    body["wanted"]["failure"] = "0" * 12
    assert refusal(url, "POST", path, **body)[0] == 404


def test_a_group_of_failures_is_dropped_for_good(frozen_server: InMemoryServer, unique: str) -> None:
    url = frozen_server.url
    caller = dead(url, unique)
    letters = admin(url, "GET", f"groups/{unique}/dead-letters")["messages"]
    path, name = f"groups/{unique}/dead-letters/drop", kind_of(NAME).fingerprint
    job = ended(url, admin(url, "POST", path, {"wanted": {"failure": name}}))
    assert (job["what"], job["done"], [item["status"] for item in job["items"]]) == ("drop", 2, [204, 204])
    shown = admin(url, "GET", f"groups/{unique}/dead-letters")["messages"]
    assert [(m["dropped"], m["redriven"]) for m in shown] == [(False, False)] * 3 + [(True, False)] * 2
    assert [(f["type"], f["open"]) for f in failures(url, unique)["failures"]] == [("Timeout", 3), ("KeyError", 0)]
    # Whoever sends all again sends the others; whoever names a dropped one is told.
    again = ended(url, admin(url, "POST", f"groups/{unique}/dead-letters/redrive", {"all": True}))
    assert (again["done"], again["failed"]) == (3, 0)
    redrive = {"ids": [letters[3]["id"]]}
    (item,) = admin(url, "POST", f"groups/{unique}/dead-letters/redrive", redrive)["result"]["items"]
    assert (item["status"], item["code"]) == (410, "dropped")
    assert sorted(bodies(caller.receive(unique))) == ["bank 0", "bank 1", "bank 2"]
    # One that was sent again stays sent.
    (item,) = admin(url, "POST", path, {"ids": [letters[0]["id"]]})["result"]["items"]
    assert item["status"] == 200
    timeline = admin(url, "GET", f"messages/{letters[3]['id']}")["timeline"]
    assert timeline[-1]["event"] == "dropped from the dead letters" and timeline[-1]["reason"] == REASON
    (action,) = admin(url, "GET", f"actions?what=dead_letter.drop&target={unique}&max=2")["actions"][1:]
    assert action["result"] == {"job": job["id"]}


def test_everything_is_dropped_by_a_purge_alone(frozen_server: InMemoryServer, unique: str) -> None:
    dead(frozen_server.url, unique)
    path = f"groups/{unique}/dead-letters/drop"
    assert refusal(frozen_server.url, "POST", path) == (422, "invalid_schema")
    assert refusal(frozen_server.url, "POST", path, ids=["x.0"], wanted={"failure": "not hexadecimal"})[0] == 422


def test_a_failing_handler_is_found_by_its_function(frozen_server: InMemoryServer, unique: str) -> None:
    """Through the SDK, and by the commands."""
    url = frozen_server.url
    consumer = Consumer(url, group=unique)

    @consumer.subscribe(unique, max_attempts=1, start="earliest")
    def handle(message: Any) -> None:
        raise RuntimeError(f"no luck with {message.text}")

    with running(consumer, subscribed=True):
        publish(url, unique, ["a", "b"])
        eventually(lambda: admin(url, "GET", f"groups/{unique}/dead-letters")["messages"][1:], "the dead letters")
    code, said = cli("dead-letter", "failures", unique, "--url", url, "--json")
    (failure,) = said["failures"]
    assert code == 0 and (failure["type"], failure["open"]) == ("RuntimeError", 2)
    assert failure["place"].endswith("test_a_failing_handler_is_found_by_its_function.<locals>.handle")
    why = ("--url", url, "--reason", "a test", "--json")
    code, said = cli("dead-letter", "drop", unique, "--failure", failure["fingerprint"], *why)
    assert (code, said["state"], said["done"]) == (0, "done", 2)


def test_a_letter_without_a_reason_counts_as_refused_by_the_consumer(
    frozen_server: InMemoryServer, unique: str
) -> None:
    """A consumer in another language need not say why."""
    url = frozen_server.url
    subscribe(url, unique, unique)
    publish(url, unique, ["x"])
    (message,) = Caller(url, unique, "i").receive(unique)
    post(url, f"/v1/groups/{unique}/settle", {"items": [{"receipt": message["receipt"], "action": "dead_letter"}]})
    (failure,) = failures(url, unique)["failures"]
    assert (failure["type"], failure["place"], failure["text"]) == (None, None, "refused by the consumer")
