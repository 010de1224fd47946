"""Bad input of any kind gets a 4xx with a code and a sentence, never a 500, and the server continues."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import structlog.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from notify.check import Outcome
from notify.client import AsyncTransactionProducer, Message
from notify.errors import IdInUse, OutcomeConflict
from notify.protocol.limits import LIMITS
from notify.protocol.wire import JSON
from notify.server.data.answer import fault_of
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS
from tests.support.groups import bodies, publish
from tests.support.http import admin, ask, call, post
from tests.support.servers import GuardedInMemory
from tests.support.transactions import half_request, new_id

REFUSED: list[tuple[str, str, Any, int, str]] = [
    ("malformed JSON", "/v1/transactions", b"{", 400, "malformed"),
    ("not an object", "/v1/transactions", [], 422, "invalid_schema"),
    ("unknown field", "/v1/transactions", half_request() | {"nope": 1}, 422, "invalid_schema"),
    ("wrong type", "/v1/transactions", half_request(key=1), 422, "invalid_schema"),
    ("no items", "/v1/transactions", {"producer_group": "g", "transactions": []}, 422, "out_of_bounds"),
    ("a name that is none", "/v1/transactions", half_request() | {"producer_group": "a b"}, 422, "invalid_name"),
    ("depth", "/v1/transactions", b"[" * 100_000, 422, "invalid_schema"),
    ("too many items", "/v1/transactions/states", {"producer_group": "g", "ids": ["x"] * 5000}, 422, "out_of_bounds"),
    ("wait too long", "/v1/checks/poll", {"producer_group": "g", "instance": "i", "wait": 61}, 422, "out_of_bounds"),
    ("lease too long", "/v1/groups/g/receive", {"instance": "i", "topics": ["t"], "lease": 9e9}, 422, "out_of_bounds"),
    ("unknown group", "/v1/groups/never-subscribed/receive", {"instance": "i"}, 404, "not_found"),
    ("unknown route", "/v1/nope", {}, 404, "not_found"),
    ("50 MB", "/v1/messages", b"x" * 50_000_000, 413, "request_too_large"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "code"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused_as_a_whole(server: ServerProcess, path: str, body: Any, status: int, code: str) -> None:
    try:
        answered, problem = ask(server.url, "POST", path, body)
    except (BrokenPipeError, ConnectionResetError):
        assert status == 413  # the server answered and closed while the request was still being sent
        return
    assert (answered, problem["code"]) == (status, code)
    assert problem["detail"] and problem["status"] == status and problem["type"].startswith("urn:")


ITEMS: list[tuple[str, dict[str, Any], int, str]] = [
    ("body above 1 MiB", {"body": "x" * (1 << 20) + "y"}, 413, "too_large"),
    ("no body", {"body": None}, 422, "invalid_body"),
    ("two bodies", {"body_base64": "eA=="}, 422, "invalid_body"),
    ("not base64", {"body": None, "body_base64": "%"}, 422, "invalid_body"),
    ("too many headers", {"headers": {str(n): "" for n in range(33)}}, 413, "too_large"),
    ("headers too long", {"headers": {"a": "x" * 9000}}, 413, "too_large"),
    ("delay beyond the bound", {"delay": 41 * 86_400}, 422, "out_of_bounds"),
    ("negative delay", {"delay": -1}, 422, "out_of_bounds"),
    ("deliver_at without a zone", {"deliver_at": "2030-01-01T00:00:00"}, 422, "invalid_delay"),
    ("both delays", {"delay": 1, "deliver_at": "2030-01-01T00:00:00Z"}, 422, "invalid_delay"),
    ("topic that is none", {"topic": "-x"}, 422, "invalid_name"),
    ("key too long", {"key": "k" * 2000}, 413, "too_large"),
]


@pytest.mark.parametrize(("message", "status", "code"), [r[1:] for r in ITEMS], ids=[r[0] for r in ITEMS])
def test_refused_item_by_item(server: ServerProcess, message: dict[str, Any], status: int, code: str) -> None:
    request = half_request(**message)
    good = {"id": new_id(), "messages": [{"topic": "t", "body": "good"}]}
    request["transactions"].append(good)
    answer = post(server.url, "/v1/transactions", request)
    assert [i["status"] for i in answer["items"]] == [status, 201]
    assert answer["items"][0]["code"] == code and answer["items"][0]["detail"]


def test_an_id_that_is_malformed_or_in_use_is_refused(server: ServerProcess) -> None:
    for bad in ("", "x", "00000000-0000-4000-8000-000000000000", new_id().upper().replace("0", "A")):
        request = {"producer_group": "g", "transactions": [{"id": bad, "messages": [{"topic": "t", "body": ""}]}]}
        item = post(server.url, "/v1/transactions", request)["items"][0]
        assert (item["status"], item["code"]) == (422, "invalid_id")
    request = half_request()
    assert post(server.url, "/v1/transactions", request)["items"][0]["status"] == 201
    assert post(server.url, "/v1/transactions", request)["items"][0]["status"] == 200
    request["transactions"][0]["messages"][0]["body"] = "other"
    item = post(server.url, "/v1/transactions", request)["items"][0]
    assert (item["status"], item["code"]) == (409, "id_in_use")


def test_an_outcome_that_is_wrong_or_in_conflict_is_refused(server: ServerProcess) -> None:
    request = half_request()
    name = request["transactions"][0]["id"]
    post(server.url, "/v1/transactions", request)

    def outcome(**item: Any) -> dict[str, Any]:
        body = {"producer_group": "g", "outcomes": [{"id": name, "outcome": "COMMIT"} | item]}
        answered: dict[str, Any] = post(server.url, "/v1/transactions/outcomes", body)["items"][0]
        return answered

    assert outcome(id=new_id())["code"] == "unknown_transaction"
    assert outcome(outcome="MAYBE")["code"] == "invalid_outcome"
    assert outcome(shard="other") | {"detail": ""} == {"id": name, "status": 421, "code": "wrong_shard", "detail": ""}
    assert outcome(outcome="UNKNOWN")["state"] == "PREPARED"
    assert outcome(outcome="UNKNOWN", check="1")["code"] == "stale_check"
    assert outcome()["state"] == "COMMITTED"
    assert outcome()["status"] == 200
    conflict = outcome(outcome="ROLLBACK")
    assert (conflict["status"], conflict["state"], conflict["code"]) == (409, "COMMITTED", "outcome_conflict")


def test_a_stranger_neither_sees_nor_decides_another_groups_transaction(server: ServerProcess) -> None:
    """An id of another group is in use, decided or not: its state is not told, and a stranger's outcome is refused."""
    request = half_request("owner")
    name = request["transactions"][0]["id"]
    post(server.url, "/v1/transactions", request)

    def outcome(group: str, outcome: str = "COMMIT", **item: Any) -> tuple[int, str | None, str | None]:
        body = {"producer_group": group, "outcomes": [{"id": name, "outcome": outcome} | item]}
        (answered,) = post(server.url, "/v1/transactions/outcomes", body)["items"]
        return answered["status"], answered.get("code"), answered.get("state")

    def state(group: str) -> tuple[int, str | None, str | None]:
        body = {"producer_group": group, "ids": [name]}
        (answered,) = post(server.url, "/v1/transactions/states", body)["items"]
        return answered["status"], answered.get("code"), answered.get("state")

    in_use = (409, "id_in_use", None)
    for decided in (False, True):
        for word in ("COMMIT", "ROLLBACK", "UNKNOWN"):
            assert outcome("stranger", word) == in_use
            assert outcome("stranger", word, check="5", unavailable=True) == in_use
        assert state("stranger") == in_use
        assert state("owner") == (200, None, "COMMITTED" if decided else "PREPARED")
        assert outcome("owner") == (200, None, "COMMITTED")


def test_an_answer_without_a_check(server: ServerProcess) -> None:
    request = half_request()
    name = request["transactions"][0]["id"]
    post(server.url, "/v1/transactions", request)
    for word in ("COMMIT", "ROLLBACK", "UNKNOWN"):
        body = {"producer_group": "g", "outcomes": [{"id": name, "outcome": word, "check": "5"}]}
        (item,) = post(server.url, "/v1/transactions/outcomes", body)["items"]
        assert (item["status"], item["code"], item["state"]) == (410, "stale_check", "PREPARED")


def test_an_outcome_beside_an_answer_of_its_own(server: ServerProcess) -> None:
    """An outcome and an answer to a check may share a request: an answer with a stale token fails alone."""
    for order in (1, -1):
        request = half_request()
        name = request["transactions"][0]["id"]
        post(server.url, "/v1/transactions", request)
        outcomes = [{"id": name, "outcome": "COMMIT"}, {"id": name, "outcome": "COMMIT", "check": "5"}][::order]
        body = {"producer_group": "g", "outcomes": outcomes}
        items = post(server.url, "/v1/transactions/outcomes", body)["items"]
        # After the decision an answer with the same outcome is confirmed, whatever its token.
        assert [item["status"] for item in items] == ([200, 200] if order == 1 else [410, 200])
        assert items[-1]["state"] == "COMMITTED"


def test_the_sdk_says_what_is_recorded(memory: InMemoryServer, unique: str) -> None:
    async def scenario() -> None:
        owner = AsyncTransactionProducer(memory.url, group=unique)
        stranger = AsyncTransactionProducer(memory.url, group=f"{unique}-2")
        half = await owner.prepare([Message(unique, "x")])
        with pytest.raises(IdInUse):
            await stranger.resolve(half, Outcome.COMMIT)
        assert await half.commit() == "COMMITTED"
        with pytest.raises(OutcomeConflict, match="COMMITTED is already recorded"):
            await half.rollback()
        with pytest.raises(IdInUse):
            await stranger.resolve(half, Outcome.COMMIT)
        await owner.close()
        await stranger.close()

    asyncio.run(scenario())


def test_a_receipt_that_is_wrong_or_stale_is_refused(server: ServerProcess, unique: str) -> None:
    url = server.url
    post(url, f"/v1/groups/{unique}/receive", {"instance": "i", "topics": [unique]})
    post(url, "/v1/messages", {"messages": [{"topic": unique, "body": "x"}]})
    message = post(url, f"/v1/groups/{unique}/receive", {"instance": "i", "wait": 30})["messages"][0]
    post(url, f"/v1/groups/{unique}x/receive", {"instance": "i", "topics": [unique]})

    def settle(group: str, receipt: str, action: str = "ack", **more: Any) -> tuple[int, str | None]:
        body = {"items": [{"receipt": receipt, "action": action} | more]}
        item = post(url, f"/v1/groups/{group}/settle", body)["items"][0]
        return item["status"], item.get("code")

    assert settle(unique + "x", message["receipt"]) == (410, "stale_receipt")  # another group's
    assert settle(unique, "zz") == (422, "invalid_receipt")
    assert settle(unique, message["receipt"], "eat") == (422, "invalid_action")
    assert settle(unique, message["receipt"], "retry", delay=1e9) == (422, "out_of_bounds")
    assert settle(unique, message["receipt"]) == (200, None)
    assert settle(unique, message["receipt"]) == (410, "stale_receipt")


def test_a_pull_reads_from_an_offset_and_refuses_a_wrong_query(server: ServerProcess, unique: str) -> None:
    publish(server.url, unique, [str(n) for n in range(3)])
    answer = call(server.url, "GET", f"/v1/topics/{unique}/queues/0/messages?offset=1&max=1")
    assert (bodies(answer["messages"]), answer["next_offset"]) == (["1"], 2)
    assert call(server.url, "GET", f"/v1/topics/{unique}/queues/0/messages?offset=3")["messages"] == []
    for path, code in (
        (f"/v1/topics/{unique}/queues/9/messages", "not_found"),
        (f"/v1/topics/{unique}/queues/x/messages", "not_found"),
        (f"/v1/topics/{unique}/queues/0/messages?max=0", "out_of_bounds"),
        (f"/v1/topics/{unique}/queues/0/messages?nope=0", "invalid_schema"),
    ):
        status, problem = ask(server.url, "GET", path)
        assert 400 <= status < 500 and problem["code"] == code


def test_other_methods_types_and_encodings(server: ServerProcess) -> None:
    path, msgpack = "/v1/messages", "application/msgpack"
    assert ask(server.url, "GET", path)[1]["code"] == "method_not_allowed"
    assert ask(server.url, "POST", path, b"x", kind="text/plain")[1]["code"] == "unsupported_type"
    text = '{"messages": [{"topic": "charsets", "body": "Ã©"}]}'
    for place, method in ((path, "POST"), ("/v1/admin/topics/charsets", "PUT")):
        for charset in ("iso-8859-1", ' "Windows-1252"'):  # these bytes are valid UTF-8, of another text
            status, problem = ask(server.url, method, place, text.encode("latin-1"), kind=f"{JSON}; charset={charset}")
            assert (status, problem["code"]) == (415, "unsupported_type") and "UTF-8" in problem["detail"]
    assert ask(server.url, "POST", path, text.encode(), kind=f'{JSON};charset="UTF-8"')[0] == 200
    status, problem = ask(server.url, "POST", path, b"\xc1", kind=msgpack)
    assert (status, problem["code"]) == (400, "malformed")
    status, problem = ask(server.url, "POST", path, msgspec.msgpack.encode({"messages": 1}), kind=msgpack)
    assert (status, problem["code"]) == (422, "invalid_schema")


def test_bytes_that_are_no_text_come_back_as_base64(server: ServerProcess, unique: str) -> None:
    body = {"messages": [{"topic": unique, "body_base64": "//4="}]}
    assert post(server.url, "/v1/messages", body)["items"][0]["status"] == 201
    message = call(server.url, "GET", f"/v1/topics/{unique}/queues/0/messages")["messages"][0]
    assert message["body_base64"] == "//4=" and "body" not in message


HEAD_BEGUN = b"POST /v1/messages HTTP/1.1\r\n"
BODY_BEGUN = HEAD_BEGUN + b"host: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"


@contextlib.contextmanager
def connected(url: str, said: bytes = b"") -> Iterator[socket.socket]:
    """A socket on which these bytes were sent."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), PATIENCE_SECONDS) as connection:
        connection.sendall(said)
        yield connection


def test_sockets_that_never_finish_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notify.server.connections.protocol.HEADER_SECONDS", 3600.0)
    with InMemoryServer(body_timeout_seconds=600) as server, contextlib.ExitStack() as stack:
        for n in range(200):
            stack.enter_context(connected(server.url, BODY_BEGUN if n % 3 == 0 else HEAD_BEGUN))
        publish(server.url, "t", ["x"])


def test_a_request_that_arrives_too_slowly_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notify.server.connections.protocol.HEADER_SECONDS", 3600.0)
    with InMemoryServer(body_timeout_seconds=0.5) as server:
        with connected(server.url, BODY_BEGUN) as connection:
            assert b"408" in connection.recv(65536)
        monkeypatch.setattr("notify.server.connections.protocol.HEADER_SECONDS", 0.1)
        with connected(server.url, HEAD_BEGUN) as connection:
            assert connection.recv(65536) == b""


def test_a_head_that_never_ends_is_cut(server: ServerProcess) -> None:
    answer = b""
    with connected(server.url) as connection, contextlib.suppress(OSError):
        connection.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(3000):
            connection.sendall(b"x-filler: " + b"y" * 1000 + b"\r\n")
            if select.select([connection], [], [], 0)[0]:
                break
        answer = connection.recv(1000)
    assert not answer or b" 431 " in answer.splitlines()[0]
    assert ask(server.url, "GET", "/readyz")[0] == 200


@pytest.mark.long
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    body=st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=20) | st.binary(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    ).map(msgspec.msgpack.encode),
    path=st.sampled_from(
        ["/v1/transactions", "/v1/transactions/outcomes", "/v1/transactions/states", "/v1/messages", "/v1/checks/poll"]
    ),
)
def test_no_msgpack_makes_it_fail(server: ServerProcess, body: bytes, path: str) -> None:
    status, problem = ask(server.url, "POST", path, body, kind="application/msgpack")
    assert 400 <= status < 500 and problem["code"]


@pytest.fixture
def fuzzed_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of its own: some of the requests made from the document change settings."""
    process = ServerProcess(tmp_path / "data").start()
    yield process
    process.stop()


@pytest.mark.long
def test_schemathesis_finds_no_server_error(fuzzed_server: ServerProcess) -> None:
    """A few requests of each kind, made from the OpenAPI document, get no 5xx; `make fuzz` makes more."""
    import schemathesis

    schema = schemathesis.openapi.from_url(fuzzed_server.url + "/openapi.json")
    made: Counter[str] = Counter()
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(max_examples=3, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            if isinstance(case.body, dict) and "wait" in case.body:
                case.body["wait"] = 0
            answer = case.call(timeout=PATIENCE_SECONDS)
            assert answer.status_code < 500, answer.text
            made[case.operation.label] += 1

        check()
    assert len(made) > 60 and made.total() > 2 * len(made)


@pytest.mark.parametrize("is_guarded", [False, True])
def test_nothing_that_strangers_send_makes_the_server_fail(is_guarded: bool) -> None:
    """Any head of an unknown sender gets an answer: no 500, no traceback in the log."""
    many_fields = "&".join(f"a{n}=b" for n in range(6000)).encode()
    form = "application/x-www-form-urlencoded"
    with InMemoryServer(access=is_guarded) as server:
        for method, path, body in (
            ("POST", "/login", b"token=x"),
            ("POST", "/login", many_fields),
            ("POST", "/login", b"token=%ff%00&next=//evil.example"),
            ("GET", "/login", None),
            ("GET", "/livez", None),
            ("GET", "/static/nothing", None),
            ("GET", "/nothing", None),
            ("PUT", "/v1/admin/limits", b"{"),
            ("POST", "/v1/messages", b"{"),
        ):
            for headers in (
                {},
                {"origin": "http://["},
                {"origin": "http://[::1]:99999999"},
                {"host": "["},
                {"host": "localhost:x"},
                {"accept": "text/html"},
                {"accept": "text/html", "host": "localhost:99999999"},
                {"cookie": 'notify_token="\\'},
                {"authorization": "Bearer \xff.\xff.\xff"},
                {"authorization": "Basic eDp5"},
            ):
                status, answer = ask(server.url, method, path, body, headers=headers, kind=form)
                assert status < 500, (method, path, headers, answer)


def test_no_cookie_is_unquoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server unquotes no cookie. FastAPI parses those of every request, and unquoting took 23 s for 62 kB."""
    unquoted: list[str] = []

    def unquote(text: str) -> str:
        unquoted.append(text[:20])
        return text

    monkeypatch.setattr("http.cookies._unquote", unquote)
    with GuardedInMemory() as server:
        for path in ("/livez", "/login", "/v1/admin/topics", "/topics", "/metrics", "/static/console.css"):
            cookie = f'a="\\\\"; notify_token={server.admin}; notify_tokens="\\134"'
            assert ask(server.url, "GET", path, headers={"cookie": cookie})[0] == 200, path
    assert unquoted == []


@pytest.mark.parametrize("path", ["/login", "/v1/admin/limits"])
def test_a_client_that_leaves_before_its_body_has_come_causes_no_error(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that leaves early is no fault. It was logged with the values of all variables, which took seconds."""
    faults: list[str] = []
    monkeypatch.setattr("notify.server.management.fault_of", lambda event, *_: faults.append(event))
    method = "POST" if path == "/login" else "PUT"
    with InMemoryServer() as server:
        begun = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{{".encode()
        for _ in range(3):
            with connected(server.url, begun) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        assert ask(server.url, "GET", "/readyz")[0] == 200
    assert faults == []


def test_a_fault_in_the_log_shows_no_values() -> None:
    secret = "nt_a_secret"

    def fail(token: str) -> None:
        raise RuntimeError("a fault in the server")

    with structlog.testing.capture_logs() as logged:
        try:
            fail(secret * 100_000)
        except RuntimeError:
            fault_of("request_failed", "GET", "/x" * 1000)
    (line,) = logged
    assert "a fault in the server" in line["trace"] and secret not in str(line) and len(str(line)) < 10_000


# --- names: they are validated before rights are asked, and before anything is made with them ---------------------


WRONG = ("x" * 128, ".x", "x y", "x" * 1_000_000)


def polled(names: dict[str, Any]) -> dict[str, Any]:
    return {"instance": "i", "wait": 0, "max": 1, **names}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_name_is_refused_before_rights_are_checked(name: str) -> None:
    with GuardedInMemory() as server:
        token = server.make("consume:points", "check:shop", "read:t", "bridge:db")
        bodies = [
            ("/v1/checks/poll", polled({"producer_group": name})),
            ("/v1/transactions/states", {"producer_group": name, "ids": []}),
            ("/v1/transactions/outcomes", {"producer_group": name, "outcomes": []}),
            ("/v1/groups/points/receive", polled({"topics": [name], "lease": 30})),
        ]
        if len(name) < 1000:  # the head's bound holds for names in a path
            path = name.replace(" ", "%20")
            bodies += [
                (f"/v1/groups/{path}/receive", polled({"topics": ["t"], "lease": 30})),
                (f"/v1/groups/{path}/settle", {"items": []}),
            ]
            for route in (f"/v1/topics/{path}/queues/0/messages", f"/v1/bridge/{path}"):
                status, problem = ask(server.url, "GET", route, token=token)
                assert (status, problem["code"]) == (422, "invalid_name"), route
        for route, body in bodies:
            status, problem = ask(server.url, "POST", route, body, token)
            assert (status, problem["code"]) == (422, "invalid_name"), route


def test_a_receive_names_so_many_topics_and_makes_none_where_none_may_be_made() -> None:
    """Such a receive is refused, and so is a subscription. They made topics although first use may make none."""
    with InMemoryServer(create_topics=False) as server:
        admin(server.url, "PUT", "topics/there", {})

        def receive(*topics: str) -> tuple[int, str | None]:
            body = polled({"topics": list(topics), "lease": 30})
            status, answer = ask(server.url, "POST", "/v1/groups/g/receive", body)
            return status, answer.get("code")

        assert receive("there") == (200, None)
        assert receive("there", "other") == (404, "unknown_topic")
        path = "/v1/groups/g/subscriptions"
        status, problem = ask(server.url, "PUT", f"{path}/other", {})
        assert (status, problem["code"]) == (404, "unknown_topic"), "a consumer made the topic by its subscription"
        assert [ask(server.url, "PUT", f"{path}/{name}", {})[0] for name in ("there", "oth*")] == [200, 200]
        assert receive(*[f"t{n}" for n in range(LIMITS.topics + 1)]) == (422, "out_of_bounds")
        assert [t["name"] for t in admin(server.url, "GET", "topics")["topics"]] == ["there"]
    with InMemoryServer() as server:
        body = polled({"topics": ["t"] * (LIMITS.topics + 1), "lease": 30})
        status, problem = ask(server.url, "POST", "/v1/groups/g/receive", body)
        assert (status, problem["code"]) == (422, "out_of_bounds")
