"""Answers to a request to receive over HTTP: in runs for a client that asks for them, as ever for all others."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import msgspec

from notify.protocol.wire import Received
from notify.testing.process import ServerProcess
from tests.support.deliveries import each_of
from tests.support.groups import publish, subscribe


def raw(url: str, path: str, body: dict[str, Any], kind: str) -> tuple[bytes, str]:
    """The body and the type of an answer as they come."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    encoded = json.dumps(body).encode() if "json" in kind else msgspec.msgpack.encode(body)
    connection.request("POST", path, encoded, {"content-type": kind})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status == 200, content
    return content, answer.headers["content-type"]


def test_all_forms_say_the_same_and_the_old_ones_stay(server: ServerProcess, unique: str) -> None:
    url = server.url
    groups = {form: f"{unique}-{form}" for form in ("json", "json-runs", "packed", "runs")}
    for group in groups.values():
        subscribe(url, group, unique)
    texts = [f"{n} {'x' * 300}" for n in range(100)]  # an answer of more bytes than are written with their head
    publish(url, unique, texts)
    asked = {"instance": "i", "topics": [unique], "max": 200}
    got: dict[str, bytes] = {}
    for form, group in groups.items():
        query = "?subscribe=no&runs=yes" if "runs" in form else ""
        kind = "application/json" if "json" in form else "application/msgpack"
        got[form], answered = raw(url, f"/v1/groups/{group}/receive{query}", asked, kind)
        assert answered == kind
    packed = msgspec.msgpack.decode(got["packed"])
    assert list(packed) == ["messages"]
    lines = []
    for m, text in zip(packed["messages"], texts, strict=True):
        fields = ("receipt", "id", "queue", "offset", "attempt", "committed_at", "topic", "body")
        assert tuple(m) == fields and m["body"] == text.encode()
        lines.append(
            f'{{"receipt":"R","attempt":1,"id":"{m["id"]}","queue":0,"offset":{m["offset"]},'
            f'"committed_at":"{m["committed_at"]}","topic":"{unique}","headers":{{}},"body":"{text}"}}'
        )
    expected = ('{"messages":[' + ",".join(lines) + "]}").encode()
    for form in ("json", "json-runs"):
        lease = json.loads(got[form])["messages"][0]["receipt"].partition(".")[0]
        plain = got[form]
        for place in reversed(range(100)):
            plain = plain.replace(f'"{lease}.{place}"'.encode(), b'"R"')
        assert plain == expected
    received = msgspec.msgpack.decode(got["runs"], type=Received)
    assert not received.messages and len(received.runs) == 1
    shown = [msgspec.structs.replace(d, receipt="") for d in each_of(received)]
    others = each_of(msgspec.msgpack.decode(got["packed"], type=Received))
    assert shown == [msgspec.structs.replace(d, receipt="") for d in others]
    run = received.runs[0]
    items = {"items": [{"receipt": f"{run.lease}.0-99", "action": "ack"}]}
    answer, _ = raw(url, f"/v1/groups/{groups['runs']}/settle", items, "application/msgpack")
    assert [item["status"] for item in msgspec.msgpack.decode(answer)["items"]] == [200]
    empty, _ = raw(url, f"/v1/groups/{groups['runs']}/receive?runs=yes", asked, "application/msgpack")
    assert msgspec.msgpack.decode(empty) == {"messages": [], "runs": []}
