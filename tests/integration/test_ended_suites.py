"""A run of tests that is ended, however, leaves none of the databases, nodes of Kafka and servers that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from notify.testing import usage
from notify.testing.guardian import MARK, Guardian, register
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.told import hear_hangups
from tests.support.verdict import INCONCLUSIVE

ROOT = Path(__file__).parents[2]
FIRST = """
import signal
from pathlib import Path
from notify.testing.process import ServerProcess

def test_node(kafka_node):
    pass

def test_waits(database_urls, tmp_path):
    assert database_urls["postgresql"] and database_urls["mariadb"]
    ServerProcess(tmp_path / "data", flags=["--workers", "2"]).start()
    Path(__file__).with_name("first").touch()
    signal.pause()
"""
SECOND = """
import signal
from pathlib import Path
from notify.testing.databases import postgresql
from notify.testing.process import ServerProcess
from tests.support.databases import own_mariadb

def test_waits(tmp_path):
    with own_mariadb(), postgresql(durable=False):
        frozen = ServerProcess(tmp_path / "data").start()
        frozen.process.send_signal(signal.SIGSTOP)
        Path(__file__).with_name("second").touch()
        signal.pause()
"""


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run with two workers, in a process group of its own, once all that it starts is up."""
    names = ("first", "second")
    for name, source in zip(names, (FIRST, SECOND), strict=True):
        (tmp_path / f"test_{name}.py").write_text(source)
    words = ["-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-n", "2", "-x"]
    with (tmp_path / "output").open("wb") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "pytest", *words, "--basetemp", str(tmp_path / "temporary"), str(tmp_path)],
            cwd=ROOT, stdout=output, stderr=output, start_new_session=True,
            preexec_fn=hear_hangups,
        )  # fmt: skip
    try:
        eventually(lambda: run.poll() is not None or all((tmp_path / name).exists() for name in names), seconds=600)
        assert run.poll() is None, (tmp_path / "output").read_text()[-3000:]
        yield run
    finally:
        run.kill()
        run.wait()


def to_all(run: subprocess.Popen[bytes], number: signal.Signals) -> None:
    os.killpg(run.pid, number)


def to_one(run: subprocess.Popen[bytes], number: signal.Signals) -> None:
    run.send_signal(number)


def twice(run: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """The second one comes while the suite ends by the first."""
    to_all(run, number)
    count = len(usage.tree(run.pid))
    eventually(lambda: len(usage.tree(run.pid)) < count, "the first of its processes to end")
    to_all(run, number)


def test_a_process_is_ended_by_its_mark_or_because_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of another user's process cannot always be read. What is not the suite's is left alone."""
    monkeypatch.delenv(MARK, raising=False)
    words = [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]
    guardian = Guardian()
    marked = subprocess.Popen(words)
    registered, other = (subprocess.Popen(words, env={}) for _ in range(2))
    register(registered.pid)
    guardian.end()
    assert (marked.wait(PATIENCE_SECONDS), registered.wait(PATIENCE_SECONDS)) == (-signal.SIGKILL, -signal.SIGKILL)
    assert other.poll() is None
    other.kill()
    other.wait()


# The guardian ends marked and registered processes: shown above, without a suite of its own.
@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "number"),
    [
        (twice, signal.SIGINT),
        (to_all, signal.SIGINT),
        (to_one, signal.SIGINT),
        (to_one, signal.SIGTERM),
        (twice, signal.SIGTERM),
        (to_all, signal.SIGHUP),
        (to_one, signal.SIGKILL),
        (to_all, signal.SIGKILL),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value.__name__,
)
def test_a_suite_that_is_ended_leaves_nothing_running(
    suite: subprocess.Popen[bytes], end: Callable[..., None], number: signal.Signals
) -> None:
    """Nodes of Kafka, databases and servers ran on after Ctrl-C: the controller kills its workers after ten seconds,
    which then end nothing."""
    started = usage.tree(suite.pid)
    assert {"mariadbd", "postgres", "java"} <= set(started.values()) and len(started) >= 12, started
    end(suite, number)
    suite.wait(120)
    eventually(lambda: not any(usage.tree(pid) for pid in started), "all that it started to end")


# --- programs: `timeout`, a cancelled CI job, a closed terminal ---------------------------------------------------


BENCH = ("notify.cli.main", "bench", "transactions", "--clients", "1", "--seconds", "3600")
DEMO = ("notify.cli.main", "demo", "--seconds", "600")
FUZZ = ("tests.fuzz", "--cases", "1000000")


def has_a_server(pid: int) -> bool:
    """Whether a child of a process is `notify serve`, and has made its data directory."""
    for child in usage.children(pid):
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        if "serve" in words and Path(words[words.index("--data-dir") + 1]).exists():
            return True
    return False


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "number"),
    [
        (BENCH, signal.SIGHUP),
        (DEMO, signal.SIGTERM),
        (FUZZ, signal.SIGTERM),
        pytest.param(BENCH, signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(DEMO, signal.SIGHUP, marks=pytest.mark.long),
        pytest.param(FUZZ, signal.SIGHUP, marks=pytest.mark.long),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value[1] if "cli" in value[0] else value[0],
)
def test_a_program_that_is_told_to_end_leaves_nothing_running(words: tuple[str, ...], number: signal.Signals) -> None:
    def heeds_it() -> None:
        signal.signal(number, signal.SIG_DFL)  # under nohup a child ignores SIGHUP

    with subprocess.Popen(
        [sys.executable, "-m", *words], preexec_fn=heeds_it, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as told:
        try:
            eventually(lambda: has_a_server(told.pid), "its server")
            started = usage.children(told.pid)
            told.send_signal(number)
            # A campaign says INCONCLUSIVE, whatever ends it.
            assert told.wait(PATIENCE_SECONDS) == (INCONCLUSIVE if words[0].startswith("tests.") else 128 + number)
        finally:
            told.terminate()
    eventually(lambda: not any(map(is_there, started)), "the end of what it started")
