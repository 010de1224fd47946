"""A result with everything that a report shows, for tests of the report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from notify.protocol.latency import BUCKETS
from notify.spark.causes.cause import Cause
from notify.spark.judge.completeness import completeness_of
from notify.spark.judge.findings import FINDINGS
from notify.spark.result import Covered, Found, Result
from tests.support.answering import Request, answering, reply

T0 = 1_800_000_000_000_000
COMMANDS = (
    "notify group show points --url http://127.0.0.1:7400",
    "notify audit explain 019aa4b7-50f8-77b0-90f7-e29bfbb51170.0 "
    "--database 'shop=postgresql://app:***@db.example/shop' --log /var/lib/notify",
)
CAUSES = (
    Cause(
        "LOST", "producer group <i>bank</i>, database shop: 2 messages committed and in no queue, between … and …", 2,
        "producer group <i>bank</i>, database shop", T0, T0 + 1_000_000, True,
        "019aa4b7-50f8-77b0-90f7-e29bfbb51170.0", COMMANDS,
    ),
    Cause("REDELIVERED", "group points got 5 messages more than once, at …", 5, "group points", T0, T0, False, "", ()),
)  # fmt: skip


def result(bad: bool = True) -> Result:
    """A made-up result, with findings or clean."""
    counts = {f.name: 0 for f in FINDINGS} | ({"LOST": 2, "REDELIVERED": 5} if bad else {})
    buckets = [
        {"at_us": T0 + n * 60_000_000, "topic": f"<b>topic {t}</b>", "messages": 100, "committed": 100,
         "queued": 98 if n == 3 and bad else 100, "in_queues": 98, "acknowledged": 97, "effects": 97, "rows": 100,
         "halves": 100, "closed": 100, "due": 100, "delivered": 98 if n == 3 and bad else 100,
         "effective": 97 if n == 3 and bad else 100, **dict.fromkeys(counts, 0)}
        for n in range(20) for t in range(2)
    ]  # fmt: skip
    evidence = {"t_us": 1, "mode": "half", "producer_group": "<i>bank</i>", "source": "a source"}
    cases = [
        Found("LOST", f"019aa4b7-50f8-77b0-90f7-e29bfbb5117{n}", 0, "<script>alert(1)</script>", "order", 0, None,
              evidence=evidence, at_us=T0)
        for n in range(2)
    ] if bad else []  # fmt: skip
    return Result(
        "FINDINGS" if bad else "PASS", [], ["a note"], counts, {"DUP_EFFECT": "name the effects"},
        {"committed": 4000, "in_queues": 3998, "effects": 3900, "rows": 4000}, cases,
        [{"input": "log a", "watermark_us": T0, "from_us": 0, "detail": "x", "kind": "log"}], buckets,
        {"row_to_queue": [(b["at_us"], b["topic"], 4 + n % 8, 50) for n, b in enumerate(buckets)],
         "queue_to_ack": [(b["at_us"], b["topic"], 6, 50) for b in buckets], "queue_to_effect": []},
        {"<i>points": [100 * (bucket == 5) for bucket in range(BUCKETS)]},
        from_us=T0, to_us=T0 + 1_200_000_000, closed_us=T0, seconds=1.5,
        coverage=[Covered("log a", "source", "the database of orders", "not given", is_whole=not bad)],
        dead=[{"group": "<i>points", "reason": "refused", "count": 3}] if bad else [],
        causes=list(CAUSES) if bad else [], causes_left=7 if bad else 0,
        completeness=completeness_of(buckets, 600.0, 99.99, has_inbox=True),
    )  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A server that answers every request with one page."""

    url: str
    port: int
    asked: list[tuple[str, str, str]]
    """Host, path and referer of each request."""


@contextmanager
def serving(html: str) -> Iterator[Served]:
    asked: list[tuple[str, str, str]] = []

    def answer(request: Request) -> None:
        asked.append((request.headers.get("host", ""), request.path, request.headers.get("referer", "")))
        reply(request, html.encode(), content_type="text/html; charset=utf-8")

    with answering(answer) as server:
        yield Served(server.url, server.port, asked)
