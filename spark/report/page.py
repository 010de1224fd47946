"""The report's page: verdict first, then how complete, how fast, what was found, and how fresh the inputs were."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from notify import __version__
from notify.spark.findings import BY_NAME, FINDINGS
from notify.spark.report import charts
from notify.spark.report.histogram import merged, percentile, shown
from notify.spark.result import LATENCIES, Found, Result

SHOWN = 50
"""Rows of evidence of a class on the page; all of them are in findings.parquet."""
POINTS = 600
"""The most points of a plot; where there are more buckets, neighbours are put together."""


def page(result: Result) -> str:
    """HTML, whole: no script, no font, no image from elsewhere."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    by_class: dict[str, list[Found]] = defaultdict(list)
    for found in result.found:
        by_class[found.finding].append(found)
    classes = [
        {
            "name": f.name,
            "count": result.counts.get(f.name, 0),
            "bad": f.is_bad,
            "meaning": f.meaning,
            "action": f.action,
            "unchecked": result.not_checked.get(f.name, ""),
            "rows": [_row(found) for found in by_class[f.name][:SHOWN]],
            "repaired": sum(1 for found in by_class[f.name] if found.evidence.get("repaired")),
        }
        for f in FINDINGS
    ]
    return templates.get_template("report.html").render(
        version=__version__,
        result=result,
        classes=classes,
        made=_instant(time.time_ns() // 1000),
        span=(_instant(result.from_us) if result.from_us else "what is retained", _instant(result.to_us)),
        closed=_instant(result.closed_us),
        inputs=[e | {"watermark": _instant(e["watermark_us"]), "since": _instant(e["from_us"])} for e in result.inputs],
        plots=[_completeness(result), _amounts(result), _latencies(result)],
        topics=_topics(result),
        latencies=[name.replace("_", " ") for name in LATENCIES],
        sentence=_sentence(result),
        is_bad=lambda name: BY_NAME[name].is_bad,
    )


def _sentence(result: Result) -> str:
    t = result.totals
    if result.verdict == "PASS":
        return (
            f"Each of {t['committed']:,} committed messages is in a queue, and nothing else is there. "
            f"{result.counts.get('PENDING', 0):,} are still on their way."
        )
    if result.verdict == "FINDINGS":
        named = [f"{result.counts[f.name]:,} {f.name}" for f in FINDINGS if f.is_bad and result.counts.get(f.name)]
        return f"Of {t['committed']:,} committed messages: {', '.join(named)}."
    return "The inputs do not allow a verdict: " + "; ".join(result.reasons) + "."


def _row(found: Found) -> dict[str, Any]:
    times = {k: v for k, v in found.evidence.items() if k.endswith("_us")}
    rest = {k: v for k, v in found.evidence.items() if not k.endswith("_us") and v not in ("", None)}
    return {
        "id": found.message_id or found.log,
        "place": f"{found.topic}/{found.queue}@{found.offset}" if found.offset is not None else found.topic,
        "at": _instant(found.at_us),
        "detail": found.detail,
        "database": found.database,
        "times": ", ".join(f"{_NAMES.get(k, k[:-3])} {_instant(v)}" for k, v in sorted(times.items(), key=_second)),
        "rest": ", ".join(f"{k} {v}" for k, v in rest.items()),
    }


_NAMES = {"t_us": "local row", "acked_us": "acknowledged", "due_us": "due", "settled_us": "settled"}


def _second(pair: tuple[str, int]) -> int:
    return pair[1]


def _by_time(result: Result) -> list[dict[str, Any]]:
    """The buckets' sums over topics, put together to at most POINTS."""
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


def _share(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None


def _completeness(result: Result) -> str:
    rows = _by_time(result)

    def line(name: str, part: str, whole: str, style: str) -> charts.Line:
        return charts.Line(name, [(r["at_us"], _share(r[part], r[whole])) for r in rows], style)

    return charts.lines(
        "Completeness, of what was committed",
        [
            line("in a queue", "queued", "committed", "s1"),
            line("acknowledged, of what is in queues", "acknowledged", "in_queues", "s2"),
            line("took effect, of what is in queues", "effects", "in_queues", "s3"),
        ],
        lambda v: f"{v:.4g} %",
        most=100.0,
    )


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
        by_bucket: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for at, _, number, count in result.latencies.get(kind, ()):
            by_bucket[at].append((number, count))
        points = [(at, percentile(merged(bins), 0.99)) for at, bins in sorted(by_bucket.items())]
        series.append(charts.Line(f"{kind.replace('_', ' ')} p99", points, style))
    return charts.lines("Latencies", series, shown, log=True)


def _topics(result: Result) -> list[dict[str, Any]]:
    sums: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for bucket in result.buckets:
        for name in ("committed", "queued", "in_queues", "acknowledged", "effects"):
            sums[bucket["topic"]][name] += bucket[name]
    bins: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for kind in LATENCIES:
        for _, topic, number, count in result.latencies.get(kind, ()):
            bins[kind, topic].append((number, count))
    rows = []
    for topic, row in sorted(sums.items(), key=lambda item: -item[1]["in_queues"])[:200]:
        cells = []
        for kind in LATENCIES:
            counted = merged(bins[kind, topic])
            cells.append(" / ".join(shown(percentile(counted, share)) for share in (0.5, 0.99, 0.999)))
        rows.append({"topic": topic or "(in no log)", **row, "latencies": cells})
    return rows


def _instant(us: int) -> str:
    if not us:
        return "–"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(us / 1e6)) + f".{us // 1000 % 1000:03d}Z"
