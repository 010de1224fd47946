"""The first minutes at a terminal: what `notify serve` says, and messages to look at while they come."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from notify.cli.serve import greeting
from notify.server.settings import Settings
from notify.testing import InMemoryServer
from notify.testing.process import launch
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import Command, cli
from tests.support.groups import publish
from tests.support.http import admin, post


def lines_of(text: str) -> dict[str, str]:
    """The lines of a greeting by their names."""
    first, *rest = text.splitlines()
    assert first.startswith("Notify ")
    return {line[2:11].strip(): line[12:] for line in rest}


def test_the_greeting_says_where_what_is(tmp_path: Path) -> None:
    told = lines_of(greeting(Settings(data_dir=str(tmp_path)), "http://127.0.0.1:7400", 3))
    assert told["storage"] == f"the log in {tmp_path}, 3 topics" and told["access"].startswith("off")
    assert told["console"] == "http://127.0.0.1:7400/"
    for name in ("try it", ""):
        assert told[name].startswith("notify ")
    (tmp_path / "admin.token").write_text("secret")
    secured = greeting(Settings(data_dir=str(tmp_path), access=True), "https://[::1]:1", 0)
    assert str(tmp_path / "admin.token") in lines_of(secured)["access"] and "secret" not in secured


def test_the_greeting_of_a_database_has_no_password() -> None:
    told = greeting(Settings(storage="postgresql://me:secret@host/db"), "http://127.0.0.1:1", 0)
    assert "database" in lines_of(told)["storage"] and "secret" not in told and "tail" not in told


@pytest.mark.skipif(sys.platform != "linux", reason="pseudo-terminals as Linux has them")
def test_a_terminal_is_greeted_and_ctrl_c_ends_the_server(tmp_path: Path) -> None:
    above, below = pty.openpty()
    words = [sys.executable, "-m", "notify", "serve", "--port", "0", "--data-dir", str(tmp_path / "data")]
    server = subprocess.Popen(words, stdin=below, stdout=below, stderr=below, start_new_session=True)
    os.close(below)
    try:
        shown = ""
        while "Ctrl-C" not in shown:
            shown += os.read(above, 65536).decode()
        (address,) = re.findall(r"is ready at (http://127\.0\.0\.1:\d+)", shown)
        assert admin(address, "GET", "topics")["topics"] == []
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_SECONDS) == 128 + signal.SIGINT
    finally:
        server.kill()
        server.wait()
        os.close(above)


def test_tail_shows_the_newest_messages_of_all_queues(memory: InMemoryServer, unique: str) -> None:
    admin(memory.url, "PUT", f"topics/{unique}", {"queues": 4})
    assert "has no messages" in cli("topic", "tail", unique, "--url", memory.url)[1]["text"]
    before = admin(memory.url, "GET", "groups")["groups"]
    for number in range(5):
        publish(memory.url, unique, [f"{key}{number}" for key in "abcd"], key=True)
    code, shown = cli("topic", "tail", unique, "--last", "3", "--url", memory.url)
    rows = [line.split("\t") for line in shown["text"].splitlines()]
    assert code == 0 and len(rows) == 3
    assert all(place.startswith(f"{unique}/") and body[0] == key for place, _, key, body in rows)
    assert {row[3][1] for row in rows} == {"4"}, "the newest come last"
    code, shown = cli("topic", "tail", unique, "--last", "100", "--url", memory.url)
    assert len(shown["text"].splitlines()) == 20
    groups = admin(memory.url, "GET", "groups")["groups"]
    assert [group["name"] for group in groups] == [group["name"] for group in before]


@pytest.mark.long
def test_tail_follows_a_topic_in_json(memory: InMemoryServer, unique: str) -> None:
    publish(memory.url, unique, ["before"])
    tail = Command("topic", "tail", unique, "--follow", "--json", "--url", memory.url)
    tail.launch = launch
    try:
        tail.start()
        eventually(lambda: len(tail.output) == 1, "the message that was there")
        post(
            memory.url, "/v1/messages", {"messages": [{"topic": unique, "body_base64": "/w==", "key": "k", "tag": "t"}]}
        )
        eventually(lambda: len(tail.output) == 2, "the message that came")
        first, second = map(json.loads, tail.output)
        assert first["body"] == "before" and first["offset"] == 0
        assert (second["body_base64"], second["key"], second["tag"], second["offset"]) == ("/w==", "k", "t", 1)
        assert tail.process is not None
        tail.process.send_signal(signal.SIGINT)
        assert tail.process.wait(PATIENCE_SECONDS) == 0, tail.output
    finally:
        tail.close()


def test_tail_of_a_mistyped_topic_is_one_sentence(memory: InMemoryServer) -> None:
    code, shown = cli("topic", "tail", "mistyped", "--url", memory.url)
    assert code == 2 and "there is no topic 'mistyped'" in shown["text"]
