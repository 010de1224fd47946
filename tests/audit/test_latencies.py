"""One paced run: /metrics, the console, `notify top` and the audit's report say how long its messages took."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

import pytest

from notify.client import Consumer, Inbox
from notify.protocol.latency import SHARES, quantile
from notify.spark.audit import Audit
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.report.files import plain
from notify.spark.report.page import page
from notify.spark.result import Inputs
from notify.testing.process import ServerProcess
from tests.audit.audited import AT_ONCE, wait_until_closed
from tests.audit.shop import TOPIC, Shop
from tests.support.clock import eventually
from tests.support.commands import run
from tests.support.databases import empty_database
from tests.support.groups import running
from tests.support.http import call
from tests.support.latency import bucket, counts, seconds_of

GROUP = "paced"
COUNT = 100
PACE_SECONDS = 0.01
QUICK_SECONDS, SLOW_SECONDS = 0.03, 0.6
SLOW_EVERY = 20
DURATION = r"[\d.]+ (?:ms|s|min)"


@pytest.mark.long
def test_a_paced_run_takes_as_long_everywhere(spark: Any, database_urls: dict[str, str], tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data").start()
    try:
        with (
            empty_database("postgresql", database_urls, tmp_path) as url,
            contextlib.closing(Shop(url, server.url)) as shop,
            contextlib.closing(Database(url, "shop")) as database,
        ):
            paced(shop, server.url)
            # Before the audit: the console and `top` show the last one to two minutes.
            shown = {"console": in_console(server.url), "top": in_top(server.url)}
            measured = counts(server.url, "commit_to_ack", GROUP)
            said = {name: bucket(quantile(measured, share)) for name, share in SHARES.items()}
            assert said["p50"] + 2 < said["p99"], "the shares can be told apart"
            wait_until_closed(database, AT_ONCE)
            inputs = Inputs([database], [LogInput(server.data_dir)])
            result = Audit(spark, AT_ONCE, inputs, tmp_path / "scratch").run()
            assert (result.verdict, result.reasons) == ("PASS", [])
            figures = plain(result)["latency"]["commit_to_ack"][GROUP]
            assert figures["count"] == COUNT == sum(measured)
            shown["report.json"] = {name: figures[name] for name in SHARES}
            shown["report.html"] = in_report(page(result))
    finally:
        server.stop()
    apart = {
        (place, share): seconds
        for place, by_share in shown.items()
        for share, seconds in by_share.items()
        if abs(bucket(seconds) - said[share]) > 1
    }
    assert apart == {}, (measured, shown)


def paced(shop: Shop, url: str) -> None:
    """Order at a pace, and handle most orders quickly."""

    consumer = Consumer(url, group=GROUP, inbox=Inbox(shop.engine), concurrency=8)

    @consumer.subscribe(TOPIC, start="earliest")
    def handle(message: Any, session: Any) -> None:
        time.sleep(SLOW_SECONDS if message.json()["n"] % SLOW_EVERY == 0 else QUICK_SECONDS)  # how slow the handler is

    with running(consumer, subscribed=True):
        for _ in range(COUNT):
            shop.order()
            time.sleep(PACE_SECONDS)  # the pace

        eventually(lambda: sum(counts(url, "commit_to_ack", GROUP)) == COUNT, "every acknowledgement")


def in_console(url: str) -> dict[str, float]:
    row = re.search(r"<td[^>]*>Commit to acknowledgement</td>(.*?)</tr>", str(call(url, "GET", f"/groups/{GROUP}")))
    assert row is not None
    return dict(zip(SHARES, map(seconds_of, re.findall(DURATION, row[1])), strict=True))


def in_top(url: str) -> dict[str, float]:
    screen = run(["top", "--rounds", "1", "--url", url]).stdout
    line = next(line for line in screen.splitlines() if line.startswith(GROUP))
    p50, p99, _ = map(seconds_of, re.findall(DURATION, line)[-3:])  # the handler's p99 is the last one
    return {"p50": p50, "p99": p99}


def in_report(html: str) -> dict[str, float]:
    row = re.search(rf"<td>{GROUP}</td>(.*?)</tr>", html)
    assert row is not None
    return dict(zip(SHARES, map(seconds_of, re.findall(DURATION, row[1])), strict=True))
