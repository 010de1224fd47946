"""`notify bench backlog`: measures producers, memory, restart and draining with a backlog of millions of messages.

Interleaved runs compare the rate of producers with their rate at a server with an empty log.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.cli.bench import children
from notify.cli.bench.requests import subscribe
from notify.testing.process import ServerProcess
from tools.bench.reference import measure as measure_reference

TOPICS = 16
PARTS = 10
"""The backlog is stored and drained in this many parts, each with its rate, to show whether the rates stay the same."""
PILE_GROUP, HEAD_GROUP, FROM_START = "down", "head", "from-start"


@dataclass(frozen=True, slots=True)
class Plan:
    """A backlog of `messages` with bodies of `body` bytes; `runs` interleaved runs of `seconds`, `clients` callers."""

    messages: int = 1_000_000
    body: int = 256
    clients: int = 1024
    seconds: float = 5.0
    runs: int = 5


def run(plan: Plan) -> dict[str, Any]:
    """Measure, and return the figures by name. Raises NotifyError if a process could not run."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-bench-")))
        piled = ServerProcess(directory / "piled").start()
        stack.callback(piled.stop)
        for n in range(TOPICS):
            subscribe(piled.url, PILE_GROUP, f"bench-{n}")
        bounds = [plan.messages * part // PARTS for part in range(PARTS + 1)]
        filled = [_fill(piled, plan, end - begin) for begin, end in itertools.pairwise(bounds)]
        empty = ServerProcess(directory / "empty").start()
        stack.callback(empty.stop)
        ratio, spread, rate, sent = _producers(plan, piled, empty, directory)
        resident = piled.anonymous_bytes() / (1 << 20)
        piled.kill()
        caches_dropped = drop_caches(directory)
        ready = piled.start(600).ready_seconds
        beside = _beside_a_drain(plan, piled, directory)
        sent += beside.pop("sent")
        caches_dropped = drop_caches(directory) and caches_dropped
        reference = measure_reference(plan.clients)
        drained = _drain(piled, PILE_GROUP, plan.messages + sent)
        log_bytes = sum(file.stat().st_size for file in (directory / "piled").rglob("*") if file.is_file())
    return {
        "ratio_to_empty": round(ratio, 3),
        "spread": spread,
        "transactions_per_second_empty": round(rate),
        "fill_per_second": [round(rate) for rate, _ in filled],
        "resident_mb": round(max(resident, filled[-1][1])),
        "resident_mb_by_part": [round(megabytes) for _, megabytes in filled],
        "ready_seconds": round(ready, 2),
        "drain_per_second": round(drained["unique"] / drained["seconds"]),
        "drain_per_second_by_part": _rates(drained["marks"]),
        "reference_rate": round(reference.transactions_per_second),
        "reference_seconds": reference.p50_ms / 1000,
        "caches_dropped": caches_dropped,
        **beside,
        "messages": plan.messages,
        "log_gb": round(log_bytes / 1e9, 2),
        "lost": plan.messages + sent - drained["unique"],
        "duplicated": drained["received"] - drained["unique"],
        "flush": "sync",
    }


def _fill(server: ServerProcess, plan: Plan, messages: int) -> tuple[float, float]:
    """Store a part of the backlog. Returns messages a second, and the server's RssAnon in MiB."""
    spec = {"url": server.url, "messages": messages, "body": plan.body, "topics": TOPICS}
    filled = children.result(children.start("notify.cli.bench.load", spec))
    time.sleep(2)  # lets the server finish sealing a segment
    return messages / filled["seconds"], server.anonymous_bytes() / (1 << 20)


def _load(plan: Plan, server: ServerProcess, directory: Path) -> subprocess.Popen[str]:
    return children.start_load(
        server.url,
        directory / "ids",
        clients=plan.clients,
        seconds=plan.seconds,
        body=plan.body,
        topics=TOPICS,
    )


def _producers(
    plan: Plan, piled: ServerProcess, empty: ServerProcess, directory: Path
) -> tuple[float, list[float], float, int]:
    """Compare producers with and without the backlog.

    Returns the median ratio of the rate with the backlog to the rate without it, the range of the ratio, the rate
    without the backlog, and the number of messages sent to the server with the backlog.
    """
    ratios, rates, sent = [], [], 0
    for _ in range(plan.runs):
        without = children.result(_load(plan, empty, directory))
        with_pile = children.result(_load(plan, piled, directory))
        sent += with_pile["acknowledged"]
        rates.append(without["committed"] / without["seconds"])
        ratios.append(with_pile["committed"] / with_pile["seconds"] / rates[-1])
    spread = [round(min(ratios), 3), round(max(ratios), 3)]
    return statistics.median(ratios), spread, statistics.median(rates), sent


def _beside_a_drain(plan: Plan, server: ServerProcess, directory: Path) -> dict[str, Any]:
    """Measure producers and a group that receives new messages, alone and while another group drains the backlog."""
    for n in range(TOPICS):
        subscribe(server.url, HEAD_GROUP, f"bench-{n}", start="latest")
        subscribe(server.url, FROM_START, f"bench-{n}")
    alone: list[tuple[float, float, int]] = []
    beside: list[tuple[float, float, int]] = []
    sent = 0
    for _ in range(plan.runs):
        for samples, draining in ((alone, False), (beside, True)):
            stop = directory / "stop"
            stop.unlink(missing_ok=True)
            groups = [[HEAD_GROUP], [FROM_START]] if draining else [[HEAD_GROUP]]
            drains = [
                children.start(
                    "notify.cli.bench.clients",
                    {
                        "url": server.url,
                        "client": "wire",
                        "groups": names,
                        "stop": str(stop),
                        "seconds": plan.seconds + 2,
                    },
                    wait_for_line=True,
                )
                for names in groups
            ]
            load = children.result(_load(plan, server, directory))
            stop.touch()
            head = children.result(drains[0])["groups"][0]
            drained = children.result(drains[1])["groups"][0]["unique"] if draining else 0
            sent += load["acknowledged"]
            rate = load["committed"] / load["seconds"]
            samples.append((rate, _median(head["latencies"]), drained))
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


def _drain(server: ServerProcess, group: str, messages: int) -> dict[str, Any]:
    spec = {"url": server.url, "client": "wire", "groups": [group], "expected": messages}
    group_result: dict[str, Any] = children.result(children.start("notify.cli.bench.clients", spec))["groups"][0]
    return group_result


def _rates(marks: list[tuple[float, int]]) -> list[int]:
    """Messages a second in each part of a drain. `marks`: instants, and the number of messages received until then."""
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
