"""`python -m tools.bench backlog`: measures producers, memory, restart and draining with millions of messages.

Interleaved runs compare the rate of producers with their rate at a server with an empty log.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any

from notify.cli.bench.runner import CONSUMERS, Bench, subscribe
from notify.testing.process import ServerProcess
from tools.bench.compare.ratios import Spread
from tools.bench.fill import filled
from tools.bench.reference import measure as measure_reference

TOPICS = 16
PARTS = 10
"""The backlog is stored and drained in this many parts, each with its rate, to show whether the rates stay the same."""
PILE_GROUP, HEAD_GROUP, FROM_START = "down", "head", "from-start"


def run(
    *, messages: int = 1_000_000, body: int = 256, clients: int = 1024, seconds: float = 5.0, runs: int = 5
) -> dict[str, Any]:
    """Measure a backlog of `messages` with `runs` interleaved runs of `seconds`, `clients` callers; figures by name.

    Raises NotifyError if a process could not run.
    """
    with Bench() as bench:
        load = {"clients": clients, "seconds": seconds, "body": body, "topics": TOPICS}
        piled = bench.server("piled")
        for n in range(TOPICS):
            subscribe(piled.url, PILE_GROUP, f"bench-{n}")
        bounds = [messages * part // PARTS for part in range(PARTS + 1)]
        stored = [_fill(piled, body, end - begin) for begin, end in itertools.pairwise(bounds)]
        ratio, rate, sent = _producers(bench, load, runs, piled, bench.server("empty"))
        resident = piled.anonymous_bytes() / (1 << 20)
        piled.kill()
        caches_dropped = drop_caches(bench.directory)
        ready = piled.start(600).ready_seconds
        beside = _beside_a_drain(bench, load, runs, piled)
        sent += beside.pop("sent")
        caches_dropped = drop_caches(bench.directory) and caches_dropped
        reference = measure_reference(clients)
        spec = {"url": piled.url, "client": "wire", "groups": [PILE_GROUP], "expected": messages + sent}
        drained = bench.start(CONSUMERS, spec).result()["groups"][0]
        log_bytes = sum(file.stat().st_size for file in (bench.directory / "piled").rglob("*") if file.is_file())
    return {
        "ratio_to_empty": round(ratio.median, 3),
        "spread": [round(ratio.minimum, 3), round(ratio.maximum, 3)],
        "transactions_per_second_empty": round(rate),
        "fill_per_second": [round(rate) for rate, _ in stored],
        "resident_mb": round(max(resident, stored[-1][1])),
        "resident_mb_by_part": [round(megabytes) for _, megabytes in stored],
        "ready_seconds": round(ready, 2),
        "drain_per_second": round(drained["unique"] / drained["seconds"]),
        "drain_per_second_by_part": _rates(drained["marks"]),
        "reference_rate": round(reference.transactions_per_second),
        "reference_seconds": reference.p50_ms / 1000,
        "caches_dropped": caches_dropped,
        **beside,
        "messages": messages,
        "log_gb": round(log_bytes / 1e9, 2),
        "lost": messages + sent - drained["unique"],
        "duplicated": drained["received"] - drained["unique"],
        "flush": "sync",
    }


def _fill(server: ServerProcess, body: int, messages: int) -> tuple[float, float]:
    """Store a part of the backlog. Returns messages a second, and the server's RssAnon in MiB."""
    stored = filled(server.url, messages=messages, body=body, topics=TOPICS)
    time.sleep(2)  # lets the server finish sealing a segment
    return messages / stored["seconds"], server.anonymous_bytes() / (1 << 20)


def _producers(
    bench: Bench, load: dict[str, Any], runs: int, piled: ServerProcess, empty: ServerProcess
) -> tuple[Spread, float, int]:
    """Compare producers with and without the backlog.

    Returns the ratios of the rate with the backlog to the rate without it, the rate without it, and the number of
    messages sent to the server with the backlog.
    """
    ratios, rates, sent = [], [], 0
    for _ in range(runs):
        without, with_pile = (bench.produce(server.url, **load).result() for server in (empty, piled))
        sent += with_pile["acknowledged"]
        rates.append(without["committed"] / without["seconds"])
        ratios.append(with_pile["committed"] / with_pile["seconds"] / rates[-1])
    return Spread.from_ratios(ratios), statistics.median(rates), sent


def _beside_a_drain(bench: Bench, load: dict[str, Any], runs: int, server: ServerProcess) -> dict[str, Any]:
    """Measure producers and a group that receives new messages, alone and while another group drains the backlog."""
    for n in range(TOPICS):
        subscribe(server.url, HEAD_GROUP, f"bench-{n}", start="latest")
        subscribe(server.url, FROM_START, f"bench-{n}")
    alone: list[tuple[float, float, int]] = []
    beside: list[tuple[float, float, int]] = []
    sent = 0
    for _ in range(runs):
        for samples, groups in ((alone, [HEAD_GROUP]), (beside, [HEAD_GROUP, FROM_START])):
            consumers = [bench.consume(server.url, [group], seconds=load["seconds"] + 2) for group in groups]
            made = bench.produce(server.url, **load).result()
            for consumer in consumers:
                consumer.tell()
            head, *draining = (consumer.result()["groups"][0] for consumer in consumers)
            sent += made["acknowledged"]
            rate = made["committed"] / made["seconds"]
            samples.append((rate, _median(head["latencies"]), sum(group["unique"] for group in draining)))
    pairs = list(zip(alone, beside, strict=True))
    rate_ratios = [rate_beside / rate_alone for (rate_alone, _, _), (rate_beside, _, _) in pairs]
    latency_ratios = [beside_s / alone_s for (_, alone_s, _), (_, beside_s, _) in pairs if alone_s]
    return {
        "producers_beside_drain": round(statistics.median(rate_ratios), 3),
        "head_p50_ms": round(statistics.median([seconds for _, seconds, _ in alone]) * 1000, 2),
        "head_p50_ms_beside_drain": round(statistics.median([seconds for _, seconds, _ in beside]) * 1000, 2),
        "head_latency_ratio": round(statistics.median(latency_ratios), 2) if latency_ratios else 0.0,
        "drained_beside_producers": sum(drained for _, _, drained in beside),
        "sent": sent,
    }


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _rates(marks: list[tuple[float, int]]) -> list[int]:
    """Messages per second in each part of a drain. `marks`: instants, and the messages received until then."""
    bounds = [len(marks) * part // PARTS for part in range(PARTS)] + [len(marks) - 1]
    pairs = itertools.pairwise(marks[bound] for bound in bounds)
    return [round((last[1] - first[1]) / max(last[0] - first[0], 1e-9)) for first, last in pairs]


def drop_caches(directory: Path) -> bool:
    """Drop cached file pages: all of the machine (True), or, without permission, only those of these files (False)."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    except OSError:
        for file in directory.rglob("*"):
            if file.is_file():
                with contextlib.suppress(OSError), file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return False
    return True
