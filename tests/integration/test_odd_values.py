"""No value that a route takes, and none that an older version stored, makes a page of the console fail."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import requests

from notify.server.console.filters import BODY_CHARACTERS, FILTERS, body
from notify.server.console.pages import PAGES
from notify.storage.shipped import records
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS
from tests.support.groups import subscribe
from tests.support.http import REASON, admin, ask, post

ODD: list[Any] = [
    "", "yesterday", "²", "9" * 400, "x" * 300, "a\0b\u202e<script>{{7*7}}", "0001-01-01T00:00:00+14:00",
    "9999-12-31T23:59:59-14:00", "2026-02-30T00:00:00Z", "20260101T000000Z", 0, -1, 10**30, 1e308, True, None,
    [], ["yesterday"], {}, {"yesterday": 1}, {"x": 10**30}, {"x": "9999-12-31T23:59:59-14:00"},
]  # fmt: skip
SAMPLES: dict[str, Any] = {
    "verdict": "FINDINGS", "counts": {"LOST": 1}, "to": "earliest", "topic": "t", "before": "earliest", "seconds": 3600,
    "values": {"alarm_parked": 5}, "name": "clerk", "rights": ["view"], "webhooks": {}, "url": "http://127.0.0.1:1/x",
    "within": 5, "share": 99,
    "ids": ["x"], "classes": [{"name": "high"}], "whole_from": "2026-01-01T00:00:00Z", "id": "x", "messages": [],
}  # fmt: skip
"""A value for each field that a write needs."""
TARGETS = {"name": "odd", "topic": "t", "action": "pause", "transaction_id": "x", "number": "1"}
ODD_NAMES = ("²", "9" * 400, "a b", "x" * 300, "%00", "..", "{{7*7}}", "-1", "1e308")


@pytest.fixture(scope="module")
def server() -> Iterator[InMemoryServer]:
    with InMemoryServer(webhook_hosts="127.0.0.1:1", webhook_secret="s") as made:
        subscribe(made.url, "odd", "odd")
        yield made


def failing_pages(server: InMemoryServer, session: requests.Session) -> list[str]:
    """The pages that are answered with 500 or above."""
    names = {"{transaction}": "x", "{message}": "x", "{topic}": "odd", "{group}": "odd", "{job}": "1"}
    failed = []
    for path, *_ in PAGES:
        for placeholder, name in names.items():
            path = path.replace(placeholder, name)
        if session.get(server.url + path, timeout=PATIENCE_SECONDS).status_code >= 500:
            failed.append(path)
    return failed


def operations(server: InMemoryServer) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(method, path, the fields of its body by name) of each admin write."""
    document = ask(server.url, "GET", "/openapi.json")[1]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if path.startswith("/v1/admin/") and method != "get":
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                yield method.upper(), path, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


@pytest.mark.long
def test_pages_show_whatever_a_write_has_taken(server: InMemoryServer) -> None:
    """Each field of each write gets each odd value; what is taken is then shown. `{"since": "yesterday"}` of an audit
    was taken, and its page was 500 from then on."""
    session = requests.Session()
    statuses: dict[int, int] = {}
    wrong: list[str] = []
    found = list(operations(server))
    assert len(found) > 30
    for number, (method, path, schema) in enumerate(found, 1):
        target = path
        for name, value in TARGETS.items():
            target = target.replace(f"{{{name}}}", value)
        fields = schema["properties"]
        needed = {name: SAMPLES[name] for name in schema.get("required", ()) if name != "reason"}
        base = {**({"reason": REASON} if "reason" in fields else {}), **needed}
        for name in fields:
            for odd in ODD:
                status = session.request(method, server.url + target, json=base | {name: odd}).status_code
                statuses[status] = statuses.get(status, 0) + 1
                if status >= 500:
                    wrong.append(f"{method} {target} {name}={odd!r}: {status}")
        subscribe(server.url, "odd", "odd")  # the write may have deleted them
        if number % 8 == 0 or path.endswith("/audits") or number == len(found):
            wrong += [f"{page} after {method} {path}" for page in failing_pages(server, session)]
    assert wrong == []
    assert statuses[200] > 100 and statuses[422] > 1000, statuses


@pytest.mark.long
def test_an_odd_query_or_name_is_refused_or_found_nowhere(server: InMemoryServer) -> None:
    session = requests.Session()
    document = ask(server.url, "GET", "/openapi.json")[1]
    wrong = []
    for path, methods in document["paths"].items():
        parameters = (
            methods.get("get", {}).get("parameters", ()) if path.startswith(("/v1/admin", "/v1/topics")) else ()
        )
        for parameter in parameters:
            for odd in (
                *ODD_NAMES,
                "nan",
                "inf",
                "-inf",
                "1_0",
                " 5",
                "+5",
                "5.0",
                "٣",
                "9999-12-31T23:59:59-14:00",
                "",
            ):
                target = path
                for other in parameters:
                    value = odd if other["name"] == parameter["name"] else TARGETS.get(other["name"], "odd")
                    target = target.replace(f"{{{other['name']}}}", quote(value, safe=""))
                query = {parameter["name"]: odd} if parameter["in"] == "query" else {}
                answer = session.get(server.url + target, params=query, timeout=PATIENCE_SECONDS)
                if answer.status_code >= 500:
                    wrong.append(f"GET {target} {query}: {answer.status_code}")
    fields = "id state older_than key topic from to before sort max after prefix failure filter what target all"
    asked = fields.split()
    for path, *_ in PAGES:
        for name in ODD_NAMES:
            shown = path
            for placeholder in ("{transaction}", "{message}", "{topic}", "{group}", "{job}"):
                shown = shown.replace(placeholder, quote(name, safe=""))
            queries = [dict.fromkeys(asked, name)]
            if name == ODD_NAMES[0]:
                queries += [{field: name} for field in asked]
            for query in queries:
                if session.get(server.url + shown, params=query, timeout=PATIENCE_SECONDS).status_code >= 500:
                    wrong.append(f"GET {shown} {query}")
    assert wrong == []


@pytest.mark.parametrize("field", ["since", "until"])
def test_the_times_of_an_audit_are_checked_when_they_are_taken(server: InMemoryServer, field: str) -> None:
    verdict: dict[str, Any] = {"reason": REASON, "verdict": "PASS", "counts": {}}
    for odd in (
        "yesterday",
        "2026-01-01",
        "2026-01-01T00:00:00",
        "9999-12-31T23:59:59-14:00",
        "²",
        "2026-13-01T00:00:00Z",
    ):
        status, problem = ask(server.url, "POST", "/v1/admin/audits", verdict | {field: odd})
        assert (status, problem["code"]) == (422, "invalid_schema"), odd
        assert field in problem["detail"] and "2026-01-31T12:00:00Z" in problem["detail"], problem
    for taken in ("", "2026-11-21T08:00:00Z", "2026-11-21T08:00:00.123456+01:00", "20261121T080000Z"):
        assert ask(server.url, "POST", "/v1/admin/audits", verdict | {field: taken})[0] == 200, taken
    shown = admin(server.url, "GET", "audits?max=1")["audits"][0]
    assert shown[field] == "2026-11-21T08:00:00.000000Z"
    for beyond in (
        {"counts": {"LOST": 10**20}},
        {"totals": {"x": 1e308}},
        {"reasons": ["x" * 2000]},
        {"counts": {"x" * 200: 1}},
    ):
        assert ask(server.url, "POST", "/v1/admin/audits", verdict | beyond)[0] == 422, beyond


def test_an_inbox_begins_before_the_end_of_the_calendar(server: InMemoryServer) -> None:
    """A consumer's report of the year 10000 in UTC was taken, and its group could not be shown any more."""
    subscribe(server.url, "late", "odd")
    report = {"whole_from": "9999-12-31T23:59:59-14:00"}
    for path in ("/v1/admin/groups/late/subscriptions/odd/inbox", "/v1/groups/late/subscriptions/odd/inbox"):
        status, problem = ask(server.url, "PUT", path, report)
        assert (status, problem["code"]) == (422, "out_of_bounds"), problem
    assert admin(server.url, "GET", "groups/late")


def call_raw(url: str, path: str, sent: bytes) -> tuple[int, str]:
    """Status and code of the answer to a request in msgpack."""
    answer = requests.post(url + path, sent, headers={"content-type": "application/msgpack"}, timeout=PATIENCE_SECONDS)
    return answer.status_code, answer.json()["code"] if answer.status_code != 200 else ""


def test_a_bridge_reports_a_lag_that_is_a_time(server: InMemoryServer) -> None:
    """The messages were stored, and the answer was 500: the bridge would have sent them again."""
    for number, lag in enumerate((math.nan, math.inf, -math.inf, 1e308)):
        batch = {"position": "", "epoch": 1, "expected_position": "", "claim": True, "lag": lag}
        sent = msgspec.msgpack.encode(batch)
        status, answer = call_raw(server.url, f"/v1/bridge/s{number}/batches", sent)
        assert (status, answer) == (422, "out_of_bounds")


def test_pages_show_what_an_older_version_stored(server: InMemoryServer) -> None:
    rows: list[dict[str, Any]] = [
        {"verdict": "PASS", "counts": {}, "since": "yesterday", "until": "²"},
        {"verdict": "FINDINGS", "counts": {"LOST": 1e308, "x": "many"}, "totals": {}, "reasons": [1], "since": 7},
        {"verdict": "PASS"}, {}, {"counts": {"LOST": None}, "since": None, "until": "9999-12-31T23:59:59-14:00"},
    ]  # fmt: skip
    database = Path(server._directory.name) / records.NAME
    with closing(sqlite3.connect(database, timeout=PATIENCE_SECONDS)) as connection, connection:
        for number, row in enumerate(rows):
            values = (number, row.get("verdict", ""), json.dumps(row), "")
            connection.execute("INSERT INTO server_audit (at_us, verdict, found, report) VALUES (?, ?, ?, ?)", values)
        for result in ("7", "null", "[]", '{"count": "x"}', '{"state": 1}', '{"within_seconds": "soon"}'):
            columns = "(at_us, who, what, target, reason, result) VALUES (1, '', 'group.reset', 'g', '', ?)"
            connection.execute(f"INSERT INTO server_action {columns}", (result,))
    assert failing_pages(server, requests.Session()) == []
    assert ask(server.url, "GET", "/audits", headers={"accept": "text/html"})[0] == 200


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_shows_as_text_what_it_cannot_format(name: str) -> None:
    arguments = {"after": [["2026-01-01T00:00:00Z"], ["yesterday"], [None]]}.get(name, [[]])
    for odd in (
        *ODD,
        math.nan,
        math.inf,
        -math.inf,
        b"\xff",
        {"body_base64": "!!!"},
        {"body": None},
        {"name": "audit"},
    ):
        for others in arguments:
            assert FILTERS[name](odd, *others) is not None or odd is None


DEEP = "[" * 900 + "1," * 8_000 + "1" + "]" * 900


@pytest.mark.parametrize(
    "text",
    [
     '{"a": "\\ud800"}', "[" * 20_000, "[" * 1_000_000, "{" * 5000, '{"a": ' + "9" * 5000 + "}", '[1e999, NaN, -0]',
     DEEP, '{"a": ' + "[1," * 100_000, "[" + "1," * 400_000 + "1]", "{\"a\":\0}", "\ufeff{}", "[\u2028]"],
    ids=lambda text: f"{text[:8]} {len(text)}",
)  # fmt: skip
def test_a_message_is_shown_whatever_its_body_looks_like(server: InMemoryServer, text: str) -> None:
    """Half a surrogate pair in its JSON made every page with the message 500; a mebibyte of deep JSON was indented."""
    shown = body({"body": text})
    assert len(shown) <= BODY_CHARACTERS and shown.encode()
    (item,) = post(server.url, "/v1/messages", {"messages": [{"topic": "odd", "body": text}]})["items"]
    session = requests.Session()
    for path in (f"/messages/{item['id']}", "/messages?topic=odd", f"/do/message.send?topic=odd&like={item['id']}"):
        assert session.get(server.url + path, timeout=PATIENCE_SECONDS).status_code == 200, path
