"""Operators' commands: their output with --json, their effects, their exit codes."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.check import CheckMessageListener, HalfMessage, Outcome
from notify.client import AsyncTransactionProducer, Message, TransactionProducer
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import Command, cli
from tests.support.groups import Caller, die, drain, publish, subscribe
from tests.support.http import metric, post
from tests.support.transactions import half_request


def test_each_command_takes_json_and_has_its_exit_code(
    engine: sa.Engine, engine_url: str, server: ServerProcess, unique: str
) -> None:
    """Each command works with --json, and has its exit code."""
    url = ("--url", server.url, "--json")
    assert cli("topic", "create", unique, "--queues", "2", "--reason", "test", *url)[0] == 0
    assert unique in [t["name"] for t in cli("topic", "list", *url)[1]["topics"]]
    with TransactionProducer(server.url, group=unique, engine=engine, mode="outbox") as producer:
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "x"))
    assert cli("relay", "--dsn", engine_url, "--once", *url) == (0, {"sent": 1, "refused": 0})
    code, report = cli("doctor", "--dsn", engine_url, "--url", server.url, "--json")
    assert report["done"] == 1 and report["source"], report
    assert cli("topic", "create", unique, "--queues", "1", "--reason", "test", *url)[0] == 2  # queues cannot shrink
    code, answer = cli("group", "show", f"nobody-{unique}", *url)
    assert code == 2 and "nobody" in answer["text"]
    assert cli("transaction", "show", "nonsense", *url)[0] == 2
    assert cli("topic", "list", "--url", "http://127.0.0.1:9")[0] == 2
    assert cli("nonsense")[0] == 2
    assert cli("serve", "--host", "0.0.0.0")[0] == 2
    code, answer = cli("serve", "--host", "0.0.0.0", "--access")
    assert code == 2 and "--tls-certificate" in answer["text"] and "NOTIFY_PLAINTEXT" in answer["text"], answer


def test_an_error_in_json(server: ServerProcess, unique: str) -> None:
    """Without --json it is a line on stderr, which other programs had to read by its words."""
    code, answer = cli("group", "show", unique, "--url", server.url, "--json")
    assert code == 2 and answer["error"]["code"] == "not_found" and answer["error"]["status"] == 404
    done = subprocess.run(
        [sys.executable, "-m", "notify", "topic", "list", "--url", "http://127.0.0.1:9", "--json"],
        capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr == ""
    assert json.loads(done.stdout)["error"]["code"] == "unavailable"


def test_a_list_is_shown_again_while_somebody_waits(server: ServerProcess, unique: str) -> None:
    watching = Command("group", "list", "--watch", "0.1", "--json", "--url", server.url)
    watching.start()
    try:
        eventually(lambda: any('"groups"' in line for line in watching.output), "the first list")
        subscribe(server.url, unique, unique)
        eventually(lambda: any(unique in line for line in watching.output), "a list with the new group")
        assert watching.process is not None
        watching.process.send_signal(signal.SIGINT)
        assert watching.process.wait(PATIENCE_SECONDS) == 0, watching.output
    finally:
        watching.close()


def test_top_writes_each_update_to_a_pipe_at_once(memory: InMemoryServer) -> None:
    """Off a terminal it wrote nothing before its end, and was told to run for ever."""
    with closing(Command("top", "--interval", "0.2", "--url", memory.url).start()) as top:
        eventually(lambda: sum(line.startswith("Notify ") for line in top.output) >= 2, "two updates")


@pytest.mark.parametrize("database", ["sqlite"])
def test_check_says_what_it_answered(memory: InMemoryServer, engine: sa.Engine, unique: str) -> None:
    """It decided transactions without a word."""
    dsn = engine.url.render_as_string(hide_password=False)
    with engine.connect() as connection:
        source = connection.execute(sa.text("SELECT id FROM notify_source")).scalar_one()
    half = half_request(unique, topic=unique)
    half["source"] = source
    post(memory.url, "/v1/transactions", half)
    name = half["transactions"][0]["id"]
    with closing(Command("check", "--dsn", dsn, "--group", unique, "--url", memory.url).start()) as check:
        eventually(lambda: any(name in line and "ROLLBACK" in line for line in check.output), "the answer in its log")


def test_admin_resolves_a_stuck_transaction(server: ServerProcess, unique: str) -> None:
    async def stuck() -> str:
        async with AsyncTransactionProducer(server.url, group=unique) as producer:
            return (await producer.prepare([Message(unique, "stuck")])).id

    subscribe(server.url, unique, unique)
    name = asyncio.run(stuck())
    url = ("--url", server.url, "--json")
    listed = cli("transaction", "list", "--producer-group", unique, *url)[1]["transactions"]
    assert [t["id"] for t in listed] == [name]
    assert cli("transaction", "commit", name, "--reason", "seen in the database", "--dry-run", *url)[1]["dry_run"]
    assert cli("transaction", "commit", name, "--reason", "seen", *url)[1]["result"]["state"] == "COMMITTED"
    assert cli("transaction", "rollback", name, "--reason", "no", *url)[0] == 2
    assert [m["body"] for m in drain(server.url, unique, unique, 1)] == ["stuck"]
    timeline = cli("message", "show", name + ".0", *url)[1]
    assert [e["event"] for e in timeline["timeline"]][:2] == ["half stored", "COMMITTED"]
    assert (timeline["timeline"][-1]["event"], timeline["timeline"][-1]["group"]) == ("acknowledged", unique)
    assert timeline["timeline_whole"]
    assert timeline["groups"][0]["state"] == "settled"


def test_transactions_are_decided_together_and_a_preview_is_the_consoles(server: ServerProcess, unique: str) -> None:
    async def stuck() -> list[str]:
        async with AsyncTransactionProducer(server.url, group=unique) as producer:
            return [(await producer.prepare([Message(unique, "stuck")])).id for _ in range(3)]

    first, *others = asyncio.run(stuck())
    url = ("--url", server.url)
    every = ("rollback", "--all", "--producer-group", unique, "--reason", "none is in the database")
    said = cli("transaction", *every, "--dry-run", *url)[1]["text"]
    assert "dry run, nothing is changed" in said
    assert f"3 transactions of producer group {unique}, in doubt for " in said
    assert "will be rolled back: 3 messages will never be delivered." in said
    assert cli("transaction", "commit", first, "--dry-run", "--reason", "r", *url)[1]["text"].splitlines()[1] == (
        "  The transaction is PREPARED now, and becomes COMMITTED."
    )
    chosen = cli("transaction", "commit", *others, "--reason", "they are there", "--json", *url)[1]["result"]
    assert [item["state"] for item in chosen["items"]] == ["COMMITTED", "COMMITTED"]
    code, job = cli("transaction", *every, "--json", *url)
    assert (code, job["state"], [item["id"] for item in job["items"]]) == (0, "done", [first])
    assert cli("transaction", "ask", "--reason", "r", *url)[0] == 2
    assert cli("transaction", "ask", first, "--all", "--reason", "r", *url)[0] == 2


def test_every_flag_has_an_environment_variable(server: ServerProcess, unique: str, monkeypatch: Any) -> None:
    for name, value in {"NOTIFY_URL": server.url, "NOTIFY_TOPIC_CREATE_QUEUES": "3"}.items():
        monkeypatch.setenv(name, value)
    assert cli("topic", "create", unique, "--reason", "test", "--json")[0] == 0
    made = next(t for t in cli("topic", "list", "--json")[1]["topics"] if t["name"] == unique)
    assert len(made["queues"]) == 3


@pytest.mark.long
def test_pauses_and_flushes_are_kept_over_a_restart(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data").start()
    url = ("--url", server.url, "--json")
    try:
        for flush in ("sync", "async", "memory"):
            assert cli("topic", "create", flush, "--flush", flush, "--reason", "test", *url)[0] == 0
        assert cli("topic", "create", "x", "--flush", "never", "--reason", "test", *url)[0] == 2
        subscribe(server.url, "g", "memory")
        assert cli("group", "pause", "g", "--reason", "test", *url)[1]["result"] == {"paused": True}
        items = [{"topic": topic, "body": "x"} for topic in ("sync", "async", "memory")]
        for item in items:
            answer = post(server.url, "/v1/messages", {"messages": [item]})
            assert answer["items"][0]["flush"] == item["topic"]
        server.kill()  # the kernel's buffers survive the process
        server.start()
        topics = {t["name"]: t for t in cli("topic", "list", *url)[1]["topics"]}
        assert {name: t["flush"] for name, t in topics.items()} == {t: t for t in ("sync", "async", "memory")}
        assert [topics[name]["queues"][0]["end"] for name in ("sync", "async")] == [1, 1]
        assert cli("group", "show", "g", *url)[1]["paused"]
        post(server.url, "/v1/messages", {"messages": items})
        assert drain(server.url, "g", "memory", 0) == []
        assert cli("group", "resume", "g", "--reason", "test", *url)[0] == 0
        assert drain(server.url, "g", "memory", 1)
    finally:
        server.stop()


def test_a_decided_transaction_shows_who_sent_it(server: ServerProcess, unique: str) -> None:
    async def send() -> str:
        async with AsyncTransactionProducer(server.url, group=unique) as producer:
            prepared = await producer.prepare([Message(unique, "x")])
            await prepared.commit()
            return prepared.id

    name = asyncio.run(send())
    answer = cli("transaction", "show", name, "--url", server.url, "--json")[1]
    assert (answer["state"], answer["producer_group"]) == ("COMMITTED", unique)


def test_commands_of_the_queue(server: ServerProcess, unique: str) -> None:
    """Policies, subscriptions, priorities and jobs work with --json; a refusal has its exit code."""
    url = ("--url", server.url, "--json")
    reason = ("--reason", "test")
    policy = ("--ttl", "60", "--backlog", "100", "--backlog-policy", "hold", "--retention-bytes", "1000000")
    assert cli("topic", "create", unique, *policy, *reason, *url)[0] == 0
    topic = next(t for t in cli("topic", "list", *url)[1]["topics"] if t["name"] == unique)
    assert (topic["ttl"], topic["backlog"], topic["backlog_policy"]) == (60, 100, "hold")
    assert cli("topic", "create", unique, "--backlog", "200", *reason, *url)[0] == 0  # the other settings stay
    topic = next(t for t in cli("topic", "list", *url)[1]["topics"] if t["name"] == unique)
    assert (topic["ttl"], topic["backlog"], topic["retention_bytes"]) == (60, 200, 1_000_000)
    options = ("--mode", "ordered", "--tag", "a", "--filter", 'tag == "a"', "--start", "earliest")
    assert cli("group", "subscribe", unique, unique, *options, *reason, *url)[0] == 0
    assert cli("group", "subscribe", unique, f"{unique}.*", *reason, *url)[0] == 0
    assert cli("group", "subscribe", unique, unique, "--filter", "nope ==", *reason, *url)[0] == 2
    shown = cli("group", "show", unique, *url)[1]
    assert shown["subscriptions"][0]["filter"] == 'tag == "a"' and shown["patterns"][0]["topic"] == f"{unique}.*"
    classes = (
        "--class",
        f"high:{unique}",
        "--class",
        "normal",
        "--class",
        "low=2:low.*,least.*",
        "--share",
        f"{unique}=3",
    )
    assert cli("group", "priorities", "set", unique, *classes, *reason, *url)[0] == 0
    answer = cli("group", "priorities", "show", unique, *url)[1]
    assert [(c["name"], c["weight"]) for c in answer["classes"]] == [("high", 6), ("normal", 3), ("low", 2)]
    assert answer["shares"] == {unique: 3} and answer["classes"][2]["topics"] == ["low.*", "least.*"]
    assert cli("group", "priorities", "set", unique, "--class", "a=x:b", *reason, *url)[0] == 2
    code, job = cli("dead-letter", "redrive", unique, "--all", *reason, *url)
    assert code == 0 and (job["state"], job["done"]) == ("done", 0)
    assert cli("job", "show", str(job["id"]), *url)[1]["state"] == "done"
    assert job["id"] in [j["id"] for j in cli("job", "list", *url)[1]["jobs"]]


@pytest.mark.long
def test_commands_of_the_operator(server: ServerProcess, unique: str, tmp_path: Path) -> None:
    """Overview, top, settings, limits, tokens, nodes and actions work with --json, and have exit codes."""
    url = ("--url", server.url, "--json")
    reason = ("--reason", "test")
    code, answer = cli("overview", *url)
    assert code in (0, 1) and answer["queues"]["topics"] >= 0 and (code == 1) == bool(answer["alarms"])
    done = subprocess.run(
        [sys.executable, "-m", "notify.cli.main", "top", "--rounds", "2", "--interval", "0.2", *url],
        capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS,
    )  # fmt: skip
    assert [json.loads(line)["version"] for line in done.stdout.splitlines()] == [answer["version"]] * 2
    code, screen = cli("top", "--rounds", "1", "--url", server.url)
    assert code == 0 and "halves" in screen["text"]
    assert cli("settings", "set", "check_attempts=7", *reason, *url)[0] == 0
    shown = {s["name"]: s["value"] for s in cli("settings", "list", *url)[1]["settings"]}
    assert shown["check_attempts"] == 7
    assert cli("settings", "set", "check_attempts=0", *reason, *url)[0] == 2
    revision = cli("settings", "history", *url)[1]["revisions"][0]["number"]
    assert cli("settings", "set", "check_attempts=", *reason, *url)[0] == 0
    assert cli("settings", "rollback", str(revision - 1), *reason, *url)[0] == 0
    assert cli("limit", "set", "--topic", f"{unique}=5", *reason, *url)[1]["result"]["topics"][unique] == 5
    assert unique not in cli("limit", "set", "--topic", f"{unique}=", *reason, *url)[1]["result"]["topics"]
    code, made = cli("token", "create", unique, "--right", "view", "--days", "1", *reason, *url)
    assert code == 0 and made["token"].startswith("nt_")
    number = next(c["id"] for c in cli("token", "list", *url)[1]["credentials"] if c["name"] == unique)
    assert cli("token", "revoke", number, *reason, *url)[0] == 0
    assert cli("token", "create", unique, "--right", "fly", *reason, *url)[0] == 2
    assert cli("node", "list", *url)[1]["members"]
    assert cli("node", "bridges", *url)[0] == 0
    assert cli("audit-log", *url)[1]["actions"][0]["what"] == "credential.revoke"


def test_doctor_names_groups_in_doubt_that_nobody_answers_for(
    engine: sa.Engine, engine_url: str, memory: InMemoryServer, unique: str
) -> None:
    async def killed_before_its_outcome() -> None:
        async with AsyncTransactionProducer(memory.url, group=unique) as producer:
            await producer.prepare([Message(unique, "x")])

    def findings() -> list[str]:
        _, answer = cli("doctor", "--dsn", engine_url, "--url", memory.url, "--json")
        return [finding for finding in answer["findings"] if unique in finding]

    asyncio.run(killed_before_its_outcome())
    memory.advance(60)
    (finding,) = findings()
    assert "none of its producers answers" in finding and "producer.start()" in finding

    class Undecided(CheckMessageListener):
        topics = (unique,)

        def check(self, half: HalfMessage) -> Outcome:
            return Outcome.UNKNOWN

    with TransactionProducer(memory.url, group=unique) as producer:
        producer.add_check_listener(Undecided())
        eventually(lambda: not findings(), "doctor to see the producer")


@pytest.mark.long
def test_doctor_says_what_to_do_about_an_alarm(memory: InMemoryServer, unique: str) -> None:
    """It printed the alarm's sentence alone."""
    subscribe(memory.url, unique, unique)
    publish(memory.url, unique, ["a"])
    die(Caller(memory.url, unique, "me"), unique, 1, "no such customer")

    def findings() -> list[str]:
        _, answer = cli("doctor", "--url", memory.url, "--json")
        return [finding for finding in answer["findings"] if unique in finding]

    memory.advance(60)
    (finding,) = eventually(findings, "the alarm")
    code, answer = cli("dead-letter", "drop", unique, "--reason", "all of them", "--url", memory.url)
    assert code == 2 and "--contains" in answer["text"] and "dead-letter purge" in answer["text"], answer
    letter = cli("dead-letter", "list", unique, "--url", memory.url, "--json")[1]["messages"][0]["id"]
    shown = cli("message", "show", letter, "--url", memory.url)[1]["text"].splitlines()
    assert "dead letter" in shown[-1] and unique in shown[-1], "it was said to be settled"
    assert "1 unresolved dead letter. " in finding and "redrive" in finding


def test_tokens_that_expire_soon_are_an_alarm_which_doctor_names() -> None:
    """A token of 90 days ended an operator's access, or a service's, without a word before."""
    with InMemoryServer(alarm_every_seconds=0.1) as server:

        def make(name: str, days: str) -> None:
            made = ("token", "create", name, "--right", "view", "--days", days, "--reason", "a test")
            code, answer = cli(*made, "--url", server.url)
            assert code == 0, answer

        def findings() -> list[str]:
            return cli("doctor", "--url", server.url, "--json")[1]["findings"]

        for name, days in (("me", "90"), ("shop", "90"), ("shop", "180"), ("guest", "1")):
            make(name, days)
        assert findings() == []
        server.advance(77 * 86_400)
        eventually(findings, "the alarm")
        (finding,) = findings()
        assert "of me expires" in finding and "notify token create" in finding
        eventually(lambda: metric(server.url, 'notify_alarms{alarm="credential"}') == 1, "the metric")
        make("me", "90")
        eventually(lambda: not findings(), "the alarm to be cleared")


def test_top_has_rows_of_groups_and_topics_and_each_is_shown_in_words() -> None:
    """`top` had no rows, `group show` printed names of the code (epoch, bound), and no command showed one topic."""
    server = InMemoryServer().start()
    try:
        publish(server.url, "orders", ["a", "b"])
        subscribe(server.url, "points", "orders", start="earliest")
        shown = cli("top", "--rounds", "1", "--url", server.url)[1]["text"]
        rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.strip()}
        assert rows["points"][0] == "2" and rows["orders"][:2] == ["0", "2"], shown
        shown = cli("group", "show", "points", "--url", server.url)[1]["text"]
        assert "acknowledged up to" in shown and "resets" in shown, shown
        assert "epoch" not in shown and "settled above" not in shown
        answer = cli("group", "show", "points", "--url", server.url, "--json")[1]
        assert "epoch" in answer["subscriptions"][0], "programs read the names of the route"
        shown = cli("topic", "show", "orders", "--url", server.url)[1]["text"]
        assert "the server's setting" in shown and "next offset" in shown and "points" in shown, shown
        answer = cli("topic", "show", "orders", "--url", server.url, "--json")[1]
        assert answer["queues"] == [{"queue": 0, "start": 0, "end": 2}] and answer["groups"][0]["lag"] == 2
        code, answer = cli("topic", "show", "none.such", "--url", server.url)
        assert code == 2 and "no topic 'none.such'" in answer["text"], answer
    finally:
        server.stop()
