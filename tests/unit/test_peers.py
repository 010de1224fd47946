"""`make bench-peers`: ratios and verdicts of planted rounds, the table, the chart, and systems that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest

from notify.errors import Unavailable
from tools.bench.peers import __main__ as peers
from tools.bench.peers import chart, driver, machine
from tools.bench.peers.comparison import Comparison, rows
from tools.bench.peers.driver import Driver
from tools.bench.peers.rounds import Measured, Round, order
from tools.bench.peers.system import Run, Step, Work
from tools.bench.peers.table import table

ROOT = Path(__file__).parents[2]
WORK = Work(callers=(1, 128))
OURS = {
    "visible_1": 1000.0, "recorded_1": 1000.0, "visible_128": 16_000.0, "recorded_128": 16_000.0, "delivered": 20_000.0,
    "awaited_1": 750.0, "awaited_128": 15_000.0,
    "paced": 2000.0, "end_to_end_p50": 2.0, "end_to_end_p99": 9.0, "drain": 200_000.0, "fan_out": 300_000.0,
    "paced_handler": 1950.0, "handler_p50": 5.0, "handler_p99": 30.0, "drain_handler": 20_000.0,
    "drain_batches": 50_000.0, "fan_out_handler": 30_000.0,
}  # fmt: skip
THEIRS = {
    "visible_1": 500.0, "recorded_1": 900.0, "visible_128": 5000.0, "settled_128": 8000.0, "recorded_128": 9000.0,
    "paced": 1990.0, "end_to_end_p50": 50.0, "end_to_end_p99": 300.0, "drain": 100_000.0, "fan_out": 600_000.0,
}  # fmt: skip


class Planted:
    """A system whose runs have figures that a test gives; `failure` is raised by the last of them."""

    def __init__(self, name: str, figures: dict[str, float], failure: Exception | None = None, lost: int = 0) -> None:
        self.name, self.title = name, name.capitalize()
        self._figures = figures
        self._failure = failure
        self._lost = lost
        self.is_warm = False
        self.stopped = 0

    def version(self) -> str:
        return "1.2"

    @contextmanager
    def started(self, directory: Path, work: Work) -> Iterator[Planted]:
        try:
            yield self
        finally:
            self.stopped += 1

    def warm_up(self) -> None:
        self.is_warm = True

    def steps(self) -> list[Step]:
        return [Step("all", lambda: Run(self._figures, self._lost, 0)), Step("the last", self._last)]

    def _last(self) -> Run:
        if self._failure is not None:
            raise self._failure
        return Run({}, 0, 0)


class Missing(Planted):
    """A system that cannot run here."""

    def version(self) -> str:
        raise Unavailable("no Java")


def compared(*pairs: tuple[dict[str, float], dict[str, float]], missing: dict[str, str] | None = None) -> Comparison:
    """A comparison of Notify and RocketMQ over rounds with these figures."""
    rounds = [
        Round(number, 0.2, 1.0, {"notify": Measured(dict(ours)), "rocketmq": Measured(dict(theirs))})
        for number, (ours, theirs) in enumerate(pairs, 1)
    ]
    return Comparison([Planted("notify", {}), Planted("rocketmq", {})], WORK, rounds, missing or {})


def ratios(comparison: Comparison) -> dict[str, float | None]:
    found: dict[str, float | None] = comparison.as_json({}, {})["to_rocketmq"]
    return found


def test_a_ratio_is_ours_by_theirs_of_what_a_consumer_can_get() -> None:
    assert ratios(compared((OURS, THEIRS))) == {
        "1": 2.0,
        "1_awaited": 1.5,  # our callers wait until the outcome is recorded, and theirs do not
        "128": 3.2,
        "128_awaited": 3.0,
        "best": 4.0,  # delivered and acknowledged, by the best visible rate and not by the best recorded
        "best_settled": 2.5,
        "best_recorded": 3.2,
        "end_to_end_p50": 0.04,
        "end_to_end_p99": 0.03,
        "handler_p50": 0.1,  # the SDK's handlers beside the bare client, by the same figure of the peer
        "handler_p99": 0.1,
        "drain": 2.0,
        "drain_handler": 0.2,
        "drain_batches": 0.5,
        "fan_out": 0.5,
        "fan_out_handler": 0.05,
    }


def test_ratios_are_those_of_one_round_and_their_median_counts() -> None:
    """The machine is half as fast in the second round; the ratios do not show it."""
    slower = [{name: value / 2 for name, value in side.items()} for side in (OURS, THEIRS)]
    slower[0]["visible_1"] = 1500.0 / 2
    quicker_peer = THEIRS | {"visible_1": 1000.0}
    comparison = compared((OURS, THEIRS), (slower[0], slower[1]), (OURS, quicker_peer))
    assert ratios(comparison)["1"] == 2.0
    spread = comparison.as_json({}, {})["spread"]["to_rocketmq"]["1"]
    assert (spread["min"], spread["median"], spread["max"]) == (1.0, 2.0, 3.0)


def test_latencies_below_the_pace_are_not_compared() -> None:
    comparison = compared((OURS, THEIRS | {"paced": 700.0}))
    assert ratios(comparison)["end_to_end_p50"] is None
    assert comparison.reasons() == [
        "Rocketmq, round 1: it reached 700 of 2,000 transactions/s, so that its latencies are not compared"
    ]
    assert comparison.verdict().word == "PASS"
    slow = compared((OURS | {"paced_handler": 700.0}, THEIRS))
    assert ratios(slow)["handler_p50"] is None and ratios(slow)["end_to_end_p50"] == 0.04


def test_a_measurement_missing_in_a_round_has_no_ratio_and_fails() -> None:
    comparison = compared(({"visible_1": 1000.0}, {}))
    comparison.rounds[0].systems["rocketmq"].reason = "128 callers: it failed"
    assert set(ratios(comparison).values()) == {None}
    assert str(comparison.verdict()).startswith("INCONCLUSIVE not everything was measured (Rocketmq)")
    assert comparison.reasons() == ["Rocketmq, round 1: 128 callers: it failed"]


@pytest.mark.parametrize("field", ["lost", "doubled"])
def test_lost_or_doubled_messages_fail_the_comparison(field: str) -> None:
    comparison = compared((OURS, THEIRS))
    setattr(comparison.rounds[0].systems["notify"], field, 1)
    verdict = comparison.verdict()
    assert verdict.exit_code == 1 and "Notify lost" in str(verdict)


def test_each_round_begins_with_another_system() -> None:
    systems = [Planted(name, {}) for name in "abc"]
    orders = ["".join(system.name for system in order(systems, number)) for number in (1, 2, 3, 4)]
    assert orders == ["abc", "bca", "cab", "abc"]


def test_the_table_has_medians_and_ranges() -> None:
    lines = table(compared((OURS, THEIRS), (OURS, THEIRS | {"visible_1": 400.0})), {"rocketmq": "5.5.0"}).splitlines()
    assert lines[0] == "|  | Notify | Rocketmq 5.5.0 | ratio |"
    assert lines[2] == "| 1 caller, visible transactions/s | 1,000 | 450 | 2.25 (2.00 to 2.50) |"
    paced = "| 2,000 transactions/s, from commit to handler, ours"
    assert lines[9] == f"{paced} the bare client, p50 (ms) | 2.00 | 50.00 | 0.040 |"
    assert lines[11] == f"{paced} a Consumer's handler, p50 (ms) | 5.00 | 50.00 | 0.10 |"
    assert len(lines) == 2 + len(rows(WORK)) and len({line.count("|") for line in lines}) == 1


def test_the_table_says_what_was_not_measured() -> None:
    lines = table(compared((OURS, {}), missing={"rocketmq": "no Java"}), {}).splitlines()
    assert lines[2] == "| 1 caller, visible transactions/s | 1,000 | not measured |  |"


def test_the_chart_has_a_bar_for_each_ratio() -> None:
    drawn = ElementTree.fromstring(chart.chart(compared((OURS, THEIRS | {"paced": 1.0, "drain": 0.0}))))
    texts = [text.text for text in drawn.findall("{*}text")]
    bars = [bar for bar in drawn.findall("{*}rect") if bar.get("width") != "12"]
    assert len(bars) == 9 and texts.count("not measured") == 7
    assert {"3.2", "0.5", "100"} - {str(text) for text in texts} == {"100"}  # the axis ends with the next power of ten
    assert all(float(bar.get("width") or -1) >= 0 for bar in bars)


def test_a_better_latency_has_a_longer_bar() -> None:
    comparison = compared((OURS, THEIRS))
    row = next(row for row in rows(WORK) if row.key == "end_to_end_p50")
    spread = chart.better(comparison.spread("rocketmq", row), row)
    assert spread is not None and spread.median == pytest.approx(25)


# --- the whole run ------------------------------------------------------------------------------------------------


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory for the results, and files that count as on a disk."""
    monkeypatch.setattr(machine, "file_system", lambda _: "ext4")
    monkeypatch.setattr(machine, "fdatasync_ms", lambda _: 0.2)
    monkeypatch.setattr(peers, "SCRATCH", tmp_path / "scratch")
    return tmp_path


def run(directory: Path, capsys: pytest.CaptureFixture[str], *systems: Planted) -> tuple[int, str, dict[str, object]]:
    """(exit code, last line, JSON) of two rounds."""
    words = ["--rounds", "2", "--callers", "1", "128", "--output", str(directory / "result")]
    code = peers.main(words, systems)
    output = capsys.readouterr().out.strip().splitlines()
    ElementTree.parse(directory / "result.svg")
    return code, output[-1], json.loads((directory / "result.json").read_text())


def test_a_whole_run_passes(on_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = Planted("notify", OURS), Planted("kafka", THEIRS)
    code, last, result = run(on_disk, capsys, ours, theirs)
    assert (code, last) == (0, "VERDICT: PASS nothing lost, nothing doubled; delivered at best 4.00 times Kafka")
    assert isinstance(result["to_kafka"], dict) and result["to_kafka"]["best"] == 4.0
    assert isinstance(result["rounds"], list) and [each["kafka"]["drain"] for each in result["rounds"]] == [1e5, 1e5]
    assert isinstance(result["machine"], dict) and result["machine"]["file_system"] == "ext4"
    assert ours.is_warm and theirs.is_warm and ours.stopped == theirs.stopped == 2


def test_a_peer_that_cannot_run_is_inconclusive(on_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, last, result = run(on_disk, capsys, Planted("notify", OURS), Missing("rocketmq", {}))
    assert code == 2 and last.startswith("VERDICT: INCONCLUSIVE")
    assert isinstance(result["to_rocketmq"], dict) and set(result["to_rocketmq"].values()) == {None}
    assert result["not_measured"] == ["Rocketmq was not measured: no Java"]


def test_a_peer_that_fails_keeps_what_it_had(on_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = Planted("kafka", THEIRS, failure=Unavailable("the broker died"))
    code, _, result = run(on_disk, capsys, Planted("notify", OURS), failing)
    assert code == 2 and failing.stopped == 2
    assert isinstance(result["to_kafka"], dict) and result["to_kafka"]["1"] == 2.0
    assert result["not_measured"] == [f"Kafka, round {number}: the last: the broker died" for number in (1, 2)]


def test_a_run_that_lost_fails(on_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, last, _ = run(on_disk, capsys, Planted("notify", OURS, lost=1), Planted("kafka", THEIRS))
    assert code == 1 and last.startswith("VERDICT: FAIL Notify lost 1 and doubled 0 in round 1;")


def test_a_disk_in_memory_is_refused(
    on_disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "file_system", lambda _: "tmpfs")
    assert peers.main([], [Planted("notify", OURS)]) == 2
    assert "set TMPDIR to a directory on a disk" in capsys.readouterr().out


def test_the_file_system_of_a_directory() -> None:
    assert machine.file_system(Path("/proc/self")) == "proc"


INTERRUPTED = """
import os, sys, time
from contextlib import contextmanager
from tools.bench.peers import __main__ as peers, machine, processes
from pathlib import Path
machine.file_system = lambda place: "ext4"
machine.fdatasync_ms = lambda place: 0.2
peers.SCRATCH = Path(sys.argv[1])
class Sleeping:
    name = title = "notify"
    def version(self):
        return "1"
    @contextmanager
    def started(self, directory, work):
        process = processes.start(["sleep", "1000"], directory / "output", os.environ)
        try:
            print(process.pid, flush=True)
            while process.poll() is None:  # a signal just before a wait without an end would never be noticed
                time.sleep(0.05)
            yield
        finally:
            processes.end(process)
sys.exit(peers.main([], [Sleeping()]))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.long) for n in (signal.SIGINT, signal.SIGHUP))]
)
def test_an_interrupted_run_ends_its_processes(tmp_path: Path, number: signal.Signals) -> None:
    def heeds_it() -> None:
        signal.signal(number, signal.SIG_DFL)  # under nohup a child ignores SIGHUP

    words = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=heeds_it) as process:
        assert process.stdout is not None
        started = next(int(line) for line in process.stdout if line.strip().isdecimal())
        process.send_signal(number)
        output, _ = process.communicate()
    assert (process.returncode, output) == (2, "VERDICT: INCONCLUSIVE it was interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.kill(started, 0)


# --- the driver's process -----------------------------------------------------------------------------------------

JAVA = """#!/bin/sh
[ "$1" = -m ] && exit 0
echo '{"ready": 1}'
while read -r name rest; do
  case $name in
    stuck) exec sleep 1000;;
    failing) echo "the broker is unreachable" >&2; exit 1;;
    *) echo '{"per_second": 5.5}';;
  esac
done
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A driver whose Java is a script."""
    java = tmp_path / "java"
    java.write_text(JAVA)
    java.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(driver, "SCRATCH", tmp_path / "scratch")
    process = Driver("Kafka", "127.0.0.1:1", tmp_path, tmp_path)
    yield process
    process.stop()


def test_a_driver_answers(started: Driver) -> None:
    assert started.ask("drain", groups=1) == {"per_second": 5.5}


def test_a_driver_that_fails_says_why(started: Driver) -> None:
    with pytest.raises(Unavailable, match="the driver failed: the broker is unreachable"):
        started.ask("failing")
    with pytest.raises(Unavailable, match="the broker is unreachable"):
        started.ask("drain")


def test_a_driver_that_hangs_is_killed(started: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "ANSWER_SECONDS", 0.2)
    with pytest.raises(Unavailable, match=r"was not done within 0\.2 s"):
        started.ask("stuck")


@pytest.mark.long
def test_the_page_shows_what_the_run_prints() -> None:
    page = (ROOT / "docs" / "measuring.md").read_text()
    assert "`make bench-peers`" in page
    assert [row.label for row in rows(Work()) if f"| {row.label} |" not in page] == []
