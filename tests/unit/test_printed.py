"""Commands show other people's text as it is, never as markup or control codes; one module prints."""

from __future__ import annotations

import ast
import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

import notify.cli
from notify.admin_api.writes import described
from notify.cli import api, backup, dead_letter, group, main, message, printed, topic, transaction, writes
from notify.cli.audit import spark_errors
from notify.cli.overview import screen_of
from notify.cli.printed import Output, OutputLost, Rows, cell, console, say
from notify.runtime.log_output import discard
from notify.runtime.visible import visible
from tests.support.commands import cli

HOSTILE = [
    "[/red]",
    "[bold]x[/nothing]",
    ":smile:",
    "\x1b]0;title\x07",
    "\x1b[2J\x1b[1;1H",
    "\x9b31m",
    "a\rb",
    "\u202eabc",
    "\udcff",
    "a\x00b",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_table_shows_any_key(text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`[/red]` in a key ended the command with a MarkupError, and an escape sequence reached the terminal."""
    row = {"key": text, "headers": {text: text}, "several": [text]}
    columns = {text: itemgetter("key"), **api.fields("headers", "several")}
    for is_terminal in (True, False):
        monkeypatch.setattr(api, "is_terminal", lambda answer=is_terminal: answer)
        api.show_rows({"messages": [row]}, False, "messages", columns)
    api.show(row, False)
    say(text)
    say(text, err=True)
    written = "".join(capsys.readouterr())
    assert visible(text) in written
    assert written.count("\t") == 4  # between the fields of two rows for other programs
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", written)


@pytest.mark.parametrize("text", HOSTILE)
def test_the_overview_shows_any_name(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown: dict[str, Any] = {
        "at": "2026-01-01T00:00:00Z",
        "version": "1",
        "rates": dict.fromkeys(("halves", "committed", "delivered", "acked"), 0),
        "in_doubt": {"count": 0, "oldest_seconds": None},
        "parked": {"count": 0},
        "disk": {"used_share": 0},
        "alarms": [{"text": text, "since": text}],
        "queues": dict.fromkeys(("lag", "dead_letters", "topics", "groups"), 0)
        | {
            "oldest_undelivered_seconds": None,
            "lagging": [{"name": text, "lag": 1, "oldest_seconds": None, "paused": False}],
        },
    }
    console().print(screen_of(shown))
    written = capsys.readouterr().out
    assert written.count(visible(text)) >= 2
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", written)


TRANSACTION: dict[str, Any] = {
    "id": "01931234-5678-7abc-8def-0123456789ab", "producer_group": "orders-of-a-long-name", "state": "PREPARED",
    "source": "s", "instance": "i", "shard": "main", "age": 12.3, "producer_online": False,
    "messages": "order.placed, order.paid",
}  # fmt: skip


def test_a_list_keeps_ids_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for is_terminal in (True, False):
        monkeypatch.setattr(api, "is_terminal", lambda answer=is_terminal: answer)
        api.show_rows({"transactions": [TRANSACTION]}, False, "transactions", transaction.COLUMNS)
        written = capsys.readouterr().out
        assert TRANSACTION["id"] in written and "PREPARED" in written and "…" not in written
        assert "shard" not in written
    assert written.splitlines()[1].split("\t") == [
        TRANSACTION["id"], "PREPARED", "12 s", "orders-of-a-long-name (offline)", "order.placed, order.paid"
    ]  # fmt: skip
    api.show_rows({"transactions": [TRANSACTION]}, False, "transactions", transaction.COLUMNS, wide=True)
    assert capsys.readouterr().out.startswith("id\tproducer_group\tstate\tsource")


def test_every_list_has_few_columns() -> None:
    assert all(len(m.COLUMNS) <= 5 for m in (transaction, dead_letter, message, topic, group))


def test_plain_text_stays_as_it_is() -> None:
    assert visible("Grüße, 注文 – 3 €\nnext line") == "Grüße, 注文 – 3 €\nnext line"
    assert cell({"a": None, "b": [1, "x"]}).plain == "a -, b 1\nx"


PRINTING = ("print", "typer.echo", "typer.secho", "click.echo", "sys.stdout.write", "sys.stderr.write")
MAKING = ("Console", "Table", "Text", "Table.grid")


def prints(source: str) -> Iterator[str]:
    """The calls of a module that print, or make a console to print with, past notify/cli/printed.py."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in (*PRINTING, *MAKING):
            yield called


def test_commands_print_in_one_place() -> None:
    folder = Path(notify.cli.__file__).parent
    wrong = {path.name: sorted(prints(path.read_text())) for path in folder.glob("*.py") if path.name != "printed.py"}
    assert {name: lines for name, lines in wrong.items() if lines} == {}, "print by way of notify/cli/printed.py"


@pytest.mark.parametrize("source", ["print(1)", "typer.echo(x)", "Console(stderr=True)", "sys.stderr.write(x)"])
def test_another_way_of_printing_is_seen(source: str) -> None:
    assert list(prints(source))


def test_rows_escape_their_columns() -> None:
    assert [str(column.header) for column in Rows("a\x1b").columns] == ["a\\x1b"]


REASON = "ConnectionError: the mail server does not answer (at shop.mail.send:7)"


def test_columns_that_do_not_fit_go_below_their_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of five columns at 80 made a dead letter ten lines high, its reason a column of seven characters."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(printed, "is_terminal", lambda: True)
    printed.say_table(
        ["message", "topic", "since", "reason"], [["0" * 38, "mail.wanted", "2026-11-25T00:16:05Z", REASON]]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["message", "topic", "since"] and lines[1].split()[1:] == [
        "mail.wanted", "2026-11-25T00:16:05Z"
    ]  # fmt: skip
    assert " ".join(" ".join(lines[2:]).split()) == f"reason: {REASON}" and max(map(len, lines)) <= 80


def test_a_write_says_what_it_did_and_not_how_it_was_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """The sentences are the console's; of an answer that has other fields than they need, the fields."""
    answer = {"queues": [{"queue": 0, "from": 9, "to": 2, "again": 15, "left_out": 0}], "effects": "repeated"}
    write = {"status": 200, "dry_run": True, "target": "points/order.placed"}
    writes.show_write("group.reset", write | {"result": answer}, False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "dry run, nothing is changed: points/order.placed"
    assert lines[1:4] == [f"  {sentence}" for sentence in described("group.reset", "x", answer).sentences]
    assert [line.split() for line in lines[4:]] == [
        ["queue", "from", "to", "again", "left", "out"],
        ["0", "9", "2", "15", "0"],
    ]
    writes.show_write("group.reset", write | {"result": {"moved": 15}}, False)
    assert capsys.readouterr().out.splitlines()[1].split() == ["moved", "15"]


def test_help_shows_variables_with_a_name_of_their_own_alone() -> None:
    command: Any = main.command()
    shown = {p.name for p in command.commands["topic"].commands["create"].params if getattr(p, "show_envvar", False)}
    assert shown == {"reason", "dry_run", "url", "as_json"}


def test_help_shows_no_type_of_a_flag_without_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.command()(["topic", "list", "--help"])
    help = capsys.readouterr().out
    assert "--json" in help and "<bool>" not in help


@pytest.mark.long
def test_a_locale_without_a_character_is_shown_its_number() -> None:
    """Help, and whatever a message or a sentence of ours holds, ended with a traceback."""
    shown = subprocess.run(
        [sys.executable, "-m", "notify", "serve", "--help"],
        env=os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "200"},
        capture_output=True,
        check=False,
    )
    assert shown.returncode == 0 and b"kafka://host:port,\\u2026" in shown.stdout, shown.stderr


def test_a_full_disk_elsewhere_is_not_blamed_on_the_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While `notify backup` copied, it was said that the output cannot be written."""

    def full(*words: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(backup, "send_write", full)
    code, answer = cli("backup", str(tmp_path / "copy"), "--reason", "nightly")
    assert (code, answer["text"]) == (
        2, "notify: a file cannot be written: No space left on device. Make room on its disk"
    )  # fmt: skip


def test_a_lost_output_does_not_count_as_a_fault_of_the_audit() -> None:
    """A watch whose reader was gone raised an alarm, as if an input were missing."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as unread:
        unread.write("a line")
        with pytest.raises(OutputLost), spark_errors():
            Output(unread).flush()
        discard(unread)


def test_a_command_starts_where_its_output_was_a_file_and_is_a_pipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a forked server of tests: no server started wherever pytest wrote to a file."""
    with (tmp_path / "output").open("w") as stream:
        stream.write("as a file")
        stream.flush()
        reading, writing = os.pipe()
        os.dup2(writing, stream.fileno())
        with pytest.raises(OSError, match="Illegal seek"):
            stream.reconfigure(errors="backslashreplace")
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "argv", ["notify", "--version"])
        with pytest.raises(SystemExit) as ended:
            main.main()
        os.close(writing)
    with os.fdopen(reading) as read:
        assert (ended.value.code, read.read().strip()) == (0, notify.__version__)


CLOSED = """
import os, sys
for number in range(3):
    os.close(number)
sys.stdout = sys.stderr = None
sys.argv = ["notify", "--version"]
from notify.cli import main
try:
    main.main()
except SystemExit:
    pass
os._exit(os.open(os.devnull, os.O_RDONLY))
"""


def test_no_file_gets_the_number_of_a_standard_stream_that_the_caller_has_closed() -> None:
    """A segment of the log could be number 2, and what a library wrote to standard error went into it."""
    assert subprocess.run([sys.executable, "-c", CLOSED], check=False).returncode > 2


def test_a_traceback_in_a_record_keeps_its_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`message show` joined the lines of a traceback with commas."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(printed, "is_terminal", lambda: True)
    trace = 'Traceback (most recent call last):\n  File "points.py", line 18\nDeadLetter: no \x1b[2Jitem'
    api.show({"timeline": [{"event": "handed out"}, {"event": "dead letter", "trace": trace}]}, False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4:] == [
        "      trace:", "        Traceback (most recent call last):", '          File "points.py", line 18',
        "        DeadLetter: no \\x1b[2Jitem",
    ]  # fmt: skip


def test_what_people_read_has_no_names_of_the_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headings had underscores, and truths were True and False."""
    monkeypatch.setattr(api, "is_terminal", lambda: True)
    api.show_rows({"bridges": [{"lag_seconds": 1}]}, False, "bridges", api.fields("lag_seconds"))
    assert capsys.readouterr().out.splitlines()[0] == "lag seconds"
    api.show({"paused": False, "producer_online": True}, False)
    assert capsys.readouterr().out.split() == ["paused", "no", "producer", "online", "yes"]


def test_the_figures_of_a_group_have_units() -> None:
    """The latencies had none, and an inbox that has every row was complete since 1970."""
    shown = group.in_words({
        "subscriptions": [{"inbox_from": "1970-01-01T00:00:00.000000Z", "retry_min": 1.0, "retry_max": 300.0}],
        "latency": {"handler": {"count": 1, "p50": 0.0075, "p99": None}},
    })  # fmt: skip
    assert shown["subscriptions"] == [
        {"inbox complete since": "the first message", "retry_min": "1.0 s", "retry_max": "5 min"}
    ]
    assert shown["latency, last 2 min"]["handler"] == {"count": 1, "p50": "7.5 ms", "p99": "-"}
