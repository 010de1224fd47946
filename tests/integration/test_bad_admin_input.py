"""Bad input to admin routes gets a 4xx with a code and a sentence, also where several workers answer together, and
leaves the records of actions readable."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest

from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.groups import subscribe
from tests.support.http import REASON, admin, ask
from tests.support.servers import make_storage, stop_if_running

HALF_OF_A_PAIR = b"\\ud800"
DROP = "/v1/admin/groups/g/dead-letters/drop"
LIMITS = "/v1/admin/limits"


@pytest.fixture
def over_a_database(engine_url: str, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose records are in a database."""
    make_storage(engine_url)
    server = ServerProcess(tmp_path / "server", flags=["--storage", engine_url])
    try:
        yield server.start()
    finally:
        stop_if_running(server)


@pytest.fixture(scope="module")
def with_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("workers"), flags=["--workers", "2"])
    try:
        yield server.start()
    finally:
        stop_if_running(server)


def test_half_of_a_surrogate_pair_is_refused_and_the_actions_stay_readable(memory: InMemoryServer) -> None:
    """It was recorded, and no list of actions with this one could be shown any more."""
    status, problem = ask(memory.url, "POST", DROP, b'{"reason": "r", "ids": ["%s"]}' % HALF_OF_A_PAIR)
    assert (status, problem["code"]) == (422, "invalid_schema") and "JSON" in problem["detail"]
    assert admin(memory.url, "GET", "actions?max=1")["actions"] is not None


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"reason": NaN}', b'{"reason": "r"} {}', '{"reason": "r"}'.encode("utf-16"), b'"\xff"'],
    ids=["depth", "NaN", "more behind it", "UTF-16", "no UTF-8"],
)
def test_a_body_that_is_not_json_is_refused(memory: InMemoryServer, with_workers: ServerProcess, body: bytes) -> None:
    for url in (memory.url, with_workers.url):
        for path in (DROP, "/v1/admin/alarms/x/unsilence", "/v1/admin/transactions/x/check"):
            status, problem = ask(url, "POST", path, body)
            assert (status, problem["code"]) == (422, "invalid_schema"), (path, problem)


def test_another_type_or_encoding_is_named(memory: InMemoryServer) -> None:
    """It said that a body of JSON should be a dictionary."""
    body = json.dumps({"reason": REASON}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/msgpack", ""):
        status, problem = ask(memory.url, "PUT", LIMITS, body, kind=kind)
        assert (status, problem["code"]) == (415, "unsupported_type")
        assert "send application/json, not" in problem["detail"]
    status, problem = ask(memory.url, "PUT", LIMITS, body, headers={"content-encoding": "gzip"})
    assert (status, problem["code"]) == (415, "unsupported_encoding")
    for kind in ("APPLICATION/JSON", "application/json; charset=utf-8"):
        assert (
            ask(memory.url, "PUT", LIMITS, body + b" ", kind=kind, headers={"content-encoding": "identity"})[0] == 200
        )


def test_a_name_with_a_line_break_is_a_name_like_any_other(with_workers: ServerProcess) -> None:
    """Workers that answer together took the line break for the end of the path, and the answer was an empty 500."""
    for method, path, status in (
        ("GET", "topics/%0d%0aX:y", 404),
        ("DELETE", "topics/%0aX", 404),
        ("POST", "groups/%0aX/reset", 404),
        ("GET", "jobs/%0a1", 404),
        ("GET", "messages/%0a1", 404),
    ):
        body = {"reason": REASON, "topic": "t", "to": "earliest"} if path.endswith("reset") else {"reason": REASON}
        answered, problem = ask(with_workers.url, method, f"/v1/admin/{path}", None if method == "GET" else body)
        assert answered in (status, 422) and problem["code"], (path, answered, problem)


def test_a_name_is_never_a_part_of_the_request_between_workers(with_workers: ServerProcess) -> None:
    """A worker that looks for a topic at the others puts its name into the path of that request."""
    name = "t%20HTTP/1.1%0d%0aX-A:%20b%0d%0a%0d%0aGET%20/livez"
    parts = urlsplit(with_workers.url)
    for key in map(str, range(8)):  # of both workers
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        body = json.dumps({"reason": REASON, "body": "x", "key": key})
        connection.request("POST", f"/v1/admin/topics/{name}/messages", body, {"content-type": "application/json"})
        status = connection.getresponse().status
        connection.close()
        assert status in (404, 422)
    assert ask(with_workers.url, "GET", "/v1/admin/topics/none")[0] == 404


def test_a_search_for_a_text_beyond_the_bound_is_refused(memory: InMemoryServer, unique: str) -> None:
    """A redrive with it was; a list with it was a fault of the server, on the console's page, too."""
    subscribe(memory.url, unique, unique)
    for path in (f"/v1/admin/groups/{unique}/dead-letters", f"/groups/{unique}/dead-letters"):
        status, answer = ask(memory.url, "GET", f"{path}?contains={'x' * 501}", headers={"accept": "text/html"})
        assert status == 422 and "500 characters" in str(answer)
        assert ask(memory.url, "GET", f"{path}?contains={'x' * 500}")[0] == 200


def test_a_text_that_the_database_refuses_is_named(over_a_database: ServerProcess) -> None:
    """PostgreSQL takes no NUL: it was a fault of the server."""
    url = over_a_database.url
    for method, path, body in (
        ("PUT", LIMITS, {"reason": "a\0b"}),
        ("GET", "/v1/admin/actions?target=%00", None),
    ):
        status, answer = ask(url, method, path, body)
        assert status in (200, 422), answer
        assert status == 200 or "NUL" in answer["detail"]
    assert admin(url, "GET", "actions") and admin(url, "PUT", "limits", {})["status"] == 200


def test_an_instant_before_all_others_is_one(over_a_database: ServerProcess) -> None:
    """Its year 0 was a fault of the server where the transactions are in a database."""
    wanted = {"stored_before": "0001-01-01T00:00:00+23:59"}
    for action in ("check", "rollback"):
        answer = admin(
            over_a_database.url, "POST", f"transactions/{action}", {"all": True, "wanted": wanted, "dry_run": True}
        )
        assert answer["status"] == 200


def test_a_producer_group_with_an_invalid_name_is_refused(over_a_database: ServerProcess) -> None:
    """MariaDB compares no other text with names: a list for it was answered with 503, to try again."""
    url = over_a_database.url
    group = {"producer_group": "注文"}
    for method, path, body in (
        ("GET", "transactions?producer_group=%E6%B3%A8", None),
        ("POST", "transactions/check", {"reason": REASON, "all": True, "wanted": group}),
    ):
        status, problem = ask(url, method, f"/v1/admin/{path}", body)
        assert (status, problem["code"]) == (422, "invalid_name")


def test_people_have_names_in_any_script(over_a_database: ServerProcess) -> None:
    """Also where the database's own character set is latin1: the write was a fault, and a search found no database."""
    url = over_a_database.url
    subject: dict[str, Any] = {"name": "x", "kind": "subject", "subject": "山田太郎 😀", "rights": ["view"]}
    assert admin(url, "POST", "credentials", subject)["result"]["subject"] == subject["subject"]
    assert admin(url, "GET", "actions?target=%F0%9F%98%80")["actions"] == []


SPOILED: dict[str, tuple[bytes, dict[str, str]]] = {
    "no JSON": (b"{", {}),
    "a list": (b"[1]", {}),
    "a number": (b"7", {}),
    "null": (b"null", {}),
    "nothing": (b"", {}),
    "nothing in it": (b"{}", {}),
    "no reason": (b'{"dry_run": false}', {}),
    "another field": (b'{"reason": "r", "nope": 1}', {}),
    "a text for a flag": (b'{"reason": "r", "dry_run": "no"}', {}),
    "a number for a flag": (b'{"reason": "r", "dry_run": 1}', {}),
    "a type": (b'{"reason": "r"}', {"content-type": "text/plain"}),
    "an encoding": (b'{"reason": "r"}', {"content-encoding": "gzip"}),
}
"""Bodies, and their headers."""


@pytest.mark.parametrize("spoiled", SPOILED)
def test_several_workers_refuse_a_body_as_one_server_does(
    memory: InMemoryServer, with_workers: ServerProcess, spoiled: str
) -> None:
    """A body that is no JSON was answered with "body.reason: Field required"."""
    body, headers = SPOILED[spoiled]
    for method, path in (
        ("POST", "groups/none/dead-letters/redrive"),
        ("POST", "groups/none/dead-letters/drop"),
        ("POST", "groups/none/dead-letters/edit"),
        ("POST", "groups/none/reset"),
        ("POST", "groups/none/pause"),
        ("POST", "groups/none/redeliver"),
        ("PUT", "groups/none/priorities"),
        ("PUT", "topics/a%20b"),
        ("DELETE", "topics/none"),
        ("POST", "topics/none/purge"),
        ("POST", "topics/none/messages"),
        ("POST", "messages/republish"),
        ("POST", "transactions/commit"),
        ("POST", "transactions/none/check"),
        ("POST", "alarms/none/silence"),
        ("POST", "jobs/1/cancel"),
        ("PUT", "limits"),
        ("POST", "nothing/of/this"),
    ):
        answers = [
            ask(url, method, f"/v1/admin/{path}", body, headers=headers) for url in (memory.url, with_workers.url)
        ]
        (status, alone), (_, together) = answers
        assert 400 <= status < 500 and alone["code"], (path, alone)
        assert together == alone, (path, answers)


@pytest.mark.long
def test_several_workers_read_a_query_as_one_server_does(memory: InMemoryServer, with_workers: ServerProcess) -> None:
    """`before=²` was a fault; `max=+5` was another number for a worker than for the one that combines the answers."""
    odd = ("²", "٣", "9" * 5000, "-1", "1_0", "+5", "5.0", "", "nan", "t", "off")
    for url in (memory.url, with_workers.url):
        admin(url, "PUT", "topics/read", {})
        subscribe(url, "read", "read")
    for path in ("messages?topic=read", "messages?topic=read&newest=true", "groups/read/dead-letters?newest=true",
                 "groups/read/dead-letters?", "topics?", "groups?", "transactions?", "jobs?"):  # fmt: skip
        for name in ("max", "before", "newest"):
            for value in odd:
                target = f"/v1/admin/{path}&{urlencode({name: value})}"
                (alone, _), (together, answer) = (ask(url, "GET", target) for url in (memory.url, with_workers.url))
                assert alone == together, (target, alone, answer)
    for place in (
        "²@worker-1",
        "²@worker-2",
        "1.²@worker-1",
        "9" * 5000 + "@worker-1",
        "1.0.0@²",
        "@",
        "²",
        "@worker-1",
    ):
        for name, path in (("before", "messages?topic=read&newest=true"), ("offset", "groups/read/dead-letters?"),
                           ("before", "groups/read/dead-letters?newest=true")):  # fmt: skip
            status, answer = ask(with_workers.url, "GET", f"/v1/admin/{path}&{urlencode({name: place})}")
            assert status < 500, (path, place, answer)
    for number in ("²", "9" * 5000, "1_0", "-1", "+1", "%20"):
        status, answer = ask(with_workers.url, "GET", f"/v1/admin/jobs/{quote(number)}")
        assert status in (404, 422) and answer["code"], answer


def test_the_most_letters_of_a_redrive_is_a_number(memory: InMemoryServer, with_workers: ServerProcess) -> None:
    """`"12.0"` was a number for the workers, and a fault of the one that combines their answers."""
    for url in (memory.url, with_workers.url):
        subscribe(url, "redriven", "redriven")
        for odd in ("12.0", "12", 12.0, True, None, [12], 10**30):
            body = {"reason": REASON, "max": odd}
            status, problem = ask(url, "POST", "/v1/admin/groups/redriven/dead-letters/redrive", body)
            assert (status, problem["code"]) == (422, "invalid_schema"), (odd, problem)
        assert admin(url, "POST", "groups/redriven/dead-letters/redrive", {"max": 12})["status"] == 200


@pytest.mark.parametrize("workers", [0, 2])
def test_a_right_is_asked_for_before_a_body_is_read(tmp_path: Path, workers: int) -> None:
    """Keys of megabytes were hashed, and kept, for callers without any right to send a message."""
    flags = ["--workers", str(workers)] if workers else []
    server = ServerProcess(tmp_path / "server", flags=flags, environment={"NOTIFY_ACCESS": "1"})
    try:
        server.start()
        token = (tmp_path / "server" / "admin.token").read_text().strip()
        asked: dict[str, Any] = {"reason": REASON, "name": "reader", "rights": ["read:zzz"]}
        reader = ask(server.url, "POST", "/v1/admin/credentials", asked, token)[1]["token"]
        for body in (b"{", b'{"reason": "r", "body": "x", "key": "' + b"k" * 500_000 + b'"}', b"[" * 100_000):
            for method, path in (("POST", "topics/t/messages"), ("PUT", "topics/t"), ("POST", "groups/g/reset"),
                                 ("PUT", "groups/g/subscriptions/t"), ("POST", "messages/republish"),
                                 ("POST", "transactions/commit"), ("PUT", "limits")):  # fmt: skip
                status, problem = ask(server.url, method, f"/v1/admin/{path}", body, reader)
                assert (status, problem["code"]) == (403, "forbidden"), (path, problem)
    finally:
        stop_if_running(server)
