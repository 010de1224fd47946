"""`make compare`: ratios of planted figures, the verdict of the bars, the order of the runs, and runs that fail."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.bench.compare import ratios
from tools.bench.compare.__main__ import main
from tools.bench.compare.bench_run import Lost, RunFailed, run_bench
from tools.bench.compare.checkout import Checkout, NotComparable, commit_of, environment
from tools.bench.compare.comparison import Comparison, measure

TRANSACTIONS = {
    "transactions_per_second": 40_000,
    "p50_ms": 3.0,
    "p99_ms": 8.0,
    "delivered": None,
    "lost": 0,
    "duplicated": 0,
    "cores": 0.8,
    "client_cores": 0.6,
    "delivered_per_second": 10_000,
}


def spread(*values: float) -> ratios.Spread:
    return ratios.Spread.from_ratios(values)


def test_a_comparison_takes_rates_and_latencies_of_a_run() -> None:
    assert ratios.figures(TRANSACTIONS) == {
        "rate": 40_000,
        "cpu_per_transaction": pytest.approx(20),  # 0.8 s of CPU time for 40,000, in microseconds
        "client_cpu_per_transaction": pytest.approx(15),
        "p50": 3.0,
        "p99": 8.0,
    }
    delivery = {"deliveries_per_second": 300_000, "lost": 0, "duplicated": 0, "cores": 1.2}
    assert ratios.figures(delivery) == {"rate": 300_000, "cpu_per_transaction": pytest.approx(4)}
    bridge = {"rows_per_second": 40_000, "lag_at_rows_per_second": 4500, "queue_cpu_us_a_row": 7.0}
    assert ratios.figures(bridge) == {"rate": 40_000, "cpu_per_transaction": 7.0}
    topics = {"transactions_per_second_16": 60_000, "ratio_10000_to_16": 0.93, "spread_10000": [0.92, 1.12]}
    assert ratios.figures(topics) == {"ratio_10000_to_16": 0.93}


@pytest.mark.parametrize("result", [{"transactions_per_second": 0}, {"committed": 5}, {"ratio_10000_to_16": None}])
def test_a_run_without_a_rate_has_no_ratio(result: dict[str, Any]) -> None:
    with pytest.raises(ratios.NoRate):
        ratios.figures(result)


def test_each_pair_is_compared_with_itself() -> None:
    """The machine may be half as fast in one pair as in another: only within a pair do figures compare."""
    pairs = [
        ({"rate": 100.0, "p50": 2.0}, {"rate": 90.0}),
        ({"rate": 50.0}, {"rate": 50.0}),
        ({"rate": 10.0}, {"rate": 11.0}),
    ]
    measured = ratios.spreads(pairs)
    assert measured == {"rate": ratios.Spread(1.0, 0.9, (0.9, 1.1), 1.1)}, "p50 is not in every run"
    assert measured["rate"].as_json() == {"median": 1.0, "min": 0.9, "quartiles": [0.9, 1.1], "max": 1.1}


def test_one_pair_is_its_own_spread() -> None:
    assert spread(0.98) == ratios.Spread(0.98, 0.98, (0.98, 0.98), 0.98)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ((0.96, 0.98, 0.99), "PASS"),  # the median counts, not a single pair
        ((0.95, 0.96, 0.98), "INCONCLUSIVE"),  # half of the pairs lie on both sides of the bar
        ((0.94, 0.95, 0.96), "FAIL"),
        ((0.97,), "PASS"),
        ((0.96,), "FAIL"),
    ],
)
def test_a_rate_against_its_bar(values: tuple[float, ...], word: str) -> None:
    verdict = ratios.judge({"rate": spread(*values)}, rate_at_least=0.97, cpu_at_most=None)
    assert verdict.word == word
    assert "at least 0.97" in verdict.reason


@pytest.mark.parametrize(
    ("values", "word"),
    [((1.0, 1.05, 1.2), "PASS"), ((1.04, 1.06, 1.2), "INCONCLUSIVE"), ((1.06, 1.1, 1.2), "FAIL")],
)
def test_cpu_time_against_its_bar(values: tuple[float, ...], word: str) -> None:
    measured = {"rate": spread(0.5), "cpu_per_transaction": spread(*values)}
    assert ratios.judge(measured, rate_at_least=None, cpu_at_most=1.05).word == word


def test_the_bar_of_cpu_time_is_the_clients_too() -> None:
    measured = {"rate": spread(1.0), "cpu_per_transaction": spread(1.0), "client_cpu_per_transaction": spread(1.2)}
    verdict = ratios.judge(measured, rate_at_least=None, cpu_at_most=1.05)
    assert (verdict.word, "CPU of the client 1.200 is not at most 1.05" in verdict.reason) == ("FAIL", True)


def test_the_worst_bar_is_the_verdict() -> None:
    measured = {"rate": spread(0.9), "cpu_per_transaction": spread(1.0, 1.1, 1.2)}
    verdict = ratios.judge(measured, rate_at_least=0.97, cpu_at_most=1.05)
    assert (verdict.word, verdict.exit_code) == ("FAIL", 1)
    assert ratios.judge(measured, rate_at_least=0.8, cpu_at_most=1.05).exit_code == 2


def test_every_ratio_of_topics_is_held_to_the_bar() -> None:
    measured = {"ratio_10000_to_16": spread(1.0), "ratio_100000_to_16": spread(0.5)}
    assert ratios.judge(measured, rate_at_least=0.97, cpu_at_most=None).word == "FAIL"


def test_a_bar_for_what_was_not_reported_is_not_passed() -> None:
    assert ratios.judge({"rate": spread(1.0)}, rate_at_least=None, cpu_at_most=1.05).word == "INCONCLUSIVE"


def test_without_bars_the_medians_are_stated() -> None:
    measured = {"rate": spread(0.4, 0.5, 0.6), "cpu_per_transaction": spread(2.0)}
    verdict = str(ratios.judge(measured, rate_at_least=None, cpu_at_most=None))
    assert verdict == "PASS rate 0.500 (0.400 to 0.600), CPU a transaction 2.000 (2.000 to 2.000)"


def comparison(pairs: int) -> Comparison:
    return Comparison("a" * 40, "b" * 40 + "-dirty", "transactions --clients 128", pairs)


def test_the_sides_take_turns_to_go_first() -> None:
    called: list[str] = []

    def run(side: str) -> dict[str, Any]:
        called.append(side)
        return TRANSACTIONS | {"transactions_per_second": 100 * len(called)}

    three = comparison(3)
    measure(three, run, lambda line: None)
    assert called == ["base", "head", *("base", "head"), *("head", "base"), *("base", "head")]
    counted = [run.result["transactions_per_second"] for run in three.runs]
    assert counted == [300, 400, 500, 600, 700, 800], "the warm-up does not count"
    rate = three.spreads()["rate"]
    assert (rate.minimum, rate.median, rate.maximum) == (500 / 600, 8 / 7, 4 / 3)


def test_one_json_object_says_everything() -> None:
    figures = comparison(1)
    measure(figures, lambda side: TRANSACTIONS, lambda line: None)
    printed = json.loads(json.dumps(figures.as_json(ratios.judge(figures.spreads(), None, None))))
    assert (printed["base"], printed["head"], printed["pairs"]) == ("a" * 40, "b" * 40 + "-dirty", 1)
    same = {"median": 1.0, "min": 1.0, "quartiles": [1.0, 1.0], "max": 1.0}
    assert [printed[name] for name in ("rate", *ratios.LABELS, "p50", "p99")] == [same] * 5
    assert [(run["pair"], run["side"], run["cores"]) for run in printed["runs"]] == [(1, "base", 0.8), (1, "head", 0.8)]
    assert printed["verdict"].startswith("PASS")


def a_run_that(prints: str, code: int = 0) -> list[str]:
    return [sys.executable, "-c", f"import sys; print({prints!r}); sys.exit({code})"]


def test_a_run_reports_one_json_object(tmp_path: Path) -> None:
    words = a_run_that(json.dumps(TRANSACTIONS | {"lost": None}))
    assert run_bench(words, tmp_path, 60) == TRANSACTIONS | {"lost": None}


@pytest.mark.parametrize("wrong", [{"lost": 3}, {"duplicated": 1}])
def test_a_run_that_lost_or_doubled_something_fails(tmp_path: Path, wrong: dict[str, int]) -> None:
    """A run that reports lost messages and ends with exit code 1 is a FAIL, not an INCONCLUSIVE."""
    words = a_run_that(json.dumps(TRANSACTIONS | wrong), code=1)
    figures = comparison(1)
    with pytest.raises(Lost, match="warm-up, base: it lost") as raised:
        measure(figures, lambda side: run_bench(words, tmp_path, 60), lambda line: None)
    assert raised.value.word == "FAIL"
    assert figures.as_json(ratios.Verdict("FAIL", str(raised.value)))["rate"] is None


def test_a_run_that_fails_is_heard_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [sys.executable, "-c", "raise SystemExit('no such option')"]
    with pytest.raises(RunFailed, match="exit code 1") as raised:
        run_bench(words, tmp_path, 60)
    assert raised.value.word == "INCONCLUSIVE"
    assert "no such option" in capsys.readouterr().err


def test_a_run_has_a_bound(tmp_path: Path) -> None:
    """A run that takes too long is interrupted, not killed, so that it stops its server; also in a background job."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupted(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted(tmp_path: Path) -> None:
    # The script sleeps for longer than it may take.
    script = "import pathlib, time\ntry: time.sleep(60)\nfinally: pathlib.Path('ended').touch()"
    with pytest.raises(RunFailed, match="not done after 2 s"):
        run_bench([sys.executable, "-c", script], tmp_path, 2)
    assert (tmp_path / "ended").exists()


def test_an_unknown_base_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--base", "no-such-revision"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "compare: BASE=no-such-revision is not a revision of this repository\n"
    assert printed.out == ""


@pytest.mark.parametrize("name", ["", "--all", "a b"])
def test_no_word_is_taken_for_an_option_of_git(name: str) -> None:
    with pytest.raises(NotComparable, match="is not a revision"):
        commit_of(name)


@pytest.mark.parametrize("pairs", ["0", "2", "-1", "x"])
def test_pairs_are_odd(pairs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--base", "HEAD", f"--pairs={pairs}"])
    assert "no odd number" in capsys.readouterr().err


def test_runs_do_not_inherit_a_way_to_another_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("NOTIFY_DSN", "sqlite://")
    inherited = environment()
    assert "PYTHONPATH" not in inherited
    assert inherited["NOTIFY_DSN"] == "sqlite://", "the bridge's bench needs it"
    assert environment(Path("/this"))["PYTHONPATH"] == "/this", "in another checkout than the environment's"


def test_an_environment_that_runs_another_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotComparable, match="make clean"):
        Checkout(tmp_path, Path(sys.executable), "a" * 40).check()


def test_a_bench_is_run_where_its_tree_has_it(tmp_path: Path) -> None:
    """The benches were commands of the package, before they moved to the tools: both sides of that are compared."""
    checkout = Checkout(tmp_path, Path("python"), "a" * 40)
    words = ["delivery", "--groups", "8", "--json"]
    assert checkout.bench("delivery --groups 8") == ["python", "-m", "notify.cli.main", "bench", *words]
    (tmp_path / "tools" / "bench").mkdir(parents=True)
    assert checkout.bench("delivery --groups 8") == ["python", "-m", "tools.bench", *words]


def test_a_source_that_changes_is_noticed(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, Path(sys.executable), "a" * 40)
    source = tmp_path / "notify" / "server" / "app.py"
    source.parent.mkdir(parents=True)
    source.touch()
    before = checkout.sources()
    assert before == checkout.sources()
    source.write_text("pass")
    os.utime(source, ns=(1, 1))  # clocks of files are coarse
    assert before != checkout.sources()
