"""The promises about dead letters, on a queue server and over Kafka with the same bodies, through the admin routes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import pytest

from notify.testing import InMemoryServer
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import Caller, die, publish, subscribe
from tests.support.http import REASON, ask, refusal

BANK = "Timeout: no answer in {n} s (at shop.bank.pay:{n})"
NAME = "KeyError: 'name' (at shop.mail.greet:7)"


class Engine(Protocol):
    """Where the letters are. `url`: the server that shows them."""

    url: str
    is_kafka: bool

    def group(self) -> str:
        """A new group."""
        ...

    def bury(self, group: str, reasons: Sequence[str]) -> None:
        """Make a letter for each reason."""
        ...

    def sent_again(self, group: str, count: int) -> int:
        """How many messages were sent to a group again, at least `count`."""
        ...


class QueueServer:
    is_kafka = False

    def __init__(self, server: InMemoryServer, name: str) -> None:
        self.url, self._name = server.url, name

    def group(self) -> str:
        subscribe(self.url, self._name, self._name)
        return self._name

    def bury(self, group: str, reasons: Sequence[str]) -> None:
        publish(self.url, group, [f"body {n}" for n in range(len(reasons))])
        for reason in reasons:
            die(Caller(self.url, group, "i"), group, 1, reason)

    def sent_again(self, group: str, count: int) -> int:
        return len(Caller(self.url, group, "i").receive(group))


class OverKafka:
    is_kafka = True

    def __init__(self, kafka_url: str, url: str) -> None:
        self.url, self._kafka_url = url, kafka_url
        self._made: Any = None

    def group(self) -> str:
        from tests.support.kafka_groups import Group

        self._made = Group(self._kafka_url)
        return str(self._made.name)

    def bury(self, group: str, reasons: Sequence[str]) -> None:
        for number, reason in enumerate(reasons):
            self._made.bury(number % 2, 1, reason)

    def sent_again(self, group: str, count: int) -> int:
        from notify.kafka.groups import retry_topic
        from tests.support.kafka_groups import committed

        return len(committed(self._made, retry_topic(group), count))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    pytest.importorskip("confluent_kafka")
    from tests.support.kafka_groups import showing

    with showing(request.getfixturevalue("kafka_url"), tmp_path_factory.mktemp("shows")) as server:
        yield server.url


@pytest.fixture(params=["queue server", "Kafka"])
def engine(request: pytest.FixtureRequest, unique: str) -> Engine:
    if request.param == "Kafka":
        return OverKafka(request.getfixturevalue("kafka_url"), request.getfixturevalue("shown"))
    return QueueServer(request.getfixturevalue("frozen_server"), unique)


def get(engine: Engine, path: str) -> Any:
    """A server over Kafka asks again for a group that it does not know: it shows what is there now."""
    eventually(lambda: ask(engine.url, "GET", "/v1/admin/groups/none")[0] == 404, "a new snapshot")
    status, answer = ask(engine.url, "GET", f"/v1/admin/{path}")
    assert status == 200, answer
    return answer


def do(engine: Engine, path: str, **body: Any) -> Any:
    status, answer = ask(engine.url, "POST", f"/v1/admin/{path}", {"reason": REASON} | body)
    assert status == 200, answer
    return answer["result"]


def letters(engine: Engine, group: str, query: str = "") -> list[dict[str, Any]]:
    return list(get(engine, f"groups/{group}/dead-letters{query}")["messages"])


def ids(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [m["id"] for m in messages]


def statuses(items: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {item["id"]: item["status"] for item in items}


def until_open(engine: Engine, group: str, count: int) -> None:
    """A look over Kafka reads only a part of what is new."""

    def is_so() -> bool:
        rows = get(engine, f"dead-letters?prefix={group}")["groups"]
        return sum(row["count"] for row in rows) == count

    eventually(is_so, f"{count} open letters")


def until_ended(engine: Engine, job: int) -> dict[str, Any]:
    eventually(lambda: get(engine, f"jobs/{job}")["state"] != "running", "the end of the job")
    return dict(get(engine, f"jobs/{job}"))


def test_pages_have_every_letter_once_from_both_ends(engine: Engine) -> None:
    group = engine.group()
    engine.bury(group, [BANK.format(n=n) for n in range(5)])
    listed = letters(engine, group)
    assert len(set(ids(listed))) == 5
    assert [m["offset"] for m in listed] == sorted(m["offset"] for m in listed)
    assert {(m["redriven"], m["dropped"]) for m in listed} == {(False, False)}
    forwards, offset = [], 0
    while page := get(engine, f"groups/{group}/dead-letters?max=2&offset={offset}"):
        forwards += ids(page["messages"])
        if page["next_offset"] in (0, offset):
            break
        offset = page["next_offset"]
    assert forwards == ids(listed)
    backwards, before = [], 0
    while page := get(engine, f"groups/{group}/dead-letters?newest=true&max=2&before={before}"):
        backwards += ids(page["messages"])
        before = page["next_before"]
        if not before:
            break
    assert backwards == forwards[::-1]


def test_letters_are_found_by_their_conditions(engine: Engine) -> None:
    group = engine.group()
    engine.bury(group, [NAME, BANK.format(n=5), NAME])
    first, second, third = ids(letters(engine, group))
    assert ids(letters(engine, group, "?contains=KeyError")) == [first, third]
    assert ids(letters(engine, group, "?contains=KeyError&newest=true")) == [third, first]
    assert ids(letters(engine, group, "?contains=Timeout")) == [second]
    assert letters(engine, group, "?topic=another") == letters(engine, group, "?key=another") == []
    assert letters(engine, group, "?filter=key%20%3D%3D%20%22another%22") == []
    assert refusal(engine.url, "GET", f"groups/{group}/dead-letters?filter=)")[0] == 422


def test_causes_are_counted_and_their_letters_found(engine: Engine) -> None:
    group = engine.group()
    engine.bury(group, [BANK.format(n=5), NAME, BANK.format(n=6)])
    path = f"groups/{group}/dead-letters"
    found = get(engine, f"{path}/failures")
    assert [(f["type"], f["place"], f["open"], f["count"]) for f in found["failures"]] == [
        ("Timeout", "shop.bank.pay", 2, 2),
        ("KeyError", "shop.mail.greet", 1, 1),
    ]
    assert (found["looked_at"], found["others"]) == (3, 0)
    bank, name = found["failures"]
    assert bank["example"]["reason"].startswith("Timeout: ")
    of_bank = ids(letters(engine, group, f"?failure={bank['fingerprint']}"))
    assert len(of_bank) == 2 and bank["example"]["id"] in of_bank
    do(engine, f"{path}/redrive", ids=[of_bank[0]])
    do(engine, f"{path}/drop", ids=ids(letters(engine, group, f"?failure={name['fingerprint']}")))
    found = get(engine, f"{path}/failures")
    assert [(f["type"], f["open"], f["count"]) for f in found["failures"]] == [("Timeout", 1, 2), ("KeyError", 0, 1)]
    job = do(engine, f"{path}/redrive", all=True, wanted={"failure": bank["fingerprint"]})["job"]
    assert until_ended(engine, job)["state"] == "done"
    assert {f["open"] for f in get(engine, f"{path}/failures")["failures"]} == {0}
    assert engine.sent_again(group, 2) == 2


def test_a_letter_is_sent_again_once(engine: Engine) -> None:
    group = engine.group()
    engine.bury(group, [NAME] * 3)
    path = f"groups/{group}/dead-letters/redrive"
    first, *others = ids(letters(engine, group))
    assert do(engine, path, ids=[first], dry_run=True)["ids"] == [first]
    assert {m["redriven"] for m in letters(engine, group)} == {False}, "a dry run sends nothing"
    assert statuses(do(engine, path, ids=[first, "none"])["items"]) == {first: 201, "none": 404}
    assert statuses(do(engine, path, ids=[first])["items"]) == {first: 200}
    assert [m["id"] for m in letters(engine, group) if m["redriven"]] == [first]
    until_open(engine, group, 2)
    assert statuses(do(engine, path)["items"]) == dict.fromkeys(others, 201)
    assert do(engine, path)["items"] == []
    until_open(engine, group, 0)
    assert engine.sent_again(group, 3) == 3


def test_a_redrive_sends_no_more_than_asked_and_goes_on_from_there(engine: Engine) -> None:
    group = engine.group()
    engine.bury(group, [NAME, BANK.format(n=1), NAME, NAME])
    path = f"groups/{group}/dead-letters/redrive"
    named = ids(letters(engine, group, "?contains=KeyError"))
    wanted = {"contains": "KeyError"}
    result = do(engine, path, wanted=wanted, max=2)
    assert statuses(result["items"]) == dict.fromkeys(named[:2], 201) and result["next_offset"]
    result = do(engine, path, wanted=wanted, max=2, offset=result["next_offset"])
    assert (statuses(result["items"]), result["next_offset"]) == ({named[2]: 201}, 0)
    until_open(engine, group, 1)


def test_a_dropped_letter_is_never_sent_and_a_sent_one_never_dropped(engine: Engine) -> None:
    group = engine.group()
    engine.bury(group, [NAME] * 3)
    path = f"groups/{group}/dead-letters"
    dropped, sent, _ = ids(letters(engine, group))
    assert do(engine, f"{path}/drop", ids=[dropped], dry_run=True)["ids"] == [dropped]
    assert statuses(do(engine, f"{path}/drop", ids=[dropped, "none"])["items"]) == {dropped: 204, "none": 404}
    assert statuses(do(engine, f"{path}/drop", ids=[dropped])["items"]) == {dropped: 200}
    items = {item["id"]: item for item in do(engine, f"{path}/redrive", ids=[dropped, sent])["items"]}
    assert (items[dropped]["status"], items[dropped]["code"], items[sent]["status"]) == (410, "dropped", 201)
    assert statuses(do(engine, f"{path}/drop", ids=[sent])["items"]) == {sent: 200}
    shown = {m["id"]: (m["redriven"], m["dropped"]) for m in letters(engine, group)}
    assert (shown[dropped], shown[sent]) == ((False, True), (True, False))
    until_open(engine, group, 1)
    assert engine.sent_again(group, 1) == 1


def test_jobs_close_each_letter_once(engine: Engine) -> None:
    group = engine.group()
    engine.bury(group, [NAME, BANK.format(n=1), NAME, BANK.format(n=2), NAME])
    path = f"groups/{group}/dead-letters"
    named = ids(letters(engine, group, "?contains=KeyError"))
    do(engine, f"{path}/redrive", ids=[named[0]])
    job = until_ended(engine, do(engine, f"{path}/drop", wanted={"contains": "KeyError"})["job"])
    assert statuses(job["items"]) == {named[0]: 200, named[1]: 204, named[2]: 204}
    assert do(engine, f"{path}/redrive", all=True, dry_run=True)["at_most"] >= 5
    for done in ([200, 201, 201], [200, 200, 200]):  # dropped letters are no part of a redrive
        job = until_ended(engine, do(engine, f"{path}/redrive", all=True)["job"])
        assert (job["state"], sorted(item["status"] for item in job["items"])) == ("done", done)
    until_open(engine, group, 0)
    assert engine.sent_again(group, 3) == 3


def test_commands_list_and_send(engine: Engine) -> None:
    group = engine.group()
    engine.bury(group, [NAME, BANK.format(n=1)])
    how = ("--url", engine.url, "--json")
    assert len(letters(engine, group)) == 2
    code, listed = cli("dead-letter", "list", group, *how)
    assert (code, ids(listed["messages"])) == (0, ids(letters(engine, group)))
    code, sent = cli("dead-letter", "redrive", group, "--contains", "KeyError", "--reason", "r", *how)
    assert (code, [item["status"] for item in sent["result"]["items"]]) == (0, [201])
    until_open(engine, group, 1)


def test_purged_letters_are_gone_and_later_ones_stay(engine: Engine) -> None:
    group = engine.group()
    engine.bury(group, [NAME] * 3)
    until_open(engine, group, 3)
    path = f"groups/{group}/dead-letters"
    gone = ids(letters(engine, group))
    do(engine, f"{path}/purge", before="2026-01-01T00:00:00Z")
    assert ids(letters(engine, group)) == gone
    do(engine, f"{path}/purge", before="latest", dry_run=True)
    assert ids(letters(engine, group)) == gone
    result = do(engine, f"{path}/purge", before="latest")
    assert (sum(row["dropped"] for row in result["queues"]) >= 3, result["missed"]) == (True, {})
    assert letters(engine, group) == letters(engine, group, "?newest=true") == []
    until_open(engine, group, 0)
    assert statuses(do(engine, f"{path}/redrive", ids=[gone[0]])["items"]) == {gone[0]: 404}
    engine.bury(group, [BANK.format(n=1)])
    until_open(engine, group, 1)
    assert [f["type"] for f in get(engine, f"{path}/failures")["failures"]] == ["Timeout"]


def test_an_edited_letter_is_sent_with_its_new_content_or_refused(engine: Engine) -> None:
    """Over Kafka the engine cannot, and says what to do instead."""
    group = engine.group()
    engine.bury(group, [NAME])
    (letter,) = letters(engine, group)
    path = f"groups/{group}/dead-letters/edit"
    if engine.is_kafka:
        assert refusal(engine.url, "POST", path, id=letter["id"], body="new")[0] == 422
        return
    result = do(engine, path, id=letter["id"], body="new", dry_run=True)
    assert (result["id"], result["changed"]) == (letter["id"], ["body"])
    result = do(engine, path, id=letter["id"], body="new")
    assert (statuses(result["items"]), result["changed"]) == ({letter["id"]: 201}, ["body"])
    assert [m["body"] for m in Caller(engine.url, group, "i").receive(group)] == ["new"]
    assert refusal(engine.url, "POST", path, id=letter["id"], body="newer") == (409, "letter_closed")
    assert refusal(engine.url, "POST", path, id="none", body="newer")[0] == 404
