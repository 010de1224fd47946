"""Held keys on a server: over HTTP, by command, with the alarm and the metrics, after a kill, and by the SDK."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from notify.client import AsyncConsumer, Consumer, ReceivedMessage
from notify.errors import InvalidRequest
from notify.server.delivery import ordered
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import Caller, bodies, is_subscribed, publish, running, subscribe
from tests.support.http import admin, ask, metric, refusal
from tests.support.shipping import shipped

HOLD: dict[str, Any] = {"max_attempts": 2, "on_exhausted": "hold", "retry_min": 0.01, "retry_max": 0.01}


def held(url: str, group: str) -> list[dict[str, Any]]:
    return list(admin(url, "GET", f"groups/{group}/held-keys")["held"])


def fail(caller: Caller, topic: str, times: int = 2, reason: str = "no such account") -> None:
    """Fail what comes so often."""
    for _ in range(times):
        received = caller.receive(topic, wait=30)
        assert caller.settle(received, "retry", delay=0, reason=reason) == [200] * len(received)


def holds_some(url: str, group: str) -> bool:
    """Whether the group exists and holds a key."""
    return is_subscribed(url, group) and held(url, group) != []


def decide(url: str, group: str, what: str, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = admin(url, "POST", f"groups/{group}/held-keys/{what}", body | {"reason": "looked at"})
    return answer


def test_look_then_retry_skip_and_release(notify_server: InMemoryServer, unique: str) -> None:
    url = notify_server.url
    subscribe(url, unique, unique, "ordered", **HOLD)
    publish(url, unique, ["a1", "b1", "c1"], key=True)
    caller = Caller(url, unique, "x")
    fail(caller, unique)
    publish(url, unique, ["a2", "b2", "c2", "d1"], key=True)
    assert bodies(caller.receive(unique)) == ["d1"]
    rows = {row["key"]: row for row in held(url, unique)}
    assert sorted(rows) == ["a", "b", "c"]
    row = rows["a"]
    assert (row["reason"], row["failures"], row["deaths"], row["waiting"]) == ("no such account", 2, 0, 1)
    assert (row["topic"], row["queue"], row["offset"]) == (unique, 0, 0) and row["since"].endswith("Z")

    preview = decide(url, unique, "retry", ids=[row["id"], "0" * 8], dry_run=True)
    assert [item.get("status") for item in preview["result"]["items"]] == [None, 404]
    assert len(held(url, unique)) == 3
    assert decide(url, unique, "retry", ids=[row["id"], "0" * 8])["result"]["items"][0]["status"] == 200
    again = caller.receive(unique, wait=30)
    assert (bodies(again), again[0]["attempt"]) == (["a1"], 3)
    assert caller.settle(again) == [200]
    assert bodies(caller.receive(unique, wait=30)) == ["a2"]

    assert decide(url, unique, "release", key="b")["result"]["items"][0]["key"] == "b"
    fail(caller, unique, times=1)
    assert [row["key"] for row in held(url, unique)] == ["c"]
    fail(caller, unique, times=1)
    assert sorted(row["key"] for row in held(url, unique)) == ["b", "c"]

    skipped = decide(url, unique, "skip", all=True)
    assert skipped["result"]["left"] == 0 and held(url, unique) == []
    came = caller.receive(unique, wait=30)
    assert sorted(bodies(came)) == ["b2", "c2"]
    letters = admin(url, "GET", f"groups/{unique}/dead-letters")["messages"]
    assert sorted(letter["body"] for letter in letters) == ["b1", "c1"]
    reasons = {letter["headers"]["notify-dead-letter-reason"] for letter in letters}
    assert reasons == {"looked at (skipped); the last attempt: no such account"}
    actions = admin(url, "GET", f"actions?target={unique}")["actions"]
    assert [action["what"] for action in actions[:3]] == ["held_key.skip", "held_key.release", "held_key.retry"]


def test_nothing_chosen_is_refused(notify_server: InMemoryServer, unique: str) -> None:
    subscribe(notify_server.url, unique, unique, "ordered", **HOLD)
    assert refusal(notify_server.url, "POST", f"groups/{unique}/held-keys/skip") == (422, "invalid_schema")
    assert ask(notify_server.url, "GET", f"/v1/admin/groups/{unique}-none/held-keys")[0] == 404


def test_another_mode_is_refused(notify_server: InMemoryServer, unique: str) -> None:
    path = f"/v1/groups/{unique}/subscriptions/{unique}"
    for mode, on_exhausted in (("shared", "hold"), ("ordered", "wait")):
        status, problem = ask(notify_server.url, "PUT", path, {"mode": mode, "on_exhausted": on_exhausted})
        assert (status, problem["code"]) == (422, "invalid_schema")
        admin_path = f"groups/{unique}/subscriptions/{unique}"
        assert refusal(notify_server.url, "PUT", admin_path, mode=mode, on_exhausted=on_exhausted)[0] == 422


@pytest.mark.long
def test_held_keys_outlast_a_kill(killed_server: ServerProcess, unique: str) -> None:
    url = killed_server.url
    subscribe(url, unique, unique, "ordered", **HOLD)
    publish(url, unique, ["a1", "a2", "b1"], key=True)
    caller = Caller(url, unique, "x")
    for _ in range(2):
        received = {m["body"]: m for m in caller.receive(unique, wait=30)}
        assert caller.settle([received.pop("a1")], "retry", delay=0, reason="boom") == [200]
        if received:
            assert caller.settle(list(received.values())) == [200]
    before = held(url, unique)
    assert [row["key"] for row in before] == ["a"]
    killed_server.kill()
    killed_server.start()
    assert caller.receive(unique) == []
    assert held(url, unique) == before
    decide(url, unique, "release", all=True)
    killed_server.kill()
    killed_server.start()
    assert held(url, unique) == []
    fail(caller, unique, times=1)
    assert held(url, unique) == []
    fail(caller, unique, times=1)
    decide(url, unique, "skip", all=True)
    killed_server.kill()
    killed_server.start()
    assert bodies(caller.receive(unique, wait=30)) == ["a2"]
    assert [m["body"] for m in admin(url, "GET", f"groups/{unique}/dead-letters")["messages"]] == ["a1"]


def test_a_clean_stop_keeps_them_too(killed_server: ServerProcess, unique: str) -> None:
    """A stop writes a checkpoint, which the next start reads instead of the records."""
    url = killed_server.url
    subscribe(url, unique, unique, "ordered", **HOLD)
    publish(url, unique, ["a1", "a2", "b1"], key=True)
    fail(Caller(url, unique, "x"), unique)
    decide(url, unique, "release", key="b")
    before = held(url, unique)
    killed_server.stop()
    killed_server.start()
    assert [row["key"] for row in held(url, unique)] == ["a"]
    fail(Caller(url, unique, "x"), unique, times=1)  # b1 has its attempts again
    assert held(url, unique) == before


@pytest.mark.long
@pytest.mark.parametrize("way", ["backup", "shipped segments"])
def test_held_keys_are_restored(way: str, tmp_path: Path, unique: str) -> None:
    """With their reasons and counts; what waits for them waits, and a decision before that is not forgotten."""
    server = ServerProcess(tmp_path / "data").start()
    try:
        subscribe(server.url, unique, unique, "ordered", **HOLD)
        publish(server.url, unique, ["a1", "b1", "c1", "a2", "b2"], key=True)
        fail(Caller(server.url, unique, "x"), unique)
        decide(server.url, unique, "release", key="b")
        decide(server.url, unique, "skip", key="c")
        before = held(server.url, unique)
        assert [row["key"] for row in before] == ["a"]
        if way == "backup":
            code, said = cli("backup", str(tmp_path / "copy"), "--url", server.url, "--reason", "r")
            assert code == 0, said
    finally:
        server.stop()
    words = [str(tmp_path / "copy")] if way == "backup" else ["--from", shipped(tmp_path / "data" / "log", tmp_path)]
    code, said = cli("restore", *words, "--data-dir", str(tmp_path / "new"))
    assert code == 0, said
    restored = ServerProcess(tmp_path / "new").start()
    try:
        nothing_read = [row | {"waiting": 0} for row in before]
        assert held(restored.url, unique) == nothing_read
        caller = Caller(restored.url, unique, "x")
        came = caller.receive(unique, wait=30)
        assert bodies(came) == ["b1"] and caller.settle(came) == [200]
        decide(restored.url, unique, "skip", key="a")
        assert sorted(bodies(caller.receive(unique, wait=30))) == ["a2", "b2"]
        letters = admin(restored.url, "GET", f"groups/{unique}/dead-letters")["messages"]
        assert sorted(letter["body"] for letter in letters) == ["a1", "c1"]
    finally:
        restored.stop()


def test_a_purge_lets_its_key_go_on(notify_server: InMemoryServer, unique: str) -> None:
    url = notify_server.url
    subscribe(url, unique, unique, "ordered", **HOLD)
    publish(url, unique, ["a1", "a2"], key=True)
    fail(Caller(url, unique, "x"), unique)
    admin(url, "POST", f"topics/{unique}/purge", {"before": "latest", "force": True, "reason": "a test's leftovers"})
    assert held(url, unique) == []
    publish(url, unique, ["a3"], key=True)
    assert bodies(Caller(url, unique, "x").receive(unique, wait=30)) == ["a3"]


def test_alarms_metrics_and_message(unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "MOST_HELD", 1)
    with InMemoryServer(alarm_every_seconds=0.1) as server:
        url = server.url
        subscribe(url, unique, unique, "ordered", **HOLD)
        publish(url, unique, ["a1", "a2"], key=True)
        fail(Caller(url, unique, "x"), unique)
        eventually(lambda: alarms(url) == [("held_keys", unique), ("held_up", unique)], "the alarms")
        publish(url, unique, ["b1"], key=True)
        assert Caller(url, unique, "x").receive(unique) == []
        reasons = admin(url, "GET", f"groups/{unique}")["held_back"]
        assert reasons[0].startswith("1 key is held") and f"Queue {unique}/0 waits" in reasons[1]
        assert admin(url, "GET", f"groups/{unique}/held-keys")["stopped"] == [f"{unique}/0"]
        assert metric(url, f'notify_held_keys{{group="{unique}"}}') == metric(url, "notify_held_total") == 1
        assert metric(url, f'notify_held_key_oldest_seconds{{group="{unique}"}}') > 0
        message = held(url, unique)[0]["id"]
        timeline = admin(url, "GET", f"messages/{message}")["timeline"]
        assert timeline[-1]["event"] == "attempt 2 failed, and its key is held"
        decide(url, unique, "retry", all=True)
        eventually(lambda: alarms(url) == [], "the alarms to clear")
        assert sorted(bodies(Caller(url, unique, "x").receive(unique, wait=30))) == ["a1", "b1"]


def alarms(url: str) -> list[tuple[str, str]]:
    """The alarms about groups that hold keys."""
    raised = admin(url, "GET", "alarms")["alarms"]
    return sorted((alarm["name"], alarm["target"]) for alarm in raised if alarm["name"].startswith("held"))


def test_the_console_shows_them_and_decides(notify_server: InMemoryServer, unique: str) -> None:
    url = notify_server.url
    subscribe(url, unique, unique, "ordered", **HOLD)
    publish(url, unique, ["a1", "b1"], key=True)
    fail(Caller(url, unique, "x"), unique, reason="no such <account>")
    assert f"/groups/{unique}/held-keys" in ask(url, "GET", f"/groups/{unique}")[1]
    page = str(ask(url, "GET", f"/groups/{unique}/held-keys")[1])
    assert "2 keys are held" in page and "no such &lt;account&gt;" in page
    rows = {row["key"]: row["id"] for row in held(url, unique)}
    form = str(ask(url, "GET", f"/do/held-keys.skip?group={unique}&ids={rows['a']}")[1])
    assert rows["a"] in form and "delivered without the effect of the skipped ones" in form
    fields = {"group": unique, "ids": rows["a"], "reason": "booked by hand", "step": "do"}
    status, done = ask(
        url, "POST", "/do/held-keys.skip", urlencode(fields).encode(), kind="application/x-www-form-urlencoded"
    )
    assert status == 200 and "1 key: the message becomes a dead letter" in str(done)
    assert [row["key"] for row in held(url, unique)] == ["b"]


def test_commands_retry_skip_and_release_held_keys(
    notify_server: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = notify_server.url
    monkeypatch.setenv("NOTIFY_URL", url)
    status, _ = cli("group", "subscribe", unique, unique, "--mode", "ordered", "--on-exhausted", "hold",
                    "--max-attempts", "1", "--reason", "test")  # fmt: skip
    assert status == 0
    publish(url, unique, ["a1", "b1", "c1"], key=True)
    fail(Caller(url, unique, "x"), unique, times=1)
    status, answer = cli("held-key", "list", unique, "--json")
    assert status == 0 and answer["of"] == 3 and {row["key"] for row in answer["held"]} == {"a", "b", "c"}
    assert "no such account" in cli("held-key", "list", unique)[1]["text"]
    why = ("--reason", "the account exists now")
    status, told = cli("held-key", "retry", unique, "--key", "a", "--dry-run", *why)
    assert status == 0 and "1 key: one more attempt" in told["text"]
    assert cli("held-key", "retry", unique, "--key", "a", *why)[0] == 0
    (of_b,) = [row["id"] for row in answer["held"] if row["key"] == "b"]
    assert cli("held-key", "skip", unique, "--id", of_b, *why)[0] == 0
    assert cli("held-key", "release", unique, "--all", *why)[0] == 0
    assert held(url, unique) == []
    assert cli("held-key", "skip", unique, *why)[0] == 2


def test_a_consumer_asks_for_it(notify_server: InMemoryServer, unique: str) -> None:
    consumer = Consumer(notify_server.url, group=unique)
    handled: list[str] = []

    @consumer.subscribe(
        unique, mode="ordered", start="earliest", max_attempts=1, retry_min=0.01, retry_max=0.01, on_exhausted="hold"
    )
    def handle(message: ReceivedMessage) -> None:
        handled.append(message.text)
        if message.text == "a1" and len(held_before) == 0:
            raise LookupError("no such account")

    held_before: list[dict[str, Any]] = []
    publish(notify_server.url, unique, ["a1", "a2", "b1"], key=True)
    with running(consumer):
        eventually(lambda: consumer.handled == 1 and held(notify_server.url, unique) != [], "the key to be held")
        held_before += held(notify_server.url, unique)
        decide(notify_server.url, unique, "retry", key="a")
        eventually(lambda: consumer.handled == 3, "the key to continue")
    assert [text for text in handled if text[0] == "a"] == ["a1", "a1", "a2"]
    assert "LookupError: no such account" in held_before[0]["reason"]


@pytest.mark.long
def test_an_async_consumer_asks_for_it(notify_server: InMemoryServer, unique: str) -> None:
    consumer = AsyncConsumer(notify_server.url, group=unique)

    @consumer.subscribe(unique, mode="ordered", start="earliest", max_attempts=1, on_exhausted="hold")
    async def handle(message: ReceivedMessage) -> None:
        raise LookupError("no such account")

    publish(notify_server.url, unique, ["a1"], key=True)
    with running(consumer):
        eventually(lambda: holds_some(notify_server.url, unique), "the key to be held")
    assert [row["key"] for row in held(notify_server.url, unique)] == ["a"]


@pytest.mark.parametrize("options", [{"mode": "shared", "on_exhausted": "hold"}, {"on_exhausted": "stop"}])
def test_a_consumer_refuses_what_no_server_takes(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="on_exhausted"):
        Consumer("http://127.0.0.1:1", group="g").subscribe("t", **options)


def test_kafka_refuses_in_one_sentence() -> None:
    consumer = Consumer("kafka://127.0.0.1:1", group="g")
    consumer.subscribe("t", mode="ordered", on_exhausted="hold")(print)
    with pytest.raises(InvalidRequest, match="needs the queues of a Notify server"):
        consumer.run(signals=False)
