"""The console's figures and charts say what /metrics says, latencies to a bucket.

The server's clock stands still and is moved by the test, so that each message takes as long as the test wants.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from notify.protocol.latency import SHARES, quantile
from notify.server.latency import KINDS
from notify.server.watch import figures
from notify.testing import InMemoryServer
from tests.support.groups import Caller, publish, subscribe
from tests.support.http import metric, post
from tests.support.latency import bucket, counts, seconds_of

TOPIC, GROUP = "order.placed", "points"
TOOK = {0.03: 96, 0.7: 4}
"""The seconds from commit to acknowledgement, and how many messages took so long."""
HANDLED = "?handled=2960000_4.96_8.4&waited=500000_2.100"
"""The report of the consumer: 96 calls of 10 to 20 ms and 4 of 0.2 to 0.5 s; all messages waited for 2 to 5 ms."""
LEFT = 7
LABELS = {"Commit to consumer": "commit_to_consumer", "Consumer to handler": "consumer_to_handler",
          "Handler time": "handler", "Commit to acknowledgement": "commit_to_ack"}  # fmt: skip
"""The kinds of latency of a group, as its page names them."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server whose charts have one minute: 100 messages were handled in it, and LEFT wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "EVERY_SECONDS", 86_400.0)  # only the test ends a minute
        with InMemoryServer() as server:
            fill(server)
            yield server.url


def fill(server: InMemoryServer) -> None:
    """Let messages take as long as TOOK says, within a minute of the charts."""
    server.freeze()
    subscribe(server.url, GROUP, TOPIC)
    server.inside(lambda running: running.figures.sample())
    server.advance(60)
    caller = Caller(server.url, GROUP, "points-1")
    for seconds, count in TOOK.items():
        publish(server.url, TOPIC, ["x"] * count)
        server.advance(seconds)
        messages = caller.receive(TOPIC)
        assert caller.settle(messages) == [200] * count
    publish(server.url, TOPIC, ["x"] * (LEFT + 1))
    (message, *_) = caller.receive(TOPIC, max=1)
    items = {"items": [{"receipt": message["receipt"], "action": "retry", "delay": 3600}]}
    post(server.url, f"/v1/groups/{GROUP}/settle{HANDLED}", items)
    server.inside(lambda running: running.figures.sample())


def said(url: str, kind: str, name: str, label: str = GROUP) -> int:
    """The bucket of a share in /metrics."""
    return bucket(quantile(counts(url, kind, label), SHARES[name]))


def assert_alike(shown: dict[tuple[str, str], str], url: str, label: str = GROUP) -> None:
    """Each text that is shown of a (kind, share) lies at most a bucket from what /metrics says."""
    apart = {
        key: (text, said(url, *key, label))
        for key, text in shown.items()
        if abs(bucket(seconds_of(text)) - said(url, *key, label)) > 1
    }
    assert apart == {}


def under_the_cursor(w: Any, chart: str) -> list[str]:
    """The values in a chart's legend while the mouse is over the newest point."""
    w.page.check("#charts input[value='5min']")  # where a minute is wider than the mouse is exact
    w.page.wait_for_selector("#charts[data-span='5min']")
    plot = w.page.locator(f"{chart} .u-over")
    plot.hover(position={"x": plot.bounding_box()["width"] - 2, "y": 100})
    value = f"{chart} .u-legend .u-series:nth-child(2) .u-value"
    w.page.wait_for_function("value => document.querySelector(value).textContent !== ''", arg=value)
    texts: list[str] = w.page.locator(f"{chart} .u-legend .u-value").all_inner_texts()
    return texts[1:]  # the first one is the time


@pytest.mark.long
def test_a_groups_page_says_what_metrics_say(url: str, window: Any) -> None:
    w = window(url)
    w.go(f"/groups/{GROUP}")
    rows = w.page.locator("table:has(th:text-is('In the last one to two minutes')) tbody tr")
    shown = {}
    for name, of, *texts in (row.split("\t") for row in rows.all_inner_texts()):
        assert int(of) == sum(counts(url, LABELS[name], GROUP)), name
        shown |= {(LABELS[name], share): text for share, text in zip(SHARES, texts, strict=True)}
    assert len(shown) == len(LABELS) * len(SHARES)
    assert_alike(shown, url)
    assert said(url, "commit_to_ack", "p50") + 3 < said(url, "commit_to_ack", "p99"), "the shares can be told apart"
    lag = metric(url, f'notify_lag_messages{{group="{GROUP}",topic="{TOPIC}"}}')
    assert w.page.inner_text(".tile:has-text('Lag') b") == f"{lag:.0f}" == str(LEFT + 1)
    assert w.wrong == []


def test_charts_say_what_metrics_say(url: str, window: Any) -> None:
    """In the line that is drawn, in words, and in the table of figures."""
    w = window(url)
    w.go(f"/groups/{GROUP}")
    w.page.wait_for_selector("#chart7 canvas")
    w.page.click("#charts summary")
    w.page.wait_for_selector("#charts details td")
    newest = dict(
        zip(
            w.page.locator("#charts details th").all_inner_texts(),
            w.page.locator("#charts details tr").nth(1).locator("td").all_inner_texts(),
            strict=True,
        )
    )
    kinds = {"#chart5": "commit_to_ack", "#chart6": "commit_to_consumer", "#chart7": "handler"}
    for chart, kind in kinds.items():
        lines = [f"{kind.replace('_', ' ')} {share}" for share in SHARES]
        drawn = under_the_cursor(w, chart)
        assert drawn == [newest[line] for line in lines]
        told = w.page.inner_text(f"#chart-told{chart[-1]}")
        assert all(f"{share} {text} now" in told for share, text in zip(SHARES, drawn, strict=True)), told
        assert_alike({(kind, share): text for share, text in zip(SHARES, drawn, strict=True)}, url)
    lag = metric(url, f'notify_lag_messages{{group="{GROUP}",topic="{TOPIC}"}}')
    assert float(newest["lag messages"]) == lag
    settled = metric(url, "notify_acked_total") / (60 + sum(TOOK))
    assert newest["settled/s"] == f"{settled:.1f}"
    assert w.wrong == []


@pytest.mark.long
def test_lists_say_what_metrics_say(url: str, window: Any) -> None:
    w = window(url)
    for path in ("/", "/groups"):
        w.go(path)
        row = w.page.locator(f"tr[data-key={GROUP}]")
        shown = {"commit_to_ack": "Ack p99", "handler": "Handler p99"}
        assert_alike({(k, "p99"): row.locator(f"td[data-l='{name}']").inner_text() for k, name in shown.items()}, url)
    w.go(f"/topics/{TOPIC}")
    w.page.wait_for_selector("#chart3 canvas")
    drawn = under_the_cursor(w, "#chart3")
    assert_alike({("commit_to_queue", share): text for share, text in zip(SHARES, drawn, strict=True)}, url, TOPIC)
    assert w.wrong == []


def test_every_kind_of_a_group_is_compared(url: str) -> None:
    assert set(LABELS.values()) == {kind.name for kind in KINDS if kind.label == "group"}


@pytest.mark.long
def test_a_browser_elsewhere_shows_the_same_figures(url: str, window: Any) -> None:
    """In its own time zone, which it names, and in no other language."""
    w = window(url, timezone_id="Asia/Kolkata", locale="de-DE")
    w.go(f"/groups/{GROUP}")
    w.page.wait_for_selector("#chart7 canvas")
    told = w.page.inner_text("#chart-told5")
    assert "(times are UTC+05:30)" in told
    newest = w.page.evaluate("fetch('/groups/points/history').then((answer) => answer.json())")["at"][0]
    assert datetime.fromtimestamp(newest, ZoneInfo("Asia/Kolkata")).strftime("Since %Y-%m-%d %H:%M") in told
    drawn = under_the_cursor(w, "#chart5")
    assert_alike({("commit_to_ack", share): text for share, text in zip(SHARES, drawn, strict=True)}, url)
    assert w.wrong == []
