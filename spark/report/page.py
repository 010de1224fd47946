"""The report's page: the verdict, what to do first, then what was read, findings, completeness, latencies, inputs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from notify import __version__
from notify.admin_api.words import latency
from notify.protocol.latency import BUCKETS, SHARES, quantile
from notify.spark.judge.completeness import Completeness, together
from notify.spark.judge.findings import FINDINGS
from notify.spark.report import charts
from notify.spark.result import LATENCIES, MOST_LISTED, Found, Result

SHOWN = 50
"""The most rows of evidence for a class on the page; findings.parquet has all."""
POINTS = 600
"""The most points of a plot; with more buckets, neighbours are added up."""


def page(result: Result) -> str:
    """The page as HTML, without scripts, fonts or images from elsewhere."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    by_class: dict[str, list[Found]] = defaultdict(list)
    for case in result.found:
        by_class[case.finding].append(case)
    classes = [
        {
            "name": f.name,
            "count": result.counts.get(f.name, 0),
            "bad": f.name in result.bad,
            "meaning": f.meaning,
            "action": f.action,
            "unchecked": result.not_checked.get(f.name, ""),
            "rows": [_row(case) for case in by_class[f.name][:SHOWN]],
            "repaired": sum(1 for case in by_class[f.name] if case.evidence.get("repaired")),
        }
        for f in FINDINGS
    ]
    return templates.get_template("report.html").render(
        version=__version__,
        result=result,
        classes=classes,
        made=_instant(time.time_ns() // 1000),
        span=(_instant(result.from_us) if result.from_us else "the oldest retained data", _instant(result.to_us)),
        closed=_instant(result.closed_us),
        inputs=[e | {"watermark": _instant(e["watermark_us"]), "since": _instant(e["from_us"])} for e in result.inputs],
        completeness=result.completeness,
        complete=_completeness(result.completeness),
        plots=[_amounts(result), _latencies(result)],
        topics=_topics(result),
        groups=[
            {"group": group, "count": sum(counts), "took": _took(counts)}
            for group, counts in result.largest(result.commit_to_ack)
        ],
        latencies=[name.replace("_", " ") for name in LATENCIES],
        shares=" / ".join(SHARES),
        sentence=_sentence(result),
    )


def _sentence(result: Result) -> str:
    t = result.totals
    if result.verdict == "PASS":
        left_out = result.counts.get("LEFT_OUT", 0)
        return (
            f"Each of {t['committed']:,} committed messages is in a queue, and nothing else is there. "
            f"{result.counts.get('PENDING', 0):,} are still on their way."
        ) + (f" {left_out:,} left the queue of a group that never settled them." if left_out else "")
    if result.verdict == "FINDINGS":
        named = [
            f"{result.counts[f.name]:,} {f.name}"
            for f in FINDINGS
            if f.name in result.bad and result.counts.get(f.name)
        ]
        return f"Of {t['committed']:,} committed messages: {', '.join(named)}."
    if result.causes:
        return "The inputs do not allow a verdict; the reasons follow."
    return "The inputs do not allow a verdict: " + "; ".join(result.reasons) + "."


def _row(case: Found) -> dict[str, Any]:
    times = {k: v for k, v in case.evidence.items() if k.endswith("_us")}
    return {
        "id": case.message_id or case.log,
        "place": f"{case.topic}/{case.queue}@{case.offset}" if case.offset is not None else case.topic,
        "at": _instant(case.at_us),
        "detail": case.detail,
        "database": case.database,
        "times": ", ".join(f"{_NAMES.get(k, k[:-3])} {_instant(v)}" for k, v in sorted(times.items(), key=_second)),
        "rest": ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in case.words().items()),
    }


_NAMES = {
    "t_us": "local row",
    "acked_us": "acknowledged",
    "due_us": "due",
    "settled_us": "settled",
    "from_us": "last position",
}


def _second(pair: tuple[str, int]) -> int:
    return pair[1]


def _by_time(result: Result) -> list[dict[str, Any]]:
    """The buckets' sums over all topics, in at most POINTS rows."""
    sums: dict[int, dict[str, int]] = {}
    for bucket in result.buckets:
        row = sums.setdefault(bucket["at_us"], defaultdict(int))
        for name, value in bucket.items():
            if isinstance(value, int) and name != "at_us":
                row[name] += value
    times = sorted(sums)
    step = max(1, -(-len(times) // POINTS))
    rows = []
    for i in range(0, len(times), step):
        together: dict[str, Any] = defaultdict(int)
        for at in times[i : i + step]:
            for name, value in sums[at].items():
                together[name] += value
        rows.append({"at_us": times[i], **together})
    return rows


def _completeness(figures: Completeness | None) -> str:
    if figures is None or not figures.due:
        return charts.lines("Completeness", [], str)
    rows = together(figures.buckets)

    def line(name: str, place: int, style: str) -> charts.Line:
        return charts.Line(name, [(row[0], 100 * row[place] / row[1]) for row in rows], style)

    series = [line(f"delivered within {figures.seconds:g} s", 2, "s1")]
    if figures.effective is not None:
        series.append(line("and took effect", 3, "s2"))
    goal = [(rows[0][0], figures.objective), (rows[-1][0], figures.objective)]
    if len(rows) > 1:
        series.append(charts.Line(f"objective {figures.objective:g} %", goal, "goal"))
    return charts.lines("Completeness", series, lambda v: f"{v:.6g} %", most=100.0)


def _amounts(result: Result) -> str:
    rows = _by_time(result)
    return charts.lines(
        "Messages by the time of their transactions",
        [
            charts.Line("committed", [(r["at_us"], r["committed"]) for r in rows], "s1"),
            charts.Line("in queues", [(r["at_us"], r["in_queues"]) for r in rows], "s2"),
        ],
        lambda v: f"{v:,.0f}",
    )


def _latencies(result: Result) -> str:
    series = []
    for kind, style in zip(LATENCIES, ("s1", "s2", "s3"), strict=True):
        by_time: dict[int, list[int]] = defaultdict(lambda: [0] * BUCKETS)
        for at, _, bucket, count in result.latencies.get(kind, ()):
            by_time[at][bucket] += count
        points = [(at, quantile(counts, 0.99)) for at, counts in sorted(by_time.items())]
        series.append(charts.Line(f"{kind.replace('_', ' ')} p99", points, style))
    return charts.lines("Latencies", series, latency, log=True)


def _took(counts: Sequence[int]) -> str:
    """The SHARES of counted durations."""
    return " / ".join(latency(quantile(counts, share)) for share in SHARES.values())


def _topics(result: Result) -> list[dict[str, Any]]:
    sums: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for bucket in result.buckets:
        for name in ("committed", "queued", "in_queues", "acknowledged", "effects"):
            sums[bucket["topic"]][name] += bucket[name]
    counts = [result.by_topic(kind) for kind in LATENCIES]
    return [
        {"topic": topic or "(in no log)", **row, "latencies": [_took(by_topic.get(topic, ())) for by_topic in counts]}
        for topic, row in sorted(sums.items(), key=lambda item: -item[1]["in_queues"])[:MOST_LISTED]
    ]


def _instant(us: int) -> str:
    if not us:
        return "–"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(us / 1e6)) + f".{us // 1000 % 1000:03d}Z"
