"""The report's page: complete in one file, readable in a real browser, and without requests elsewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from notify.spark.findings import FINDINGS
from notify.spark.report.files import write
from notify.spark.report.histogram import merged, percentile, shown
from notify.spark.report.page import page
from notify.spark.result import Covered, Found, Plan, Result
from notify.spark.verdict import judge

T0 = 1_800_000_000_000_000


def result(bad: bool = True) -> Result:
    """A result with everything that the page shows."""
    counts = {f.name: 0 for f in FINDINGS} | ({"LOST": 2, "REDELIVERED": 5} if bad else {})
    buckets = [
        {"at_us": T0 + n * 60_000_000, "topic": f"<b>topic {t}</b>", "messages": 100, "committed": 100,
         "queued": 98 if n == 3 and bad else 100, "in_queues": 98, "acknowledged": 97, "effects": 97, "rows": 100,
         "halves": 100, "closed": 100, **dict.fromkeys(counts, 0)}
        for n in range(20) for t in range(2)
    ]  # fmt: skip
    cases = [
        Found("LOST", f"019aa4b7-50f8-77b0-90f7-e29bfbb5117{n}", 0, "<script>alert(1)</script>", "order", 0, None,
              evidence={"t_us": 1, "mode": "half"}, at_us=T0)
        for n in range(2)
    ] if bad else []  # fmt: skip
    return Result(
        "FINDINGS" if bad else "PASS", [], ["a note"], counts, {"DUP_EFFECT": "name the effects"},
        {"committed": 4000, "in_queues": 3998, "effects": 3900, "rows": 4000}, cases,
        [{"input": "log a", "watermark_us": T0, "from_us": 0, "detail": "x", "kind": "log"}], buckets,
        {"commit_to_queue": [(b["at_us"], b["topic"], 40 + n % 8, 50) for n, b in enumerate(buckets)],
         "queue_to_ack": [(b["at_us"], b["topic"], 50, 50) for b in buckets], "queue_to_effect": []},
        T0, T0 + 1_200_000_000, T0, 1.5,
        coverage=[Covered("log a", "source", "the database of orders", "not given", is_whole=not bad)],
        dead=[{"group": "<i>points", "reason": "refused", "count": 3}] if bad else [],
    )  # fmt: skip


def test_percentiles_come_from_steps_of_a_doubling() -> None:
    bins = merged([(40, 50), (44, 49), (40, 0), (60, 1)])
    assert percentile(bins, 0.5) == pytest.approx(2 ** (40.5 / 4) / 1e6)
    assert percentile(bins, 0.999) == pytest.approx(2 ** (60.5 / 4) / 1e6)
    assert percentile([], 0.5) is None
    assert [shown(s) for s in (None, 2e-5, 0.02, 3, 600, 9000)] == ["–", "20 µs", "20 ms", "3 s", "10 min", "2.5 h"]


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
    assert html.index("FINDINGS</h1>") < html.index("<h2>What was read") < html.index("<h2>Findings")
    assert html.index("<h2>Findings") < html.index("<h2>Dead letters") < html.index("<h2>Over time")
    assert '<span class="bad">not given</span>' in html and "&lt;i&gt;points" in html
    assert "<script" not in html and "&lt;script&gt;" in html and "<b>topic" not in html
    assert not re.search(r"(src|href)\s*=", html) and "url(" not in html and "@import" not in html
    assert html.count("<svg") == 3 and "not checked" in html
    assert "PASS</h1>" in page(result(bad=False))
    assert "no data" in page(Result(counts={}, reasons=["nothing there"], totals={"committed": 0}))


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


def test_in_a_browser_nothing_leaves_the_page(tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no Chromium")
    asked: list[tuple[str, str, str]] = []
    html = page(result()).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.headers.get("host", ""), self.path, self.headers.get("referer", "")))
            self.send_response(200)
            self.send_header("content-type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(html)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    origin = f"http://127.0.0.1:{server.server_port}/"
    try:
        done = subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,1800",
                f"--user-data-dir={tmp_path}/profile", f"--screenshot={tmp_path}/page.png", "--enable-logging=stderr",
                "--disable-background-networking", "--disable-component-update", "--no-first-run",
                # Requests to any other host come to this server, which records them.
                f"--host-resolver-rules=MAP * 127.0.0.1:{server.server_port}", origin + "report",
            ],
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    assert (tmp_path / "page.png").stat().st_size > 20_000, done.stderr[-500:]
    # The browser's own requests to its vendor have no referer, and are not the page's.
    of_the_page = {path for host, path, referer in asked if referer or host in origin}
    assert "/report" in of_the_page and of_the_page <= {"/report", "/favicon.ico"}
    assert "Content Security Policy" not in done.stderr
