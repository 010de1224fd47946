"""Alarms are raised and cleared for each thing that can be wrong; webhooks are signed, listed, and not redirected."""

from __future__ import annotations

import hashlib
import hmac
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notify import ids
from notify.errors import InvalidRequest, Unavailable
from notify.server import webhooks
from notify.server.alarms import MEANING
from notify.settings import Settings
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.http import ask

SECRET = "a secret of the tests"
WHY = {"reason": "a test"}


class Receiver:
    """Takes webhooks. `answer` makes the body from what was asked."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.unsigned = 0
        self.status = 200
        self.location = ""
        self.answer: Any = lambda asked: {}
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                fields = dict(part.split("=") for part in self.headers["notify-signature"].split(","))
                proof = hmac.new(SECRET.encode(), f"{fields['t']}.".encode() + body, hashlib.sha256).hexdigest()
                if not hmac.compare_digest(proof, fields["v1"]) or abs(time.time() - int(fields["t"])) > 60:
                    receiver.unsigned += 1
                asked = json.loads(body)
                receiver.got.append(asked)
                answer = json.dumps(receiver.answer(asked)).encode()
                self.send_response(receiver.status)
                if receiver.location:
                    self.send_header("location", receiver.location)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.place = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.place}/notify"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def watched(receiver: Receiver, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose alarms come soon."""
    server = ServerProcess(
        tmp_path / "data",
        environment={
            "NOTIFY_WEBHOOK_HOSTS": receiver.place,
            "NOTIFY_WEBHOOK_SECRET": SECRET,
            "NOTIFY_ALARM_WEBHOOK": receiver.url,
            "NOTIFY_ALARM_EVERY_SECONDS": "0.2",
            "NOTIFY_ALARM_DOUBT_SECONDS": "0.5",
            "NOTIFY_ALARM_NO_CONSUMER_SECONDS": "0.5",
            "NOTIFY_ALARM_DISK_SHARE": "0",
            "NOTIFY_ALARM_LAG_GROWING_SECONDS": "0",
            "NOTIFY_ALARM_BRIDGE_SECONDS": "0.5",
            "NOTIFY_CHECK_ATTEMPTS": "1",
            "NOTIFY_CHECK_BACKOFF_SECONDS": "0.1",
        },
    ).start()
    yield server
    server.stop()


def half(server: ServerProcess, group: str) -> str:
    name = ids.to_text(ids.new_id())
    sent = {"id": name, "messages": [{"topic": "t", "body": '{"n": 1}'}], "check_after": 0.5}
    assert ask(server.url, "POST", "/v1/transactions", {"producer_group": group, "transactions": [sent]})[0] == 200
    return name


def names(server: ServerProcess) -> set[str]:
    return {alarm["name"] for alarm in ask(server.url, "GET", "/v1/admin/overview")[1]["alarms"]}


def test_alarms_are_raised_said_and_cleared(watched: ServerProcess, receiver: Receiver) -> None:
    url = watched.url
    assert names(watched) == set()
    doubt, parked = half(watched, "away"), half(watched, "unsure")
    checks = ask(url, "POST", "/v1/checks/poll", {"producer_group": "unsure", "instance": "i", "wait": 5, "max": 1})[1]
    answer = {"id": parked, "outcome": "UNKNOWN", "check": checks["checks"][0]["token"]}
    ask(url, "POST", "/v1/transactions/outcomes", {"producer_group": "unsure", "outcomes": [answer]})
    ask(url, "PUT", "/v1/admin/groups/nobody/subscriptions/lonely", WHY)
    ask(url, "POST", "/v1/messages", {"messages": [{"topic": "lonely", "body": "x"}]})
    ask(url, "POST", "/v1/admin/audits", WHY | {"verdict": "FINDINGS", "counts": {"LOST": 1}})
    batch = {"epoch": 1, "expected_position": "", "position": "", "claim": True}
    status, _ = ask(url, "POST", "/v1/bridge/shop/batches", batch)
    assert status == 200
    wanted = {"in_doubt", "parked", "no_consumers", "audit", "bridge"}
    eventually(lambda: names(watched) == wanted, 20)
    eventually(lambda: {n["name"] for n in receiver.got} == wanted, 5)
    assert all(n["alarm"] == "raised" for n in receiver.got) and receiver.unsigned == 0
    assert "alarm_raised" in "".join(watched.output)
    # Each is said once, not at every look.
    assert len(receiver.got) == len(wanted)
    for name, action in ((doubt, "rollback"), (parked, "commit")):
        assert ask(url, "POST", f"/v1/admin/transactions/{name}/{action}", WHY)[0] == 200
    ask(url, "POST", "/v1/admin/groups/nobody/pause", WHY)
    ask(url, "POST", "/v1/admin/audits", WHY | {"verdict": "PASS", "counts": {}})
    eventually(lambda: names(watched) <= {"bridge"}, 20)
    eventually(lambda: {n["name"] for n in receiver.got if n["alarm"] == "cleared"} >= wanted - {"bridge"}, 5)
    status, metrics = ask(url, "GET", "/metrics")
    assert 'notify_alarms{alarm="parked"} 0' in metrics


def test_each_alarm_has_a_meaning_in_the_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    for name, meaning in MEANING.items():
        assert f"| `{name}` | {meaning} |" in guide, f"docs/operating.md lacks: | `{name}` | {meaning} |"


def test_checks_go_to_a_webhook(watched: ServerProcess, receiver: Receiver) -> None:
    outcomes = {"decided": "COMMIT", "undone": "ROLLBACK"}
    known: dict[str, str] = {}
    receiver.answer = lambda asked: {
        "outcomes": [{"id": c["id"], "outcome": known.get(c["id"], "UNKNOWN")} for c in asked.get("checks", [])]
    }
    status, answer = ask(
        watched.url, "PUT", "/v1/admin/check-webhooks", WHY | {"webhooks": {"php": "http://192.0.2.1/x"}}
    )
    assert status == 422 and "allow-list" in answer["detail"]
    receiver.status = 503  # it is away first: that uses up no check
    ask(watched.url, "PUT", "/v1/admin/check-webhooks", WHY | {"webhooks": {"php": receiver.url}})
    for outcome in outcomes.values():
        known[half(watched, "php")] = outcome

    def state(name: str) -> str:
        return str(ask(watched.url, "GET", f"/v1/admin/transactions/{name}")[1]["state"])

    eventually(lambda: any("checks" in got for got in receiver.got), 10)
    assert {state(name) for name in known} == {"PREPARED"}
    receiver.status = 200
    eventually(lambda: [state(n) for n in known] == ["COMMITTED", "ROLLED_BACK"], 25)
    assert receiver.unsigned == 0
    checks = [c for got in receiver.got for c in got.get("checks", [])]
    assert checks[0]["messages"][0]["body"] == '{"n": 1}'
    _, found = ask(watched.url, "GET", f"/v1/admin/transactions/{next(iter(known))}")
    assert [c["what"] for c in found["checks"]][-1] == "COMMIT"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.2:80/",
        "ftp://127.0.0.1:9/",
        "http://user@127.0.0.1:9/",
        "http://127.0.0.1:99999/",
        "x",
        "http://",
    ],
)
def test_webhooks_go_nowhere_else(url: str) -> None:
    with pytest.raises(InvalidRequest):
        webhooks.check_address(url, Settings(webhook_hosts="127.0.0.1:9", webhook_secret="s"))
    with pytest.raises(InvalidRequest, match="NOTIFY_WEBHOOK_SECRET"):
        webhooks.check_address("http://127.0.0.1:9/", Settings(webhook_hosts="127.0.0.1:9"))


def test_a_webhook_is_not_redirected(receiver: Receiver) -> None:
    other = Receiver()
    try:
        receiver.status, receiver.location = 307, other.url
        with pytest.raises(Unavailable, match="307"):
            webhooks._post(receiver.url, b"{}", SECRET)
        assert other.got == []
    finally:
        other.close()


def test_the_secret_is_not_shown(watched: ServerProcess) -> None:
    _, found = ask(watched.url, "GET", "/v1/admin/settings")
    row = next(s for s in found["settings"] if s["name"] == "webhook_secret")
    assert row["value"] == "(secret)" and SECRET not in json.dumps(found)
