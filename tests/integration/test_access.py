"""Access: tokens, rights, quotas, bodies of strangers. Once it is on, everything is denied by default."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from notify.client import AsyncReader, Consumer, Message, TransactionProducer
from notify.errors import Forbidden, InvalidRequest, Unauthorized
from notify.server.access import lookup
from notify.server.access.rights import Right, parse_right
from notify.server.running import Running
from notify.server.serve import check_host
from notify.server.settings import Settings
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import running
from tests.support.http import ask, call
from tests.support.servers import Guarded, GuardedInMemory
from tests.support.transactions import half_request, new_id


@pytest.fixture(scope="module")
def guarded() -> Iterator[GuardedInMemory]:
    with pytest.MonkeyPatch.context() as patched, GuardedInMemory() as server:
        # Otherwise a slow machine answers an unknown token with 503 until it has read the records.
        patched.setattr(lookup, "WAIT_SECONDS", PATIENCE_SECONDS)
        yield server


def test_rights_cover_what_they_name() -> None:
    assert parse_right("publish:order.*").covers("publish", "order.placed", "*")
    assert not parse_right("publish:order.*").covers("publish", "orders", "*")
    assert not parse_right("publish:order.*").covers("consume", "order.placed", "*")
    assert parse_right("consume:a*c@t.*.x").covers("consume", "abc", "t.1.x")
    assert not parse_right("consume:a*a").covers("consume", "a", "*")  # the pattern needs two letters
    assert not parse_right("consume:g@t").covers("consume", "g", "*")
    assert parse_right("admin").covers("admin", "*", "*") and not parse_right("admin:x").covers("admin", "*", "*")
    assert [str(parse_right(t)) for t in ("view", "check:g", "consume:g@t")] == ["view", "check:g", "consume:g@t"]
    assert str(Right("publish")) == "publish"
    for wrong in ("", "fly", "publish:", "publish:a b", "publish:a@b", "view\n", "consume:g@"):
        with pytest.raises(InvalidRequest):
            parse_right(wrong)


@pytest.mark.parametrize("path", ["/v1/members", "/v1/admin/topics"])
def test_a_missing_or_wrong_token_is_refused(guarded: GuardedInMemory, path: str) -> None:
    """A text that is no token is refused. tests/integration/test_rights.py asks every route with good tokens."""
    for shown in (None, "", "nt_000000000000_" + "A" * 43, "x", guarded.admin[:-1] + "."):
        status, problem = ask(guarded.url, "GET", path, token=shown)
        assert (status, problem["code"]) == (401, "unauthorized"), shown


def test_items_are_refused_one_by_one(guarded: GuardedInMemory, unique: str) -> None:
    token = guarded.make(f"publish:{unique}.a")
    messages = [{"topic": f"{unique}.{t}", "body": "x"} for t in "aba"]
    status, answer = ask(guarded.url, "POST", "/v1/messages", {"messages": messages}, token)
    assert status == 200 and [item["status"] for item in answer["items"]] == [201, 403, 201]
    assert f"publish:{unique}.b" in answer["items"][1]["detail"]  # the item's error names the missing right


def test_transactions_are_decided_by_who_administers_their_group(guarded: GuardedInMemory, unique: str) -> None:
    name = new_id()
    half = half_request(unique, name, topic=unique)
    assert ask(guarded.url, "POST", "/v1/transactions", half, guarded.make("publish", "check"))[0] == 200
    path = f"/v1/admin/transactions/{name}/commit"
    assert ask(guarded.url, "POST", path, {"reason": "r"}, guarded.make("admin:other"))[0] == 403
    status, answer = ask(guarded.url, "POST", path, {"reason": "r"}, guarded.make(f"admin:{unique}", name="operator"))
    assert (status, answer["result"]["state"]) == (200, "COMMITTED")
    _, actions = ask(guarded.url, "GET", "/v1/admin/actions?what=transaction.&max=1", token=guarded.admin)
    assert (actions["actions"][0]["who"], actions["actions"][0]["target"]) == ("operator", name)


def test_tokens_expire_and_are_revoked(guarded: GuardedInMemory) -> None:
    def status(token: str) -> int:
        return ask(guarded.url, "GET", "/v1/admin/topics", token=token)[0]

    short, token = guarded.make("view", expires_in=600), guarded.make("view", name="gone")
    assert status(short) == status(token) == 200
    credentials = call(guarded.url, "GET", "/v1/admin/credentials", token=guarded.admin)["credentials"]
    number = next(c["id"] for c in credentials if c["name"] == "gone")
    path = f"/v1/admin/credentials/{number}/revoke"
    call(guarded.url, "POST", path, {"reason": "r", "dry_run": True}, guarded.admin)
    assert status(token) == 200  # the dry run changed nothing
    call(guarded.url, "POST", path, {"reason": "r"}, guarded.admin)
    assert status(token) == 401
    guarded.server.advance(599)
    assert status(short) == 200
    guarded.server.advance(1)
    refusal, problem = ask(guarded.url, "GET", "/v1/admin/topics", token=short)
    assert refusal == 401 and "expired" in problem["detail"]


@pytest.mark.parametrize("end", ["revoked", "expired"])
@pytest.mark.parametrize("route", ["groups/{0}/receive", "checks/poll"])
def test_a_poll_ends_with_its_token(guarded: GuardedInMemory, unique: str, route: str, end: str) -> None:
    """A waiting poll ends when its token is revoked or expires: its holder gets no message that comes afterwards."""
    token = guarded.make(f"consume:{unique}@*", f"check:{unique}", name=unique, expires_in=1)
    call(guarded.url, "PUT", f"/v1/admin/groups/{unique}/subscriptions/{unique}", {"reason": "r"}, guarded.admin)
    receive = {"instance": "i", "max": 1, "wait": 60, "lease": 30}
    poll = {"producer_group": unique, "instance": "i", "wait": 60, "max": 1}
    path = f"/v1/{route.format(unique)}"
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(ask, guarded.url, "POST", path, poll if "poll" in route else receive, token)
        eventually(lambda: guarded.server.under_way(path) >= 1, "the poll to wait")
        if end == "expired":
            guarded.server.advance(1)
        else:
            number = token.split("_")[1]
            call(guarded.url, "POST", f"/v1/admin/credentials/{number}/revoke", {"reason": "r"}, guarded.admin)
        status, problem = waiting.result()
    assert status == 401 and end in problem["detail"]


@pytest.mark.long
def test_only_hashes_are_kept_and_files_are_the_owners(tmp_path: Path) -> None:
    made = Guarded(tmp_path / "data")
    token = made.make("view")
    try:
        secret = token.split("_", 2)[2].encode()  # it may have `_` itself
        assert len(secret) == 43
        for path in (tmp_path / "data").rglob("*"):
            if path.is_file():
                assert secret not in path.read_bytes(), path
                assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
        first = made.admin.split("_")[1]
        status, answer = ask(made.url, "POST", f"/v1/admin/credentials/{first}/revoke", {"reason": "r"}, made.admin)
        assert (status, answer["code"]) == (422, "last_admin")
        made.server.stop()
        made.server.start()
        assert ask(made.url, "GET", "/v1/admin/topics", token=token)[0] == 200
        assert token not in "".join(made.server.output) and made.admin not in "".join(made.server.output)
    finally:
        made.server.stop()


def test_rates_and_polls_of_a_principal(guarded: GuardedInMemory, unique: str) -> None:
    token, other = guarded.make("publish", requests=5), guarded.make("publish")

    def publish(token: str) -> int:
        return ask(guarded.url, "POST", "/v1/messages", {"messages": [{"topic": unique, "body": "x"}]}, token)[0]

    assert [publish(token) for _ in range(7)] == [200] * 5 + [429] * 2
    assert publish(other) == 200  # another principal has a rate of its own
    guarded.server.advance(1)
    assert [publish(token) for _ in range(7)] == [200] * 5 + [429] * 2
    token = guarded.make("check", polls=1)

    def poll(wait: float) -> tuple[int, Any]:
        asked = {"producer_group": unique, "instance": "i", "wait": wait, "max": 1}
        return ask(guarded.url, "POST", "/v1/checks/poll", asked, token)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(poll, 60)
        try:
            eventually(lambda: guarded.server.under_way("/v1/checks/poll") == 1, "a poll that waits")
            status, problem = poll(0)
            assert (status, problem["code"]) == (429, "too_many_polls")
        finally:
            # A check that is due ends the wait.
            half = half_request(unique, topic=unique)
            assert ask(guarded.url, "POST", "/v1/transactions", half, guarded.make("publish", "check"))[0] == 200
            guarded.server.advance(60)
        assert waiting.result(PATIENCE_SECONDS)[0] == 200
    assert poll(0)[0] == 200


def test_the_sdk_shows_its_token(guarded: GuardedInMemory, unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rights = [f"publish:{unique}", f"check:{unique}", f"consume:{unique}", f"read:{unique}"]
    token = guarded.make(*rights)
    got: list[str] = []
    consumer = Consumer(guarded.url, group=unique, token=token)

    @consumer.subscribe(unique, start="earliest")
    def handle(message: Any) -> None:
        got.append(message.text)
        consumer.stop()

    with TransactionProducer(guarded.url, group=unique, token=token) as producer:
        producer.publish(Message(unique, "hello"))
        with pytest.raises(Forbidden, match="publish:other"):
            producer.publish(Message("other", "x"))
    consumer.run(signals=False)
    assert got == ["hello"]
    with TransactionProducer(guarded.url, group=unique, token="nt_wrong") as producer:
        with pytest.raises(Unauthorized):
            producer.publish(Message(unique, "x"))
    monkeypatch.setenv("NOTIFY_TOKEN", token)
    with TransactionProducer(guarded.url, group=unique) as producer:
        producer.publish(Message(unique, "from the environment"))


def test_a_refused_body_is_not_taken(guarded: GuardedInMemory) -> None:
    """A refusal is answered before the body arrives: a stranger cannot fill the server's memory."""
    parts = urlsplit(guarded.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE_SECONDS) as s:
        s.sendall(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                  b"content-length: 8000000\r\n\r\n{")  # fmt: skip
        assert b" 401 " in s.recv(4096).split(b"\r\n")[0]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/admin/limits"])
def test_pages_of_other_sites_change_nothing(memory: InMemoryServer, path: str) -> None:
    """While access is off, loopback protects the server: a page in a browser on this machine must not get through."""
    method = "POST" if path == "/v1/messages" else "PUT"
    body = {"messages": [{"topic": "t", "body": "x"}]} if method == "POST" else {"reason": "r", "dry_run": True}
    host = memory.url.removeprefix("http://")
    for headers in (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": f"https://{host}.evil.example"},
        {"origin": "http://evil.example:7400", "host": "evil.example:7400"},  # its name points here
        {"sec-fetch-site": "same-origin", "host": "evil.example"},
    ):
        status, problem = ask(memory.url, method, path, body, headers=headers)
        assert status == 403 and problem["code"] in ("forbidden", "foreign_host"), headers
    for headers in ({"origin": memory.url, "sec-fetch-site": "same-origin"}, {}, {"sec-fetch-site": "none"}):
        assert ask(memory.url, method, path, body, headers=headers)[0] == 200, headers


def test_admin_bodies_are_bounded(memory: InMemoryServer) -> None:
    body = json.dumps({"reason": "x" * (2 << 20)}).encode()
    status, problem = ask(memory.url, "PUT", "/v1/admin/limits", body)
    assert (status, problem["code"]) == (413, "request_too_large")


def test_a_reachable_address_needs_access_and_tls() -> None:
    for host, fields in itertools.product(("0.0.0.0", "192.0.2.1", "::"), ({}, {"access": True})):
        with pytest.raises(InvalidRequest, match="PLAINTEXT" if fields else "access"):
            check_host(Settings(host=host, **fields))
    check_host(Settings(host="0.0.0.0", access=True, plaintext=True))
    check_host(Settings(host="0.0.0.0", access=True, tls_certificate="c.pem"))
    for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        check_host(Settings(host=host))


def test_where_the_servers_are_takes_a_right_and_who_else_is_there_takes_view(guarded: GuardedInMemory) -> None:
    async def parts(running: Running) -> Running:
        return running

    running = guarded.server.inside(parts)
    everyone = running.members()
    consumer = everyone["members"][0] | {"name": "points/i1", "kind": "consumer", "detail": {"group": "points"}}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(running.data, "_members", lambda: everyone | {"members": [*everyone["members"], consumer]})

        def kinds(*rights: str) -> list[str]:
            answer = call(guarded.url, "GET", "/v1/members", token=guarded.make(*rights))
            return [member["kind"] for member in answer["members"]]

        assert kinds("publish:x") == ["server"] and kinds("view") == ["server", "consumer"]
        status, problem = ask(guarded.url, "GET", "/v1/members", token=guarded.make())
        assert (status, problem["code"]) == (403, "forbidden")


def test_a_right_to_every_topic_does_not_let_write_dead_letters(guarded: GuardedInMemory, unique: str) -> None:
    def publish(topic: str, *rights: str) -> int:
        body = {"messages": [{"topic": topic, "body": "x"}]}
        _, answer = ask(guarded.url, "POST", "/v1/messages", body, guarded.make(*rights))
        return int(answer["items"][0]["status"])

    dead = f"dead-letter.{unique}"
    assert publish(dead, "publish") == publish(dead, "publish:*") == publish(dead, "publish:d*") == 403
    assert publish(unique, "publish") == 201
    assert publish(dead, "publish:dead-letter.*") == publish(dead, f"publish:{dead}") == 201


def test_who_consumes_one_topic_gets_what_is_sent_again_without_naming_it(
    guarded: GuardedInMemory, unique: str
) -> None:
    """A poll without topics gets redriven messages, too. It was refused for the retry topic that a redrive makes."""
    token = guarded.make(f"consume:{unique}@{unique}.t", f"publish:{unique}.t")
    path, body = f"/v1/groups/{unique}", {"instance": "i", "max": 10, "wait": 0, "lease": 30}

    def received(**fields: Any) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = call(guarded.url, "POST", f"{path}/receive", body | fields, token)["messages"]
        return messages

    assert received(topics=[f"{unique}.t"]) == []
    call(guarded.url, "POST", "/v1/messages", {"messages": [{"topic": f"{unique}.t", "body": "x"}]}, token)
    (message,) = received()
    settled = {"items": [{"receipt": message["receipt"], "action": "dead_letter", "reason": "r"}]}
    call(guarded.url, "POST", f"{path}/settle", settled, token)
    call(guarded.url, "POST", f"/v1/admin/groups/{unique}/dead-letters/redrive", {"reason": "r"}, guarded.admin)
    assert [m["body"] for m in received()] == ["x"]


@pytest.mark.parametrize(
    ("fields", "said", "is_secure"),
    [
        ({}, "", False),
        ({}, "https", False),  # any client may send this header
        ({"plaintext": True}, "", False),
        ({"plaintext": True}, "https", True),
        ({"url": "https://notify.example"}, "", True),
    ],
)
def test_the_cookie_is_secure_behind_a_proxy_that_ends_tls(fields: dict[str, Any], said: str, is_secure: bool) -> None:
    with GuardedInMemory(**fields) as server:
        parts = urlsplit(server.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_SECONDS)
        headers = {"content-type": "application/x-www-form-urlencoded"} | ({"x-forwarded-proto": said} if said else {})
        connection.request("POST", "/login", f"token={server.admin}", headers)
        answer = connection.getresponse()
        cookie = answer.headers["set-cookie"]
        connection.close()
        assert answer.status == 303 and ("secure" in cookie.lower()) is is_secure
        headers = {"accept": "text/html"} | ({"x-forwarded-proto": said} if said else {})
        page = str(ask(server.url, "GET", "/", token=server.admin, headers=headers)[1])
        scheme = "https" if is_secure else "http"
        assert f"export NOTIFY_URL={scheme}://" in page and "export NOTIFY_TOKEN=" in page


def test_a_data_directory_that_was_open_is_closed(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    (directory / "admin.token").write_text("prepared by someone")
    (directory / "admin.token").chmod(0o644)
    made = Guarded(directory)
    try:
        assert made.admin != "prepared by someone"
        assert stat.S_IMODE((directory / "admin.token").stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    finally:
        made.server.stop()


def test_the_limits_say_what_concerns_who_asks(guarded: GuardedInMemory) -> None:
    rates = {"topics": {"a.x": 1.0, "b.x": 2.0}, "producer_groups": {"a": 3.0}, "consumer_groups": {"a": 4.0, "b": 5.0}}
    call(guarded.url, "PUT", "/v1/admin/limits", rates | {"reason": "a test"}, guarded.admin)

    def limits(*rights: str) -> dict[str, Any]:
        answer: dict[str, Any] = call(guarded.url, "GET", "/v1/limits", token=guarded.make(*rights))
        assert (answer["message_bytes"], answer["items"]) == (1 << 20, 4096)
        assert "connections" not in answer
        return answer["rates"]  # type: ignore[no-any-return]

    none: dict[str, Any] = {"topics": {}, "producer_groups": {}, "consumer_groups": {}}
    assert limits() == none
    assert limits("view") == rates
    assert limits("publish:a.*", "consume:b@x") == none | {"topics": {"a.x": 1.0}, "consumer_groups": {"b": 5.0}}
    assert limits("check:a") == none | {"producer_groups": {"a": 3.0}}


def test_a_service_subscribes_and_reads_without_an_admin_route(guarded: GuardedInMemory, unique: str) -> None:
    url, token = guarded.url, guarded.make(f"consume:{unique}", f"read:{unique}", f"publish:{unique}")
    wanted = {"mode": "ordered", "start": "earliest", "tags": ["vip"]}
    path = f"/v1/groups/{unique}/subscriptions/{unique}"
    named = {"group": unique, "topic": unique, "mode": "ordered"}
    assert call(url, "PUT", path, wanted, token) == named | {"is_new": True, "made_topic": True, "lag": 0}
    assert call(url, "PUT", path, wanted, token) == named | {"is_new": False, "made_topic": False, "lag": 0}
    call(url, "PUT", path + "/inbox", {"whole_from": "2026-01-01T00:00:00Z"}, token)
    (shown,) = call(url, "GET", f"/v1/admin/groups/{unique}", token=guarded.admin)["subscriptions"]
    assert (shown["mode"], shown["tags"], shown["inbox_from"]) == ("ordered", ["vip"], "2026-01-01T00:00:00.000000Z")
    topic = call(url, "GET", f"/v1/topics/{unique}", token=token)
    assert topic["queues"] == [{"queue": 0, "start": 0, "end": 0}]
    assert topic == call(url, "GET", f"/v1/admin/topics/{unique}", token=guarded.admin)
    for body, status, code in (
        ({"mode": "random"}, 422, "invalid_schema"),
        ({"start": "soon"}, 422, "invalid_start"),
        ({"max_attempts": 0}, 422, "out_of_bounds"),
        ({"reason": "unknown here"}, 422, "invalid_schema"),
        ({"filter": "1 +"}, 422, "invalid_filter"),
    ):
        answered, problem = ask(url, "PUT", f"{path}-new", body, guarded.make("consume"))
        assert (answered, problem["code"]) == (status, code), body
    consumer = Consumer(url, group=unique, token=token)
    consumer.subscribe(unique, mode="ordered")(print)
    with running(consumer):
        group = f"/v1/admin/groups/{unique}"
        eventually(
            lambda: call(url, "GET", group, token=guarded.admin)["instances"], "the consumer to ask for messages"
        )

    async def read() -> list[Any]:
        async with AsyncReader(url, token=token) as reader:
            return [message async for message in reader.read(unique)]

    assert asyncio.run(read()) == []
    actions = call(url, "GET", "/v1/admin/actions", token=guarded.admin)["actions"]
    assert [action for action in actions if action["target"].startswith(unique)] == []
    assert ask(url, "GET", f"/v1/topics/{unique}-none", token=guarded.make("read"))[0] == 404
    assert ask(url, "POST", f"/v1/topics/{unique}", {}, token)[0] == 405


def test_the_actions_on_a_target_are_told_from_those_on_longer_names(guarded: GuardedInMemory, unique: str) -> None:
    """A group's page showed none of its own actions beside a busy group whose name begins with its name."""
    for group in (unique, f"{unique}-eu", f"{unique}-eu"):
        subscription = f"/v1/admin/groups/{group}/subscriptions/{unique}"
        call(guarded.url, "PUT", subscription, {"reason": "r"}, guarded.admin)
        path = f"/v1/admin/groups/{group}/pause"
        assert ask(guarded.url, "POST", path, {"reason": "the database moves"}, token=guarded.admin)[0] == 200
    _, exact = ask(guarded.url, "GET", f"/v1/admin/actions?exact_target={unique}&max=1", token=guarded.admin)
    assert [row["target"] for row in exact["actions"]] == [unique]
    _, begun = ask(guarded.url, "GET", f"/v1/admin/actions?target={unique}&what=group.pause", token=guarded.admin)
    assert len(begun["actions"]) == 3
