"""Commands with a wrong file, number, name or database: one sentence, exit code 2, and nothing is changed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS
from tests.support.commands import cli
from tests.support.groups import subscribe

WHY = ("--reason", "r")


def refusal(url: str, *words: str) -> str:
    """The sentence of a command that could not run."""
    code, answer = cli(*words, "--url", url)
    assert code == 2, answer
    return " ".join(str(answer["text"]).replace("│", " ").split())


def test_a_token_whose_file_cannot_be_made_is_not_made(memory: InMemoryServer, unique: str, tmp_path: Path) -> None:
    made = ("token", "create", unique, "--right", "view", *WHY)
    assert f"{tmp_path}/none/token cannot be used: No such file" in refusal(
        memory.url, *made, "--out", f"{tmp_path}/none/token", "--json"
    )
    (tmp_path / "token").write_text("mine")
    assert "exists: remove it" in refusal(memory.url, *made, "--out", str(tmp_path / "token"))
    assert unique not in [c["name"] for c in cli("token", "list", "--url", memory.url, "--json")[1]["credentials"]]


def test_a_token_is_shown_once(memory: InMemoryServer, unique: str, tmp_path: Path) -> None:
    """Without --json and --out nobody got it."""
    made = ("token", "create", unique, "--right", "view", *WHY, "--url", memory.url)
    shown = cli(*made)[1]["text"]
    assert re.search(r"this once: nt_\w+_[\w-]{20,}$", shown.strip()), shown
    assert "nt_" not in cli(*made, "--out", str(tmp_path / "token"))[1]["text"]
    assert "nt_" not in cli(*made, "--dry-run")[1]["text"]


def test_a_file_is_left_only_where_there_is_a_token(memory: InMemoryServer, unique: str, tmp_path: Path) -> None:
    out = tmp_path / "token"
    made = ("token", "create", unique, "--out", str(out), *WHY)
    for more in (
        ["--right", "nonsense"],
        ["--right", "view", "--dry-run"],
        ["--right", "view", "--certificate", unique],
    ):
        cli(*made, *more, "--url", memory.url)
        assert not out.exists(), more
    assert cli(*made, "--right", "view", "--url", memory.url)[0] == 0
    assert out.read_text().strip() and out.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("limit", "set", "--topic", "t=many", *WHY), "'many' is not a rate"),
        (("limit", "set", *WHY), "say what to change"),
        (("group", "priorities", "set", "g", "--class", "high"), "Missing option '--reason'"),
        (("group", "priorities", "set", "g", "--share", "t=2", *WHY), "Missing option '--class'"),
        (("topic", "create", "orders/new", *WHY), "'orders/new' is not a name"),
        (("topic", "delete", "..", *WHY), "'..' is not a name"),
        (("message", "find", "--topic", "t", "--from", "2h"), "should be an instant, such as 2026-01-31T12:00:00Z"),
        (("group", "subscribe", "g", "t", "--mode", "keyed", *WHY), "should be one of shared, ordered, exclusive"),
        (("dead-letter", "redrive", "g", *WHY), "say which: --id, --all"),
        (("dead-letter", "list", "nobody-has-this-group"), "there is no group"),
        (("dead-letter", "failures", "nobody-has-this-group"), "there is no group"),
        (("doctor", "--create-tables"), "--create-tables goes with --dsn"),
        (("doctor", "--kafka", "a:9092"), "'a:9092' is not a Kafka URL: write kafka://"),
        (("bridge", "--dsn", "mysql://u@127.0.0.1:9/x", "--backfill-from", "noon"), "'noon' is not a time"),
    ],
)
def test_the_sentence_says_what_to_write(memory: InMemoryServer, words: tuple[str, ...], said: str) -> None:
    assert said in refusal(memory.url, *words)


def test_a_group_without_dead_letters_says_so(memory: InMemoryServer, unique: str) -> None:
    subscribe(memory.url, unique, unique)
    code, answer = cli("dead-letter", "list", unique, "--url", memory.url, "--json")
    assert (code, answer["messages"]) == (0, [])
    purged = refusal(memory.url, "dead-letter", "purge", unique, "--before", "latest", *WHY)
    assert f"group '{unique}' has no dead letters" in purged
    assert cli("dead-letter", "redrive", unique, "--id", "x", *WHY, "--url", memory.url)[0] == 1


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello")
    (tmp_path / "backup").mkdir()
    (tmp_path / "backup" / "backup.json").write_text('{"name": "b", "files": []}')
    for words, said in (
        (("restore", str(tmp_path / "backup"), "--data-dir", str(text)), f"{text} cannot be used: File exists"),
        (("storage", "upgrade", "--storage", f"sqlite:///{text}"), "not an SQLite database"),
        (("relay", "--dsn", f"sqlite:///{text}", "--once"), "not an SQLite database"),
        (
            ("serve", "--registry", f"sqlite:///{text}", "--port", "0", "--data-dir", str(tmp_path / "r")),
            "the database refuses: file is not a database",
        ),
        (("storage", "upgrade", "--storage", f"sqlite:///{tmp_path}/s.db", "--shard", "a/b"), "'a/b' is not a name"),
        (
            ("bridge", "--dsn", "mysql+cymysql://u:secret@127.0.0.1:9/x"),
            "//u:***@127.0.0.1:9/x: No module",
        ),
        (("bench", "transactions", "--client", "wires"), "--client must be one of wire, plain, threads, coroutines"),
        (("serve", "--tls-certificate", str(text), "--data-dir", str(tmp_path / "d")), f"the certificate {text}"),
    ):
        code, answer = cli(*words)
        assert code == 2 and said in " ".join(str(answer["text"]).split()), (words, answer)
        assert "Traceback" not in answer["text"]


def test_a_list_of_refused_messages_is_not_made_in_another_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/other.db"
    code, answer = cli("refused", "list", "--dsn", url)
    assert code == 2 and "neither half_message nor server_half_message" in str(answer["text"])
    engine = sa.create_engine(url)
    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()


def test_no_messages_asked_for_is_not_no_messages(memory: InMemoryServer, unique: str) -> None:
    assert cli("message", "send", unique, "hello", "--url", memory.url)[0] == 0
    assert cli("topic", "tail", unique, "--last", "0", "--url", memory.url) == (0, {"text": ""})


@pytest.mark.parametrize(
    ("output", "command", "code", "said"),
    [
        ("full", "topic list", 2, "the output cannot be written"),
        ("closed", "topic list", 0, ""),
        ("unread", "topic list", 2, ""),
        ("unread", "overview", 2, ""),  # rich prints it
        ("full", "topic list --help", 2, "the output cannot be written"),  # typer prints it
    ],
)
def test_an_output_that_nobody_reads_does_not_exit_with_1(
    memory: InMemoryServer, output: str, command: str, code: int, said: str
) -> None:
    """Exit code 1 would say that the answer is bad news, and a traceback that the command is broken."""
    reading, unread = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "notify", *command.split(), "--url", memory.url]
    with open("/dev/full", "wb") as full, open(unread, "wb") as pipe:
        run = subprocess.run(
            ["sh", "-c", '"$@" >&-', "sh", *words] if output == "closed" else words,
            stdout=full if output == "full" else pipe, stderr=subprocess.PIPE,
            text=True, timeout=4 * PATIENCE_SECONDS, check=False,
        )  # fmt: skip
    assert (run.returncode, said in run.stderr, "Traceback" in run.stderr) == (code, True, False), run.stderr


@pytest.mark.long
def test_the_process_that_ships_ends_without_a_word_of_its_own(tmp_path: Path) -> None:
    """It was aborted by its interpreter, which said so on stderr, where the store was refused at once."""
    order = b'{"url": "nonsense", "data_dir": "%s", "bytes_per_second": 1e6, "stall_seconds": 5, "keep_seconds": 0}\n'
    child = subprocess.Popen(
        [sys.executable, "-m", "notify.storage.shipped.worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
    )  # fmt: skip
    with child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        child.stdin.write(order % os.fsencode(tmp_path))
        child.stdin.flush()  # the input stays open, as a server keeps it
        said = child.stdout.read()
        assert child.wait(4 * PATIENCE_SECONDS) == 0
        assert b"is not a store" in said and child.stderr.read() == b""


@pytest.mark.parametrize(
    "when",
    [
        "sys.meta_path.insert(0, types.SimpleNamespace(find_spec=lambda name, *_: end() if 'cli' in name else None))",
        "from notify.cli import main as m; m.root_command = end",
    ],
    ids=["its modules", "its commands"],
)
def test_ctrl_c_while_notify_loads_leaves_no_traceback(when: str) -> None:
    """It was the traceback of whatever was imported just then, for a second on a slow machine."""
    end = "end = lambda: os.kill(os.getpid(), signal.SIGINT)"
    program = f"import os, signal, sys, types; from notify.__main__ import run; {end}; {when}; run()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")
