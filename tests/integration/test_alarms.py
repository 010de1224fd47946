"""Each alarm is raised and cleared; webhooks are signed, go only to listed hosts, and follow no redirect."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from notify.errors import Conflict, InvalidRequest, Unavailable
from notify.protocol.limits import OLD_SLOT_TRANSACTIONS
from notify.server import webhooks
from notify.server.database import open_database
from notify.server.settings import Settings
from notify.server.watch import silences
from notify.server.watch.alarm import MEANING
from notify.testing import InMemoryServer
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import Caller, publish, subscribe
from tests.support.http import REASON, admin, ask, call, metric, post, refusal
from tests.support.transactions import half_request, new_id
from tests.support.webhook import SECRET, Receiver


@pytest.fixture
def watched(receiver: Receiver) -> Iterator[InMemoryServer]:
    """A server that posts its alarms, and whose clock only the test moves."""
    server = InMemoryServer(
        webhook_hosts=receiver.place,
        webhook_secret=SECRET,
        alarm_webhook=receiver.url,
        alarm_every_seconds=0.1,
        alarm_doubt_seconds=600,
        alarm_no_consumer_seconds=600,
        alarm_bridge_seconds=600,
        check_attempts=1,
    )
    with server:
        server.freeze()
        yield server


def half(server: InMemoryServer, group: str) -> str:
    """Store a half that the server checks after half a second; return its id."""
    request = half_request(group, body='{"n": 1}')
    request["transactions"][0]["check_after"] = 0.5
    post(server.url, "/v1/transactions", request)
    return str(request["transactions"][0]["id"])


def test_a_slot_that_keeps_too_much_is_an_alarm_until_it_keeps_less(watched: InMemoryServer) -> None:
    """The bridge of a PostgreSQL reports what is kept for it with each batch."""
    url = watched.url
    batch = {"epoch": 1, "expected_position": "", "position": ""}
    post(url, "/v1/bridge/shop/batches", batch | {"claim": True})

    def report(kept: int, left: int | None, age: int) -> None:
        post(url, "/v1/bridge/shop/batches", batch | {"retained": kept, "retained_left": left, "slot_age": age})

    report(40 << 20, 60 << 20, 1000)
    assert metric(url, 'notify_bridge_retained_bytes{source="shop"}') == 40 << 20
    assert metric(url, 'notify_bridge_retained_left_bytes{source="shop"}') == 60 << 20
    assert metric(url, 'notify_bridge_slot_age_transactions{source="shop"}') == 1000
    report(60 << 20, 40 << 20, 1000)
    eventually(lambda: names(watched) == {"retained_log"}, "the alarm of the retained log")
    (alarm,) = admin(url, "GET", "overview")["alarms"]
    assert alarm["target"] == "shop" and "60 MB" in alarm["text"] and "40 MB more" in alarm["text"]
    report(40 << 20, 60 << 20, OLD_SLOT_TRANSACTIONS + 1)
    eventually(lambda: names(watched) == {"old_slot"}, "the alarm of the slot's age")
    report(40 << 20, None, 1000)
    eventually(lambda: not names(watched), "both to be cleared")


def names(server: InMemoryServer) -> set[str]:
    return {alarm["name"] for alarm in admin(server.url, "GET", "overview")["alarms"]}


def test_alarms_are_raised_said_and_cleared(watched: InMemoryServer, receiver: Receiver) -> None:
    url = watched.url
    doubt, parked = half(watched, "away"), half(watched, "unsure")
    watched.advance(0.5)
    (check,) = post(url, "/v1/checks/poll", {"producer_group": "unsure", "instance": "i", "max": 1})["checks"]
    answer = {"id": parked, "outcome": "UNKNOWN", "check": check["token"]}
    post(url, "/v1/transactions/outcomes", {"producer_group": "unsure", "outcomes": [answer]})
    subscribe(url, "nobody", "lonely")
    publish(url, "lonely", ["x"])
    admin(url, "POST", "audits", {"verdict": "FINDINGS", "counts": {"LOST": 1}})
    batch = {"epoch": 1, "expected_position": "", "position": "", "claim": True}
    post(url, "/v1/bridge/shop/batches", batch)
    eventually(lambda: names(watched) == {"parked", "audit"}, "the alarms that need no time")
    assert metric(url, 'notify_alarms{alarm="parked"}') == 1
    wanted = {"in_doubt", "parked", "no_consumers", "audit", "bridge"}

    def all_are_raised() -> bool:
        watched.advance(300)
        return names(watched) == wanted

    with structlog.testing.capture_logs() as logged:
        eventually(all_are_raised, "all alarms")
    assert "alarm_raised" in {entry["event"] for entry in logged}
    for name, action in ((doubt, "rollback"), (parked, "commit")):
        admin(url, "POST", f"transactions/{name}/{action}", {})
    admin(url, "POST", "groups/nobody/pause", {})
    admin(url, "POST", "audits", {"verdict": "PASS", "counts": {}})
    eventually(lambda: names(watched) == {"bridge"}, "the others to be cleared")
    eventually(lambda: len(receiver.received) >= 9, "every change to be posted")
    # Each change is posted once, not at every look.
    said = Counter((notice["alarm"], notice["name"]) for notice in receiver.received)
    assert said == Counter([("raised", name) for name in wanted] + [("cleared", name) for name in wanted - {"bridge"}])
    assert receiver.unsigned == 0
    assert metric(url, 'notify_alarms{alarm="parked"}') == 0


def test_a_consumer_that_left_with_a_long_lease_does_not_count(watched: InMemoryServer) -> None:
    url = watched.url
    subscribe(url, "workers", "tasks")
    publish(url, "tasks", ["a", "b"])
    caller = Caller(url, "workers", "dead")
    (held,) = caller.receive("tasks", max=1, lease=3600)

    def state() -> str:
        return str(admin(url, "GET", "groups/workers")["instances"][0]["state"])

    watched.advance(50)
    caller.settle([held], "renew", lease=3600)  # it asks for nothing, and lives
    watched.advance(50)
    assert state() == "ok"
    watched.advance(50)
    assert state() == "gone"

    def is_raised() -> bool:
        watched.advance(100)
        return names(watched) == {"no_consumers"}

    eventually(is_raised, "the alarm, though the lease continues")


def test_a_topic_that_no_running_consumer_asks_for_is_an_alarm(watched: InMemoryServer) -> None:
    """A new version of a service that had dropped a handler left its messages waiting, and nothing said so."""
    url = watched.url
    for topic in ("kept", "dropped"):
        subscribe(url, "workers", topic)
        publish(url, topic, ["a"])
    caller = Caller(url, "workers", "new")

    def alarms() -> list[dict[str, Any]]:
        watched.advance(30)
        if received := caller.receive("kept"):
            caller.settle(received)
        return list(admin(url, "GET", "overview")["alarms"])

    (alarm,) = eventually(alarms, "the alarm")
    assert (alarm["name"], alarm["target"]) == ("unread_topic", "workers/dropped")
    assert alarm["text"] == "No running consumer of group workers asks for topic dropped; 1 message is waiting"
    caller.receive("dropped", max=1)
    eventually(lambda: not admin(url, "GET", "overview")["alarms"], "the alarm to be cleared")


def test_dead_letters_and_stuck_consumers_are_alarms_until_they_are_seen_to(watched: InMemoryServer) -> None:
    url = watched.url
    subscribe(url, "workers", "tasks", max_attempts=1000)
    publish(url, "tasks", ["a", "b", "c"])
    caller = Caller(url, "workers", "w")
    caller.settle(caller.receive("tasks", max=2), "dead_letter", reason="no such customer")
    eventually(lambda: names(watched) == {"dead_letters"}, "the alarm")
    (alarm,) = admin(url, "GET", "overview")["alarms"]
    assert (alarm["target"], alarm["severity"]) == ("workers", "warning") and "has 2 unresolved dead letters" in alarm[
        "text"
    ]
    assert "redrive" in alarm["meaning"]
    status = admin(url, "GET", "status")
    assert status["alarms"] == [{"name": "dead_letters", "target": "workers", "severity": "warning"}]
    assert status["waiting"] == {"in_doubt": 0, "parked": 0, "refused": 0, "dead_letters": 2, "held_keys": 0}
    ids = [m["id"] for m in admin(url, "GET", "groups/workers/dead-letters")["messages"]]
    admin(url, "POST", "groups/workers/dead-letters/redrive", {"ids": ids[:1]})
    admin(url, "POST", "groups/workers/dead-letters/redrive", {"ids": ids[:1]})  # which sends nothing
    assert admin(url, "GET", "overview")["queues"]["dead_letters"] == 1
    assert admin(url, "GET", "dead-letters")["groups"] == [{"group": "workers", "count": 1, "redriven": 1}]
    watched.restart()  # what it has counted is counted again
    eventually(lambda: admin(url, "GET", "overview")["queues"]["dead_letters"] == 1, "the count")
    admin(url, "POST", "groups/workers/dead-letters/redrive", {"ids": ids[1:]})
    eventually(lambda: names(watched) == set(), "the alarm to be cleared")
    status = admin(url, "GET", "status")
    assert (status["alarms"], status["waiting"]["dead_letters"]) == ([], 0)
    caller.receive("tasks", max=10, lease=1)
    watched.advance(2)

    def is_raised() -> bool:
        watched.advance(30)
        caller.receive("tasks", max=10, lease=1, wait=0)
        return names(watched) == {"consumers"}

    eventually(is_raised, "the alarm")
    (alarm,) = admin(url, "GET", "overview")["alarms"]
    assert "1 stuck" in alarm["text"]
    watched.advance(2)
    caller.settle(caller.receive("tasks", max=10))
    eventually(lambda: names(watched) == set(), "the alarm to be cleared")


def test_refused_messages_of_a_source_are_shown_until_somebody_decides(watched: InMemoryServer) -> None:
    url = watched.url
    line = {"id": new_id(), "topic": "order.placed", "code": "too_large", "detail": "the body is <too> long"}
    path = "/v1/sources/shop-db/refused"
    assert ask(url, "PUT", path, {"waiting": 3, "transactions": [line]})[0] == 200
    eventually(lambda: "refused" in names(watched), "the alarm")
    assert metric(url, 'notify_refused_transactions{source="shop-db"}') == 3
    (row,) = admin(url, "GET", "refused")["sources"]
    assert (row["source"], row["waiting"], row["transactions"]) == ("shop-db", 3, [line])
    page = str(call(url, "GET", "/nodes"))
    assert line["id"] in page and "&lt;too&gt;" in page and "notify refused" in page
    assert ask(url, "PUT", path, {"waiting": 0})[0] == 200
    eventually(lambda: "refused" not in names(watched), "the alarm to be cleared")
    assert line["id"] not in str(call(url, "GET", "/nodes"))
    for bad in ({"waiting": -1}, {"waiting": 1, "transactions": [line] * 21}):
        assert ask(url, "PUT", path, bad)[0] == 422
    ask(url, "PUT", path, {"waiting": 3})
    watched.advance(3601)
    assert admin(url, "GET", "refused")["sources"] == []


def test_transactions_left_behind_are_shown_until_they_are_sent(watched: InMemoryServer) -> None:
    url, path = watched.url, "/v1/transactions/left-behind"
    report = {"producer_group": "shop", "source": "shop-db", "transactions": 3, "seconds": 90}
    assert ask(url, "POST", path, report)[0] == 200
    eventually(lambda: "left_behind" in names(watched), "the alarm")
    labels = '{producer_group="shop",source="shop-db"}'
    assert metric(url, f"notify_left_behind_transactions{labels}") == 3
    assert metric(url, f"notify_left_behind_seconds{labels}") >= 90
    (row,) = admin(url, "GET", "left-behind")["left_behind"]
    assert (row["source"], row["producer_group"], row["transactions"]) == ("shop-db", "shop", 3)
    assert "notify check" in str(call(url, "GET", "/nodes"))
    assert ask(url, "POST", path, report | {"transactions": 0})[0] == 200
    eventually(lambda: "left_behind" not in names(watched), "the alarm to be cleared")
    for bad in ({"transactions": -1}, {"seconds": -1}, {"source": ""}, {"producer_group": "a b"}):
        assert ask(url, "POST", path, report | bad)[0] == 422
    assert ask(url, "POST", path, report | {"seconds": 1})[0] == 200
    watched.advance(3601)
    assert admin(url, "GET", "left-behind")["left_behind"] == []


def test_each_alarm_has_a_meaning_in_the_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "alarms.md").read_text()
    for name, meaning in MEANING.items():
        assert f"| `{name}` | {meaning} |" in guide, f"docs/alarms.md lacks: | `{name}` | {meaning} |"


def test_checks_go_to_a_webhook(watched: InMemoryServer, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notify.server.core.check_webhooks.RETRY_SECONDS", 0.05)
    url, wanted = watched.url, {"COMMIT": "COMMITTED", "ROLLBACK": "ROLLED_BACK"}
    outcomes: dict[str, str] = {}
    receiver.answer = lambda asked: {
        "outcomes": [{"id": c["id"], "outcome": outcomes.get(c["id"], "UNKNOWN")} for c in asked.get("checks", [])]
    }
    elsewhere = {"webhooks": {"php": "http://192.0.2.1/x"}}
    assert refusal(url, "PUT", "check-webhooks", **elsewhere) == (422, "invalid_webhook")
    receiver.status = 503  # while the webhook is unreachable no check is used up
    admin(url, "PUT", "check-webhooks", {"webhooks": {"php": receiver.url}})
    for outcome in wanted:
        outcomes[half(watched, "php")] = outcome

    def states() -> list[str]:
        return [admin(url, "GET", f"transactions/{name}")["state"] for name in outcomes]

    watched.advance(0.5)
    eventually(lambda: any("checks" in asked for asked in receiver.received), "the first check")
    assert states() == ["PREPARED", "PREPARED"]
    receiver.status = 200

    def are_decided() -> bool:
        watched.advance(1)
        shown = states()
        assert "PARKED" not in shown
        return shown == list(wanted.values())

    eventually(are_decided, "the webhook's answers to be carried out")
    assert receiver.unsigned == 0
    checks = [check for asked in receiver.received for check in asked.get("checks", [])]
    assert checks[0]["messages"][0]["body"] == '{"n": 1}'
    shown = admin(url, "GET", f"transactions/{next(iter(outcomes))}")
    assert [check["what"] for check in shown["checks"]][-1] == "COMMIT"


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
        allowed = Settings(webhook_hosts=f"{receiver.place},{other.place}", webhook_secret=SECRET)
        with pytest.raises(Unavailable, match="307"):
            asyncio.run(webhooks.post(receiver.url, b"{}", allowed))
        assert len(receiver.received) == 1 and other.received == []
    finally:
        other.close()


def test_the_secret_is_not_shown(watched: InMemoryServer) -> None:
    shown = admin(watched.url, "GET", "settings")
    row = next(s for s in shown["settings"] if s["name"] == "webhook_secret")
    assert row["value"] == "(secret)" and SECRET not in json.dumps(shown)


def test_a_stored_filter_that_is_refused_now_stops_nothing_but_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server starts with a stored filter that it refuses now: an alarm says so, and its subscription waits."""
    costly = "headers.all(a, headers.all(b, headers.all(c, true)))"
    with InMemoryServer(alarm_every_seconds=0.05) as server:
        with monkeypatch.context() as earlier:
            earlier.setattr("notify.protocol.filter.check_cost", lambda text: 1.0)
            for topic in ("a", "b"):
                subscribe(server.url, "g", topic, filter=costly if topic == "a" else "")
        publish(server.url, "a", ["one"])
        publish(server.url, "b", ["two"])
        server.restart()

        def received() -> list[str]:
            asked = {"instance": "i", "max": 10, "wait": 0, "lease": 30}
            return [m["body"] for m in post(server.url, "/v1/groups/g/receive", asked)["messages"]]

        def raised() -> list[tuple[str, str]]:
            alarms = admin(server.url, "GET", "overview")["alarms"]
            return [(a["name"], a["target"]) for a in alarms if a["name"] == "filter"]

        assert received() == ["two"] and received() == []
        eventually(lambda: raised() == [("filter", "g/a")], "the alarm")
        assert "macro" in admin(server.url, "GET", "overview")["alarms"][0]["text"]
        subscribe(server.url, "g", "a", filter='!("x" in headers)')
        assert received() == ["one"]
        eventually(lambda: raised() == [], "the alarm to be cleared")


def test_a_silenced_alarm_is_shown_and_not_said(watched: InMemoryServer, receiver: Receiver) -> None:
    url = watched.url
    silence = {"target": "workers", "seconds": 3600}
    said = admin(url, "POST", "alarms/dead_letters/silence", silence)["result"]
    assert (said["name"], said["target"], said["reason"]) == ("dead_letters", "workers", REASON)
    for group in ("workers", "others"):
        subscribe(url, group, "tasks")
    publish(url, "tasks", ["a"])
    for group in ("workers", "others"):
        caller = Caller(url, group, "w")
        caller.settle(caller.receive("tasks"), "dead_letter", reason="no such customer")
    eventually(lambda: len(admin(url, "GET", "alarms")["alarms"]) == 2, "both alarms")
    shown = {alarm["target"]: alarm["silence"] for alarm in admin(url, "GET", "overview")["alarms"]}
    assert shown["others"] is None and shown["workers"]["until"] == said["until"]
    assert metric(url, 'notify_alarms{alarm="dead_letters"}') == 1
    page = str(call(url, "GET", "/"))
    assert "1 silenced" in page and "Silence dead_letters of others" in page
    eventually(lambda: receiver.received, "the alarm that is heard")
    code, listed = cli("alarm", "list", "--url", url, "--json")
    assert code == 0 and [s["target"] for s in listed["silences"]] == ["workers"]
    admin(url, "POST", "groups/others/dead-letters/purge", {"before": "latest"})
    eventually(lambda: len(receiver.received) == 2, "it to be cleared")
    assert cli("overview", "--url", url, "--json")[0] == 0, "a silenced alarm is no bad news"
    watched.restart()
    eventually(lambda: names(watched) == {"dead_letters"}, "the alarm after a restart")
    assert cli("overview", "--url", url, "--json")[0] == 0
    # It is said when the silence is over; here somebody ends it.
    admin(url, "POST", "alarms/dead_letters/unsilence", {"target": "workers"})
    eventually(lambda: len(receiver.received) == 3, "it to be said")
    assert [(n["alarm"], n["target"]) for n in receiver.received] == [
        ("raised", "others"), ("cleared", "others"), ("raised", "workers"),
    ]  # fmt: skip
    assert refusal(url, "POST", "alarms/dead_letters/unsilence", target="workers")[0] == 404
    assert refusal(url, "POST", "alarms/no_such/silence", seconds=60)[0] == 404
    assert refusal(url, "POST", "alarms/disk/silence", seconds=31 * 86_400)[0] == 422
    whats = [action["what"] for action in admin(url, "GET", "actions?what=alarm")["actions"]]
    assert whats == ["alarm.unsilence", "alarm.silence"]


def test_a_silence_ends_by_itself(watched: InMemoryServer) -> None:
    admin(watched.url, "POST", "alarms/disk/silence", {"seconds": 60})
    assert len(admin(watched.url, "GET", "alarms")["silences"]) == 1
    watched.advance(61)
    assert admin(watched.url, "GET", "alarms")["silences"] == []


def test_silences_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silences, "MOST_SILENCES", 2)
    database = open_database(str(tmp_path))

    async def fill() -> None:
        held = silences.Silences(database)
        for n, until in enumerate((10, 20)):
            await held.put(silences.Silence("disk", str(n), until, "ann", "why"), 0)
        with pytest.raises(Conflict):
            await held.put(silences.Silence("disk", "x", 30, "ann", "why"), 0)
        await held.put(silences.Silence("disk", "0", 15, "ann", "longer"), 0)
        await held.put(silences.Silence("disk", "x", 30, "ann", "why"), 16)  # one is over
        later = silences.Silences(database)
        await later.load()
        assert [s.target for s in later.listed(16)] == ["1", "x"] == [s.target for s in held.listed(16)]

    try:
        asyncio.run(fill())
    finally:
        database.dispose()
