"""The report's page: complete in one file, readable in a real browser, and without requests elsewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from notify.spark.inputs.log_read import LogRead
from notify.spark.judge.completeness import completeness_of, percent
from notify.spark.judge.verdict import judge
from notify.spark.report.files import plain, write
from notify.spark.report.page import page
from notify.spark.result import MOST_LISTED, Plan, Result
from tests.audit.reported import COMMANDS, T0, result, serving


def test_the_page_and_the_json_show_latencies_by_topic_and_group() -> None:
    told = result()
    figures = plain(told)["latency"]
    assert figures["commit_to_ack"] == {"<i>points": {"count": 100, "p50": 0.035, "p95": 0.0485, "p99": 0.0497}}
    assert figures["row_to_queue"]["<b>topic 0</b>"]["count"] == 1000 and figures["queue_to_effect"] == {}
    html = page(told)
    assert "&lt;i&gt;points" in html and ">35 ms / 48.5 ms / 49.7 ms<" in html
    assert html.count("p50 / p95 / p99") == 4, "three columns of topics, one of groups"
    many = Result(commit_to_ack={f"g{n}": [n + 1] for n in range(MOST_LISTED + 1)})
    assert len(many.latency["commit_to_ack"]) == MOST_LISTED and "g0" not in many.latency["commit_to_ack"]


def test_inputs_that_know_nothing_of_each_other_prove_nothing() -> None:
    """Over Kafka no record says which database it came from: but one common message would be there."""
    totals = {"rows": 10, "in_queues": 10, "committed": 10, "queued": 0, "closed": 20}
    result = Result(totals=totals, counts={"LOST": 10})
    judge(Plan(), result, T0)
    assert (result.verdict, result.exit_code) == ("FINDINGS", 1) and "may not belong together" in result.reasons[0]
    result = Result(totals=totals | {"queued": 1}, counts={"LOST": 9})
    judge(Plan(), result, T0)
    assert result.reasons == []


def test_the_page_is_whole_and_escapes_what_it_shows(tmp_path: Path) -> None:
    html = page(result())
    assert html.index("FINDINGS</h1>") < html.index("<h2>What to do first") < html.index("<h2>Coverage")
    assert html.index("<h2>Coverage") == html.index("<h2>", html.index("</ol>")), "coverage is the first table"
    assert html.index("<table>") > html.index("<h2>Coverage") and "<h2>Findings" in html
    assert "group &lt;i&gt;bank" in html and "app:***@db.example" in html and "And 7 more causes" in html
    assert html.count('<code tabindex="0">') == len(COMMANDS)
    assert "99.85 % took effect; the objective of 99.99 % is missed" in html and 'polyline class="goal"' in html
    assert html.index("<h2>Findings") < html.index("<h2>Dead letters") < html.index("<h2>Over time")
    assert '<span class="bad">not given</span>' in html and "&lt;i&gt;points" in html
    assert "<script" not in html and "&lt;script&gt;" in html and "<b>topic" not in html
    assert not re.search(r"(src|href)\s*=", html) and "url(" not in html and "@import" not in html
    assert html.count("<svg") == 3 and "not checked" in html
    assert "PASS</h1>" in page(result(bad=False))
    assert "no data" in page(Result(counts={}, reasons=["nothing there"], totals={"committed": 0}))


def test_a_report_copies_nothing_that_it_does_not_tell() -> None:
    """The files of a log are a list as long as the log."""

    class Files:
        def __deepcopy__(self, memo: object) -> Files:
            raise AssertionError("the list of a log's files was copied")

    told = result()
    told.logs = [LogRead("log", Files(), 0, ())]  # type: ignore[arg-type]
    assert plain(told)["verdict"] == told.verdict and plain(told)["causes"][0]["sentence"] == told.causes[0].sentence


def test_the_files_say_the_same(tmp_path: Path) -> None:
    written = write(result(), tmp_path)
    assert written.name == "report.html"
    plain = json.loads((tmp_path / "report.json").read_text())
    rows = pq.read_table(tmp_path / "findings.parquet").to_pylist()
    assert plain["verdict"] == "FINDINGS" and plain["exit_code"] == 1 and plain["inconclusive"] is False
    assert plain["coverage"][0] | {"read": "not given", "is_whole": False} == plain["coverage"][0]
    assert [r["message_id"] for r in rows] == [f["message_id"] for f in plain["findings"]]
    assert pq.read_table(tmp_path / "buckets.parquet").num_rows == 40
    assert not list(tmp_path.glob(".*"))
    assert plain["causes"][0]["sentence"].startswith("producer group") and plain["causes_left"] == 7
    assert plain["causes"][0]["commands"] == list(COMMANDS)
    figures = plain["completeness"]
    assert (figures["due"], figures["delivered"], figures["effective"], figures["is_met"]) == (4000, 3996, 3994, False)
    assert len(figures["buckets"]) == 20 and figures["buckets"][3]["effective"] == 194


def test_completeness_is_never_shown_as_more_than_it_is() -> None:
    assert percent(999_999, 1_000_000) == "99.9999 %" and percent(9_999_999, 10_000_000) == "99.9999 %"
    assert percent(10, 10) == "100 %" and percent(0, 10) == "0 %"

    def figures(delivered: int, effective: int, *, has_inbox: bool = True) -> bool | None:
        bucket = {"at_us": T0, "due": 10_000, "delivered": delivered, "effective": effective}
        return completeness_of([bucket], 600, 99.99, has_inbox=has_inbox).is_met

    assert figures(10_000, 9_999) is True and figures(10_000, 9_998) is False and figures(9_998, 9_998) is False
    assert figures(9_999, 0, has_inbox=False) is True
    none = completeness_of([], 600, 99.99, has_inbox=True)
    assert none.is_met is None and "no committed message was due" in none.sentence and none.plain()["is_met"] is None


@pytest.mark.long  # tests/browser/test_report.py shows it, too
def test_in_a_browser_nothing_leaves_the_page(tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no Chromium")
    with serving(page(result())) as served:
        origin = f"{served.url}/"
        done = subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,1800",
                f"--user-data-dir={tmp_path}/profile", f"--screenshot={tmp_path}/page.png", "--enable-logging=stderr",
                "--disable-background-networking", "--disable-component-update", "--no-first-run",
                # Requests to any other host come to this server, which records them.
                f"--host-resolver-rules=MAP * 127.0.0.1:{served.port}", origin + "report",
            ],
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    assert (tmp_path / "page.png").stat().st_size > 20_000, done.stderr[-500:]
    # The browser's own requests to its vendor have no referer, and are not the page's.
    of_the_page = {path for host, path, referer in served.asked if referer or host in origin}
    assert "/report" in of_the_page and of_the_page <= {"/report", "/favicon.ico"}
    assert "Content Security Policy" not in done.stderr
