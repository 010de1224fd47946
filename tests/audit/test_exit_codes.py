"""Exit codes of `notify audit`: 1 says that something is wrong, and a failure of the tool is never 1."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from notify.cli import audit as command
from notify.cli.audit_inputs import InputFlags
from notify.errors import NotifyError
from notify.protocol.ids import new_id
from notify.spark.audit import Audit
from notify.spark.judge import measures
from notify.spark.session import drivers
from notify.spark.watch import watching
from tests.audit.trade import SERVICES, Trade, make_trade
from tests.support import commands
from tests.support.clock import PATIENCE_SECONDS, eventually


@pytest.fixture(scope="module")
def trade(tmp_path_factory: pytest.TempPathFactory) -> Trade:
    return make_trade(tmp_path_factory.mktemp("codes") / "trade")


@pytest.fixture
def spark_is_there(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands use the tests' session."""
    monkeypatch.setattr(command, "session", lambda *_, **__: contextlib.nullcontext(spark))


def cli(*words: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the JSON of stdout or its text, also of a command that fails."""
    ended = commands.run(words)
    code = 2 if isinstance(ended.exception, NotifyError) else ended.exit_code  # as notify.cli.main.main does
    return code, json.loads(ended.stdout) if ended.stdout.startswith("{") else {"text": ended.output}


def flags(trade: Trade, report: Path, services: Sequence[str] = SERVICES) -> list[str]:
    named = [word for service in services for word in ("--database", f"{service}={trade.url(service)}")]
    times = ["--max-transaction-seconds", "5", "--deliver-seconds", "5"]
    return ["audit", "run", *named, "--log", str(trade.log), "--report", str(report), *times]


@pytest.mark.long
@pytest.mark.usefixtures("spark_is_there")
def test_verdicts_have_their_codes(trade: Trade, tmp_path: Path) -> None:
    code, said = cli(*flags(trade, tmp_path / "report"), "--json")
    assert (code, said["verdict"], said["inconclusive"], said["exit_code"]) == (0, "PASS", False, 0)
    assert said["completeness"]["is_met"] is True and said["causes"] == []
    harmed = trade.copy(tmp_path / "harmed")
    harmed.execute("bank", f"DELETE FROM half_message WHERE transaction_id = '{trade.name(1)}'")
    # In doubt besides: a database is missing.
    code, said = cli(*flags(harmed, tmp_path / "report", ("bank", "points")), "--json")
    assert (code, said["verdict"], said["inconclusive"]) == (1, "FINDINGS", True)
    ghost, doubt = said["causes"]
    assert ghost["finding"] == "GHOST" and f"notify audit explain {trade.message(1)} --database" in ghost["commands"][0]
    assert doubt["finding"] == "INCONCLUSIVE" and "no given database has this id" in doubt["sentence"]


@pytest.mark.long
@pytest.mark.usefixtures("spark_is_there")
def test_doubt_alone_has_its_code(trade: Trade, tmp_path: Path) -> None:
    code, said = cli(*flags(trade, tmp_path / "report", ("bank", "points")), "--json")
    assert (code, said["verdict"], said["inconclusive"], said["exit_code"]) == (2, "INCONCLUSIVE", True, 2)


@pytest.mark.long
@pytest.mark.usefixtures("spark_is_there")
def test_people_read_what_was_covered_first_and_the_verdict_last(trade: Trade, tmp_path: Path) -> None:
    harmed = trade.copy(tmp_path / "harmed")
    harmed.execute("bank", f"DELETE FROM half_message WHERE transaction_id = '{trade.name(1)}'")
    code, said = cli(*flags(harmed, tmp_path / "report"), "--objective", "50")
    lines = [line for line in said["text"].splitlines() if not line.startswith("…")]
    assert code == 1 and lines[0] == "inputs:" and "log" in lines[1]
    first = lines.index("do first:")
    assert lines[first + 1].startswith("  1. producer group payments, database bank: 1 message delivered")
    assert "notify audit explain" in lines[first + 2]
    (case,) = [line for line in lines if line.startswith("    GHOST ")]
    assert "producer group payments" in case and f"source {trade.source('bank')}" in case
    assert "the objective of 50 % is met" in lines[-2] and lines[-1].startswith("FINDINGS: ")


@pytest.mark.long
def test_wrong_arguments_exit_with_2(trade: Trade, tmp_path: Path) -> None:
    good = flags(trade, tmp_path / "report")
    for wrong in (
        ["--nonsense"], ["--objective", "101"], ["--from", "yesterday"], ["--deliver-seconds", "soon"],
        ["--from", "1h", "--to", "2h"], ["--repair", str(tmp_path / "none.json")], ["--fail-on", "DEED"],
    ):  # fmt: skip
        assert cli(*good, *wrong)[0] == 2, wrong
    (tmp_path / "plan.json").write_text("")
    code, said = cli(*good, "--json", "--plan", str(tmp_path / "plan.json"))
    assert code == 2 and "plan.json exists" in said["failed"] and said["exit_code"] == 2
    assert cli("audit", "run", "--json")[1]["exit_code"] == 2
    assert cli("audit", "explain", "nonsense", *good[2:-4])[0] == 2


@pytest.mark.usefixtures("spark_is_there")
def test_one_audit_at_a_time_writes_to_a_directory(trade: Trade, tmp_path: Path) -> None:
    """One removed the copies of segments that the other was reading: PATH_NOT_FOUND, after a minute."""
    with command.alone_in(tmp_path / "report"):
        code, said = cli(*flags(trade, tmp_path / "report"), "--json")
    assert code == 2 and "another audit writes to" in said["failed"] and "a --report of its own" in said["failed"]


def test_without_spark_or_java_an_audit_says_what_to_install(
    trade: Trade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyspark", None)
        code, said = cli(*flags(trade, tmp_path / "report"), "--json")
        assert code == 2 and "pip install" in said["failed"]
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        patch.delenv("JAVA_HOME", raising=False)
        code, said = cli(*flags(trade, tmp_path / "report"), "--json")
        assert code == 2 and "Java" in said["failed"]


def test_a_start_before_1970_is_that_of_everything() -> None:
    """Rows were said to be purged there."""
    assert [command.instant_us("--from", text) for text in ("1901-01-01", "99999999d", "")] == [1, 1, 0]


def no_user(_: int) -> Any:
    raise KeyError


def test_surroundings_in_which_spark_does_not_start(
    trade: Trade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark said only that its gateway exited, below a trace of Java's, or failed later in odd ways."""
    drivers()  # Maven fetches them with the machine's own Java
    for name in ("SparkContext._gateway", "SparkContext._jvm", "SparkContext._active_spark_context"):
        monkeypatch.setattr(f"pyspark.{name}", None)  # another test of this process may have started Spark
    monkeypatch.setattr("pyspark.sql.SparkSession._instantiatedSession", None)
    java, spark = tmp_path / "java", tmp_path / "spark"
    line = [*flags(trade, tmp_path / "report"), "--json"]

    def said() -> str:
        code, answer = cli(*line)
        assert code == 2
        return str(answer["failed"])

    monkeypatch.setenv("JAVA_HOME", str(java))
    assert "where no bin/java is" in said()
    (java / "bin").mkdir(parents=True)
    (java / "bin" / "java").write_text("#!/bin/sh\necho 'Unrecognized option' >&2\nexit 1\n")
    (java / "bin" / "java").chmod(0o755)
    with warnings.catch_warnings():  # pyspark leaves its pipe to Java unclosed
        warnings.simplefilter("ignore", ResourceWarning)
        assert said().startswith("Java ended before Spark had started")
        gc.collect()
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path}/file/a,{tmp_path}/file/b")
    assert "where Spark cannot keep temporary files (Not a directory)" in said()
    monkeypatch.setattr("pwd.getpwuid", no_user)
    assert "a user without a name" in said()
    (spark / "jars").mkdir(parents=True)
    (spark / "jars" / "spark-core_2.12-3.5.1.jar").touch()
    monkeypatch.setenv("SPARK_HOME", str(spark))
    assert f"SPARK_HOME is {spark}, where no Spark" in said()


@pytest.mark.parametrize("what", ["run", "explain", "watch"])
def test_without_kafkas_client_an_audit_names_the_extra(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback, and in JSON "a fault of the audit itself"."""
    monkeypatch.delitem(sys.modules, "notify.spark.inputs.kafka_input", raising=False)
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    words = {"explain": [new_id().hex()], "watch": ["--state", str(tmp_path / "state"), "--windows", "1"]}
    inputs = ["--database", f"sqlite:///{tmp_path}/shop.db", "--kafka", "kafka://127.0.0.1:9092"]
    code, said = cli("audit", what, *words.get(what, []), *inputs, "--json")
    assert code == 2 and "pip install 'notify-tx[kafka]'" in said["failed"], said


@pytest.mark.parametrize("file", ["findings.parquet", "report.json", "report.html"])
def test_a_report_for_which_the_disk_has_no_room_exits_with_2(
    trade: Trade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """The audit itself has ended: what cannot be written is its report."""
    monkeypatch.setattr(command, "session", lambda *_, **__: contextlib.nullcontext(None))
    none = dict.fromkeys(measures.TOTALS, 0)
    monkeypatch.setattr(Audit, "run", lambda audit: replace(audit.result, verdict="PASS", totals=none))
    report = tmp_path / "report"
    report.mkdir()
    (report / f".{file}.{os.getpid()}").symlink_to("/dev/full")
    code, said = cli(*flags(trade, report), "--json")
    assert code == 2 and "No space left" in said["failed"], said


def run(words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "notify.cli.main", *words]
    return subprocess.Popen(line, stderr=subprocess.PIPE, text=True, **options)


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.long
@pytest.mark.parametrize(
    ("output", "number", "more"),
    [(closed_pipe, 1, []), pytest.param(full_disk, 5000, ["--json"], marks=pytest.mark.long)],
)
def test_nobody_reads_the_answer(
    trade: Trade, tmp_path: Path, output: Callable[[], int], number: int, more: list[str]
) -> None:
    """The answer is that nothing is wrong (0), or that no source knows it (1); but nobody heard it."""
    stdout = output()
    process = run(
        ["audit", "explain", trade.name(number), *flags(trade, tmp_path / "report")[2:], *more], stdout=stdout
    )
    os.close(stdout)
    _, said = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 2, said
    assert "could not be printed" in said and "Traceback" not in said


RUN_SECONDS = 280.0
"""A process of its own starts a JVM of its own."""


@pytest.mark.long
def test_nobody_reads_the_verdict(trade: Trade, tmp_path: Path) -> None:
    stdout = closed_pipe()
    process = run(flags(trade, tmp_path / "report"), stdout=stdout)
    os.close(stdout)
    _, said = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 2 and "could not be printed" in said, said


def jvm_of(pid: int) -> int:
    """The JVM that a process has started; 0 if it has none."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if "java" in Path(f"/proc/{child}/exe").resolve().name:
            return int(child)
    return 0


def test_ctrl_c_ends_a_watch_after_its_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's own handler of SIGINT ended it in the middle of the window, with tracebacks."""

    @contextlib.contextmanager
    def session(*_: object, **__: object) -> Iterator[None]:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as Spark sets one that raises KeyboardInterrupt
        yield

    class Watch:
        def __init__(self, *_: object, **__: object) -> None:
            """A watch that is interrupted within its first window."""

        def run(self, stop: threading.Event, windows: int | None) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.wait(PATIENCE_SECONDS)
            ended.append("its window")

        def close(self) -> None:
            ended.append("the watch")

    ended: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    inputs = SimpleNamespace(databases=[])
    monkeypatch.setattr(command, "session", session)
    monkeypatch.setattr(InputFlags, "checked", lambda flags: flags)
    monkeypatch.setattr(InputFlags, "opened", lambda _: contextlib.nullcontext(inputs))
    monkeypatch.setattr(watching, "Watch", Watch)
    assert cli("audit", "watch", "--log", str(tmp_path), "--state", str(tmp_path / "state"))[0] == 0
    assert ended == ["its window", "the watch"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.long
def test_no_spark_is_left_where_its_start_is_interrupted(trade: Trade, tmp_path: Path) -> None:
    """It holds the pipes of its output, which end only with it."""
    process = run(flags(trade, tmp_path / "report"), stdout=subprocess.PIPE)
    eventually(lambda: jvm_of(process.pid), "a JVM", RUN_SECONDS)
    interrupt(process)
    process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 2


def interrupt(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)


def kill_spark(process: subprocess.Popen[str]) -> None:
    os.kill(jvm_of(process.pid), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("harm", [interrupt, kill_spark])
def test_an_audit_that_is_ended(trade: Trade, tmp_path: Path, harm: Callable[[subprocess.Popen[str]], None]) -> None:
    """In the middle: the log's segments are copied, and Spark is about to join."""
    report = tmp_path / "report"
    process = run([*flags(trade, report), "--json"], stdout=subprocess.PIPE)
    try:
        eventually(lambda: list(report.rglob("facts.json")) or process.poll() is not None, "copies", RUN_SECONDS)
        harm(process)
        stdout, stderr = process.communicate(timeout=RUN_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 2, (process.returncode, stdout[-500:], stderr[-2000:])
    assert json.loads(stdout.splitlines()[-1])["exit_code"] == 2
